//! What a rank's recorder holds, as a file that `bonfire trace` reads.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::core::Core;
use super::record::{Record, State};
use super::recorder::KEPT;
use crate::sync::lock;
use crate::types::Error;

/// The version of the format.
const VERSION: u32 = 1;

/// No trace is larger, and none is read that is.
const LARGEST: u64 = 16 << 20;

/// More ranks than any group has: a trace that says so is none.
const MOST_RANKS: usize = 1 << 20;

/// One rank's last operations in one group; see [`Group::trace`](crate::Group::trace).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Trace {
    /// The version of the format: 1.
    pub bonfire_trace: u32,
    /// The group's name, the same on all its ranks and no other group's. None on transports from elsewhere.
    pub group: Option<String>,
    /// Whose trace it is.
    pub rank: usize,
    /// The ranks of the group.
    pub world_size: usize,
    /// The name of the host, for people.
    pub host: String,
    /// The number of the process.
    pub process: u32,
    /// Where it is the same, times can be compared; elsewhere only durations can.
    pub clock: String,
    /// How coarse the times are at which operations were done. The others are fine.
    pub resolution_ns: u64,
    /// When the trace was taken, on that clock.
    pub taken_ns: u64,
    /// The same in seconds since 1970, for people: hosts differ.
    pub taken_unix: u64,
    /// What poisoned the group, if anything did.
    pub failure: Option<String>,
    /// Collectives begun so far.
    pub collectives: u64,
    /// The last operations, oldest first, 1024 at most. Those that wait for their turn are not among them.
    pub operations: Vec<Record>,
}

impl Trace {
    /// Reads a file that [`Group::write_trace`](crate::Group::write_trace) or a failure wrote.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be read, [`Error::Broken`] where it holds something else.
    pub fn read(path: impl AsRef<Path>) -> Result<Trace, Error> {
        let path = path.as_ref();
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut bytes));
        let operation = || format!("reading the trace {}", path.display());
        read.map_err(|e| Error::io(operation(), e))?;
        Trace::parse(&bytes).map_err(|reason| Error::broken(operation(), reason))
    }

    /// Takes nothing for granted: files may have been cut, changed, or written by somebody else.
    fn parse(bytes: &[u8]) -> Result<Trace, String> {
        if bytes.len() as u64 > LARGEST {
            return Err(format!("it has more than {} MiB, which no trace has", LARGEST >> 20));
        }
        let trace: Trace = serde_json::from_slice(bytes).map_err(|e| format!("it is no trace: {e}"))?;
        let Trace { bonfire_trace, rank, world_size, operations, .. } = &trace;
        if *bonfire_trace != VERSION {
            return Err(format!("its format is version {bonfire_trace}, and this program reads version {VERSION}"));
        }
        let peers = operations.iter().filter_map(|record| record.message.map(|message| message.peer));
        if *world_size > MOST_RANKS || peers.chain([*rank]).any(|rank| rank >= *world_size) {
            return Err(format!("it is damaged: it names ranks that a group of {world_size} has not"));
        }
        let in_order = operations.is_sorted_by(|a, b| a.number < b.number);
        let whole = |record: &Record| {
            record.ended_ns.is_some() == (record.state != State::Begun)
                && record.ended_ns.is_none_or(|ended| ended >= record.begun_ns)
                && record.message.is_none() == record.call.operation.is_collective()
        };
        if operations.len() > KEPT || !in_order || !operations.iter().all(whole) {
            return Err("it is damaged: its operations contradict each other".into());
        }
        Ok(trace)
    }

    /// Writes a file that is there as a whole or not at all. One with this name is replaced.
    pub(super) fn write(&self, path: &Path) -> Result<(), Error> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let written = || -> io::Result<()> {
            let text = serde_json::to_vec(self)?;
            let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
            let mut hidden = OsStr::new(".").to_owned();
            hidden.push(name);
            hidden.push(format!(".{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
            let hidden = path.with_file_name(hidden);
            // `create_new` follows no link that somebody left in a folder that others may write to.
            let mut file = OpenOptions::new().write(true).create_new(true).open(&hidden)?;
            let moved = file.write_all(&text).and_then(|()| fs::rename(&hidden, path));
            if moved.is_err() {
                let _ = fs::remove_file(&hidden);
            }
            moved
        };
        written().map_err(|e| Error::io(format!("writing the trace {}", path.display()), e))
    }
}

impl Core {
    /// What the recorder holds now. Waits for nobody.
    pub(super) fn trace(&self) -> Trace {
        let clock = &self.recorder.clock;
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Trace {
            bonfire_trace: VERSION,
            group: self.session.map(|session| format!("{session:016x}")),
            rank: self.rank(),
            world_size: self.world_size(),
            host: fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().into(),
            process: std::process::id(),
            clock: clock.name(),
            resolution_ns: clock.resolution(),
            taken_ns: clock.at(std::time::Instant::now()),
            taken_unix: unix.as_secs(),
            failure: self.failure().map(ToString::to_string),
            collectives: self.recorder.collectives(),
            operations: self.recorder.records(),
        }
    }

    /// The group has failed or the process is interrupted: leaves this rank's trace where `BONFIRE_TRACE` says, if it
    /// does. Once, and who comes second returns when it is there.
    pub(super) fn leave_trace(&self) {
        let mut traced = lock(&self.traced);
        if std::mem::replace(&mut *traced, true) {
            return;
        }
        let Some(folder) = std::env::var_os("BONFIRE_TRACE").filter(|folder| !folder.is_empty()) else { return };
        let (folder, rank) = (PathBuf::from(folder), self.rank());
        // No two groups have the same name. Without one, the process and the moment stand for it.
        let trace = self.trace();
        let group = trace.group.clone().unwrap_or_else(|| format!("{}-{}", trace.process, trace.taken_ns));
        let path = folder.join(format!("trace-{group}-{rank}.json"));
        let made = fs::create_dir_all(&folder).map_err(|e| Error::io("making the folder of BONFIRE_TRACE", e));
        match made.and_then(|()| trace.write(&path)) {
            Ok(()) => log::warn!("rank {rank}: its last operations are in {}: see `bonfire trace`", path.display()),
            Err(error) => log::warn!("rank {rank}: no trace: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::Message;
    use super::*;
    use crate::group::Group;
    use crate::types::ReduceOp;

    fn traced() -> Trace {
        let group = Group::threads(1).unwrap().remove(0);
        group.barrier().unwrap();
        group.all_reduce(&mut [1f32; 8], ReduceOp::Sum).unwrap();
        group.trace()
    }

    #[test]
    fn a_trace_survives_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        let trace = traced();
        trace.write(&path).unwrap();
        assert_eq!(Trace::read(&path).unwrap(), trace);
        // A second one takes its place, and nothing else is left.
        let other = traced();
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
            let mut trace = traced();
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
            |trace| trace.operations.extend((2..2000).map(|number| Record { number, ..traced().operations.remove(0) })),
        ];
        for (i, damage) in damages.into_iter().enumerate() {
            assert!(parse(damage).is_err(), "damage {i}");
        }
        let text = serde_json::to_vec(&traced()).unwrap();
        for len in 0..text.len() {
            assert!(Trace::parse(&text[..len]).is_err(), "cut after {len} bytes");
        }
    }
}
