//! The ranks of a measurement: threads, or processes that run this program.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::thread;

#[cfg(unix)]
use bonfire::Medium;
use bonfire::{Builder, Error, Group};
use clap::Parser;

use super::Common;
use crate::run;

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
pub enum Transport {
    /// Threads of one process
    Local,
    /// Processes over TCP; on loopback where this program starts them
    Tcp,
    /// Processes of one host in shared memory
    Shm,
    /// Processes in shared memory on a host and over TCP between hosts
    Auto,
    /// Processes that MPI's launcher started, on MPI
    #[cfg(feature = "mpi")]
    Mpi,
    /// The same, by calls that block in MPI
    #[cfg(feature = "mpi")]
    MpiBlocking,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Local => "local",
            Transport::Tcp => "tcp",
            Transport::Shm => "shm",
            Transport::Auto => "auto",
            #[cfg(feature = "mpi")]
            Transport::Mpi => "mpi",
            #[cfg(feature = "mpi")]
            Transport::MpiBlocking => "mpi-blocking",
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum RankError {
    #[error(transparent)]
    Group(#[from] Error),
    #[cfg(unix)]
    #[error(transparent)]
    Collective(#[from] bonfire::CollectiveError),
    #[error("cannot start a rank: {0}")]
    Start(io::Error),
    #[error("a rank panicked; its message is above")]
    Panicked,
    #[error("cannot print: {0}")]
    Print(#[from] io::Error),
    #[error("cannot draw {0}: {1}")]
    Draw(PathBuf, String),
    #[cfg(feature = "mpi")]
    #[error("MPI's launcher starts the ranks: mpirun -n {0} bonfire perf ... --transport mpi")]
    NotByMpi(u32),
    #[cfg(not(unix))]
    #[error("TCP needs a unix system")]
    Platform,
}

/// Runs `work` on every rank; it gives the number of wrong elements over all of them. Returns the exit status.
pub fn measure(
    common: &Common,
    work: impl Fn(&Group) -> Result<u64, RankError> + Clone + Send + 'static,
) -> Result<u8, RankError> {
    let wrong = match common.transport {
        Transport::Local => threads(with_algorithms(Builder::default(), common), common.ranks, work)?,
        #[cfg(feature = "mpi")]
        Transport::Mpi | Transport::MpiBlocking if Builder::from_env()?.launched().is_none() => {
            return Err(RankError::NotByMpi(common.ranks));
        }
        #[cfg(feature = "mpi")]
        Transport::Mpi => work(&with_algorithms(Builder::from_env()?, common).transport(Medium::Mpi).connect()?)?,
        #[cfg(feature = "mpi")]
        Transport::MpiBlocking => {
            work(&with_algorithms(Builder::from_env()?, common).transport(Medium::MpiBlocking).connect()?)?
        }
        _ if launched()?.is_none() => return processes(common.ranks),
        #[cfg(unix)]
        Transport::Tcp => work(&with_algorithms(Builder::from_env()?, common).transport(Medium::Tcp).connect()?)?,
        #[cfg(unix)]
        Transport::Shm => work(&with_algorithms(Builder::from_env()?, common).transport(Medium::Shm).connect()?)?,
        #[cfg(unix)]
        Transport::Auto => work(&with_algorithms(Builder::from_env()?, common).transport(Medium::Auto).connect()?)?,
        #[cfg(not(unix))]
        _ => return Err(RankError::Platform),
    };
    Ok(u8::from(wrong > 0))
}

fn with_algorithms(builder: Builder, common: &Common) -> Builder {
    common.algorithms.iter().cloned().fold(builder, Builder::algorithms)
}

/// The number of ranks where a launcher started this process as one of them. What the group makes of a number that is
/// missing, it says itself. A shell in a cluster is a rank alone to others than `bonfire run`, and starts what it measures.
#[cfg(unix)]
pub fn launched() -> Result<Option<u32>, Error> {
    let Some(launched) = Builder::from_env()?.launched() else { return Ok(None) };
    let ranks = launched.world_size.and_then(|ranks| ranks.try_into().ok()).unwrap_or(1);
    Ok(Some(ranks).filter(|ranks| *ranks > 1 || std::env::var_os("BONFIRE_RANK").is_some()))
}

#[cfg(not(unix))]
pub fn launched() -> Result<Option<u32>, Error> {
    Ok(None)
}

fn threads(
    builder: Builder,
    ranks: u32,
    work: impl Fn(&Group) -> Result<u64, RankError> + Clone + Send + 'static,
) -> Result<u64, RankError> {
    let spawn = |group: Group| {
        let work = work.clone();
        thread::spawn(move || work(&group))
    };
    let threads: Vec<_> = builder.threads(ranks as usize)?.into_iter().map(spawn).collect();
    let results: Vec<_> = threads.into_iter().map(thread::JoinHandle::join).collect();
    let mut wrong = 0;
    for result in results {
        wrong = result.map_err(|_| RankError::Panicked)??;
    }
    Ok(wrong)
}

/// Starts this program once per rank as `bonfire run` does, which ends all if one fails.
fn processes(ranks: u32) -> Result<u8, RankError> {
    let program = std::env::current_exe().map_err(RankError::Start)?.into_os_string();
    let flags = ["run", "--no-prefix", "--ranks", &ranks.to_string(), "--"].map(OsString::from);
    let command = [program].into_iter().chain(std::env::args_os().skip(1));
    let args = run::Args::parse_from(flags.into_iter().chain(command));
    Ok(run::run(&args).unwrap_or_else(|failure| {
        eprintln!("error: {failure}");
        failure.status
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_element_is_exit_status_1() {
        let common = Common { transport: Transport::Local, ranks: 2, algorithms: None, json: false };
        assert_eq!(measure(&common, |_| Ok(0)).unwrap(), 0);
        assert_eq!(measure(&common, |_| Ok(1)).unwrap(), 1);
        assert_eq!(measure(&common, |_| Ok(256)).unwrap(), 1);
    }
}
