//! The ranks of a measurement: threads, or copies of this program.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::thread;

#[cfg(unix)]
use bonfire::Medium;
use bonfire::{Builder, Error, Group};

use super::Common;
use crate::run;

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
pub enum Transport {
    /// Threads of one process
    Local,
    /// Processes that this program starts, over TCP on loopback
    Tcp,
    /// Processes that this program starts, in shared memory
    Shm,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Transport::Local => "local",
            Transport::Tcp => "tcp",
            Transport::Shm => "shm",
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum RanksError {
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
    #[cfg(not(unix))]
    #[error("TCP needs a unix system")]
    Platform,
}

/// Runs `work` on every rank; it gives the number of wrong elements over all of them. Returns the exit status.
pub fn measure(
    common: &Common,
    work: impl Fn(&Group) -> Result<u64, RanksError> + Clone + Send + 'static,
) -> Result<u8, RanksError> {
    let wrong = match common.transport {
        Transport::Local => threads(with_algorithms(Builder::default(), common), common.ranks, work)?,
        Transport::Tcp | Transport::Shm if !common.as_rank => return processes(common.ranks),
        #[cfg(unix)]
        Transport::Tcp => work(&with_algorithms(Builder::from_env()?, common).transport(Medium::Tcp).connect()?)?,
        #[cfg(unix)]
        Transport::Shm => work(&with_algorithms(Builder::from_env()?, common).transport(Medium::Shm).connect()?)?,
        #[cfg(not(unix))]
        Transport::Tcp | Transport::Shm => return Err(RanksError::Platform),
    };
    Ok(u8::from(wrong > 0))
}

fn with_algorithms(builder: Builder, common: &Common) -> Builder {
    common.algorithms.iter().cloned().fold(builder, Builder::algorithms)
}

fn threads(
    builder: Builder,
    ranks: u32,
    work: impl Fn(&Group) -> Result<u64, RanksError> + Clone + Send + 'static,
) -> Result<u64, RanksError> {
    let spawn = |group: Group| {
        let work = work.clone();
        thread::spawn(move || work(&group))
    };
    let threads: Vec<_> = builder.threads(ranks as usize)?.into_iter().map(spawn).collect();
    let results: Vec<_> = threads.into_iter().map(thread::JoinHandle::join).collect();
    let mut wrong = 0;
    for result in results {
        wrong = result.map_err(|_| RanksError::Panicked)??;
    }
    Ok(wrong)
}

/// Starts this program once per rank as `bonfire run` does, which ends all if one fails.
fn processes(ranks: u32) -> Result<u8, RanksError> {
    let program = std::env::current_exe().map_err(RanksError::Start)?.into_os_string();
    let arguments = std::env::args_os().skip(1).chain(["--as-rank".into()]);
    Ok(run::run(&run::Args::local(ranks, [program].into_iter().chain(arguments).collect())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_element_is_exit_status_1() {
        let common = Common { transport: Transport::Local, ranks: 2, algorithms: None, json: false, as_rank: false };
        assert_eq!(measure(&common, |_| Ok(0)).unwrap(), 0);
        assert_eq!(measure(&common, |_| Ok(1)).unwrap(), 1);
        assert_eq!(measure(&common, |_| Ok(256)).unwrap(), 1);
    }
}
