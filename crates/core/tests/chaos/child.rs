//! What a child does: its ranks join, run the stream, do to themselves what they are told, and report.

use std::panic::{catch_unwind, resume_unwind};
use std::time::{Duration, Instant, UNIX_EPOCH};
use std::{fs, thread};

use bonfire_core::{Builder, Error, Group, Medium, ReduceOp, Secret};
use rustix::process::{Resource, Rlimit, Signal, getpid, getrlimit, kill_process, setrlimit};

use crate::machine;
use crate::orders::{Act, Carrier, ORDERS, Orders, Report, Words};
use crate::stream::{Flaw, Step};
use bonfire_testing::process::say;

/// What a child says once all its ranks are in its group.
pub const GOING: &str = "going";

/// What a panic says that was ordered.
const ON_PURPOSE: &str = "on purpose";

/// So often the ranks look whether the stream is to end.
const LOOK: u64 = 8;

pub fn main() {
    let orders = std::env::var(ORDERS).expect("the parent says what to do");
    let orders: Orders = serde_json::from_str(&orders).expect("orders are plain data");
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload().downcast_ref::<&str>() != Some(&ON_PURPOSE) {
            loud(panic);
        }
    }));
    // tokio keeps two sockets for signals from its first runtime on.
    drop(tokio::runtime::Builder::new_current_thread().enable_all().build());
    let before = Belongings::now();
    let reports = if orders.carrier == Carrier::Threads {
        let groups = builder(&orders).threads(orders.world_size).expect("a group of threads");
        let ranks: Vec<_> = groups
            .into_iter()
            .map(|group| {
                let orders = Orders { rank: group.rank(), ..orders.clone() };
                thread::spawn(move || report(&orders, |_| Ok(group)))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("reports do not panic")).collect()
    } else {
        vec![report(&orders, Builder::connect)]
    };
    // What is left is counted with descriptors of one's own.
    lift(Resource::Nofile);
    lift(Resource::As);
    let words = Words { reports, leaks: before.leaks() };
    say(serde_json::to_string(&words).expect("words are plain data"));
}

fn builder(orders: &Orders) -> Builder {
    let builder = Group::builder().rank(orders.rank).world_size(orders.world_size).address(&orders.address);
    let builder = builder.deadline(orders.deadline).silence(orders.silence).rendezvous_timeout(orders.patience);
    let builder = builder.transport(match orders.carrier {
        Carrier::Tcp => Medium::Tcp,
        Carrier::Shm => Medium::Shm,
        Carrier::Threads | Carrier::Mixed => Medium::Auto,
    });
    let builder = match &orders.host {
        Some(host) => builder.host(host),
        None => builder.machine(format!("machine {}", orders.rank % 2)),
    };
    if orders.secret { builder.secret(Secret::new([7; 32]).expect("long enough")) } else { builder }
}

/// Joins a group by `join` and lives in it to its end.
fn report(orders: &Orders, join: impl FnOnce(Builder) -> Result<Group, Error> + Send) -> Report {
    let mut report =
        Report { rank: orders.rank, error: None, took: Duration::ZERO, steps: 0, went_on: None, wrong: Vec::new() };
    // A thread of its own, since a rank may be told to panic.
    let end = thread::scope(|scope| {
        let rank = || {
            let began = Instant::now();
            if let Some(files) = orders.files {
                limit(Resource::Nofile, count("/proc/self/fd") as u64 + files);
            }
            if let Some(memory) = orders.memory {
                limit(Resource::As, addresses() + memory);
            }
            match join(builder(orders)) {
                Ok(group) => live(group, orders, &mut report),
                Err(error) => (report.error, report.took) = (Some(error), began.elapsed()),
            }
        };
        scope.spawn(rank).join()
    });
    if let Err(panic) = end
        && panic.downcast_ref::<&str>() != Some(&ON_PURPOSE)
    {
        report.wrong.push("a rank panicked".into());
    }
    report
}

/// Runs the stream until it ends, or the group does.
fn live(group: Group, orders: &Orders, report: &mut Report) {
    let began = Instant::now();
    let mut outcome = group.barrier().map_err(Flaw::Failed);
    if outcome.is_ok() && (group.rank() == 0 || orders.carrier != Carrier::Threads) {
        say(GOING);
    }
    report.took = began.elapsed();
    let mut begun = false;
    while outcome.is_ok() && report.steps < orders.steps {
        let deed = orders.deeds.iter().find(|deed| deed.rank == orders.rank && deed.at == report.steps);
        let began = Instant::now();
        outcome = match deed.map(|deed| &deed.act) {
            Some(Act::Leave) => return,
            Some(Act::Exit) => std::process::exit(0),
            Some(Act::Skip) => Ok(()),
            Some(Act::Other) => group.barrier().map_err(Flaw::Failed),
            Some(Act::Panic) => std::panic::panic_any(ON_PURPOSE),
            Some(Act::PanicInside) => panic_inside(&group),
            Some(act) => {
                begin(act);
                begun = true;
                step(&group, orders, report.steps)
            }
            None => step(&group, orders, report.steps),
        };
        // Being slow is the fault, and no part of the call that follows.
        report.took = match deed.map(|deed| &deed.act) {
            Some(Act::Sleep(long)) => began.elapsed().saturating_sub(*long),
            _ => began.elapsed(),
        };
        if outcome.is_ok() {
            report.steps += 1;
            if orders.until.is_some() && report.steps.is_multiple_of(LOOK) {
                outcome = match is_over(&group, orders) {
                    Ok(true) => break,
                    Ok(false) => Ok(()),
                    Err(error) => Err(Flaw::Failed(error)),
                };
            }
        }
    }
    match outcome.and_then(|()| Ok(group.barrier()?)) {
        Ok(()) => {}
        Err(Flaw::Wrong(what)) => report.wrong.push(what),
        // Another victim was faster, and this one ends all the same: while the others come together again.
        Err(Flaw::Failed(_)) if !begun && orders.signal().is_some() => {
            orders.signal().into_iter().for_each(begin);
            loop {
                thread::park();
            }
        }
        Err(Flaw::Failed(error)) => {
            // A call that could not begin ends nothing. This rank gives up all the same.
            let sound = matches!(error, Error::Io { .. }) && group.failure().is_none();
            if !sound && !stays(&group, &error) {
                report.wrong.push(format!("{error:?} is not what the group says it ended with"));
            }
            report.error = Some(error);
            if orders.goes_on {
                report.went_on = Some(goes_on(&group, orders, &mut report.wrong));
            }
        }
    }
}

/// Goes on with those who are left, until a group of theirs has done all that it should. Gives who they are.
fn goes_on(group: &Group, orders: &Orders, wrong: &mut Vec<String>) -> Result<u32, Error> {
    let mut left = group.shrink()?;
    loop {
        match go_on(&left, group.rank(), orders) {
            Ok(who) => return Ok(who),
            // Another one was lost meanwhile.
            Err(Flaw::Failed(_)) => left = left.shrink()?,
            Err(Flaw::Wrong(what)) => {
                wrong.push(format!("in the group of those who are left: {what}"));
                return Ok(0);
            }
        }
    }
}

/// A stream in the group of those who are left, and who they are.
fn go_on(left: &Group, first_rank: usize, orders: &Orders) -> Result<u32, Flaw> {
    const STEPS: u64 = 12;
    let mut who = [1u32 << first_rank];
    left.all_reduce(&mut who, ReduceOp::Sum)?;
    for number in 0..STEPS {
        Step::draw((!orders.seed, number), orders.largest, left, left.world_size() == 1).run(left)?;
    }
    left.barrier()?;
    Ok(who[0])
}

/// Step `number`. Where a rank is slow or does something else, and just after, it is a collective operation: messages do
/// not take all ranks, and who waits for one names its sender.
fn step(group: &Group, orders: &Orders, number: u64) -> Result<(), Flaw> {
    let disagrees = |act: &Act| matches!(act, Act::Sleep(_) | Act::Skip | Act::Other);
    let near = orders.deeds.iter().any(|deed| (deed.at..=deed.at + 1).contains(&number) && disagrees(&deed.act));
    if orders.deeds.iter().any(|deed| deed.at == number && matches!(deed.act, Act::Skip | Act::Other)) {
        // What no other step calls: who calls the next one instead is found out.
        let mut data = vec![1f32; 777];
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        return Err(Flaw::Wrong("an operation succeeded that a rank did not call".into()));
    }
    Step::draw((orders.seed, number), orders.largest, group, near).run(group)
}

/// What lasts longer than the moment.
fn begin(act: &Act) {
    match *act {
        Act::Sleep(long) => thread::sleep(long),
        Act::Files(more) => limit(Resource::Nofile, count("/proc/self/fd") as u64 + more),
        Act::Clock(wrong_by) => {
            let seconds = || UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs() as i64);
            machine::set_clock(0);
            let right = seconds();
            machine::set_clock(wrong_by);
            assert!((seconds() - right - wrong_by).abs() < 60, "the clock jumps");
        }
        Act::Signal { number, micros } => {
            thread::spawn(move || {
                thread::sleep(Duration::from_micros(micros));
                let signal = Signal::from_named_raw(number).expect("a signal");
                kill_process(getpid(), signal).expect("a signal to oneself");
            });
        }
        _ => unreachable!("these take the step's place"),
    }
}

/// A buffer that panics when the operation wants it.
struct Broken;

impl AsMut<[f32]> for Broken {
    fn as_mut(&mut self) -> &mut [f32] {
        std::panic::panic_any(ON_PURPOSE)
    }
}

fn panic_inside(group: &Group) -> Result<(), Flaw> {
    let work = group.start_all_reduce(Broken, ReduceOp::Sum)?;
    // It comes back from `wait`, and takes the group along.
    let Err(panic) = catch_unwind(std::panic::AssertUnwindSafe(|| work.wait())) else {
        return Err(Flaw::Wrong("a buffer's panic was lost".into()));
    };
    resume_unwind(panic)
}

/// Whether all ranks are to end the stream here, as rank 0 sees it.
fn is_over(group: &Group, orders: &Orders) -> Result<bool, Error> {
    let mut over = [u8::from(group.rank() == 0 && orders.until.as_ref().is_some_and(|file| file.exists()))];
    group.all_reduce(&mut over, ReduceOp::Max)?;
    Ok(over == [1])
}

/// Whether every later call returns the same error.
fn stays(group: &Group, error: &Error) -> bool {
    let later = [group.barrier(), group.all_reduce(&mut [1f32; 3], ReduceOp::Sum), group.send(&[0u8; 2], 0)];
    // A message to oneself is refused before anything else.
    let refused = |later: &Result<(), Error>| matches!(later, Err(Error::InvalidArgument { .. })) && group.rank() == 0;
    group.failure().as_ref() == Some(error) && later.iter().all(|later| later.as_ref() == Err(error) || refused(later))
}

fn limit(resource: Resource, to: u64) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: Some(to), maximum }).expect("a limit below the hard one");
}

fn lift(resource: Resource) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: maximum, maximum }).expect("the hard limit");
}

fn count(folder: &str) -> usize {
    fs::read_dir(folder).map_or(0, Iterator::count)
}

/// Bytes of addresses that this process has.
fn addresses() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux has it");
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).expect("a size");
    1024 * size.trim().trim_end_matches(" kB").parse::<u64>().expect("a number")
}

/// What a process has that a group can leave behind.
#[derive(Debug, PartialEq, PartialOrd)]
struct Belongings {
    files: usize,
    threads: usize,
    segments: usize,
}

impl Belongings {
    fn now() -> Belongings {
        let maps = fs::read_to_string("/proc/self/maps").expect("Linux has it");
        Belongings {
            files: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            segments: maps.lines().filter(|line| line.contains("memfd:bonfire")).count(),
        }
    }

    /// What there is more of than before, once threads had the time to end.
    fn leaks(&self) -> Vec<String> {
        const TIME: Duration = Duration::from_secs(3);
        let start = Instant::now();
        loop {
            let now = Belongings::now();
            let more = [
                ("descriptors", self.files, now.files),
                ("threads", self.threads, now.threads),
                ("segments", self.segments, now.segments),
            ];
            let more: Vec<_> = more
                .iter()
                .filter(|(_, before, now)| now > before)
                .map(|(what, before, now)| format!("{now} {what}, {before} before"))
                .collect();
            if more.is_empty() || start.elapsed() > TIME {
                return more;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}
