//! Which job saves into a folder.
//!
//! The sets of two jobs in one folder would mix: each would remove the other's drafts and old sets, and load what the
//! other has saved. So the folder has a file that names the job, and the newest job has it: [`Claim::open`] writes the
//! file, and a save fails if another one has written it since. A job that goes on where one has died takes the folder
//! over so, and one that was only thought to be dead does no harm.
//!
//! No lock of the system does this: on network file systems it may be missing, or outlive a host that died. Only where
//! the other job certainly runs, as a process of this machine that has not dropped its `Checkpoints`, does a new one
//! fail at its start.
//!
//! A job may have several `Checkpoints` of one folder: those of which it only loads do not take the folder from the one
//! that saves. Of two that save, the one that began later has it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use log::warn;
use serde::{Deserialize, Serialize};

use super::folder::replace;
use super::{OPENING, SAVING};
use bonfire_core::Error;
use bonfire_core::internal::random;

/// The file that names the job.
const FILE: &str = "job.json";

/// What to do about two jobs.
const REMEDY: &str = "the sets of two jobs would mix; end one of them, or give each a folder of its own";

/// Rank 0's claim to a folder.
pub(super) struct Claim {
    folder: PathBuf,
    own: Owner,
    /// Whether the folder was this claim's. Saves and the drop are one after the other, so no ordering is needed.
    taken: AtomicBool,
}

/// Who saves into a folder.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Owner {
    /// A random number, another one for each `Checkpoints`.
    id: String,
    /// The numbers of the processes of all ranks: a job keeps at least one of them when it shrinks.
    processes: Vec<u64>,
    /// Rank 0's process.
    process: Process,
    /// When it took the folder, in seconds since 1970.
    since: u64,
    /// Whether it has dropped its `Checkpoints`.
    ended: bool,
}

/// A process, for people and for the machine that it runs on.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Process {
    host: String,
    program: String,
    id: u32,
    birth: Option<Birth>,
}

/// What no two processes have in common with their ids.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Birth {
    /// The running system and its space of process ids.
    machine: String,
    /// When the process was started, in ticks of the running system.
    ticks: u64,
}

impl Claim {
    /// Prepares a claim for the job of these processes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if another job has the folder that certainly still runs. [`Error::Io`] if the file
    /// cannot be read.
    pub fn new(folder: &Path, processes: Vec<u64>) -> Result<Claim, Error> {
        let (id, process) = (format!("{:016x}", random()?), Process::own());
        let own = Owner { id, processes, process, since: now(), ended: false };
        let claim = Claim { folder: folder.to_path_buf(), own, taken: AtomicBool::new(false) };
        match claim.owner(OPENING)? {
            Some(other) if !other.ended && !claim.is_of(&other) && other.process.runs() => {
                let (folder, since) = (folder.display(), other.since());
                let reason = format!("{} has saved into {folder} for {since}, and still runs; {REMEDY}", other.process);
                Err(Error::argument(OPENING, reason))
            }
            _ => Ok(claim),
        }
    }

    /// Takes the folder, unless this job has it: then the first save takes it.
    pub fn open(&self) -> Result<(), Error> {
        match self.owner(OPENING)? {
            Some(other) if self.is_of(&other) && !other.ended => Ok(()),
            _ => self.take(OPENING),
        }
    }

    /// Fails if the folder is another job's. The first call takes it from another claim of this job.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], which names the other job. [`Error::Io`] if the file cannot be read or written.
    pub fn check(&self) -> Result<(), Error> {
        let other = match self.owner(SAVING)? {
            Some(owner) if owner.id == self.own.id => return Ok(()),
            Some(owner) if self.taken.load(Ordering::Relaxed) || !self.is_of(&owner) => owner,
            _ => return self.take(SAVING),
        };
        let (folder, since) = (self.folder.display(), other.since());
        let who = if self.is_of(&other) {
            format!("another `Checkpoints` of {}", other.process)
        } else {
            other.process.to_string()
        };
        Err(Error::argument(SAVING, format!("{who} has taken {folder} over, {since} ago; {REMEDY}")))
    }

    /// Whether this claim is of the same job.
    fn is_of(&self, owner: &Owner) -> bool {
        self.own.processes.iter().any(|process| owner.processes.contains(process))
    }

    fn take(&self, operation: &str) -> Result<(), Error> {
        self.write(&Owner { since: now(), ..self.own.clone() })
            .map_err(|error| Error::io(format!("{operation}: writing {}", self.folder.join(FILE).display()), error))?;
        self.taken.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn write(&self, owner: &Owner) -> io::Result<()> {
        replace(&self.folder, FILE, &self.own.id, &serde_json::to_vec_pretty(owner)?)
    }

    /// Reads who has the folder. A file that says nothing is none: it is only ever replaced as a whole.
    fn owner(&self, operation: &str) -> Result<Option<Owner>, Error> {
        let path = self.folder.join(FILE);
        match fs::read(&path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Error::io(format!("{operation}: reading {}", path.display()), error)),
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Only for the start of another job while this process goes on: a process that has ended is none that runs.
        if let Ok(Some(owner)) = self.owner(SAVING)
            && owner.id == self.own.id
            && let Err(error) = self.write(&Owner { ended: true, ..owner })
        {
            warn!("cannot give {} free for other jobs: {error}", self.folder.display());
        }
    }
}

impl Owner {
    /// How long it has had the folder, as text. The clocks of two hosts may differ.
    fn since(&self) -> String {
        format!("{} s", now().saturating_sub(self.since))
    }
}

impl std::fmt::Display for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} (`{}`) on host `{}`", self.id, self.program, self.host)
    }
}

impl Process {
    fn own() -> Process {
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
        let program = std::env::args_os().next().map(PathBuf::from).unwrap_or_default();
        let program = program.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let id = std::process::id();
        Process { host, program, id, birth: Birth::of(id) }
    }

    /// Whether it certainly runs.
    fn runs(&self) -> bool {
        self.birth.is_some() && Birth::of(self.id) == self.birth
    }
}

impl Birth {
    /// Returns that of a process of this machine which runs, on a system that tells it.
    fn of(process: u32) -> Option<Birth> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let ids = fs::read_link("/proc/self/ns/pid").ok()?;
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The name before these fields may contain anything.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        // Ended, and not yet waited for.
        let runs = !matches!(fields.first(), Some(&("Z" | "X" | "x")));
        let ticks = fields.get(19)?.parse().ok()?;
        runs.then(|| Birth { machine: format!("{} {}", boot.trim(), ids.display()), ticks })
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}
