//! One case: a group whose ranks are child processes, and the checks of what they report.

use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::{Duration, Instant};

use bonfire_core::Error;
use rustix::process::Signal;

use crate::child::GOING;
use crate::orders::{Act, ChildReport, GroupTransport, ORDERS, Orders, Report, ScheduledAct};
use crate::stream::random;
use bonfire_testing::free_address;
use bonfire_testing::process::Process;
use bonfire_testing::transport::Random;

/// The deadline of operations that must not time out.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// The heartbeat timeout: the shortest that can be configured.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(3);

/// The heartbeat timeout where no rank may be declared lost, however busy the machine is.
pub const LONG_HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(15);

/// Every rank must know of a fault that is not silent within this time, on a machine that is busy with other groups.
pub const SOON: Duration = Duration::from_secs(10);

/// A child that reports nothing for this long hangs: deadline, rendezvous and graceful shutdown are shorter together.
const HANG_TIMEOUT: Duration = Duration::from_secs(120);

/// Decides whether a rank may end with this error, or with none.
pub type IsExpected<'a> = &'a dyn Fn(usize, Option<&Error>) -> bool;

/// A group with an injected fault, and the outcome.
pub struct Case {
    pub transport: GroupTransport,
    /// Whether groups of more than two ranks begin as stars.
    pub star: bool,
    /// Whether the group has so many ranks that it is a star without being told.
    pub many: bool,
    random: Random,
    /// A description of the fault.
    pub what: String,
    pub faults: usize,
    pub skipped: Option<String>,
    /// A rank that may abort, as a Rust program does when it runs out of memory.
    pub may_abort: Option<usize>,
    /// The longest time from the start of a call to its error.
    pub slowest: Duration,
    pub hangs: Vec<String>,
    pub wrong: Vec<String>,
    pub leaks: Vec<String>,
}

/// A child process, and a message of it that was received early.
pub struct Child {
    pub process: Process,
    ranks: std::ops::Range<usize>,
    early_message: Option<String>,
}

impl Case {
    pub fn new(transport: GroupTransport, seed: u64) -> Case {
        let (mut random, what) = (random(&[seed]), String::new());
        let star = transport != GroupTransport::Threads && random.next() >> 16 & 1 == 0;
        let (hangs, wrong, leaks) = Default::default();
        let (skipped, may_abort) = (None, None);
        Case {
            transport,
            star,
            many: false,
            random,
            what,
            faults: 0,
            skipped,
            may_abort,
            slowest: Duration::ZERO,
            hangs,
            wrong,
            leaks,
        }
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.random.next() >> 16) as usize % limit
    }

    /// Draws a world size from 2 to 4, or from 17 to 32. With two hosts at least 3, so that one host has two ranks.
    pub fn world_size(&mut self) -> usize {
        if self.many {
            return [17, 32, 17 + self.below(16)][self.below(3)];
        }
        if self.transport == GroupTransport::Mixed { 3 + self.below(2) } else { 2 + self.below(3) }
    }

    /// Returns `time`, or more of it for a large group on a few cores.
    pub fn scaled(&self, time: Duration) -> Duration {
        if self.many { time * 3 } else { time }
    }

    /// The orders of all ranks of a group: to run the stream until it fails.
    pub fn orders(&mut self, world_size: usize) -> Orders {
        Orders {
            transport: self.transport,
            rank: 0,
            world_size,
            address: free_address(),
            host: None,
            secret: false,
            deadline: DEADLINE,
            heartbeat_timeout: LONG_HEARTBEAT_TIMEOUT,
            hang_timeout: None,
            full_mesh_limit: if self.star && !self.many { 2 } else { 16 },
            rendezvous_timeout: self.scaled(DEADLINE),
            seed: self.random.next(),
            steps: u64::MAX,
            largest: if self.many { 14 } else { 20 },
            until: None,
            acts: Vec::new(),
            subgroups: false,
            continues: false,
            files: None,
            memory: None,
        }
    }

    /// Draws one of the first steps. Some of them open connections.
    pub fn early(&mut self) -> u64 {
        let range = [4, 40][self.below(2)];
        self.below(range) as u64
    }

    /// Starts a group in which `rank` performs `act` at an early step.
    pub fn start_with(&mut self, orders: &Orders, rank: usize, act: Act) -> Vec<Child> {
        let at = self.early();
        self.what = format!("{act:?} on rank {rank} of {} before step {at}", orders.world_size);
        self.start(&Orders { acts: vec![ScheduledAct { rank, at, act }], ..orders.clone() })
    }

    /// Starts all children of a group.
    pub fn start(&self, orders: &Orders) -> Vec<Child> {
        if self.transport == GroupTransport::Threads {
            return vec![self.child(&[], orders)];
        }
        (0..orders.world_size).map(|rank| self.child(&[], &Orders { rank, ..orders.clone() })).collect()
    }

    /// Starts one child by a command that replaces itself with the child.
    pub fn child(&self, command: &[String], orders: &Orders) -> Child {
        let ranks =
            if self.transport == GroupTransport::Threads { 0..orders.world_size } else { orders.rank..orders.rank + 1 };
        let text = serde_json::to_string(orders).expect("orders are plain data");
        Child { process: Process::start_by(command, "child", &[(ORDERS, text)]), ranks, early_message: None }
    }

    /// Waits until all ranks have joined their group. Returns false when one has not.
    pub fn going(&mut self, children: &mut [Child]) -> bool {
        children.iter_mut().all(|child| {
            let heard = child.next_message();
            let going = heard.as_deref() == Ok(GOING);
            if !going {
                self.wrong.push(format!("ranks {:?} did not join their group: {heard:?}", child.ranks));
                child.early_message = heard.ok();
            }
            going
        })
    }

    /// Receives and checks the reports of all children but those in `gone`, and returns them. With `same`, all errors
    /// must have the same cause.
    pub fn end(
        &mut self,
        children: Vec<Child>,
        gone: &[usize],
        within: Duration,
        same: bool,
        is_expected: IsExpected,
    ) -> Vec<Report> {
        let mut reports = Vec::new();
        for mut child in children {
            if gone.contains(&child.ranks.start) {
                self.expect_no_report(child);
                continue;
            }
            let Some(report) = self.report_of(&mut child) else { continue };
            self.leaks.extend(report.leaks.iter().map(|leak| format!("ranks {:?}: {leak}", child.ranks)));
            reports.extend(report.reports);
            match child.process.end_within(HANG_TIMEOUT) {
                Some(status) if status.success() => {}
                Some(status) => self.wrong.push(format!("ranks {:?} ended with {status}", child.ranks)),
                None => self.hangs.push(format!("ranks {:?} do not end", child.ranks)),
            }
        }
        self.judge(&reports, within, same, is_expected);
        reports
    }

    fn judge(&mut self, reports: &[Report], within: Duration, same: bool, is_expected: IsExpected) {
        for Report { rank, error, took, wrong, steps, .. } in reports {
            self.wrong.extend(wrong.iter().map(|wrong| format!("rank {rank}: {wrong}")));
            if !is_expected(*rank, error.as_ref()) {
                self.wrong.push(format!("rank {rank} must not end with {error:?} after {steps} steps and {took:.1?}"));
            }
            if error.is_some() {
                self.slowest = self.slowest.max(*took);
                if *took > within {
                    self.hangs.push(format!("rank {rank} had its error after {took:.1?}: {error:?}"));
                }
            }
        }
        let mut causes: Vec<_> = reports.iter().filter_map(|report| report.error.as_ref()).map(cause).collect();
        causes.dedup();
        if same && causes.len() > 1 {
            self.wrong.push(format!("the ranks have different errors: {causes:?}"));
        }
    }

    /// Checks that all ranks but those in `without` continued in one group.
    pub fn continued(&mut self, reports: &[Report], world_size: usize, without: &[usize]) {
        let left = (0..world_size).filter(|rank| !without.contains(rank)).fold(0, |mask, rank| mask | 1 << rank);
        for report in reports.iter().filter(|report| !without.contains(&report.rank)) {
            if report.continued != Some(Ok(left)) {
                self.wrong.push(format!("rank {} continued as {:?}", report.rank, report.continued));
            }
        }
    }

    /// Checks that all ranks that continued are in one group, and that the others got a shrink error.
    pub fn went_on_as_one(&mut self, reports: &[Report]) {
        let members =
            |report: &Report| report.continued.as_ref().and_then(|continued| continued.as_ref().ok()).copied();
        let all =
            reports.iter().filter(|report| members(report).is_some()).fold(0, |mask, report| mask | 1 << report.rank);
        for report in reports {
            let excluded = matches!(report.continued, Some(Err(Error::Shrink { .. })));
            if !excluded && members(report) != Some(all) {
                self.wrong.push(format!("rank {} continued as {:?}, all are {all:b}", report.rank, report.continued));
            }
        }
    }

    /// Checks that all ranks completed the stream, or that all had an error.
    pub fn all_or_none(&mut self, reports: &[Report]) {
        let completed: Vec<_> =
            reports.iter().filter(|report| report.error.is_none()).map(|report| report.rank).collect();
        if !completed.is_empty() && completed.len() < reports.len() {
            let errors = reports.iter().filter_map(|report| report.error.as_ref()).map(cause).collect::<Vec<_>>();
            self.wrong.push(format!("ranks {completed:?} completed the stream, and others had {errors:?}"));
        }
    }

    /// Returns the report of a child, if it sends one.
    fn report_of(&mut self, child: &mut Child) -> Option<ChildReport> {
        match child.final_message() {
            Ok(report) => Some(serde_json::from_str(&report).expect("a child's report")),
            Err(RecvTimeoutError::Timeout) => {
                self.hangs.push(format!("ranks {:?} report nothing", child.ranks));
                None
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = child.process.end_within(HANG_TIMEOUT);
                let aborted = status.and_then(|status| status.signal()) == Some(Signal::ABORT.as_raw());
                if !aborted || self.may_abort != Some(child.ranks.start) {
                    self.wrong.push(format!("ranks {:?} ended without a report: {status:?}", child.ranks));
                }
                None
            }
        }
    }

    /// Checks that a child ended before it sent a report.
    fn expect_no_report(&mut self, mut child: Child) {
        match child.final_message() {
            Ok(report) => self.wrong.push(format!("ranks {:?} should have ended: {report}", child.ranks)),
            Err(RecvTimeoutError::Timeout) => self.hangs.push(format!("ranks {:?} do not end", child.ranks)),
            Err(RecvTimeoutError::Disconnected) => {}
        }
    }

    /// Checks that the address can be bound again, once a starting child has closed what it inherits.
    pub fn port_is_free(&mut self, address: &str) {
        const TIME: Duration = Duration::from_secs(3);
        let start = Instant::now();
        while let Err(error) = TcpListener::bind(address) {
            if start.elapsed() > TIME {
                return self.leaks.push(format!("{address} is taken: {error}"));
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn passed(&self) -> bool {
        self.hangs.is_empty() && self.wrong.is_empty() && self.leaks.is_empty()
    }
}

impl Child {
    fn final_message(&mut self) -> Result<String, RecvTimeoutError> {
        loop {
            match self.early_message.take().map_or_else(|| self.next_message(), Ok) {
                Ok(message) if message == GOING => {}
                heard => return heard,
            }
        }
    }

    fn next_message(&self) -> Result<String, RecvTimeoutError> {
        self.process.read_line_within(HANG_TIMEOUT)
    }
}

/// The part of an error that is the same on all ranks: which ranks it names and why, but neither the time nor the call.
fn cause(error: &Error) -> String {
    match error {
        Error::PeerLost { peer, .. } => format!("rank {peer} was lost"),
        Error::Left { rank, .. } => format!("rank {rank} left"),
        Error::Timeout { missing, .. } => format!("ranks {missing:?} are missing"),
        // Where the ranks are depends on when they are asked.
        Error::Mismatch { sequence, calls, .. } => format!("mismatch at #{sequence}: {calls:?}"),
        Error::Rendezvous { .. } => "rendezvous".into(),
        other => format!("{other:?}"),
    }
}

pub fn is_lost(error: Option<&Error>, victims: &[usize]) -> bool {
    matches!(error, Some(Error::PeerLost { peer, .. }) if victims.contains(peer))
}
