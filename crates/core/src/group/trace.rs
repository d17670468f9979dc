//! Trace files: the contents of a rank's recorder, in the form that `bonfire trace` reads.
//!
//! # When a rank writes its trace
//!
//! If `BONFIRE_TRACE` names a folder, a rank writes its trace at its group's first failure, after it has told its
//! peers, or when a signal interrupts it, while it leaves. The variable is read at that moment, in every kind
//! of group. The file's name contains the group's random session number, so jobs do not overwrite each other's files.
//!
//! A rank that is stuck outside of any operation does not notice a failure, and writes a trace only if it is
//! interrupted. Without its trace `bonfire trace` reports it as missing, which is right.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::core::Core;
use super::record::{Record, State};
use super::recorder::CAPACITY;
use crate::sync::lock;
use crate::types::{Error, Locate, Whereabouts};

/// Version of the format.
const VERSION: u32 = 1;

/// No trace file is larger than this, in bytes; larger files are rejected.
const MAX_BYTES: u64 = 16 << 20;

/// More ranks than any group has. A file that claims more is not a trace.
const MAX_RANKS: usize = 1 << 20;

/// One rank's last operations in one group; see [`Group::trace`](crate::Group::trace).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Trace {
    /// The version of the format: 1.
    pub bonfire_trace: u32,
    /// The group's name: the same on all its ranks, and different from every other group's. None on custom transports.
    pub group: Option<String>,
    /// The name of the group of which this one was made by subgroups and shrinks, itself if by none. It is the same for
    /// all groups of a job, unless its program connects several times.
    #[serde(default)]
    pub job: Option<String>,
    /// The rank that recorded the trace.
    pub rank: usize,
    /// The number of ranks in the group.
    pub world_size: usize,
    /// The name of the host, for display. Empty if it is not known.
    pub host: String,
    /// The process ID.
    pub process: u32,
    /// Names the clock. Times from the same clock can be compared; across clocks only durations can.
    pub clock: String,
    /// Resolution of the times at which operations completed, in nanoseconds. All other times are finer.
    pub resolution_ns: u64,
    /// When the trace was taken, in nanoseconds on that clock.
    pub taken_ns: u64,
    /// When the trace was taken, in seconds since 1970, for display: the clocks of hosts differ.
    pub taken_unix: u64,
    /// The error that poisoned the group, if any.
    pub failure: Option<String>,
    /// Where ranks were in their programs: this one when the trace was taken, and others as they have told it when it
    /// waited for them.
    #[serde(default)]
    pub whereabouts: Vec<(usize, Whereabouts)>,
    /// The number of collectives begun so far.
    pub collectives: u64,
    /// The last operations, oldest first, at most 1024. Operations that wait for their turn are not included.
    pub operations: Vec<Record>,
}

impl Trace {
    /// Reads a file written by [`Group::write_trace`](crate::Group::write_trace) or after a failure. The file need not
    /// be trusted.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, [`Error::Broken`] if it is not a trace of this version or has more
    /// than 16 MiB.
    pub fn read(path: impl AsRef<Path>) -> Result<Trace, Error> {
        let path = path.as_ref();
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|file| file.take(MAX_BYTES + 1).read_to_end(&mut bytes));
        let operation = || format!("reading the trace {}", path.display());
        read.map_err(|e| Error::io(operation(), e))?;
        Trace::parse(&bytes).map_err(|reason| Error::broken(operation(), reason))
    }

    /// Parses and validates a trace. The file is untrusted: it may be truncated, modified, or not be a trace at all.
    fn parse(bytes: &[u8]) -> Result<Trace, String> {
        if bytes.len() as u64 > MAX_BYTES {
            return Err(format!("it has more than {} MiB, which no trace has", MAX_BYTES >> 20));
        }
        let trace: Trace = serde_json::from_slice(bytes).map_err(|e| format!("it is no trace: {e}"))?;
        let Trace { bonfire_trace, rank, world_size, operations, whereabouts, .. } = &trace;
        if *bonfire_trace != VERSION {
            return Err(format!("its format is version {bonfire_trace}, and this program reads version {VERSION}"));
        }
        let peers = operations.iter().filter_map(|record| record.message.map(|message| message.peer));
        let told = whereabouts.iter().map(|(rank, _)| *rank);
        if *world_size > MAX_RANKS || peers.chain(told).chain([*rank]).any(|rank| rank >= *world_size) {
            return Err(format!("it is damaged: it names ranks outside a group of {world_size}"));
        }
        let in_order = operations.is_sorted_by(|a, b| a.number < b.number);
        let consistent = |record: &Record| {
            record.ended_ns.is_some() == (record.state != State::Begun)
                && record.ended_ns.is_none_or(|ended| ended >= record.begun_ns)
                && record.message.is_none() == record.call.operation.is_collective()
        };
        if operations.len() > CAPACITY || !in_order || !operations.iter().all(consistent) {
            return Err("it is damaged: its operations contradict each other".into());
        }
        Ok(trace)
    }

    /// Writes the file atomically and replaces an existing file of that name.
    pub(super) fn write(&self, path: &Path) -> Result<(), Error> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let written = || -> io::Result<()> {
            let text = serde_json::to_vec(self)?;
            let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
            let mut temporary = OsStr::new(".").to_owned();
            temporary.push(name);
            temporary.push(format!(".{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
            let temporary = path.with_file_name(temporary);
            // `create_new` follows no symbolic link planted in a folder that others may write to.
            let mut file = OpenOptions::new().write(true).create_new(true).open(&temporary)?;
            let result = file.write_all(&text).and_then(|()| fs::rename(&temporary, path));
            if result.is_err() {
                let _ = fs::remove_file(&temporary);
            }
            result
        };
        written().map_err(|e| Error::io(format!("writing the trace {}", path.display()), e))
    }
}

impl Core {
    /// Returns a snapshot of the recorder. Never blocks.
    pub(super) fn trace(&self) -> Trace {
        let clock = &self.operations.recorder.clock;
        let name = |session: u64| format!("{session:016x}");
        let mut whereabouts = match self.failure() {
            Some(Error::Timeout { whereabouts, .. }) => whereabouts.to_vec(),
            _ => Vec::new(),
        };
        whereabouts.retain(|(rank, _)| *rank != self.rank());
        whereabouts.push((self.rank(), self.journal.whereabouts()));
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Trace {
            bonfire_trace: VERSION,
            group: self.session.map(name),
            job: self.journal.job.map(name),
            rank: self.rank(),
            world_size: self.world_size(),
            host: fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().into(),
            process: std::process::id(),
            clock: clock.name(),
            resolution_ns: clock.resolution(),
            taken_ns: clock.at(std::time::Instant::now()),
            taken_unix: unix.as_secs(),
            failure: self.failure().map(ToString::to_string),
            whereabouts,
            collectives: self.operations.recorder.collectives(),
            operations: self.operations.recorder.records(),
        }
    }

    /// Writes this rank's trace to the folder named by `BONFIRE_TRACE`, if it is set, because the group failed or the
    /// process was interrupted. Only the first call writes; a concurrent call returns when the file is there.
    pub(super) fn save_trace(&self) {
        let mut saved = lock(&self.trace_saved);
        if std::mem::replace(&mut *saved, true) {
            return;
        }
        let Some(folder) = std::env::var_os("BONFIRE_TRACE").filter(|folder| !folder.is_empty()) else { return };
        let (folder, rank) = (PathBuf::from(folder), self.rank());
        // Group names are unique. A group without one is identified by process and time.
        let trace = self.trace();
        let group = trace.group.clone().unwrap_or_else(|| format!("{}-{}", trace.process, trace.taken_ns));
        let path = folder.join(format!("trace-{group}-{rank}.json"));
        let created = fs::create_dir_all(&folder).map_err(|e| Error::io("creating the folder BONFIRE_TRACE", e));
        match created.and_then(|()| trace.write(&path)) {
            Ok(()) => log::warn!("rank {rank}: last operations written to {}: see `bonfire trace`", path.display()),
            Err(error) => log::warn!("rank {rank}: could not write a trace: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::Message;
    use super::*;
    use crate::group::Group;
    use crate::types::ReduceOp;

    fn sample() -> Trace {
        let group = Group::threads(1).unwrap().remove(0);
        group.barrier().unwrap();
        group.all_reduce(&mut [1f32; 8], ReduceOp::Sum).unwrap();
        group.trace()
    }

    #[test]
    fn traces_round_trip_through_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        let trace = sample();
        trace.write(&path).unwrap();
        assert_eq!(Trace::read(&path).unwrap(), trace);
        // A second write replaces the first and leaves no temporary file.
        let other = sample();
        other.write(&path).unwrap();
        assert_eq!(Trace::read(&path).unwrap(), other);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
        assert!(trace.write(&folder.path().join("nowhere/trace")).is_err());
        assert!(trace.write(folder.path()).is_err());
        assert!(Trace::read(folder.path().join("absent")).is_err());
    }

    #[test]
    fn damaged_files_are_refused() {
        let parse = |change: fn(&mut Trace)| {
            let mut trace = sample();
            change(&mut trace);
            Trace::parse(&serde_json::to_vec(&trace).unwrap())
        };
        assert!(parse(|_| ()).is_ok());
        let damages: [fn(&mut Trace); 9] = [
            |trace| trace.bonfire_trace = 2,
            |trace| trace.rank = 1,
            |trace| trace.world_size = 0,
            |trace| trace.world_size = usize::MAX,
            |trace| trace.operations[0].number = 1,
            |trace| trace.operations[0].ended_ns = None,
            |trace| trace.operations[0].ended_ns = Some(0),
            |trace| trace.operations[0].message = Some(Message { peer: 0, sends: true }),
            |trace| trace.operations.extend((2..2000).map(|number| Record { number, ..sample().operations.remove(0) })),
        ];
        for (i, damage) in damages.into_iter().enumerate() {
            assert!(parse(damage).is_err(), "damage {i}");
        }
        let text = serde_json::to_vec(&sample()).unwrap();
        for len in 0..text.len() {
            assert!(Trace::parse(&text[..len]).is_err(), "cut after {len} bytes");
        }
    }
}
