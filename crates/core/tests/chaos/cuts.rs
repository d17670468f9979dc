//! Links between hosts that are cut and heal, some of them repeatedly, at any moment of a group's life.
//!
//! Whatever the ranks make of it, no result is wrong, no call outlasts its time, and at the end at most one group goes
//! on.

use std::thread;
use std::time::Duration;

use bonfire_core::Error;
use rustix::process::Signal;

use crate::case::{Case, HEARTBEAT_TIMEOUT, SOON};
use crate::hosts::Group;
use crate::machine::Network;
use crate::orders::{Act, GroupTransport, Orders, ScheduledAct};

/// The timeout of a rendezvous whose links are cut.
const CUT_TIMEOUT: Duration = Duration::from_secs(8);

/// Time from the last repair until the streams end: each rank has noticed by then which peers it has lost.
const SETTLE: Duration = Duration::from_secs(6);

/// The directed links to cut, as pairs of hosts, and what they are.
fn draw_links(case: &mut Case, hosts: usize) -> (String, Vec<(usize, usize)>) {
    let pairs = |cut: &dyn Fn(usize, usize) -> bool| -> Vec<(usize, usize)> {
        let all = (0..hosts).flat_map(|from| (0..hosts).map(move |to| (from, to)));
        all.filter(|(from, to)| from != to && cut(*from, *to)).collect()
    };
    // Two hosts, mostly others than that of rank 0.
    let first = 1 + case.below(hosts - 1);
    let second = (first + 1 + case.below(hosts - 1)) % hosts;
    let (away, bridge) = (1 + case.below((1 << hosts) - 2), case.below(hosts));
    let side = |host: usize| away >> host & 1;
    match case.below(5) {
        0 => (format!("{first} and {second}"), pairs(&|a, b| [(first, second), (second, first)].contains(&(a, b)))),
        1 => (format!("{first} to {second}"), vec![(first, second)]),
        2 => (format!("{away:b} from the others"), pairs(&|a, b| side(a) != side(b))),
        3 => (
            format!("{away:b} from the others but {bridge}"),
            pairs(&|a, b| side(a) != side(b) && a != bridge && b != bridge),
        ),
        _ => ("all but a ring".into(), pairs(&|a, b| (a + 1) % hosts != b && (b + 1) % hosts != a)),
    }
}

/// Cuts links and repairs them, up to three times, and describes it.
fn cut_and_heal(case: &mut Case, network: &Network, hosts: usize) {
    for _ in 0..1 + case.below(3) {
        let (what, links) = draw_links(case, hosts);
        let heartbeat_timeout = HEARTBEAT_TIMEOUT.as_millis() as usize;
        let long = Duration::from_millis(
            [case.below(heartbeat_timeout), heartbeat_timeout + case.below(heartbeat_timeout)][case.below(2)] as u64,
        );
        case.what.push_str(&format!("; {what}, for {long:.1?}"));
        case.faults += 1;
        links.iter().for_each(|(from, to)| network.cut(*from, *to).expect("it succeeded before"));
        thread::sleep(long);
        network.heal().expect("it succeeded before");
        thread::sleep(Duration::from_millis(case.below(1000) as u64));
    }
}

/// Starts a group on three or four hosts, cuts links after a random part of `delay`, and checks the outcome. A `victim`
/// dies by itself.
fn run(case: &mut Case, waits: bool, delay: Duration, settle: impl Fn(Orders) -> Orders, victim: Option<usize>) {
    let hosts = 3 + case.below(2);
    let n = if case.transport == GroupTransport::Mixed { 2 * hosts } else { hosts };
    let settle = |orders: Orders| {
        let limits = Orders {
            heartbeat_timeout: HEARTBEAT_TIMEOUT,
            deadline: SOON,
            hang_timeout: Some(SOON),
            largest: 16,
            ..orders
        };
        settle(Orders { rendezvous_timeout: if waits { limits.rendezvous_timeout } else { CUT_TIMEOUT }, ..limits })
    };
    // Where iptables is missing, the first cut fails, and the scenario is skipped.
    let Some(mut group) = Group::start_with(case, (hosts, n), |network, _| network.heal(), settle) else { return };
    case.what = format!("{n} ranks on {hosts} hosts");
    if !waits || case.going(&mut group.children) {
        thread::sleep(Duration::from_micros(case.below(delay.as_micros() as usize) as u64));
        cut_and_heal(case, &group.network, hosts);
    }
    thread::sleep(SETTLE);
    std::fs::write(&group.until, "").expect("a file");
    let gone: Vec<usize> = victim.into_iter().collect();
    let reports = case.end(group.children, &gone, SOON * 2 + HEARTBEAT_TIMEOUT, false, &|_, error| {
        !matches!(error, Some(Error::Mismatch { .. } | Error::InvalidArgument { .. }))
    });
    case.all_or_none(&reports);
    let shrunk: Vec<_> = reports.into_iter().filter(|report| report.continued.is_some()).collect();
    case.went_on_as_one(&shrunk);
}

pub fn in_the_stream(case: &mut Case) {
    run(case, true, Duration::from_millis(100), |orders| orders, None);
}

/// The cut may come before ranks have found each other, or just after.
pub fn in_the_rendezvous(case: &mut Case) {
    run(case, false, Duration::from_millis(600), |orders| orders, None);
}

/// A rank is killed, and links are cut while the others shrink the group.
pub fn in_the_shrink(case: &mut Case) {
    let (victim, at) = (case.below(3), case.early());
    let act = ScheduledAct { rank: victim, at, act: Act::Signal { number: Signal::KILL.as_raw(), micros: 100 } };
    let settle = |orders| Orders { acts: vec![act.clone()], ..orders };
    run(case, true, Duration::from_millis(100), settle, Some(victim));
    case.faults += 1;
}

/// The stream makes subgroups.
pub fn in_subgroups(case: &mut Case) {
    run(case, true, Duration::from_millis(200), |orders| Orders { subgroups: true, ..orders }, None);
}
