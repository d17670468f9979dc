//! A set of one rank in memory, to hand a training over as one value.

use std::io::Cursor;
use std::path::Path;

use super::format::{self, FileId, Manifest};
use super::parts::Parts;
use super::set::{Data, Set};
use super::{SAVING, Snapshot, argument};
use bonfire_core::Error;

/// The bytes before the manifest: its length and its checksum.
const PREFIX: usize = 12;

/// Returns what a rank saves that has the whole of everything: a manifest, behind its length and its checksum, and its
/// file.
///
/// # Errors
/// Those of the snapshot.
pub fn to_bytes(Snapshot { contents, collect }: Snapshot) -> Result<Vec<u8>, Error> {
    let mut parts = Parts::new(0, 1);
    collect(&mut parts)?;
    let mut file = Cursor::new(Vec::new());
    let summary = format::write_to(&mut file, SAVING, FileId::new(ID, 0, 1), parts.into_list().0)?;
    let manifest = serde_json::to_vec(&Manifest::new(ID, vec![summary], contents));
    let manifest = manifest.map_err(|error| Error::broken(SAVING, error.to_string()))?;
    let (len, checksum) = (manifest.len() as u64, crc32fast::hash(&manifest));
    Ok([&len.to_le_bytes()[..], &checksum.to_le_bytes(), &manifest, file.get_ref()].concat())
}

/// Returns the set in these bytes.
///
/// # Errors
/// [`Error::InvalidArgument`] if they are not what [`to_bytes`] has returned, or were damaged.
pub fn from_bytes(bytes: Vec<u8>) -> Result<Set, Error> {
    let parts = bytes.split_first_chunk::<PREFIX>().and_then(|(len, rest)| {
        let (len, checksum) = len.split_first_chunk()?;
        let len = usize::try_from(u64::from_le_bytes(*len)).ok().filter(|len| *len <= rest.len())?;
        let (manifest, file) = rest.split_at(len);
        (checksum == crc32fast::hash(manifest).to_le_bytes()).then_some((manifest, file))
    });
    let manifest = parts.and_then(|(manifest, file)| {
        let manifest = Manifest::parse(std::str::from_utf8(manifest).ok()?).ok()?;
        (manifest.files.len() == 1).then_some((manifest, bytes.len() - file.len()))
    });
    let invalid = || argument("these bytes are not what `TrainingState::save` returned, or were damaged");
    let (manifest, start) = manifest.ok_or_else(invalid)?;
    // The only file takes them.
    let mut bytes = Some(bytes);
    let open = |_: &Path| Ok(Data::Memory(bytes.take().unwrap_or_default(), start));
    Set::open_with(Path::new("the bytes"), &manifest, open).map_err(|_| invalid())
}

/// The id of the set. Its only file cannot be of another one.
const ID: &str = "bytes";

#[cfg(test)]
mod tests {
    use super::super::contents::{Contents, Item, Kind};
    use super::super::format::Dtype;
    use super::super::scalar::Scalar;
    use super::*;

    fn snapshot() -> Snapshot {
        let items = vec![Item::new("model", Kind::Model)];
        let collect = |parts: &mut Parts| {
            let read = |range: std::ops::Range<usize>, sink: super::super::Sink<'_>| sink(&[3, 1, 4, 1, 5][range]);
            parts.add_replicated("model/a".into(), Dtype::U8, &[5], read)?;
            parts.add_scalar("scheduler/step".into(), Scalar::Int(-7))
        };
        Snapshot { contents: Contents { epoch: 2, samples: 9, items }, collect: Box::new(collect) }
    }

    /// All that a set in memory has.
    fn read(bytes: &[u8]) -> Result<(Contents, Vec<u8>, Option<Scalar>), Error> {
        let set = from_bytes(bytes.to_vec())?;
        let contents = set.contents().cloned().expect("the contents");
        Ok((contents, set.read("model/a", 1..5)?, set.scalar("scheduler/step")?))
    }

    #[test]
    fn a_set_in_memory_is_read_and_damage_found_anywhere() {
        let (contents, bytes) = (snapshot().contents, to_bytes(snapshot()).unwrap());
        assert_eq!(read(&bytes).unwrap(), (contents, vec![1, 4, 1, 5], Some(Scalar::Int(-7))));
        for place in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[place] ^= 0x20;
            assert!(matches!(read(&damaged), Err(Error::InvalidArgument { .. })), "byte {place}");
            assert!(matches!(read(&bytes[..place]), Err(Error::InvalidArgument { .. })), "{place} bytes");
        }
    }

    #[test]
    fn fuzz_bytes() {
        bonfire_testing::fuzz::fuzz("checkpoint-bytes", [to_bytes(snapshot()).unwrap()], |bytes| read(bytes).is_ok());
    }
}
