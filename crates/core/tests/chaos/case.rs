//! One case: a group whose ranks are children, and what all of them must say of it.

use std::fs;
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::sync::mpsc::RecvTimeoutError;
use std::thread;
use std::time::{Duration, Instant};

use bonfire_core::Error;
use rustix::process::Signal;

use crate::child::GOING;
use crate::orders::{Act, Carrier, Deed, ORDERS, Orders, Report, Words};
use crate::stream::random;
use bonfire_testing::free_address;
use bonfire_testing::process::Process;
use bonfire_testing::transport::Random;

/// How long an operation may take where no deadline is to be missed.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// After so much silence a rank counts as lost. It cannot be less.
pub const SILENCE: Duration = Duration::from_secs(3);

/// Where nobody is to be taken for lost, however busy the machine is.
pub const PATIENT: Duration = Duration::from_secs(15);

/// By when a fault that is not silent is known, on a machine that is busy with other groups.
pub const SOON: Duration = Duration::from_secs(10);

/// A child that has said nothing for so long never will: deadline, rendezvous and farewell are shorter together.
const HANGS: Duration = Duration::from_secs(120);

/// Which errors are right, by rank; nothing where that rank must have none.
pub type Right<'a> = &'a dyn Fn(usize, Option<&Error>) -> bool;

/// A group under a fault, and what came of it.
pub struct Case {
    pub carrier: Carrier,
    random: Random,
    /// What was done, in words.
    pub what: String,
    pub faults: usize,
    pub skipped: Option<String>,
    /// A rank that may abort, since a Rust program does where it has no memory.
    pub may_abort: Option<usize>,
    /// The longest time from the beginning of a call to its error.
    pub slowest: Duration,
    pub hangs: Vec<String>,
    pub wrong: Vec<String>,
    pub leaks: Vec<String>,
}

/// A child, and what it has said at the end.
pub struct Child {
    pub process: Process,
    ranks: std::ops::Range<usize>,
    words: Option<String>,
}

impl Case {
    pub fn new(carrier: Carrier, seed: u64) -> Case {
        let (random, what) = (random(&[seed]), String::new());
        let (hangs, wrong, leaks) = Default::default();
        let (skipped, may_abort) = (None, None);
        Case { carrier, random, what, faults: 0, skipped, may_abort, slowest: Duration::ZERO, hangs, wrong, leaks }
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.random.next() >> 16) as usize % limit
    }

    /// From 2 to 4 ranks, such that two hosts have something to share.
    pub fn world_size(&mut self) -> usize {
        if self.carrier == Carrier::Mixed { 3 + self.below(2) } else { 2 + self.below(3) }
    }

    /// What all ranks of a group do: the stream, until it fails.
    pub fn orders(&mut self, world_size: usize) -> Orders {
        Orders {
            carrier: self.carrier,
            rank: 0,
            world_size,
            address: free_address(),
            host: None,
            secret: false,
            deadline: DEADLINE,
            silence: PATIENT,
            patience: DEADLINE,
            seed: self.random.next(),
            steps: u64::MAX,
            largest: 20,
            until: None,
            deeds: Vec::new(),
            goes_on: false,
            files: None,
            memory: None,
        }
    }

    /// One of the first steps: before some of them connections are opened.
    pub fn early(&mut self) -> u64 {
        let range = [4, 40][self.below(2)];
        self.below(range) as u64
    }

    /// Starts a group in which one rank does something, and gives its orders.
    pub fn start_with(&mut self, orders: &Orders, rank: usize, act: Act) -> Vec<Child> {
        let at = self.early();
        self.what = format!("{act:?} on rank {rank} of {} before step {at}", orders.world_size);
        self.start(&Orders { deeds: vec![Deed { rank, at, act }], ..orders.clone() })
    }

    /// Starts all children of a group.
    pub fn start(&self, orders: &Orders) -> Vec<Child> {
        if self.carrier == Carrier::Threads {
            return vec![self.child(&[], orders)];
        }
        (0..orders.world_size).map(|rank| self.child(&[], &Orders { rank, ..orders.clone() })).collect()
    }

    /// Starts one child by a command that becomes it.
    pub fn child(&self, command: &[String], orders: &Orders) -> Child {
        let ranks = if self.carrier == Carrier::Threads { 0..orders.world_size } else { orders.rank..orders.rank + 1 };
        let text = serde_json::to_string(orders).expect("orders are plain data");
        Child { process: Process::start_by(command, "child", &[(ORDERS, text)]), ranks, words: None }
    }

    /// Waits until all ranks are in their group, or gives up where one is not.
    pub fn going(&mut self, children: &mut [Child]) -> bool {
        children.iter_mut().all(|child| {
            let heard = child.hear();
            let going = heard.as_deref() == Ok(GOING);
            if !going {
                self.wrong.push(format!("ranks {:?} did not find their group: {heard:?}", child.ranks));
                child.words = heard.ok();
            }
            going
        })
    }

    /// Hears all children but those in `gone`, and judges what they say. Where `same` all who have an error must have it
    /// for the same cause. Gives what they say.
    pub fn end(
        &mut self,
        children: Vec<Child>,
        gone: &[usize],
        within: Duration,
        same: bool,
        right: Right,
    ) -> Vec<Report> {
        let mut reports = Vec::new();
        for mut child in children {
            if gone.contains(&child.ranks.start) {
                self.no_words(child);
                continue;
            }
            let Some(words) = self.last_words(&mut child) else { continue };
            self.leaks.extend(words.leaks.iter().map(|leak| format!("ranks {:?}: {leak}", child.ranks)));
            reports.extend(words.reports);
            match child.process.end_within(HANGS) {
                Some(status) if status.success() => {}
                Some(status) => self.wrong.push(format!("ranks {:?} ended with {status}", child.ranks)),
                None => self.hangs.push(format!("ranks {:?} do not end", child.ranks)),
            }
        }
        self.judge(&reports, within, same, right);
        reports
    }

    fn judge(&mut self, reports: &[Report], within: Duration, same: bool, right: Right) {
        for Report { rank, error, took, wrong, steps, .. } in reports {
            self.wrong.extend(wrong.iter().map(|wrong| format!("rank {rank}: {wrong}")));
            if !right(*rank, error.as_ref()) {
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

    /// All but these of so many ranks went on together.
    pub fn went_on(&mut self, reports: &[Report], world_size: usize, without: &[usize]) {
        let left = (0..world_size).filter(|rank| !without.contains(rank)).fold(0, |mask, rank| mask | 1 << rank);
        for report in reports.iter().filter(|report| !without.contains(&report.rank)) {
            if report.went_on != Some(Ok(left)) {
                self.wrong.push(format!("rank {} went on as {:?}", report.rank, report.went_on));
            }
        }
    }

    /// Whoever goes on is in the same group as all others that do, and the rest is told not to.
    pub fn went_on_as_one(&mut self, reports: &[Report]) {
        let who = |report: &Report| report.went_on.as_ref().and_then(|went_on| went_on.as_ref().ok()).copied();
        let all = reports.iter().filter(|report| who(report).is_some()).fold(0, |mask, report| mask | 1 << report.rank);
        for report in reports {
            let told = matches!(report.went_on, Some(Err(Error::Shrink { .. })));
            if !told && who(report) != Some(all) {
                self.wrong.push(format!("rank {} went on as {:?}, all are {all:b}", report.rank, report.went_on));
            }
        }
    }

    /// Ranks of one group complete the stream together, or have an error together.
    pub fn all_or_none(&mut self, reports: &[Report]) {
        let completed: Vec<_> =
            reports.iter().filter(|report| report.error.is_none()).map(|report| report.rank).collect();
        if !completed.is_empty() && completed.len() < reports.len() {
            let errors = reports.iter().filter_map(|report| report.error.as_ref()).map(cause).collect::<Vec<_>>();
            self.wrong.push(format!("ranks {completed:?} completed the stream, and others had {errors:?}"));
        }
    }

    /// What a child says last, if it does.
    fn last_words(&mut self, child: &mut Child) -> Option<Words> {
        match child.last_heard() {
            Ok(words) => Some(serde_json::from_str(&words).expect("a child's last words")),
            Err(RecvTimeoutError::Timeout) => {
                self.hangs.push(format!("ranks {:?} say nothing", child.ranks));
                None
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = child.process.end_within(HANGS);
                let aborted = status.and_then(|status| status.signal()) == Some(Signal::ABORT.as_raw());
                if !aborted || self.may_abort != Some(child.ranks.start) {
                    self.wrong.push(format!("ranks {:?} ended without a word: {status:?}", child.ranks));
                }
                None
            }
        }
    }

    /// A child that was to end before its last words.
    fn no_words(&mut self, mut child: Child) {
        match child.last_heard() {
            Ok(words) => self.wrong.push(format!("ranks {:?} should have ended: {words}", child.ranks)),
            Err(RecvTimeoutError::Timeout) => self.hangs.push(format!("ranks {:?} do not end", child.ranks)),
            Err(RecvTimeoutError::Disconnected) => {}
        }
    }

    /// The address can be listened at again, once a child that is just being started has let go of what it inherits.
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

    pub fn is_well(&self) -> bool {
        self.hangs.is_empty() && self.wrong.is_empty() && self.leaks.is_empty()
    }
}

impl Child {
    fn last_heard(&mut self) -> Result<String, RecvTimeoutError> {
        loop {
            match self.words.take().map_or_else(|| self.hear(), Ok) {
                Ok(words) if words == GOING => {}
                heard => return heard,
            }
        }
    }

    fn hear(&self) -> Result<String, RecvTimeoutError> {
        self.process.hear_within(HANGS)
    }
}

/// What every rank must say alike: whom an error names and why, not how long it took or in which call it was noticed.
fn cause(error: &Error) -> String {
    match error {
        Error::PeerLost { peer, .. } => format!("rank {peer} was lost"),
        Error::Left { rank, .. } => format!("rank {rank} left"),
        Error::Timeout { missing, .. } => format!("ranks {missing:?} are missing"),
        Error::Mismatch { .. } => error.to_string(),
        Error::Rendezvous { .. } => "rendezvous".into(),
        other => format!("{other:?}"),
    }
}

pub fn is_lost(error: Option<&Error>, victims: &[usize]) -> bool {
    matches!(error, Some(Error::PeerLost { peer, .. }) if victims.contains(peer))
}

/// What groups could leave in `/dev/shm`.
pub fn shared_files() -> Vec<String> {
    let files = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    files.map(|file| file.file_name().to_string_lossy().into_owned()).filter(|name| name.contains("bonfire")).collect()
}
