//! A child process: its ranks join, run the stream, inject the faults that they are ordered to, and report.

use std::panic::{catch_unwind, resume_unwind};
use std::time::{Duration, Instant, UNIX_EPOCH};
use std::{fs, thread};

use bonfire_core::error::ShrinkError;
use bonfire_core::{Builder, Error, Group, ReduceOp, Secret, TransportKind};
use rustix::process::{Resource, Rlimit, Signal, getpid, getrlimit, kill_process, setrlimit};

use crate::machine;
use crate::orders::{Act, ChildReport, GroupTransport, ORDERS, Orders, Report};
use crate::stream::{Step, StepError};
use bonfire_testing::process::send_line;
use bonfire_testing::resources::{Resources, count};

/// The message of a child whose ranks have all joined the group.
pub const GOING: &str = "going";

/// The payload of a panic that was ordered.
const ON_PURPOSE: &str = "on purpose";

/// Steps between two checks whether the stream is to end.
const CHECK_INTERVAL: u64 = 8;

pub fn main() {
    let orders = std::env::var(ORDERS).expect("set by the parent");
    let orders: Orders = serde_json::from_str(&orders).expect("orders are plain data");
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload().downcast_ref::<&str>() != Some(&ON_PURPOSE) {
            default_hook(panic);
        }
    }));
    let before = Resources::at_start();
    let reports = if orders.transport == GroupTransport::Threads {
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
    // Counting what is left needs memory, too.
    lift(Resource::As);
    let report = ChildReport { reports, leaks: before.leaks() };
    send_line(serde_json::to_string(&report).expect("reports are plain data"));
}

fn builder(orders: &Orders) -> Builder {
    let builder = Group::builder().rank(orders.rank).world_size(orders.world_size).address(&orders.address);
    let builder = builder
        .deadline(orders.deadline)
        .heartbeat_timeout(orders.heartbeat_timeout)
        .rendezvous_timeout(orders.rendezvous_timeout);
    let builder =
        orders.hang_timeout.into_iter().fold(builder.full_mesh_limit(orders.full_mesh_limit), Builder::hang_timeout);
    let builder = builder.transport(match orders.transport {
        GroupTransport::Tcp => TransportKind::Tcp,
        GroupTransport::Shm => TransportKind::Shm,
        GroupTransport::Threads | GroupTransport::Mixed => TransportKind::Auto,
    });
    let builder = match &orders.host {
        Some(host) => builder.host(host),
        None => builder.machine(format!("machine {}", orders.rank % 2)),
    };
    if orders.secret { builder.secret(Secret::new([7; 32]).expect("long enough")) } else { builder }
}

/// Joins a group by `join` and runs the rank to its end.
fn report(orders: &Orders, join: impl FnOnce(Builder) -> Result<Group, Error> + Send) -> Report {
    let mut report =
        Report { rank: orders.rank, error: None, took: Duration::ZERO, steps: 0, continued: None, wrong: Vec::new() };
    // On a thread of its own, since a rank may be ordered to panic.
    let end = thread::scope(|scope| {
        let rank = || {
            let began = Instant::now();
            if let Some(files) = orders.files {
                limit_files(files);
            }
            if let Some(memory) = orders.memory {
                limit(Resource::As, address_space() + memory);
            }
            match join(builder(orders)) {
                Ok(group) => run_stream(group, orders, &mut report),
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

/// Runs the stream until it ends or the group fails.
fn run_stream(group: Group, orders: &Orders, report: &mut Report) {
    let began = Instant::now();
    let mut outcome = group.barrier().map_err(StepError::Failed);
    if outcome.is_ok() && (group.rank() == 0 || orders.transport != GroupTransport::Threads) {
        send_line(GOING);
    }
    report.took = began.elapsed();
    let mut performed = false;
    while outcome.is_ok() && report.steps < orders.steps {
        let act = orders.acts.iter().find(|act| act.rank == orders.rank && act.at == report.steps);
        let began = Instant::now();
        outcome = match act.map(|act| &act.act) {
            Some(Act::Leave) => return,
            Some(Act::Exit) => std::process::exit(0),
            Some(Act::Skip) => Ok(()),
            Some(Act::Other) => group.barrier().map_err(StepError::Failed),
            Some(Act::Panic) => std::panic::panic_any(ON_PURPOSE),
            Some(Act::PanicInside) => panic_inside(&group),
            Some(act) => {
                perform(act);
                performed = true;
                step(&group, orders, report.steps)
            }
            None => step(&group, orders, report.steps),
        };
        // The delay is the injected fault, and no part of the call that follows.
        report.took = match act.map(|act| &act.act) {
            Some(Act::Sleep(long)) => began.elapsed().saturating_sub(*long),
            _ => began.elapsed(),
        };
        if outcome.is_ok() {
            report.steps += 1;
            if orders.until.is_some() && report.steps.is_multiple_of(CHECK_INTERVAL) {
                outcome = match is_over(&group, orders) {
                    Ok(true) => break,
                    Ok(false) => Ok(()),
                    Err(error) => Err(StepError::Failed(error)),
                };
            }
        }
    }
    match outcome.and_then(|()| Ok(group.barrier()?)) {
        Ok(()) => {}
        Err(StepError::Wrong(what)) => report.wrong.push(what),
        // Another victim failed first. This one performs its act nevertheless, while its peers shrink the group.
        Err(StepError::Failed(_)) if !performed && orders.signal().is_some() => {
            orders.signal().into_iter().for_each(perform);
            loop {
                thread::park();
            }
        }
        Err(StepError::Failed(error)) => {
            // A call that could not start does not fail the group. This rank ends its stream nevertheless.
            let sound = matches!(error, Error::Io { .. }) && group.failure().is_none();
            if !sound && !is_sticky(&group, &error) {
                report.wrong.push(format!("{error:?} is not the failure that the group reports"));
            }
            report.error = Some(error);
            if orders.continues {
                report.continued = Some(shrink_and_continue(&group, orders, &mut report.wrong));
            }
        }
    }
}

/// Shrinks the group until a smaller one completes its stream. Returns the members of that group.
fn shrink_and_continue(group: &Group, orders: &Orders, wrong: &mut Vec<String>) -> Result<u32, Error> {
    let mut left = shrink(&group.with_deadline(SHRINK_DEADLINE))?;
    loop {
        let outcome = continue_in(&left, group.rank(), orders);
        match outcome.and_then(|members| Ok((members, orders.until.is_none() || is_over(&left, orders)?))) {
            Ok((members, true)) => return Ok(members),
            Ok((_, false)) => {}
            // Another rank was lost meanwhile.
            Err(StepError::Failed(_)) => left = shrink(&left)?,
            Err(StepError::Wrong(what)) => {
                wrong.push(format!("in the shrunk group: {what}"));
                return Ok(0);
            }
        }
    }
}

/// The deadline of a shrink, and of operations in the group that it makes.
const SHRINK_DEADLINE: Duration = Duration::from_secs(15);

/// Shrinks the group. Calls again after an error that is not final.
fn shrink(group: &Group) -> Result<Group, Error> {
    let repeated = |error: &Error| {
        !matches!(error, Error::Shrink { why: ShrinkError::Excluded { .. } | ShrinkError::Minority { .. }, .. })
    };
    let mut result = group.shrink();
    for _ in 0..2 {
        if result.as_ref().is_err_and(repeated) {
            result = group.shrink();
        }
    }
    result
}

/// Runs a stream in the shrunk group, and returns its members as a mask of the original ranks.
fn continue_in(left: &Group, first_rank: usize, orders: &Orders) -> Result<u32, StepError> {
    const STEPS: u64 = 12;
    let mut members = [1u32 << first_rank];
    left.all_reduce(&mut members, ReduceOp::Sum)?;
    for number in 0..STEPS {
        Step::draw((!orders.seed, number), orders.largest, left, left.world_size() == 1).run(left)?;
    }
    left.barrier()?;
    Ok(members[0])
}

/// Runs step `number`. Where a rank is slow or makes a different call, and in the step after it, the operation is a
/// collective: a message does not involve all ranks, and a rank that waits for one names only its sender.
fn step(group: &Group, orders: &Orders, number: u64) -> Result<(), StepError> {
    let disagrees = |act: &Act| matches!(act, Act::Sleep(_) | Act::Skip | Act::Other);
    let near = orders.acts.iter().any(|act| (act.at..=act.at + 1).contains(&number) && disagrees(&act.act));
    if orders.acts.iter().any(|act| act.at == number && matches!(act.act, Act::Skip | Act::Other)) {
        // No other step makes this call, so the rank that makes the next call instead is detected.
        let mut data = vec![1f32; 777];
        group.all_reduce(&mut data, ReduceOp::Sum)?;
        return Err(StepError::Wrong("an operation succeeded that a rank did not call".into()));
    }
    if orders.subgroups && number % 5 == 4 {
        return in_subgroups(group);
    }
    Step::draw((orders.seed, number), orders.largest, group, near).run(group)
}

/// Makes two subgroups, and calls an operation in each. If that fails, so does the next operation of the group, which
/// says why.
fn in_subgroups(group: &Group) -> Result<(), StepError> {
    let Some(half) = group.split(Some(group.rank() as u64 % 2), 0)? else { return Ok(()) };
    let mut ranks = [1u64];
    match half.all_reduce(&mut ranks, ReduceOp::Sum) {
        Ok(()) if ranks[0] != half.world_size() as u64 => Err(StepError::Wrong(format!("{ranks:?} ranks in {half:?}"))),
        _ => Ok(()),
    }
}

/// Performs an act that does not replace the step.
fn perform(act: &Act) {
    match *act {
        Act::Sleep(long) => thread::sleep(long),
        Act::Files(more) => limit_files(more),
        Act::Clock(offset) => {
            let seconds = || UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs() as i64);
            machine::set_clock(0);
            let right = seconds();
            machine::set_clock(offset);
            assert!((seconds() - right - offset).abs() < 60, "the clock jumps");
        }
        Act::Signal { number, micros } => {
            thread::spawn(move || {
                thread::sleep(Duration::from_micros(micros));
                let signal = Signal::from_named_raw(number).expect("a signal");
                kill_process(getpid(), signal).expect("a signal to oneself");
            });
        }
        _ => unreachable!("these replace the step"),
    }
}

/// A buffer that panics when the operation accesses it.
struct PanickingBuffer;

impl AsMut<[f32]> for PanickingBuffer {
    fn as_mut(&mut self) -> &mut [f32] {
        std::panic::panic_any(ON_PURPOSE)
    }
}

fn panic_inside(group: &Group) -> Result<(), StepError> {
    let work = group.start_all_reduce(PanickingBuffer, ReduceOp::Sum)?;
    // The panic surfaces in `wait`. Resuming it drops the group during a panic.
    let Err(panic) = catch_unwind(std::panic::AssertUnwindSafe(|| work.wait())) else {
        return Err(StepError::Wrong("a buffer's panic was lost".into()));
    };
    resume_unwind(panic)
}

/// Whether all ranks are to end the stream here, as rank 0 decides.
fn is_over(group: &Group, orders: &Orders) -> Result<bool, Error> {
    let mut over = [u8::from(group.rank() == 0 && orders.until.as_ref().is_some_and(|file| file.exists()))];
    group.all_reduce(&mut over, ReduceOp::Max)?;
    Ok(over == [1])
}

/// Whether every later call returns the same error.
fn is_sticky(group: &Group, error: &Error) -> bool {
    let later = [group.barrier(), group.all_reduce(&mut [1f32; 3], ReduceOp::Sum), group.send(&[0u8; 2], 0)];
    // A message to oneself is rejected before anything else is checked.
    let refused = |later: &Result<(), Error>| matches!(later, Err(Error::InvalidArgument { .. })) && group.rank() == 0;
    group.failure().as_ref() == Some(error) && later.iter().all(|later| later.as_ref() == Err(error) || refused(later))
}

/// Allows so many descriptors more than now, and the one that counting needs. Connecting raises the soft limit to the
/// hard one.
fn limit_files(more: u64) {
    let most = Some(count("/proc/self/fd") as u64 + more);
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).expect("a process may lower its limits");
}

fn limit(resource: Resource, to: u64) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: Some(to), maximum }).expect("a limit below the hard one");
}

fn lift(resource: Resource) {
    let maximum = getrlimit(resource).maximum;
    setrlimit(resource, Rlimit { current: maximum, maximum }).expect("the hard limit");
}

/// The size of this process's address space in bytes.
fn address_space() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux has it");
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")).expect("a size");
    1024 * size.trim().trim_end_matches(" kB").parse::<u64>().expect("a number")
}
