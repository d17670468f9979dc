//! Faults during the rendezvous.

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use bonfire_core::Error;
use rustix::process::Signal;

use crate::case::{Case, Child, SOON, is_lost};
use crate::orders::Orders;

/// The timeout of a rendezvous in which ranks are missing.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Steps of the stream of a complete group.
const STEPS: u64 = 20;

fn failed(error: Option<&Error>) -> bool {
    matches!(error, Some(Error::Rendezvous { .. }))
}

fn orders_with_timeout(case: &mut Case, n: usize) -> Orders {
    Orders { rendezvous_timeout: TIMEOUT, steps: STEPS, ..case.orders(n) }
}

/// Starts these ranks in a random order.
fn start(case: &mut Case, mut orders: Vec<Orders>) -> Vec<Child> {
    let mut children = Vec::new();
    while !orders.is_empty() {
        let orders = orders.swap_remove(case.below(orders.len()));
        children.push(case.child(&[], &orders));
    }
    children
}

/// A rank is started twice: all processes fail alike, or all but one of the two connect.
pub fn duplicate(case: &mut Case) {
    let n = case.world_size();
    let (orders, twice) = (orders_with_timeout(case, n), case.below(n));
    let all = (0..n).chain([twice]).map(|rank| Orders { rank, ..orders.clone() }).collect();
    let children = start(case, all);
    case.what = format!("rank {twice} of {n}");
    case.faults = 1;
    let reports = case.end(children, &[], TIMEOUT + SOON, false, &|_, error| error.is_none() || failed(error));
    let connected = reports.iter().filter(|report| report.error.is_none()).map(|report| report.rank);
    let mut connected: Vec<_> = connected.collect();
    connected.sort_unstable();
    if !connected.is_empty() && !connected.iter().copied().eq(0..n) {
        case.wrong.push(format!("ranks {connected:?} connected"));
    }
    case.port_is_free(&orders.address);
}

/// A rank that starts late, but not too late.
pub fn late(case: &mut Case) {
    let n = case.world_size();
    let (orders, last) = (Orders { rendezvous_timeout: SOON * 3, ..orders_with_timeout(case, n) }, case.below(n));
    let late = Duration::from_millis(case.below(1500) as u64);
    let others = (0..n).filter(|rank| *rank != last).map(|rank| Orders { rank, ..orders.clone() }).collect();
    let mut children = start(case, others);
    thread::sleep(late);
    children.push(case.child(&[], &Orders { rank: last, ..orders.clone() }));
    case.what = format!("rank {last} of {n} by {late:?}");
    case.faults = 1;
    case.end(children, &[], SOON, true, &|_, error| error.is_none());
    case.port_is_free(&orders.address);
}

/// A rank that starts after the rendezvous of its peers has timed out.
pub fn too_late(case: &mut Case) {
    let n = case.world_size();
    let (orders, last) = (orders_with_timeout(case, n), case.below(n));
    let others = (0..n).filter(|rank| *rank != last).map(|rank| Orders { rank, ..orders.clone() }).collect();
    let children = start(case, others);
    case.what = format!("rank {last} of {n}");
    case.faults = 1;
    case.end(children, &[], TIMEOUT + SOON, true, &|_, error| failed(error));
    let child = case.child(&[], &Orders { rank: last, ..orders.clone() });
    case.end(vec![child], &[], TIMEOUT + SOON, true, &|_, error| failed(error));
    case.port_is_free(&orders.address);
}

pub fn world_size(case: &mut Case) {
    let n = case.world_size();
    let (orders, odd) = (orders_with_timeout(case, n), case.below(n));
    let other = if n > 2 && odd < n - 1 && case.below(2) == 0 { n - 1 } else { n + 1 };
    let world_size = |rank| if rank == odd { other } else { n };
    let children =
        start(case, (0..n).map(|rank| Orders { rank, world_size: world_size(rank), ..orders.clone() }).collect());
    case.what = format!("{other} on rank {odd} of {n}");
    case.faults = 1;
    case.end(children, &[], TIMEOUT + SOON, true, &|_, error| failed(error));
    case.port_is_free(&orders.address);
}

/// Another listener has rank 0's address, and stays silent.
pub fn port_in_use(case: &mut Case) {
    let n = case.world_size();
    let orders = orders_with_timeout(case, n);
    let listener = TcpListener::bind(&orders.address).expect("a free address");
    let children = start(case, (0..n).map(|rank| Orders { rank, ..orders.clone() }).collect());
    case.what = format!("{n} ranks");
    case.faults = 1;
    case.end(children, &[], TIMEOUT + SOON, true, &|_, error| failed(error));
    drop(listener);
    case.port_is_free(&orders.address);
}

/// A rank is killed during the rendezvous, or just after it.
pub fn killed(case: &mut Case) {
    let n = case.world_size();
    let (orders, victim) = (Orders { steps: u64::MAX, ..orders_with_timeout(case, n) }, case.below(n));
    let mut children: Vec<_> = (0..n).map(|rank| case.child(&[], &Orders { rank, ..orders.clone() })).collect();
    let late = Duration::from_micros(case.below(20_000) as u64);
    thread::sleep(late);
    let mut child = children.remove(victim);
    child.process.signal(Signal::KILL);
    child.process.end();
    case.what = format!("rank {victim} of {n} after {late:?}");
    case.faults = 1;
    case.end(children, &[], TIMEOUT + SOON, false, &|_, error| failed(error) || is_lost(error, &[victim]));
    case.port_is_free(&orders.address);
}
