//! Reading a set: any range of a tensor, from the files that have it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::contents::{Contents, Item, LOADING, argument};
use super::folder::file_name;
use super::format::{Dtype, Manifest, StoredRange, check_id, elements, parse_header, read_header, width};
use super::parts::describe;
use super::scalar::Scalar;
use bonfire_core::Error;

/// An open set.
pub struct Set {
    /// The files by rank, of a part of a set too.
    files: Arc<Vec<Source>>,
    tensors: BTreeMap<String, SavedTensor>,
    contents: Option<Contents>,
}

/// Where the ranges of a rank are.
struct Source {
    path: PathBuf,
    file: Data,
    /// Where the data begin, behind the header.
    data: u64,
}

/// A file, or its bytes.
pub(super) enum Data {
    File(File),
    /// From this byte on.
    Memory(Vec<u8>, usize),
}

impl Data {
    fn len(&self) -> io::Result<u64> {
        match self {
            Data::File(file) => Ok(file.metadata()?.len()),
            Data::Memory(bytes, start) => Ok((bytes.len() - start) as u64),
        }
    }

    /// Reads from this place on.
    fn at(&self, offset: u64) -> io::Result<Box<dyn Read + '_>> {
        match self {
            Data::File(file) => {
                let mut file: &File = file;
                file.seek(SeekFrom::Start(offset))?;
                Ok(Box::new(file))
            }
            Data::Memory(bytes, start) => Ok(Box::new(bytes.get(start + offset as usize..).unwrap_or_default())),
        }
    }
}

/// A tensor of a set.
#[derive(Clone)]
pub struct SavedTensor {
    /// The element type.
    pub dtype: Dtype,
    /// The shape of the whole.
    pub shape: Vec<usize>,
    /// The stored ranges with their files, in order. Together they have all elements.
    ranges: Vec<(usize, StoredRange)>,
}

impl SavedTensor {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        elements(&self.shape).unwrap_or(0)
    }
}

impl Set {
    /// Opens the files of a set, and checks that they are those of its manifest and have all elements of all tensors.
    pub(super) fn open(folder: &Path, manifest: &Manifest) -> Result<Set, Error> {
        Set::open_with(folder, manifest, |path| File::open(path).map(Data::File))
    }

    /// As [`open`](Self::open), with the files that `open` returns for their paths.
    pub(super) fn open_with(
        folder: &Path,
        manifest: &Manifest,
        mut open: impl FnMut(&Path) -> io::Result<Data>,
    ) -> Result<Set, Error> {
        let mut files = Vec::new();
        let mut set = Set { files: Arc::default(), tensors: BTreeMap::new(), contents: manifest.contents.clone() };
        for (rank, summary) in manifest.files.iter().enumerate() {
            let path = folder.join(file_name(rank));
            let broken = |reason: &str| invalid(&path, reason);
            let failed = |error: io::Error| match error.kind() {
                io::ErrorKind::NotFound => broken("it is missing"),
                io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => broken(&error.to_string()),
                _ => Error::io(format!("{LOADING}: opening {}", path.display()), error),
            };
            let file = open(&path).map_err(failed)?;
            let bytes = file.len().map_err(failed)?;
            let header = file.at(0).and_then(|file| read_header(file, bytes)).map_err(failed)?;
            let id = manifest.file_id(rank);
            check_id(&header, id).map_err(|reason| broken(&reason))?;
            if bytes != summary.bytes {
                return Err(broken(&format!("it has {bytes} bytes instead of {}: it is truncated", summary.bytes)));
            }
            if crc32fast::hash(&header) != summary.header_crc32 {
                return Err(broken("its header is damaged"));
            }
            for range in parse_header(&header, bytes, id).map_err(|reason| broken(&reason))? {
                set.add(rank, range).map_err(|reason| broken(&reason))?;
            }
            files.push(Source { path, file, data: header.len() as u64 });
        }
        for (name, tensor) in &mut set.tensors {
            tensor.ranges.sort_by_key(|(_, range)| range.range.start);
            let covered = tensor
                .ranges
                .iter()
                .try_fold(0, |end: usize, (_, range)| (range.range.start <= end).then_some(end.max(range.range.end)));
            if covered != elements(&tensor.shape) {
                return Err(invalid(folder, &format!("its files do not have all elements of `{name}`")));
            }
        }
        set.files = Arc::new(files);
        Ok(set)
    }

    /// Returns what has names that begin with `prefix`, under the rest of these names.
    pub(super) fn part(&self, prefix: &str, contents: Contents) -> Set {
        let tensors = self.names(prefix).map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
        Set { files: self.files.clone(), tensors, contents: Some(contents) }
    }

    fn add(&mut self, file: usize, range: StoredRange) -> Result<(), String> {
        let tensor = self.tensors.entry(range.name.clone()).or_insert_with(|| SavedTensor {
            dtype: range.dtype,
            shape: range.shape.clone(),
            ranges: Vec::new(),
        });
        if (tensor.dtype, &tensor.shape) != (range.dtype, &range.shape) {
            let (own, other) = (describe(range.dtype, &range.shape), describe(tensor.dtype, &tensor.shape));
            return Err(format!("in it `{}` is {own}, and {other} in another file", range.name));
        }
        tensor.ranges.push((file, range));
        Ok(())
    }

    /// Returns what the set holds. A set of version 1 does not say it.
    pub fn contents(&self) -> Option<&Contents> {
        self.contents.as_ref()
    }

    /// Fails if the set does not hold this item, but another one. A set of version 1 does not say it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], which names both.
    pub fn check(&self, own: &Item) -> Result<(), Error> {
        let Some(contents) = &self.contents else { return Ok(()) };
        own.check(contents.items.iter().find(|item| item.name == own.name))
    }

    /// Fails if an item has other fields in the set than these. A set of version 1 does not say it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], which names both.
    pub fn check_fields(&self, own: &Item, fields: &[impl AsRef<str>]) -> Result<(), Error> {
        let prefix = format!("{}/", own.name);
        let mut saved: Vec<&str> = self.names(&prefix).map(|(field, _)| field).collect();
        let mut fields: Vec<&str> = fields.iter().map(AsRef::as_ref).collect();
        saved.sort_unstable();
        fields.sort_unstable();
        if self.contents.is_none() || saved == fields {
            return Ok(());
        }
        let text =
            |fields: &[&str]| if fields.is_empty() { "nothing".into() } else { format!("`{}`", fields.join("`, `")) };
        let (saved, fields) = (text(&saved), text(&fields));
        Err(argument(format!(
            "it has {saved} of {own}, which now has {fields}: another one was saved; load it into what was saved, or \
             give another folder"
        )))
    }

    /// Returns the tensors whose names begin with `prefix`, in order, without the prefix.
    pub fn names<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a SavedTensor)> {
        let all = self.tensors.range(prefix.to_owned()..);
        all.map_while(move |(name, tensor)| Some((name.strip_prefix(prefix)?, tensor)))
    }

    /// Returns a tensor of this name, if the set has it.
    pub fn tensor(&self, name: &str) -> Option<&SavedTensor> {
        self.tensors.get(name)
    }

    /// Returns these elements of a tensor as bytes. Their checksums are checked.
    pub fn read(&self, name: &str, range: Range<usize>) -> Result<Vec<u8>, Error> {
        let missing = || argument(format!("it has no elements {range:?} of `{name}`"));
        let tensor = self.tensors.get(name).filter(|tensor| range.end <= tensor.elements()).ok_or_else(missing)?;
        let width = width(tensor.dtype);
        let mut bytes = vec![0; range.len() * width];
        let mut next = range.start;
        for (file, stored) in &tensor.ranges {
            let end = stored.range.end.min(range.end);
            if next >= range.end || end <= next {
                continue;
            }
            let whole = self.read_stored(*file, stored, width)?;
            let from = (next - stored.range.start) * width;
            let to = (next - range.start) * width;
            let len = (end - next) * width;
            bytes[to..to + len].copy_from_slice(&whole[from..from + len]);
            next = end;
        }
        Ok(bytes)
    }

    /// Returns a number, if the set has it.
    pub fn scalar(&self, name: &str) -> Result<Option<Scalar>, Error> {
        let Some(tensor) = self.tensor(name).filter(|tensor| tensor.shape.is_empty()) else { return Ok(None) };
        Ok(Scalar::from_bytes(tensor.dtype, &self.read(name, 0..1)?))
    }

    /// Returns a small value, if the set has it.
    pub fn value(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        self.tensor(name).map(|tensor| self.read(name, 0..tensor.elements())).transpose()
    }

    fn read_stored(&self, file: usize, stored: &StoredRange, width: usize) -> Result<Vec<u8>, Error> {
        let Source { path, file, data } = &self.files[file];
        let mut bytes = vec![0; stored.range.len() * width];
        let read = file.at(data + stored.offset).and_then(|mut file| file.read_exact(&mut bytes));
        read.map_err(|e| Error::io(format!("{LOADING}: reading {}", path.display()), e))?;
        match crc32fast::hash(&bytes) == stored.crc32 {
            true => Ok(bytes),
            false => Err(invalid(path, &format!("its part of `{}` is damaged", stored.name))),
        }
    }
}

/// Refuses a file of a set.
pub(super) fn invalid(path: &Path, reason: &str) -> Error {
    argument(format!(
        "{}: {reason}; restore the files of this set, or remove the set's folder to load the one before it",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checkpoint::contents::Kind;
    use crate::checkpoint::format::{FileId, FileSummary, Part, write};
    use bonfire_core::partition;

    const SET: &str = "0123456789abcdef";

    /// A part of a tensor of bytes, in which each element is its index.
    fn part(name: &str, len: usize, range: Range<usize>) -> Part {
        let bytes: Vec<u8> = range.clone().map(|i| i as u8).collect();
        Part { name: name.into(), dtype: Dtype::U8, shape: vec![len], range, read: Box::new(move |sink| sink(&bytes)) }
    }

    fn manifest(files: Vec<FileSummary>) -> Manifest {
        let items = vec![Item::new("model", Kind::Model).of("Net"), Item::new("user", Kind::User).record("burn 0.21")];
        Manifest::new(SET, files, Contents { epoch: 3, samples: 14, items })
    }

    /// Writes the files of a set, and opens it.
    fn open(folder: &Path, files: Vec<Vec<Part>>) -> Result<Set, Error> {
        let world_size = files.len();
        let summaries = files
            .into_iter()
            .enumerate()
            .map(|(rank, parts)| write(&folder.join(file_name(rank)), FileId::new(SET, rank, world_size), parts));
        Set::open(folder, &manifest(summaries.collect::<Result<_, _>>()?))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(30))]
        #[test]
        fn any_range_is_assembled_from_the_files_that_have_it(
            len in 0usize..250, n in 1usize..6, ends in (0usize..250, 0usize..250),
        ) {
            let folder = tempfile::tempdir().unwrap();
            // Ranges may overlap.
            let own = |rank| partition(len, n, rank).start..(partition(len, n, rank).end + rank).min(len);
            let set = open(folder.path(), (0..n).map(|rank| vec![part("a", len, own(rank))]).collect()).unwrap();
            let (start, end) = (ends.0.min(ends.1).min(len), ends.0.max(ends.1).min(len));
            let expected: Vec<u8> = (start..end).map(|i| i as u8).collect();
            prop_assert_eq!(set.read("a", start..end).unwrap(), expected);
            prop_assert!(set.read("a", start..len + 1).is_err() && set.read("b", 0..0).is_err());
        }
    }

    #[test]
    fn sets_that_lack_elements_or_contradict_themselves_are_refused() {
        let refused = |files, expected: &str| {
            let folder = tempfile::tempdir().unwrap();
            let error = open(folder.path(), files).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        };
        let lacks = "its files do not have all elements of `a`";
        refused(vec![vec![part("a", 9, 0..4)], vec![part("a", 9, 5..9)]], lacks);
        refused(vec![vec![part("a", 9, 1..9)]], lacks);
        refused(vec![vec![part("a", 9, 0..8)]], lacks);
        let differs = "rank-1.safetensors: in it `a` is u8 [8], and u8 [9] in another file";
        refused(vec![vec![part("a", 9, 0..5)], vec![part("a", 8, 5..8)]], differs);
    }

    #[test]
    fn fuzz_files() {
        let folder = tempfile::tempdir().unwrap();
        let seed = |parts| {
            let folder = tempfile::tempdir().unwrap();
            open(folder.path(), vec![parts]).unwrap();
            std::fs::read(folder.path().join(file_name(0))).unwrap()
        };
        let wide = Part { dtype: Dtype::F32, shape: vec![2, 3], ..part("c", 6, 0..6) };
        let wide = Part { read: Box::new(|sink| sink(&[7; 24])), ..wide };
        let seeds = [seed(vec![part("a", 5, 0..5)]), seed(vec![part("a", 5, 0..5), part("b", 0, 0..0), wide])];
        bonfire_testing::fuzz::fuzz("checkpoint-file", seeds, |bytes| {
            std::fs::write(folder.path().join(file_name(0)), bytes).unwrap();
            // A manifest that agrees with any header.
            let header_crc32 = read_header(bytes, bytes.len() as u64).map_or(0, |header| crc32fast::hash(&header));
            let manifest = manifest(vec![FileSummary { bytes: bytes.len() as u64, header_crc32 }]);
            let Ok(set) = Set::open(folder.path(), &manifest) else { return false };
            // Data that were changed have another checksum.
            for (name, tensor) in set.names("") {
                drop(set.read(name, 0..tensor.elements()));
            }
            true
        });
    }

    #[test]
    fn fuzz_manifests() {
        let summary = FileSummary { bytes: 1000, header_crc32: 7 };
        let seed = serde_json::to_vec_pretty(&manifest(vec![summary; 2])).unwrap();
        let old = br#"{"format":"bonfire checkpoint 1","set":"01","files":[{"bytes":9,"header_crc32":7}]}"#;
        let seeds = [seed, old.to_vec()];
        assert!(seeds.iter().all(|seed| Manifest::parse(std::str::from_utf8(seed).unwrap()).is_ok()));
        bonfire_testing::fuzz::fuzz("checkpoint-manifest", seeds, |bytes| {
            std::str::from_utf8(bytes).is_ok_and(|text| Manifest::parse(text).is_ok())
        });
    }
}
