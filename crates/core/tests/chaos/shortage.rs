//! Resources that a process or its machine runs out of, and clocks that differ or jump.

use std::time::Duration;

use bonfire_core::Error;

use crate::case::{Case, Child, SOON, is_lost};
use crate::machine;
use crate::orders::{Act, Orders, ScheduledAct};

/// The timeout of the rendezvous and of operations: a rank that has no thread or no memory to connect with reports
/// nothing, so its peers wait for it.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Starts a group in which the rank of `short` has fewer resources than it needs.
fn start(case: &mut Case, orders: &Orders, short: &Orders) -> Vec<Child> {
    let orders = |rank| if rank == short.rank { short.clone() } else { Orders { rank, ..orders.clone() } };
    (0..orders(0).world_size).map(|rank| case.child(&[], &orders(rank))).collect()
}

/// Whether a rank may end with this error, where the rank `short` lacks descriptors: that rank says so or leaves, or it
/// has enough and all complete the stream. No rank waits until its deadline, except for one that could not connect.
fn names_files(error: Option<&Error>, short: usize) -> bool {
    match error {
        None | Some(Error::Rendezvous { .. }) => true,
        Some(error @ Error::Io { .. }) => error.to_string().contains("open files"),
        error => is_expected(error, short) && !matches!(error, Some(Error::Timeout { .. })),
    }
}

/// Whether a rank may end with this error. The rank that lacks a resource reports it and leaves, or its peers time out,
/// or it has enough and all complete the stream. No other rank is lost or leaves.
fn is_expected(error: Option<&Error>, short: usize) -> bool {
    match error {
        None | Some(Error::Io { .. } | Error::Rendezvous { .. } | Error::Timeout { .. }) => true,
        Some(Error::Left { rank, .. }) => *rank == short,
        error => is_lost(error, &[short]),
    }
}

pub fn files_before(case: &mut Case) {
    let n = case.world_size();
    let (orders, rank) =
        (Orders { rendezvous_timeout: TIMEOUT, deadline: TIMEOUT, steps: 30, ..case.orders(n) }, case.below(n));
    let files = case.below(20) as u64;
    let children = start(case, &orders, &Orders { rank, files: Some(files), ..orders.clone() });
    case.what = format!("{files} descriptors for rank {rank} of {n} before it connects");
    case.faults = 1;
    let reports = case.end(children, &[], TIMEOUT + SOON, false, &|_, error| names_files(error, rank));
    case.all_or_none(&reports);
    case.port_is_free(&orders.address);
}

pub fn files_during(case: &mut Case) {
    let n = case.world_size();
    let (orders, rank) = (Orders { deadline: TIMEOUT, steps: 60, ..case.orders(n) }, case.below(n));
    let act = Act::Files(case.below(3) as u64);
    let acts = vec![ScheduledAct { rank, at: case.below(3) as u64, act }];
    case.what = format!("{acts:?} of {n}");
    let children = case.start(&Orders { acts, ..orders.clone() });
    case.faults = 1;
    let reports = case.end(children, &[], SOON, false, &|_, error| names_files(error, rank));
    case.all_or_none(&reports);
    case.port_is_free(&orders.address);
}

/// Limits the address space to some or all of the threads and mappings that a group needs.
pub fn memory(case: &mut Case) {
    let n = case.world_size();
    let (orders, rank) =
        (Orders { rendezvous_timeout: TIMEOUT, deadline: TIMEOUT, steps: 30, ..case.orders(n) }, case.below(n));
    let memory = (case.below(64) as u64) << 19;
    let children = start(case, &orders, &Orders { rank, memory: Some(memory), ..orders.clone() });
    case.what = format!("{} KiB of address space for rank {rank} of {n}", memory >> 10);
    case.faults = 1;
    case.may_abort = Some(rank);
    let reports = case.end(children, &[], TIMEOUT + SOON, false, &|_, error| is_expected(error, rank));
    case.all_or_none(&reports);
    case.port_is_free(&orders.address);
}

/// Gives each rank a `/dev/shm` of its own without a free byte.
pub fn shared_full(case: &mut Case) {
    let mount = "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero >/dev/shm/full && exec \"$@\"";
    let command = ["unshare", "-m", "sh", "-c", mount, "sh"].map(String::from);
    if let Err(why) = machine::try_out(&command) {
        case.skipped = Some(why);
        return;
    }
    let n = case.world_size();
    let orders = Orders { steps: 40, ..case.orders(n) };
    let children = (0..n).map(|rank| case.child(&command, &Orders { rank, ..orders.clone() })).collect();
    case.what = format!("for {n} ranks");
    case.faults = 1;
    case.end(children, &[], SOON, true, &|_, error| error.is_none());
    case.port_is_free(&orders.address);
}

/// The monotonic clocks of the ranks differ by days.
pub fn clocks_differ(case: &mut Case) {
    let n = case.world_size();
    let (orders, mut commands) = (Orders { steps: 40, ..case.orders(n) }, Vec::new());
    for _ in 0..n {
        let days = |case: &mut Case| (case.below(100) * 86_400).to_string();
        let (monotonic, boot) = (days(case), days(case));
        let command = ["unshare", "--time", "--monotonic", &monotonic, "--boottime", &boot].map(String::from);
        if let Err(why) = machine::try_out(&command) {
            case.skipped = Some(why);
            return;
        }
        commands.push(command);
    }
    let child = |(rank, command): (usize, &[String; 6])| case.child(command, &Orders { rank, ..orders.clone() });
    let children = commands.iter().enumerate().map(child).collect();
    case.what = format!("on {n} ranks");
    case.faults = 1;
    case.end(children, &[], SOON, true, &|_, error| error.is_none());
    case.port_is_free(&orders.address);
}

/// The wall clock of one rank jumps while the stream runs, back and forth.
pub fn clock_jumps(case: &mut Case) {
    if let Err(why) = machine::has_own_clock() {
        case.skipped = Some(why);
        return;
    }
    let n = case.world_size();
    let (orders, rank) = (Orders { steps: 60, ..case.orders(n) }, case.below(n));
    let days = 1 + case.below(1000) as i64;
    let jumps = [(5, -days), (15, days), (25, 1)];
    let acts = jumps.map(|(at, days)| ScheduledAct { rank, at, act: Act::Clock(days * 86_400) });
    case.what = format!("{acts:?} of {n}");
    let children = case.start(&Orders { acts: acts.into(), ..orders.clone() });
    case.faults = jumps.len();
    case.end(children, &[], SOON, true, &|_, error| error.is_none());
    case.port_is_free(&orders.address);
}
