//! The file of a rank: a safetensors file, which other programs can read and map into memory.
//!
//! Each tensor of the file is a range of a saved tensor, as one dimension. The file's metadata say which set and rank
//! it is of, and for each tensor the whole shape, where the range starts, and a checksum of its bytes. The manifest has
//! the length of each file and the checksum of its header, so damage, truncated files and files of another save are
//! found before anything is used.
//!
//! burn's records would be a form that only burn reads, as a whole, with 32 bits for a length.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::contents::Contents;
use bonfire_core::Error;

pub use safetensors::Dtype;

/// Identifies the format and its version.
const FORMAT: &str = "bonfire checkpoint 2";

/// The version before, whose manifest does not say what the set holds.
const FORMAT_1: &str = "bonfire checkpoint 1";

/// The longest header that is read, in bytes: that of safetensors.
const LONGEST_HEADER: u64 = 100_000_000;

/// The bytes before a header: its length.
const PREFIX: usize = 8;

/// What makes a set valid, in a file of its own: the files of all ranks, by rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub format: String,
    /// The id of the set, which is another one in each save.
    pub set: String,
    pub files: Vec<FileSummary>,
    /// How good the program found the training to be, more being better.
    #[serde(default)]
    pub score: Option<f64>,
    /// `None` in version 1.
    #[serde(default)]
    pub contents: Option<Contents>,
}

/// What the manifest says about a file.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct FileSummary {
    pub bytes: u64,
    /// The checksum of the header, which has those of the data.
    pub header_crc32: u32,
}

impl Manifest {
    pub fn new(set: &str, files: Vec<FileSummary>, contents: Contents) -> Manifest {
        Manifest { format: FORMAT.into(), set: set.into(), files, score: None, contents: Some(contents) }
    }

    /// Reads a manifest. Its summaries are compared with the files later.
    pub fn parse(text: &str) -> Result<Manifest, String> {
        let manifest: Manifest = serde_json::from_str(text).map_err(|e| format!("it is no manifest: {e}"))?;
        let version = if manifest.contents.is_some() { FORMAT } else { FORMAT_1 };
        match manifest.format == version && !manifest.files.is_empty() {
            true => Ok(manifest),
            false => Err(format!("it is a `{}`, and this version reads `{FORMAT}` and `{FORMAT_1}`", manifest.format)),
        }
    }

    /// Returns which file of the set that of a rank is.
    pub fn file_id(&self, rank: usize) -> FileId<'_> {
        FileId { format: &self.format, set: &self.set, rank, world_size: self.files.len() }
    }
}

/// Which file of which set a file is.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileId<'a> {
    format: &'a str,
    pub set: &'a str,
    pub rank: usize,
    pub world_size: usize,
}

impl<'a> FileId<'a> {
    /// Returns the id of a file that is to be written.
    pub fn new(set: &'a str, rank: usize, world_size: usize) -> FileId<'a> {
        FileId { format: FORMAT, set, rank, world_size }
    }

    fn metadata(&self, ranges: String) -> HashMap<String, String> {
        let FileId { format, set, rank, world_size } = self;
        let (rank, world_size) = (rank.to_string(), world_size.to_string());
        let fields = [("format", (*format).into()), ("set", (*set).into()), ("rank", rank), ("world_size", world_size)];
        fields.into_iter().chain([("ranges", ranges)]).map(|(key, value)| (key.into(), value)).collect()
    }
}

/// A range of a tensor that is to be written.
pub(crate) struct Part {
    pub name: String,
    pub dtype: Dtype,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The elements in this part, as indices in the flat tensor.
    pub range: Range<usize>,
    pub read: ReadBytes,
}

/// Passes the bytes of a part on, in order and in any number of pieces.
pub type ReadBytes = Box<dyn FnOnce(Sink<'_>) -> Result<(), Error> + Send>;

/// Takes bytes from where they are, so that nothing is copied before it is written.
pub type Sink<'a> = &'a mut dyn FnMut(&[u8]) -> Result<(), Error>;

/// Bytes that are added to the checksum and written at a time: they are still in the processor's cache when the system
/// copies them.
const AT_A_TIME: usize = 256 << 10;

/// The range of a tensor that a file has.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StoredRange {
    pub name: String,
    pub dtype: Dtype,
    /// The shape of the whole tensor.
    pub shape: Vec<usize>,
    /// The elements that the file has.
    pub range: Range<usize>,
    /// Where their bytes begin, after the header.
    pub offset: u64,
    pub crc32: u32,
}

/// What the metadata say about a range.
#[derive(Serialize, Deserialize)]
struct RangeInfo {
    shape: Vec<usize>,
    start: usize,
    /// Eight hexadecimal digits: the header's length does not depend on it.
    crc32: String,
}

/// Bytes per element.
pub fn width(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// Returns the number of elements of a tensor of this shape.
pub(super) fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, dimension| product.checked_mul(*dimension))
}

/// Writes a file, and flushes it to disk.
pub(super) fn write(path: &Path, id: FileId<'_>, parts: Vec<Part>) -> Result<FileSummary, Error> {
    let operation = format!("writing {}", path.display());
    let mut file = File::create_new(path).map_err(|error| Error::io(&operation, error))?;
    let summary = write_to(&mut file, &operation, id, parts)?;
    file.sync_all().map_err(|error| Error::io(&operation, error))?;
    Ok(summary)
}

/// Writes what belongs into a file. Errors name the operation.
pub(super) fn write_to(
    mut file: impl Write + Seek,
    operation: &str,
    id: FileId<'_>,
    mut parts: Vec<Part>,
) -> Result<FileSummary, Error> {
    let failed = |error| Error::io(operation, error);
    // Wide elements first, so that all are aligned for programs that map the file.
    parts.sort_by_key(|part| std::cmp::Reverse(width(part.dtype)));
    let mut end = 0;
    let ranges = parts.iter().map(|Part { name, dtype, shape, range, .. }| {
        let offset = end;
        end += (range.len() * width(*dtype)) as u64;
        let (name, shape, range) = (name.clone(), shape.clone(), range.clone());
        StoredRange { name, dtype: *dtype, shape, range, offset, crc32: 0 }
    });
    let mut ranges: Vec<_> = ranges.collect();
    let mut header = encode_header(id, &ranges).map_err(|e| Error::broken(operation, e))?;
    let len = header.len();
    file.write_all(&header).map_err(failed)?;
    for (part, range) in parts.into_iter().zip(&mut ranges) {
        let (mut checksum, mut len) = (crc32fast::Hasher::new(), 0);
        (part.read)(&mut |bytes| {
            len += bytes.len();
            bytes.chunks(AT_A_TIME).try_for_each(|piece| {
                checksum.update(piece);
                file.write_all(piece).map_err(failed)
            })
        })?;
        if len != range.range.len() * width(range.dtype) {
            return Err(Error::broken(operation, format!("`{}` has changed its size", range.name)));
        }
        range.crc32 = checksum.finalize();
    }
    // Now with the checksums.
    header = encode_header(id, &ranges).map_err(|e| Error::broken(operation, e))?;
    if header.len() != len {
        return Err(Error::broken(operation, "the header has changed its size"));
    }
    file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&header)).map_err(failed)?;
    Ok(FileSummary { bytes: len as u64 + end, header_crc32: crc32fast::hash(&header) })
}

/// Returns a file's header, with its length before it.
fn encode_header(id: FileId<'_>, ranges: &[StoredRange]) -> Result<Vec<u8>, String> {
    let infos = ranges.iter().map(|StoredRange { name, shape, range, crc32, .. }| {
        (name.as_str(), RangeInfo { shape: shape.clone(), start: range.start, crc32: format!("{crc32:08x}") })
    });
    let infos = serde_json::to_string(&infos.collect::<BTreeMap<_, _>>()).map_err(|e| e.to_string())?;
    let tensors = ranges.iter().map(|StoredRange { name, dtype, range, offset, .. }| {
        let start = *offset as usize;
        let data_offsets = (start, start + range.len() * width(*dtype));
        (name.clone(), TensorInfo { dtype: *dtype, shape: vec![range.len()], data_offsets })
    });
    // Fails if the header would break a rule of the format.
    let metadata = Metadata::new(Some(id.metadata(infos)), tensors.collect()).map_err(|e| e.to_string())?;
    let mut json = serde_json::to_vec(&metadata).map_err(|e| e.to_string())?;
    json.resize(json.len().next_multiple_of(PREFIX), b' ');
    if json.len() as u64 > LONGEST_HEADER {
        return Err(format!("a header of {} bytes is too long: save fewer tensors", json.len()));
    }
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

/// Reads the header of a file of this length, with its length before it.
pub(super) fn read_header(mut file: impl Read, bytes: u64) -> io::Result<Vec<u8>> {
    let truncated = || io::Error::new(io::ErrorKind::InvalidData, "its header is truncated or damaged");
    if bytes < PREFIX as u64 {
        return Err(truncated());
    }
    let mut header = vec![0; PREFIX];
    file.read_exact(&mut header)?;
    let json = header.first_chunk().map_or(0, |prefix| u64::from_le_bytes(*prefix));
    if json > LONGEST_HEADER || json > bytes.saturating_sub(PREFIX as u64) {
        return Err(truncated());
    }
    header.resize(PREFIX + json as usize, 0);
    file.read_exact(&mut header[PREFIX..])?;
    Ok(header)
}

/// Fails if a header says that its file is another one. A header that says nothing is damaged, which is found later.
pub(super) fn check_id(header: &[u8], id: FileId<'_>) -> Result<(), String> {
    let metadata = serde_json::from_slice::<Metadata>(header.get(PREFIX..).unwrap_or_default());
    let fields = metadata.ok().and_then(|metadata| metadata.metadata().clone()).unwrap_or_default();
    let differs = |key: &str, own: String| fields.get(key).filter(|value| **value != own);
    if differs("set", id.set.into()).is_some() {
        return Err("it is of another save than the others".into());
    }
    match differs("rank", id.rank.to_string()) {
        Some(rank) => Err(format!("it is the file of rank {rank}")),
        None => Ok(()),
    }
}

/// Parses the header of a file of this length. Returns the ranges that the file has.
pub(super) fn parse_header(header: &[u8], bytes: u64, id: FileId<'_>) -> Result<Vec<StoredRange>, String> {
    let json = header.get(PREFIX..).unwrap_or_default();
    let metadata: Metadata = serde_json::from_slice(json).map_err(|e| format!("its header is damaged: {e}"))?;
    let fields = metadata.metadata().clone().unwrap_or_default();
    let ranges = fields.get("ranges").cloned().unwrap_or_default();
    let expected = id.metadata(ranges.clone());
    for (key, value) in &expected {
        if fields.get(key) != Some(value) {
            let found = fields.get(key).map_or("nothing", String::as_str);
            return Err(format!("its {key} is {found} instead of {value}"));
        }
    }
    if header.len() as u64 + metadata.data_len() as u64 != bytes {
        return Err("it has another length than its header says".into());
    }
    let mut infos: BTreeMap<String, RangeInfo> =
        serde_json::from_str(&ranges).map_err(|e| format!("its header is damaged: {e}"))?;
    let stored = metadata.offset_keys().into_iter().map(|name| {
        let parsed = infos.remove(&name).zip(metadata.info(&name)).and_then(|(info, tensor)| {
            let [len] = tensor.shape[..] else { return None };
            let end = info.start.checked_add(len)?;
            let fits = tensor.dtype.bitsize() >= 8 && elements(&info.shape).is_some_and(|elements| end <= elements);
            let offset = tensor.data_offsets.0 as u64;
            let crc32 = u32::from_str_radix(&info.crc32, 16).ok()?;
            let (dtype, range) = (tensor.dtype, info.start..end);
            fits.then_some(StoredRange { name: name.clone(), dtype, shape: info.shape, range, offset, crc32 })
        });
        parsed.ok_or_else(|| format!("its header contradicts itself about `{name}`"))
    });
    stored.collect()
}
