//! The ranks of a node from start to end.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::future::pending;
use std::io;
use std::panic::resume_unwind;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::Signal;
use tokio::runtime;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::args::Args;
use super::layout::Layout;
use super::output::{Message, Stream, forward, start_printer};
use super::rank::{End, Rank, Signs, ended};
use super::signals;
use crate::text::list;

/// How long output is awaited from what a rank left behind, a `tee` for instance.
const LINGER: Duration = Duration::from_secs(1);
/// How long output may take to be printed once the launcher was told to end and the ranks have.
const PRINTING: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("cannot set up the launcher: {0}")]
    Runtime(io::Error),
    #[error(
        "command not found: {command:?} ({source}): check its spelling, PATH, and the interpreter \
         named in its first line"
    )]
    NotFound { command: OsString, source: io::Error },
    #[error(
        "command cannot be executed: {command:?} ({source}): check its permissions, and the first \
         line if it is a script"
    )]
    NotExecutable { command: OsString, source: io::Error },
    #[error("cannot start rank {rank}: {source}; the ranks already started were killed")]
    Start { rank: u32, source: io::Error },
    #[error("cannot wait for a rank: {0}; all ranks were killed")]
    Wait(io::Error),
    #[error("cannot print the output of the ranks: {0}; the ranks were ended")]
    Output(io::Error),
}

impl RunError {
    /// 126 and 127 are a shell's statuses for a command it could not execute or find.
    pub fn status(&self) -> u8 {
        match self {
            Self::NotFound { .. } => 127,
            Self::NotExecutable { .. } => 126,
            _ => 1,
        }
    }
}

/// Starts the ranks, waits for their end and returns the launcher's exit status.
pub fn run(layout: &Layout, args: &Args) -> Result<u8, RunError> {
    // The ranks ask to die with the thread that started them (see `rank`). On this runtime that is
    // the main thread, which lives as long as the process.
    let runtime = runtime::Builder::new_current_thread().enable_all().build().map_err(RunError::Runtime)?;
    let ended = runtime.block_on(supervise(layout, args));
    // A write to a pipe nobody reads any more must not hold up the exit.
    runtime.shutdown_background();
    ended
}

async fn supervise(layout: &Layout, args: &Args) -> Result<u8, RunError> {
    // Signals are caught before there is a rank that one could orphan.
    let mut signals = signals::listen().map_err(RunError::Runtime)?;
    let (messages, printer) = start_printer(layout, !args.no_prefix);
    let (end_sender, ends) = mpsc::unbounded_channel();
    let mut supervisor = Supervisor {
        first_rank: layout.first_rank,
        grace: Duration::from_secs(args.grace.into()),
        tolerates: args.tolerate,
        succeeded: false,
        ranks: BTreeMap::new(),
        running: BTreeSet::new(),
        following: JoinSet::new(),
        ends,
        messages,
        notes: JoinSet::new(),
        printer: Some(printer),
        ending: None,
    };
    for local in 0..layout.local_world_size {
        let (rank, signs) = Rank::start(&args.command, layout, local)
            .map_err(|source| start_error(source, args, layout.first_rank + local))?;
        let number = layout.first_rank + local;
        log::debug!("rank {number} is process {}", signs.process.as_raw_pid());
        supervisor.ranks.insert(local, rank);
        supervisor.running.insert(local);
        let messages = supervisor.messages.clone();
        supervisor.following.spawn(follow(local, signs, messages, end_sender.clone()));
    }
    supervisor.watch(&mut signals).await?;
    supervisor.finish(&mut signals).await
}

/// The ranks by their number on this node, and what is known of them.
struct Supervisor {
    first_rank: u32,
    grace: Duration,
    /// How many more ranks may fail.
    tolerates: u32,
    /// Whether any rank has ended as it should.
    succeeded: bool,
    /// Started and not reaped. Whichever way the launcher ends, dropping this kills them.
    ranks: BTreeMap<u32, Rank>,
    /// Those of `ranks` whose end was not seen yet.
    running: BTreeSet<u32>,
    following: JoinSet<io::Result<u32>>,
    ends: UnboundedReceiver<(u32, End)>,
    messages: mpsc::Sender<Message>,
    /// Messages of the launcher's own that may still wait for a place in the queue.
    notes: JoinSet<()>,
    /// `None` once it failed.
    printer: Option<JoinHandle<io::Result<()>>>,
    ending: Option<Ending>,
}

/// The run is being brought to its end.
struct Ending {
    cause: Cause,
    /// When patience ends: with the ranks, or with the printing of their output if `killed`.
    deadline: Option<Instant>,
    killed: bool,
}

enum Cause {
    Failure { local: u32, end: End },
    Signal(Signal),
    Output(io::Error),
}

impl Supervisor {
    /// Returns when every rank has ended and its output was taken, or when nobody wants to wait
    /// for that any longer.
    async fn watch(&mut self, signals: &mut UnboundedReceiver<Signal>) -> Result<(), RunError> {
        while !self.ranks.is_empty() {
            let deadline = self.ending.as_ref().and_then(|ending| ending.deadline);
            tokio::select! {
                // A rank's end is seen before its follower's, which forgets the rank.
                biased;
                Some(signal) = signals.recv() => self.on_signal(signal),
                () = at(deadline) => {
                    if self.ending.as_ref().is_some_and(|ending| ending.killed) {
                        break;
                    }
                    self.note(format!("{} did not end in time: killed", self.list_running()));
                    self.kill();
                }
                Some((local, end)) = self.ends.recv() => self.on_end(local, end),
                Some(followed) = self.following.join_next() => {
                    let local = joined(followed).map_err(RunError::Wait)?;
                    self.ranks.remove(&local);
                }
                error = failure(&mut self.printer) => {
                    self.printer = None;
                    self.end(Cause::Output(error), Signal::TERM);
                }
            }
        }
        // Ends followers that nobody waits for, and with them their hold on the printer.
        self.following.abort_all();
        self.ranks.clear();
        Ok(())
    }

    /// Prints what is left to print.
    async fn finish(self, signals: &mut UnboundedReceiver<Signal>) -> Result<u8, RunError> {
        let (status, patience, report) = match self.ending.map(|ending| ending.cause) {
            None => (0, None, None),
            Some(Cause::Output(error)) => return Err(RunError::Output(error)),
            Some(Cause::Signal(signal)) => {
                (signals::exit_status(signal.as_raw()), Some(Instant::now() + PRINTING), None)
            }
            Some(Cause::Failure { local, end }) => {
                let what = format!("rank {} failed: it {end}", self.first_rank + local);
                (end.status(), None, Some(Message::Failure { local, what }))
            }
        };
        let (messages, mut notes, printer) = (self.messages, self.notes, self.printer);
        let printing = async move {
            // The report comes after what was noted on the way to it.
            while notes.join_next().await.is_some() {}
            if let Some(report) = report {
                // Fails only with the printer, which is asked next.
                let _ = messages.send(report).await;
            }
            drop(messages);
            match printer {
                Some(printer) => joined(printer.await).map_err(RunError::Output),
                None => Ok(()),
            }
        };
        tokio::select! {
            printed = printing => printed.map(|()| status),
            // Whoever keeps the output from being printed must not keep the launcher.
            () = at(patience) => Ok(status),
            () = told_to_end(signals) => Ok(status),
        }
    }

    fn on_signal(&mut self, signal: Signal) {
        if !signals::ends(signal) {
            return self.signal_running(signal);
        }
        match &mut self.ending {
            None => {
                let name = signals::name(signal.as_raw());
                self.note(format!("{name}: ending {}", self.list_running()));
                self.end(Cause::Signal(signal), signal);
            }
            // Only output can still be awaited.
            Some(ending) if ending.killed => ending.deadline = Some(Instant::now()),
            Some(_) if signal == Signal::INT => {
                self.note(format!("SIGINT again: killing {}", self.list_running()));
                self.kill();
            }
            Some(_) => self.signal_running(signal),
        }
    }

    fn on_end(&mut self, local: u32, end: End) {
        self.running.remove(&local);
        log::debug!("rank {} {end}", self.first_rank + local);
        self.succeeded |= !end.failed();
        if !end.failed() || self.ending.is_some() {
            return;
        }
        // Where nobody is left who could still succeed, the run has failed.
        if self.tolerates > 0 && (self.succeeded || !self.running.is_empty()) {
            self.tolerates -= 1;
            let others =
                if self.running.is_empty() { String::new() } else { format!("; {} may go on", self.list_running()) };
            self.note(format!("rank {} {end}{others}", self.first_rank + local));
            return;
        }
        if !self.running.is_empty() {
            let rank = self.first_rank + local;
            self.note(format!("rank {rank} {end}; ending {}", self.list_running()));
        }
        self.end(Cause::Failure { local, end }, Signal::TERM);
    }

    /// Asks the ranks to end. The first cause is the one that is reported.
    fn end(&mut self, cause: Cause, signal: Signal) {
        if self.ending.is_some() {
            return;
        }
        self.signal_running(signal);
        self.ending = Some(Ending { cause, deadline: Some(Instant::now() + self.grace), killed: false });
    }

    fn kill(&mut self) {
        for rank in self.ranks.values() {
            rank.signal(Signal::KILL);
        }
        if let Some(ending) = &mut self.ending {
            ending.killed = true;
            // The report of a failure waits for a pager's user; a signal to the launcher does not.
            ending.deadline = match ending.cause {
                Cause::Signal(_) => Some(Instant::now() + PRINTING),
                Cause::Failure { .. } | Cause::Output(_) => None,
            };
        }
    }

    /// Spares what an ended rank left behind: it may be about to print the rank's last lines.
    fn signal_running(&self, signal: Signal) {
        for (local, rank) in &self.ranks {
            if self.running.contains(local) {
                rank.signal(signal);
            }
        }
    }

    /// Has `text` printed without waiting for it, as the queue may be full.
    fn note(&mut self, text: String) {
        let messages = self.messages.clone();
        self.notes.spawn(async move {
            // Fails only with the printer, which is asked for that.
            let _ = messages.send(Message::Note(text)).await;
        });
    }

    fn list_running(&self) -> String {
        let ranks: Vec<_> = self.running.iter().map(|local| self.first_rank + local).collect();
        match &ranks[..] {
            [] => "what the ranks left behind".to_owned(),
            [rank] => format!("rank {rank}"),
            ranks => format!("ranks {}", list(ranks)),
        }
    }
}

/// Passes on the output of a rank and reports its end; returns its number on this node once it has
/// ended and its output was taken.
async fn follow(
    local: u32,
    signs: Signs,
    messages: mpsc::Sender<Message>,
    ends: UnboundedSender<(u32, End)>,
) -> io::Result<u32> {
    let (cut, cut_seen) = watch::channel(false);
    let stdout = forward(signs.stdout, local, Stream::Stdout, messages.clone(), cut_seen.clone());
    let stderr = forward(signs.stderr, local, Stream::Stderr, messages, cut_seen);
    // Of what arrives together, standard error counts as the later: it is where the reason of a
    // failure stands, which the last lines should hold.
    let mut output = tokio::spawn(async { tokio::join!(biased; stdout, stderr) });
    let end = ended(signs.process, signs.exits).await?;
    // The supervisor lets go of the receiver only when it ends itself.
    let _ = ends.send((local, end));
    // A process that the rank left behind may hold its pipes open for ever.
    let taken = match timeout(LINGER, &mut output).await {
        Ok(taken) => taken,
        Err(_) => {
            cut.send_replace(true);
            output.await
        }
    };
    joined(taken.map(|_| Ok(local)))
}

/// The result of a task; a panic in it is one here.
fn joined<T>(result: Result<io::Result<T>, JoinError>) -> io::Result<T> {
    result.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => resume_unwind(panic),
        Err(cancelled) => Err(io::Error::other(cancelled)),
    })
}

/// Waits until the printer fails, if there is one. It does not end otherwise while it can still be
/// sent messages.
async fn failure(printer: &mut Option<JoinHandle<io::Result<()>>>) -> io::Error {
    if let Some(printer) = printer
        && let Err(error) = joined(printer.await)
    {
        return error;
    }
    pending().await
}

async fn at(instant: Option<Instant>) {
    match instant {
        Some(instant) => sleep_until(instant).await,
        None => pending().await,
    }
}

async fn told_to_end(signals: &mut UnboundedReceiver<Signal>) {
    while let Some(signal) = signals.recv().await {
        if signals::ends(signal) {
            return;
        }
    }
    pending().await
}

fn start_error(source: io::Error, args: &Args, rank: u32) -> RunError {
    let command = args.command[0].clone();
    let no_program = source.raw_os_error() == Some(Errno::NOEXEC.raw_os_error());
    match source.kind() {
        io::ErrorKind::NotFound => RunError::NotFound { command, source },
        io::ErrorKind::PermissionDenied => RunError::NotExecutable { command, source },
        _ if no_program => RunError::NotExecutable { command, source },
        _ => RunError::Start { rank, source },
    }
}
