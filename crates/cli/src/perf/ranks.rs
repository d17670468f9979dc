//! The ranks of a measurement: threads, or processes that run this program.

use std::env;
use std::ffi::OsString;
use std::thread;

#[cfg(unix)]
use bonfire::TransportKind;
use bonfire::{Builder, Error, Group};
use clap::Parser;

use super::args::{Common, Transport};
use super::timing::RankError;
use crate::failure::Failure;
use crate::run;
use crate::text::name;

/// Runs `work`, which returns the number of wrong elements over all ranks, on every rank. Returns the exit status.
pub fn measure(
    common: &Common,
    launched: bool,
    work: impl Fn(&Group) -> Result<u64, RankError> + Sync,
) -> Result<u8, Failure> {
    let wrong = match common.transport {
        transport if transport.has_threads() && !launched => as_threads(common, work),
        #[cfg(unix)]
        transport if launched || transport.is_mpi() => as_process(common, work),
        _ => return start_processes(common.ranks),
    };
    let failed = |error| format!("{} ranks over {}: {error}", common.ranks, name(&common.transport));
    wrong.map(|wrong| u8::from(wrong > 0)).map_err(|error| Failure::with(1)(failed(error)))
}

/// Returns the number of ranks if a launcher started this process as one of them. If the number is missing, the group
/// reports that itself. A single rank that `bonfire run` has not started is a shell in a cluster's job: it starts the
/// processes to measure.
#[cfg(unix)]
pub fn launched() -> Result<Option<u32>, Error> {
    let Some(launched) = Builder::from_env()?.launched() else { return Ok(None) };
    let ranks = launched.world_size.and_then(|ranks| ranks.try_into().ok()).unwrap_or(1);
    Ok(Some(ranks).filter(|ranks| *ranks > 1 || env::var_os("BONFIRE_RANK").is_some()))
}

#[cfg(not(unix))]
pub fn launched() -> Result<Option<u32>, Error> {
    Ok(None)
}

#[cfg(unix)]
impl Transport {
    fn kind(self) -> TransportKind {
        match self {
            Transport::Tcp => TransportKind::Tcp,
            Transport::Shm => TransportKind::Shm,
            Transport::Local | Transport::Auto => TransportKind::Auto,
            #[cfg(feature = "cuda")]
            Transport::Cuda => TransportKind::Auto,
            #[cfg(feature = "mpi")]
            Transport::Mpi => TransportKind::Mpi,
            #[cfg(feature = "mpi")]
            Transport::MpiBlocking => TransportKind::MpiBlocking,
        }
    }

    fn is_mpi(self) -> bool {
        matches!(self.kind(), TransportKind::Mpi | TransportKind::MpiBlocking)
    }
}

fn with_algorithms(builder: Builder, common: &Common) -> Builder {
    common.algorithms.iter().cloned().fold(builder, Builder::algorithms)
}

fn as_threads(common: &Common, work: impl Fn(&Group) -> Result<u64, RankError> + Sync) -> Result<u64, RankError> {
    let groups = with_algorithms(Builder::default(), common).threads(common.ranks as usize)?;
    let work = &work;
    thread::scope(|scope| {
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || work(&group))).collect();
        let results: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap_or(Err(RankError::Panicked))).collect();
        results.into_iter().try_fold(0, |_, wrong| wrong)
    })
}

/// Runs `work` in this process, as one of the ranks that a launcher started.
#[cfg(unix)]
fn as_process(common: &Common, work: impl Fn(&Group) -> Result<u64, RankError>) -> Result<u64, RankError> {
    let builder = Builder::from_env()?;
    if builder.launched().is_none() {
        return Err(RankError::NotUnderMpi(common.ranks));
    }
    work(&with_algorithms(builder, common).transport(common.transport.kind()).connect()?)
}

/// Starts this program once per rank as `bonfire run` does, which ends all ranks if one fails.
fn start_processes(ranks: u32) -> Result<u8, Failure> {
    let program = env::current_exe().map_err(|error| Failure::with(1)(format!("cannot start a rank: {error}")))?;
    let flags = ["run", "--no-prefix", "--ranks", &ranks.to_string(), "--"].map(OsString::from);
    let command = [program.into_os_string()].into_iter().chain(env::args_os().skip(1));
    let args = run::Args::try_parse_from(flags.into_iter().chain(command)).map_err(Failure::with(1))?;
    run::run(&args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_element_is_exit_status_1() {
        let common = Common { transport: Transport::Local, ranks: 2, algorithms: None, json: false };
        for (wrong, status) in [(0, 0), (1, 1), (256, 1)] {
            assert_eq!(measure(&common, false, |_| Ok(wrong)).unwrap(), status);
        }
    }
}
