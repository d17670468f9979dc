//! The ranks of a program: processes if a launcher started this one, otherwise threads.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
#[cfg(unix)]
use std::sync::OnceLock;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use crate::group::{Builder, Group};
#[cfg(unix)]
pub use crate::rendezvous::Launched;
use crate::sync::{Deadline, with_local};
use crate::types::Error;

thread_local! {
    /// The rank whose program runs on this thread.
    static RANK: RefCell<Option<usize>> = const { RefCell::new(None) };
}

/// Prints a line on rank 0 only, as `std::println!` does: in the program that [`launch`](crate::launch()) or
/// [`run`](crate::launch::run) runs, and in a process that a launcher made a rank. Without either it always prints, as
/// do other threads that a program with ranks as threads starts.
///
/// All ranks compute the arguments, so they may be results of collectives. With an import every `println!` of a module
/// becomes this one:
///
/// ```
/// use bonfire_core::{Error, Group, ReduceOp, launch, println};
///
/// launch(3, |group: Group| {
///     let mut sum = [1u64];
///     group.all_reduce(&mut sum, ReduceOp::Sum)?;
///     println!("{} ranks", sum[0]);              // once
///     Ok::<(), Error>(())
/// })?;
/// # Ok::<(), bonfire_core::launch::Failed>(())
/// ```
#[macro_export]
macro_rules! println {
    () => { $crate::println!("") };
    ($($argument:tt)*) => {
        match ::std::format_args!($($argument)*) {
            line => if $crate::launch::is_first_rank() { ::std::println!("{line}") },
        }
    };
}

/// Whether the program of rank 0 runs on this thread, or that of no rank.
#[doc(hidden)]
pub fn is_first_rank() -> bool {
    RANK.with_borrow(|rank| rank.or_else(of_process)).is_none_or(|rank| rank == 0)
}

/// Returns the rank that a launcher made this process, if it is known.
fn of_process() -> Option<usize> {
    #[cfg(unix)]
    {
        static RANK: OnceLock<Option<usize>> = OnceLock::new();
        *RANK.get_or_init(|| Builder::from_env().ok()?.launched()?.rank)
    }
    #[cfg(not(unix))]
    None
}

/// How long the other ranks of the process may take to end after one has failed: as long as `bonfire run` gives them.
const GRACE: Duration = Duration::from_secs(10);

/// Runs `body` as every rank of this process: as the one rank that the launcher made this process, or without a
/// launcher as each of `threads` ranks, on threads of their own. Returns the ranks' results in rank order.
///
/// One program thus runs under plain `cargo run` and under every launcher that [`Group::from_env`] knows. There the
/// launcher determines the number of ranks, and each process runs `body` once, on the caller's thread.
///
/// Settings that are malformed or incomplete are errors and never mean that there is no launcher. If no launcher was
/// recognised, a line in the log (level info) says so. [`Builder::launched`] tells a program beforehand.
///
/// ```
/// use bonfire_core::launch::{Failed, launch};
/// use bonfire_core::{Error, Group, ReduceOp};
///
/// fn rank(group: Group) -> Result<f32, Error> {
///     let mut sum = [group.rank() as f32];
///     group.all_reduce(&mut sum, ReduceOp::Sum)?;
///     Ok(sum[0])
/// }
///
/// fn main() -> Result<(), Failed> {
///     let sums = launch(4, rank)?;
///     assert_eq!(sums, [6.0; 4]);
///     Ok(())
/// }
/// ```
///
/// # Errors
/// [`Failed`] with the first error that `body` returned; what other ranks return as a consequence is dropped. Without a
/// rank if the ranks could not be started: [`Error::Config`] and the other errors of [`Group::from_env`], or
/// [`Error::InvalidArgument`] if `threads` is 0 and there is no launcher. On systems other than Unix all ranks are
/// threads, and a launcher or a transport by name is [`Error::Config`].
///
/// # Panics
/// If `body` panicked on a rank before any rank failed. The message of the panic names the thread, `rank 2`, and a
/// program that does not catch it ends with status 101.
pub fn launch<T, E>(
    threads: usize,
    body: impl Fn(Group) -> Result<T, E> + Send + Sync + 'static,
) -> Result<Vec<T>, Failed<E>>
where
    T: Send + 'static,
    E: From<Error> + Send + 'static,
{
    match ranks(threads) {
        Ok(groups) => run(groups, body),
        Err(error) => Err(Failed::new(None, error.into())),
    }
}

/// Returns the groups of this process's ranks.
#[cfg(unix)]
fn ranks(threads: usize) -> Result<Vec<Group>, Error> {
    let builder = Builder::from_env()?;
    if builder.launched().is_some() {
        return Ok(vec![builder.connect()?]);
    }
    log::info!("no launcher was recognised: {threads} ranks are threads of this process");
    builder.threads(threads)
}

#[cfg(not(unix))]
fn ranks(threads: usize) -> Result<Vec<Group>, Error> {
    refuse_processes(|variable| std::env::var(variable).ok())?;
    Builder::default().threads(threads)
}

/// Fails where variables ask for ranks as processes: each process would train alone, as all ranks.
#[cfg(not(unix))]
fn refuse_processes(read: impl Fn(&str) -> Option<String>) -> Result<(), Error> {
    let own = ["BONFIRE_RANK", "BONFIRE_WORLD_SIZE", "BONFIRE_ADDRESS", "BONFIRE_TRANSPORT"];
    // Those of torchrun, and of MPI's launchers.
    for variable in own.into_iter().chain(["TORCHELASTIC_RUN_ID", "PMI_RANK"]) {
        let text = read(variable).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
        if let Some(text) = text.filter(|text| variable != "BONFIRE_TRANSPORT" || text != "auto") {
            return Err(Error::Config(format!(
                "{variable} is '{text}', which asks for ranks as processes, and on this system all ranks are threads \
                 of one process: unset it, and start the program once and without a launcher"
            )));
        }
    }
    Ok(())
}

/// As [`launch`], with ranks that exist already, such as those of [`Group::threads`] or
/// [`Builder::connect_ranks`](crate::Builder::connect_ranks): runs `body` on a thread for each of them. A single rank
/// runs on the caller's thread.
///
/// If a rank fails, the others have 10 s to end. One that does not, because it computes or hangs, is left to itself and
/// ends with the process, so that it cannot hold back the error.
///
/// # Errors
/// See [`launch`].
///
/// # Panics
/// See [`launch`].
pub fn run<T, E>(
    groups: Vec<Group>,
    body: impl Fn(Group) -> Result<T, E> + Send + Sync + 'static,
) -> Result<Vec<T>, Failed<E>>
where
    T: Send + 'static,
    E: From<Error> + Send + 'static,
{
    run_with(groups, body, GRACE)
}

/// The first failure of a rank.
enum Failure<E> {
    Returned(Failed<E>),
    Panicked(Box<dyn Any + Send>),
}

fn run_with<T, E>(
    mut groups: Vec<Group>,
    body: impl Fn(Group) -> Result<T, E> + Send + Sync + 'static,
    grace: Duration,
) -> Result<Vec<T>, Failed<E>>
where
    T: Send + 'static,
    E: From<Error> + Send + 'static,
{
    if groups.len() == 1
        && let Some(group) = groups.pop()
    {
        let rank = group.rank();
        return with_local(&RANK, rank, || body(group))
            .map(|result| vec![result])
            .map_err(|error| Failed::new(Some(rank), error));
    }
    let (count, body) = (groups.len(), Arc::new(body));
    let (sender, outcomes) = channel();
    for (position, group) in groups.into_iter().enumerate() {
        let (rank, body, sender) = (group.rank(), body.clone(), sender.clone());
        let run = move || {
            // Peers learn that this rank has failed when its last handle is dropped, which is this one. So the failure
            // is sent before any that it causes.
            let handle = group.clone();
            let outcome = catch_unwind(AssertUnwindSafe(|| with_local(&RANK, rank, || body(group))));
            // Nothing receives it after the grace period.
            let _ = sender.send((position, rank, outcome));
            drop(handle);
        };
        let started = thread::Builder::new().name(format!("rank {rank}")).spawn(run);
        started.map_err(|error| Failed::new(Some(rank), Error::io("starting a rank's thread", error).into()))?;
    }
    drop(sender);
    let mut results: Vec<Option<T>> = (0..count).map(|_| None).collect();
    let mut failure: Option<(Failure<E>, Deadline)> = None;
    loop {
        let next = match &failure {
            None => outcomes.recv().ok(),
            Some((_, deadline)) => outcomes.recv_timeout(deadline.remaining()).ok(),
        };
        let Some((position, rank, outcome)) = next else { break };
        let failed = match outcome {
            Ok(Ok(result)) => {
                results[position] = Some(result);
                continue;
            }
            Ok(Err(error)) => Failure::Returned(Failed::new(Some(rank), error)),
            Err(panic) => Failure::Panicked(panic),
        };
        failure.get_or_insert_with(|| (failed, Deadline::after(grace)));
    }
    match failure {
        None => Ok(results.into_iter().flatten().collect()),
        Some((Failure::Returned(failed), _)) => Err(failed),
        // The panic hook has printed the message already.
        Some((Failure::Panicked(panic), _)) => resume_unwind(panic),
    }
}

/// The first failure among the ranks of this process. `Debug` gives the message, as `Display` does: it is what Rust
/// prints if `main` returns it.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct Failed<E = Error> {
    /// The rank that failed. `None` if the ranks could not be started.
    pub rank: Option<usize>,
    /// Its error.
    pub error: Box<E>,
}

impl<E> Failed<E> {
    fn new(rank: Option<usize>, error: E) -> Self {
        Failed { rank, error: Box::new(error) }
    }
}

impl<E: fmt::Display> fmt::Display for Failed<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.rank {
            Some(rank) => write!(f, "rank {rank}: {}", self.error),
            None => self.error.fmt(f),
        }
    }
}

impl<E: fmt::Display> fmt::Debug for Failed<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

// The message contains that of the error, which is therefore no source.
impl<E: fmt::Display> std::error::Error for Failed<E> {}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender};

    use super::*;

    #[test]
    fn rank_0_prints_what_all_ranks_have_computed() {
        let computed = Arc::new(AtomicUsize::new(0));
        let count = computed.clone();
        let first = run(Group::threads(3).unwrap(), move |_| {
            crate::println!();
            crate::println!("{} of {first}", count.fetch_add(1, Ordering::SeqCst), first = is_first_rank());
            Ok::<_, Error>(is_first_rank())
        });
        assert_eq!((first.unwrap(), computed.load(Ordering::SeqCst)), (vec![true, false, false], 3));
        // The program of a single rank runs on the caller's thread.
        let alone = Group::threads(2).unwrap().remove(1);
        assert_eq!(run(vec![alone], |_| Ok::<_, Error>(is_first_rank())).unwrap(), [false]);
        assert!(is_first_rank());
    }

    #[cfg(windows)]
    #[test]
    fn variables_that_ask_for_processes_are_refused_where_all_ranks_are_threads() {
        let with = |name: &'static str, text: &'static str| {
            refuse_processes(move |variable| (variable == name).then(|| text.to_owned()))
        };
        for (name, text) in [("BONFIRE_RANK", "1"), ("BONFIRE_TRANSPORT", "shm"), ("TORCHELASTIC_RUN_ID", "x")] {
            let error = with(name, text).unwrap_err();
            assert!(matches!(&error, Error::Config(reason) if reason.contains("start the program once")), "{error}");
            assert!(error.to_string().contains(&format!("{name} is '{text}'")), "{error}");
        }
        for (name, text) in [("BONFIRE_RANK", " "), ("BONFIRE_TRANSPORT", "auto"), ("BONFIRE_DEADLINE", "60")] {
            assert_eq!(with(name, text), Ok(()));
        }
        // SAFETY: on Windows other threads may use the environment meanwhile. No other test calls `launch`.
        unsafe { std::env::set_var("BONFIRE_RANK", "1") };
        let failed = launch(2, |_| Ok::<_, Error>(()));
        // SAFETY: as above.
        unsafe { std::env::remove_var("BONFIRE_RANK") };
        assert_eq!(failed.unwrap_err().rank, None);
    }

    #[test]
    fn a_rank_that_does_not_end_does_not_hold_back_the_failure() {
        let (never, hangs): (Sender<()>, Receiver<()>) = channel();
        let hangs = Mutex::new(hangs);
        let body = move |group: Group| match group.rank() {
            0 => hangs.lock().map_or(Ok(()), |hangs| hangs.recv().map_err(|error| Error::broken("test", error))),
            _ => Err(Error::argument("test", "on purpose")),
        };
        let failed = run_with(Group::threads(2).unwrap(), body, Duration::ZERO).unwrap_err();
        assert_eq!(failed, Failed::new(Some(1), Error::argument("test", "on purpose")));
        assert_eq!(failed.to_string(), "rank 1: test: on purpose");
        drop(never);
    }
}
