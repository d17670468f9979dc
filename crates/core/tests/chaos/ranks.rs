//! Faults of the ranks themselves.

use std::time::Duration;

use bonfire_core::Error;
use bonfire_core::error::ShrinkError;
use rustix::process::Signal;

use crate::case::{Case, DEADLINE, HEARTBEAT_TIMEOUT, SOON, is_lost};
use crate::orders::{Act, GroupTransport, Orders, Report, ScheduledAct};

/// A deadline that is missed, and the time by which it is missed.
const SHORT: Duration = Duration::from_secs(3);

pub fn killed(case: &mut Case) {
    let n = case.world_size();
    let (orders, victim) = (Orders { continues: true, ..case.orders(n) }, case.below(n));
    let act = Act::Signal { number: Signal::KILL.as_raw(), micros: case.below(3000) as u64 };
    let children = case.start_with(&orders, victim, act);
    case.faults = 1;
    let reports = case.end(children, &[victim], case.scaled(SOON), true, &|_, error| is_lost(error, &[victim]));
    case.continued(&reports, n, &[victim]);
    case.port_is_free(&orders.address);
}

/// Several ranks are killed at one moment. Which of them is noticed first may differ from rank to rank.
pub fn several_killed(case: &mut Case) {
    let n = if case.many { case.world_size() } else { 4 };
    let (orders, first, at) = (case.orders(n), case.below(n), case.early());
    let mut victims = vec![first, (first + 1 + case.below(n - 1)) % n];
    if case.many && case.below(3) == 0 {
        victims.push(0);
        victims.sort_unstable();
        victims.dedup();
    }
    let act = |case: &mut Case| Act::Signal { number: Signal::KILL.as_raw(), micros: case.below(1000) as u64 };
    let acts: Vec<_> = victims.iter().map(|rank| ScheduledAct { rank: *rank, at, act: act(case) }).collect();
    case.what = format!("{acts:?} of {n}");
    case.faults = victims.len();
    let children = case.start(&Orders { acts, continues: true, ..orders.clone() });
    let reports = case.end(children, &victims, case.scaled(SOON), false, &|_, error| is_lost(error, &victims));
    case.continued(&reports, n, &victims);
    case.port_is_free(&orders.address);
}

/// A rank is stopped, and resumed after its peers have declared it lost, or never.
pub fn stopped(case: &mut Case) {
    let n = case.world_size();
    let (orders, victim) = (
        Orders { heartbeat_timeout: case.scaled(HEARTBEAT_TIMEOUT), continues: true, ..case.orders(n) },
        case.below(n),
    );
    let act = Act::Signal { number: Signal::STOP.as_raw(), micros: case.below(3000) as u64 };
    let continues = case.below(2) == 0;
    let mut children = case.start_with(&orders, victim, act);
    case.faults = 1;
    let stopped = children.remove(victim);
    let reports =
        case.end(children, &[], case.scaled(HEARTBEAT_TIMEOUT + SOON), true, &|_, error| is_lost(error, &[victim]));
    if n == 2 && victim == 0 {
        // The silent rank 0 may still be alive and continue, so that the other one must not.
        let refused = |report: &Report| matches!(report.continued, Some(Err(Error::Shrink { .. })));
        case.wrong.extend(reports.iter().filter(|report| !refused(report)).map(|report| format!("{report:?} went on")));
    } else {
        case.continued(&reports, n, &[victim]);
    }
    if continues {
        stopped.process.signal(Signal::CONT);
        let slowest = case.slowest;
        // It learns that it was declared lost, or that all peers have left.
        case.end(vec![stopped], &[], DEADLINE * 2, false, &|_, error| error.is_some());
        case.slowest = slowest;
    } else {
        // Dropping it kills it, which frees its port.
        drop(stopped);
    }
    case.port_is_free(&orders.address);
}

pub fn exits(case: &mut Case) {
    let n = case.world_size();
    let (orders, victim) = (Orders { continues: true, ..case.orders(n) }, case.below(n));
    let children = case.start_with(&orders, victim, Act::Exit);
    case.faults = 1;
    let reports = case.end(children, &[victim], case.scaled(SOON), true, &|_, error| is_lost(error, &[victim]));
    case.continued(&reports, n, &[victim]);
    case.port_is_free(&orders.address);
}

pub fn leaves(case: &mut Case) {
    let n = case.world_size();
    let (orders, victim) = (Orders { continues: true, ..case.orders(n) }, case.below(n));
    let children = case.start_with(&orders, victim, Act::Leave);
    case.faults = 1;
    let reports = case.end(children, &[], case.scaled(SOON), true, &|rank, error| match error {
        Some(Error::Left { rank: left, .. }) => *left == victim,
        error => error.is_none() && rank == victim,
    });
    case.continued(&reports, n, &[victim]);
    case.port_is_free(&orders.address);
}

pub fn panics(case: &mut Case) {
    let n = case.world_size();
    let (orders, victim) = (Orders { continues: true, ..case.orders(n) }, case.below(n));
    let act = if case.below(2) == 0 { Act::Panic } else { Act::PanicInside };
    let children = case.start_with(&orders, victim, act);
    case.faults = 1;
    let reports = case.end(children, &[], case.scaled(SOON), true, &|rank, error| {
        if rank == victim { error.is_none() } else { is_lost(error, &[victim]) }
    });
    case.continued(&reports, n, &[victim]);
    case.port_is_free(&orders.address);
}

/// The deadline passes while a rank sleeps. The rank gets the error when it calls.
pub fn too_slow(case: &mut Case) {
    let (n, short) = (case.world_size(), case.scaled(SHORT));
    let (orders, victim) = (Orders { deadline: short, ..case.orders(n) }, case.below(n));
    let children = case.start_with(&orders, victim, Act::Sleep(short * 2));
    case.faults = 1;
    case.end(
        children,
        &[],
        short + case.scaled(SOON),
        true,
        &|_, error| matches!(error, Some(Error::Timeout { missing, .. }) if *missing == [victim]),
    );
    case.port_is_free(&orders.address);
}

/// A rank lives and does not call for longer than the deadline and the hang timeout. The others go on without it if
/// they are the majority, and otherwise with it.
pub fn hangs(case: &mut Case) {
    let (n, short) = (case.world_size(), case.scaled(SHORT));
    let (orders, victim) =
        (Orders { deadline: short, hang_timeout: Some(short), continues: true, ..case.orders(n) }, case.below(n));
    let children = case.start_with(&orders, victim, Act::Sleep(short * 4));
    case.faults = 1;
    let reports = case.end(
        children,
        &[],
        short + case.scaled(SOON),
        true,
        &|_, error| matches!(error, Some(Error::Timeout { missing, .. }) if *missing == [victim]),
    );
    if n == 2 && victim == 0 {
        case.continued(&reports, n, &[]);
    } else {
        case.continued(&reports, n, &[victim]);
        let excluded = |report: &Report| {
            matches!(&report.continued, Some(Err(Error::Shrink { why: ShrinkError::Excluded { .. }, .. })))
        };
        let came = reports.iter().filter(|report| report.rank == victim && !excluded(report));
        case.wrong.extend(came.map(|report| format!("{report:?} was not excluded")));
    }
    case.port_is_free(&orders.address);
}

/// A rank that is stopped for less than the heartbeat timeout does no harm.
pub fn pauses(case: &mut Case) {
    let n = case.world_size();
    let folder = tempfile::tempdir().expect("a folder for a file");
    let until = folder.path().join("over");
    let orders =
        Orders { heartbeat_timeout: case.scaled(Duration::from_secs(5)), until: Some(until.clone()), ..case.orders(n) };
    let (victim, long) = (case.below(n), Duration::from_millis(500 + case.below(2000) as u64));
    let mut children = case.start(&orders);
    case.what = format!("rank {victim} of {n} for {long:?}");
    if case.going(&mut children) {
        std::thread::sleep(Duration::from_millis(case.below(1000) as u64));
        case.faults = 1;
        children[victim].process.signal(Signal::STOP);
        std::thread::sleep(long);
        children[victim].process.signal(Signal::CONT);
    }
    std::fs::write(until, "").expect("a file");
    case.end(children, &[], case.scaled(SOON), true, &|_, error| error.is_none());
    case.port_is_free(&orders.address);
}

/// A fault in a group that is a star because of its size.
pub fn many(case: &mut Case) {
    let faults =
        [killed, several_killed, stopped, exits, leaves, panics, too_slow, hangs, pauses, slow, disagrees, all_stopped];
    (case.many, case.star) = (true, true);
    faults[case.below(faults.len())](case);
}

/// A rank that is slow for less than the deadline does no harm.
pub fn slow(case: &mut Case) {
    let n = case.world_size();
    let (orders, victim) = (Orders { steps: 50, ..case.orders(n) }, case.below(n));
    let long = Duration::from_millis(500 + case.below(1000) as u64);
    let children = case.start_with(&orders, victim, Act::Sleep(long));
    case.faults = 1;
    case.end(children, &[], case.scaled(SOON), true, &|_, error| error.is_none());
    case.port_is_free(&orders.address);
}

/// A rank skips an operation, or makes a different call.
pub fn disagrees(case: &mut Case) {
    let n = case.world_size();
    let (orders, victim) = (Orders { continues: true, ..case.orders(n) }, case.below(n));
    let act = if case.below(2) == 0 { Act::Skip } else { Act::Other };
    let children = case.start_with(&orders, victim, act);
    case.faults = 1;
    let reports =
        case.end(children, &[], case.scaled(SOON), true, &|_, error| matches!(error, Some(Error::Mismatch { .. })));
    case.continued(&reports, n, &[]);
    case.port_is_free(&orders.address);
}

/// The machine sleeps for longer than the heartbeat timeout. After it resumes, no rank is declared lost.
pub fn all_stopped(case: &mut Case) {
    let n = case.world_size();
    let folder = tempfile::tempdir().expect("a folder for a file");
    let until = folder.path().join("over");
    let orders =
        Orders { heartbeat_timeout: case.scaled(HEARTBEAT_TIMEOUT), until: Some(until.clone()), ..case.orders(n) };
    let mut children = case.start(&orders);
    case.what = format!("all {n} ranks stop for longer than the heartbeat timeout");
    if case.going(&mut children) {
        case.faults = 1;
        children.iter().for_each(|child| child.process.signal(Signal::STOP));
        std::thread::sleep(case.scaled(HEARTBEAT_TIMEOUT) + Duration::from_secs(1));
        children.iter().rev().for_each(|child| child.process.signal(Signal::CONT));
        std::fs::write(until, "").expect("a file");
    }
    case.end(children, &[], case.scaled(SOON), true, &|_, error| error.is_none());
    case.port_is_free(&orders.address);
}

pub const PROCESSES: &[GroupTransport] = &[GroupTransport::Tcp, GroupTransport::Shm, GroupTransport::Mixed];
pub const ALL: &[GroupTransport] =
    &[GroupTransport::Tcp, GroupTransport::Shm, GroupTransport::Mixed, GroupTransport::Threads];
