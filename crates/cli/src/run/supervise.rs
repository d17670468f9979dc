//! Supervises the ranks of a node from start to end.

use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::io;
use std::panic::resume_unwind;
use std::time::Duration;

use bonfire_core::internal::{Event, Report};
use rustix::process::Signal;
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::args::Args;
use super::error::RunError;
use super::fate::Fates;
use super::layout::Layout;
use super::memory::MemoryKills;
#[cfg(target_os = "linux")]
use super::orphans;
use super::output::{PrinterMessage, forward, start_printer};
use super::rank::{End, Rank, RankHandles, ended};
use super::reports::Reports;
use super::signals;
use super::sink::Stream;
use crate::machine::Machine;
use crate::text::list;

/// How long to wait for output of processes that an ended rank left behind, such as `tee`.
const LINGER: Duration = Duration::from_secs(1);
/// How long other ranks have to end by themselves after a failure. A signal could cut their last lines.
const MOMENT: Duration = Duration::from_secs(1);
/// The same, while the rank that failed first may still be about to end: because all failures so far name another rank,
/// or because its group has failed. A rank that panics leaves its group before it ends, which takes up to two seconds.
const SETTLING: Duration = Duration::from_secs(5);
/// Signals within this time are one request to stop: some systems signal a process twice.
const SAME_REQUEST: Duration = Duration::from_secs(1);
/// How long printing may take after a signal told the launcher to end and the ranks have ended.
const PRINT_TIMEOUT: Duration = Duration::from_secs(2);

/// Starts the ranks, waits for their end and returns the launcher's exit status.
pub fn run(layout: &Layout, args: &Args) -> Result<u8, RunError> {
    // The kernel kills the ranks when the thread that started them ends (see `rank`). On this runtime that is the main
    // thread, which lives as long as the process.
    let runtime = runtime::Builder::new_current_thread().enable_all().build().map_err(RunError::Runtime)?;
    let ended = runtime.block_on(supervise(layout, args));
    // A write to a full pipe that no process empties must not delay the exit.
    runtime.shutdown_background();
    ended
}

async fn supervise(layout: &Layout, args: &Args) -> Result<u8, RunError> {
    // Signals are caught before the first rank starts, so that none can orphan a rank.
    let mut signals = signals::listen().map_err(RunError::Runtime)?;
    let reports = Reports::new().map_err(RunError::Runtime)?;
    let (messages, printer) = start_printer(layout, !args.no_prefix).map_err(RunError::Runtime)?;
    let (end_sender, ends) = mpsc::unbounded_channel();
    let mut supervisor = Supervisor {
        first_rank: layout.first_rank,
        grace: layout.grace,
        stop_signal: layout.stop_signal,
        stopping: BTreeSet::new(),
        tolerated_failures: args.tolerate,
        succeeded: false,
        ranks: BTreeMap::new(),
        running: BTreeSet::new(),
        fates: Fates::new(layout.local_world_size),
        memory: MemoryKills::new(Machine::this()),
        reports,
        last_wait: String::new(),
        following: JoinSet::new(),
        ends,
        messages,
        notes: JoinSet::new(),
        printer,
        shutdown: None,
    };
    for local in 0..layout.local_world_size {
        let (rank, handles) = Rank::start(&args.command, layout, &supervisor.reports, local)
            .map_err(|source| RunError::start(source, args, layout.first_rank + local))?;
        let number = layout.first_rank + local;
        log::debug!("rank {number} is process {}", handles.process.as_raw_pid());
        supervisor.ranks.insert(local, rank);
        supervisor.running.insert(local);
        let messages = supervisor.messages.clone();
        supervisor.following.spawn(follow(local, handles, messages, end_sender.clone()));
    }
    supervisor.watch(&mut signals).await?;
    supervisor.finish(&mut signals).await
}

/// The state of a run on this node. Ranks are identified by their local rank.
struct Supervisor {
    first_rank: u32,
    grace: Duration,
    /// The signal that asks programs to stop in order.
    stop_signal: i32,
    /// Ranks whose programs have heard that all ranks stop.
    stopping: BTreeSet<u32>,
    /// How many more failures are tolerated.
    tolerated_failures: u32,
    /// Whether any rank has exited with status 0.
    succeeded: bool,
    /// Ranks that were started and not reaped. Dropping this kills them, however the launcher ends.
    ranks: BTreeMap<u32, Rank>,
    /// Those of `ranks` that are not known to have ended.
    running: BTreeSet<u32>,
    fates: Fates,
    memory: MemoryKills<'static>,
    reports: Reports,
    /// The last wait that was printed: all ranks that wait report the same one.
    last_wait: String,
    following: JoinSet<io::Result<u32>>,
    ends: UnboundedReceiver<(u32, End)>,
    messages: mpsc::Sender<PrinterMessage>,
    /// Pending sends of the launcher's own messages to the printer's queue.
    notes: JoinSet<()>,
    printer: JoinHandle<()>,
    shutdown: Option<Shutdown>,
}

/// The launcher is ending the run.
struct Shutdown {
    began: Instant,
    cause: Cause,
    phase: Phase,
}

#[derive(Clone, Copy)]
enum Phase {
    /// A rank has failed. The others may end by themselves before they are told to.
    Settling { since: Instant },
    /// The ranks were told to end, and are killed at this time.
    Ending { until: Instant },
    /// The ranks have agreed to stop: they save, and end by themselves, which may take any time.
    Stopping,
    /// The ranks were killed. Their output is waited for until this time, if there is one.
    Killed { until: Option<Instant> },
}

enum Cause {
    Failure,
    Signal(Signal),
}

impl Supervisor {
    /// Returns when every rank has ended and its output was read, or when the deadline for that has passed.
    async fn watch(&mut self, signals: &mut UnboundedReceiver<Signal>) -> Result<(), RunError> {
        let mut exits = signal(SignalKind::child()).map_err(RunError::Runtime)?;
        self.reap_orphans();
        while !self.ranks.is_empty() {
            let deadline = self.deadline();
            tokio::select! {
                // A rank's end is handled before that of its follower, which removes the rank.
                biased;
                Some(signal) = signals.recv() => self.on_signal(signal),
                () = deadline_passed(deadline) => match self.shutdown.as_ref().map(|shutdown| shutdown.phase) {
                    Some(Phase::Settling { .. }) => self.tell_to_end(Signal::TERM),
                    Some(Phase::Killed { .. }) => break,
                    _ => {
                        self.note(format!("{} did not end in time: killed", self.list_running()));
                        self.kill();
                    }
                },
                Some((local, end)) = self.ends.recv() => self.on_end(local, end),
                Some(()) = exits.recv() => self.reap_orphans(),
                Ok(()) = self.reports.arrived() => self.receive_reports(),
                Some(followed) = self.following.join_next() => {
                    let local = flatten(followed).map_err(RunError::Wait)?;
                    self.ranks.remove(&local);
                }
            }
        }
        // Drops the remaining followers, and with them their handles to the printer.
        self.following.abort_all();
        self.ranks.clear();
        Ok(())
    }

    /// Prints what is still queued, then the report of a failure. Returns the launcher's exit status.
    async fn finish(self, signals: &mut UnboundedReceiver<Signal>) -> Result<u8, RunError> {
        let (status, print_deadline, report) = match self.shutdown.as_ref().map(|shutdown| &shutdown.cause) {
            None => (0, None, None),
            Some(Cause::Signal(signal)) => {
                let signal = signal.as_raw();
                let in_order = signal == self.stop_signal && self.fates.all_succeeded();
                let status = if in_order { 0 } else { signals::exit_status(signal) };
                // Ranks that fail because they were told to end are no news; those that do while others save are.
                let failed = self.fates.first().filter(|_| !self.stopping.is_empty());
                (status, Some(Instant::now() + PRINT_TIMEOUT), failed.map(|(local, _)| self.report(local)))
            }
            Some(Cause::Failure) => {
                // The failure that began the shutdown was that of a rank.
                let Some((local, status)) = self.fates.first() else { return Ok(1) };
                (status, None, Some(self.report(local)))
            }
        };
        let (messages, mut notes, printer) = (self.messages, self.notes, self.printer);
        let printing = async move {
            // The report comes after all notes.
            while notes.join_next().await.is_some() {}
            if let Some(report) = report {
                // The printer outlives its senders.
                let _ = messages.send(report).await;
            }
            drop(messages);
            flatten(printer.await.map(Ok))
        };
        tokio::select! {
            printed = printing => printed.map(|()| status).map_err(RunError::Wait),
            // Blocked output must not block the launcher's exit.
            () = deadline_passed(print_deadline) => Ok(status),
            () = signals::termination(signals, self.stop_signal) => Ok(status),
        }
    }

    /// Reports which rank failed first, and how all ended.
    fn report(&self, local: u32) -> PrinterMessage {
        let (what, local) = self.fates.describe(local, self.first_rank);
        PrinterMessage::Failure { ends: self.fates.list(self.first_rank), what, local }
    }

    fn on_signal(&mut self, signal: Signal) {
        if !signals::ends(signal, self.stop_signal) {
            return self.signal_running(signal);
        }
        // Ranks that stop already have said so.
        self.receive_reports();
        let name = signals::name(signal.as_raw());
        let Some(Shutdown { began, phase, .. }) = &mut self.shutdown else {
            self.note(format!("{name}: ending {}", self.list_running()));
            return self.end(signal);
        };
        match phase {
            Phase::Settling { .. } => self.tell_to_end(signal),
            // Only output is still waited for: stop that.
            Phase::Killed { until } => *until = Some(Instant::now()),
            Phase::Stopping if signal.as_raw() == self.stop_signal && began.elapsed() < SAME_REQUEST => {}
            Phase::Ending { .. } if signal != Signal::INT => self.signal_running(signal),
            Phase::Ending { .. } | Phase::Stopping => {
                self.note(format!("{name} again: killing {}", self.list_running()));
                self.kill();
            }
        }
    }

    fn on_end(&mut self, local: u32, end: End) {
        // What the rank reported was sent before it ended.
        self.receive_reports();
        let end = match self.shutdown.as_ref().map(|shutdown| shutdown.phase) {
            Some(Phase::Killed { .. }) => end,
            _ => self.memory.explain(end),
        };
        self.running.remove(&local);
        log::debug!("rank {} {end}", self.first_rank + local);
        self.succeeded |= !end.failed();
        let counts = end.failed() && self.shutdown.is_none();
        // If no rank has succeeded and none is left that could, the run has failed.
        let tolerated = counts && self.tolerated_failures > 0 && (self.succeeded || !self.running.is_empty());
        self.fates.ended(local, end, tolerated);
        if !counts {
            return self.on_uncounted_end(local, end);
        }
        if tolerated {
            self.tolerated_failures -= 1;
            let others =
                if self.running.is_empty() { String::new() } else { format!("; {} may continue", self.list_running()) };
            self.note(format!("rank {} {end}{others}", self.first_rank + local));
            return;
        }
        if !self.running.is_empty() {
            self.note(format!("rank {} {end}", self.first_rank + local));
        }
        let since = Instant::now();
        self.shutdown = Some(Shutdown { began: since, cause: Cause::Failure, phase: Phase::Settling { since } });
    }

    /// Once a rank has failed, those that stop in order cannot save, and are waited for no longer than after a signal.
    fn on_uncounted_end(&mut self, local: u32, end: End) {
        if let Some(Shutdown { phase: phase @ Phase::Stopping, .. }) = &mut self.shutdown
            && end.failed()
        {
            *phase = Phase::Ending { until: Instant::now() + self.grace };
            self.note(format!("rank {} {end} before all had stopped", self.first_rank + local));
        }
    }

    /// The program of a rank has heard that all ranks stop after so many steps.
    fn on_stop(&mut self, local: u32, steps: u64) {
        if self.stopping.is_empty() {
            self.note(format!("the ranks stop after training step {steps}, and are waited for"));
        }
        self.stopping.insert(local);
        if let Some(Shutdown { cause: Cause::Signal(signal), phase: phase @ Phase::Ending { .. }, .. }) =
            &mut self.shutdown
            && signal.as_raw() == self.stop_signal
            && !self.fates.any_failed()
        {
            *phase = Phase::Stopping;
        }
    }

    /// Waits for ended processes that the launcher has adopted.
    fn reap_orphans(&self) {
        #[cfg(target_os = "linux")]
        if orphans::are_adopted() {
            orphans::reap(&Machine::this(), |process| self.ranks.values().any(|rank| rank.process() == process));
        }
    }

    /// Takes the reports that have arrived.
    fn receive_reports(&mut self) {
        while let Some(Report { local, event }) = self.reports.next() {
            match event {
                Event::Failed { names_another, named, error } => {
                    self.fates.failed(local, names_another, named, error);
                }
                Event::Connected => self.fates.connected(local),
                Event::Stops { steps } => self.on_stop(local, steps),
                Event::Waits { elapsed, what, places } => {
                    if what != self.last_wait {
                        self.note(format!("rank {} has waited {elapsed:.1?} {what}{places}", self.first_rank + local));
                        self.last_wait = what;
                    }
                }
            }
        }
    }

    /// Returns when the current phase of the shutdown ends.
    fn deadline(&self) -> Option<Instant> {
        match self.shutdown.as_ref()?.phase {
            Phase::Settling { since } => {
                let failing = self.running.iter().any(|local| self.fates.has_failed(*local));
                Some(since + if self.fates.first_is_known() && !failing { MOMENT } else { SETTLING })
            }
            Phase::Ending { until } => Some(until),
            Phase::Stopping => None,
            Phase::Killed { until } => until,
        }
    }

    /// Sends a signal to the running ranks and starts the grace period. Ranks that stop already are waited for instead.
    fn end(&mut self, signal: Signal) {
        let began = Instant::now();
        let stops = signal.as_raw() == self.stop_signal && !self.stopping.is_disjoint(&self.running);
        let phase = if stops { Phase::Stopping } else { Phase::Ending { until: began + self.grace } };
        let asked = self.running_ranks().filter(|(local, _)| !(stops && self.stopping.contains(local)));
        asked.for_each(|(_, rank)| rank.signal(signal));
        self.shutdown = Some(Shutdown { began, cause: Cause::Signal(signal), phase });
    }

    /// Sends `signal` to the ranks that still run some time after a failure, and starts the grace period.
    fn tell_to_end(&mut self, signal: Signal) {
        self.note(format!("ending {}", self.list_running()));
        self.fates.end_all();
        self.signal_running(signal);
        if let Some(shutdown) = &mut self.shutdown {
            shutdown.phase = Phase::Ending { until: Instant::now() + self.grace };
        }
    }

    fn kill(&mut self) {
        self.fates.end_all();
        for rank in self.ranks.values() {
            rank.signal(Signal::KILL);
        }
        if let Some(shutdown) = &mut self.shutdown {
            // The report of a failure waits for a slow reader such as a pager, but not after a signal to the launcher.
            let until = match shutdown.cause {
                Cause::Signal(_) => Some(Instant::now() + PRINT_TIMEOUT),
                Cause::Failure => None,
            };
            shutdown.phase = Phase::Killed { until };
        }
    }

    /// Signals running ranks only. Processes that an ended rank left behind may still print its last lines.
    fn signal_running(&self, signal: Signal) {
        self.running_ranks().for_each(|(_, rank)| rank.signal(signal));
    }

    fn running_ranks(&self) -> impl Iterator<Item = (&u32, &Rank)> {
        self.ranks.iter().filter(|(local, _)| self.running.contains(local))
    }

    /// Prints `text` without waiting, as the queue may be full.
    fn note(&mut self, text: String) {
        let messages = self.messages.clone();
        self.notes.spawn(async move {
            // The printer outlives its senders.
            let _ = messages.send(PrinterMessage::Note(text)).await;
        });
    }

    fn list_running(&self) -> String {
        let ranks: Vec<_> = self.running.iter().map(|local| self.first_rank + local).collect();
        match &ranks[..] {
            [] => "processes that the ranks left behind".to_owned(),
            [rank] => format!("rank {rank}"),
            ranks => format!("ranks {}", list(ranks)),
        }
    }
}

/// Forwards the output of a rank and reports its end. Returns its local rank once it has ended and its output was read.
async fn follow(
    local: u32,
    handles: RankHandles,
    messages: mpsc::Sender<PrinterMessage>,
    ends: UnboundedSender<(u32, End)>,
) -> io::Result<u32> {
    let (cut, cut_seen) = watch::channel(false);
    let stdout = forward(handles.stdout, local, Stream::Stdout, messages.clone(), cut_seen.clone());
    let stderr = forward(handles.stderr, local, Stream::Stderr, messages, cut_seen);
    // Standard output first: of lines that arrive together, those of standard error count as later. They have the
    // reason of a failure, which the report's last lines should include.
    let mut output = tokio::spawn(async { tokio::join!(biased; stdout, stderr) });
    let end = ended(handles.process, handles.exits).await?;
    // The supervisor drops the receiver only when it ends itself.
    let _ = ends.send((local, end));
    // A process that the rank left behind may keep its pipes open forever.
    let taken = match timeout(LINGER, &mut output).await {
        Ok(taken) => taken,
        Err(_) => {
            cut.send_replace(true);
            output.await
        }
    };
    flatten(taken.map(|_| Ok(local)))
}

/// Returns the result of a task, and propagates its panic.
fn flatten<T>(result: Result<io::Result<T>, JoinError>) -> io::Result<T> {
    result.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => resume_unwind(panic),
        Err(cancelled) => Err(io::Error::other(cancelled)),
    })
}

async fn deadline_passed(instant: Option<Instant>) {
    match instant {
        Some(instant) => sleep_until(instant).await,
        None => pending().await,
    }
}
