//! Network faults between hosts, which are network namespaces of this machine.

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use bonfire_core::Error;

use crate::case::{Case, Child, HEARTBEAT_TIMEOUT, LONG_HEARTBEAT_TIMEOUT, SOON};
use crate::machine::Network;
use crate::orders::{GroupTransport, Orders};

pub const TRANSPORTS: &[GroupTransport] = &[GroupTransport::Tcp, GroupTransport::Mixed];

/// A group over several hosts: one rank on each of three hosts, or two ranks on each of two.
pub struct Group {
    pub network: Network,
    pub hosts: usize,
    pub children: Vec<Child>,
    /// The stream ends when this file exists.
    pub until: PathBuf,
    _folder: tempfile::TempDir,
}

impl Group {
    /// Prepares the network by `prepare` and starts the ranks. Returns `None` where this machine does not allow it.
    fn start(
        case: &mut Case,
        heartbeat_timeout: Duration,
        prepare: impl Fn(&Network, usize) -> Result<(), String>,
    ) -> Option<Group> {
        let (hosts, n) = if case.transport == GroupTransport::Mixed { (2, 4) } else { (3, 3) };
        Group::start_with(case, (hosts, n), prepare, |orders| Orders { heartbeat_timeout, ..orders })
    }

    /// As [`start`](Group::start), with `n` ranks on `hosts` hosts in turn and with orders that `settle` completes.
    pub fn start_with(
        case: &mut Case,
        (hosts, n): (usize, usize),
        prepare: impl Fn(&Network, usize) -> Result<(), String>,
        settle: impl Fn(Orders) -> Orders,
    ) -> Option<Group> {
        let made = Network::new(hosts).and_then(|network| {
            (0..hosts).try_for_each(|host| prepare(&network, host))?;
            Ok(network)
        });
        let network = match made {
            Ok(network) => network,
            Err(why) => {
                case.skipped = Some(why);
                return None;
            }
        };
        let folder = tempfile::tempdir().expect("a folder for a file");
        let until = folder.path().join("over");
        let address = format!("{}:29400", Network::address(0));
        let orders = Orders { address, secret: true, until: Some(until.clone()), continues: true, ..case.orders(n) };
        let orders = settle(orders);
        let child = |rank: usize| {
            let host = Some(Network::address(rank % hosts));
            case.child(&network.on(rank % hosts), &Orders { rank, host, ..orders.clone() })
        };
        let children = (0..n).map(child).collect();
        Some(Group { network, hosts, children, until, _folder: folder })
    }

    /// Calls `act` on the network once all ranks have joined, lets the stream run for `long`, and ends it.
    fn during(mut self, case: &mut Case, long: Duration, act: impl FnOnce(&Network)) {
        if case.going(&mut self.children) {
            case.faults = 1;
            act(&self.network);
            thread::sleep(long);
        }
        std::fs::write(&self.until, "").expect("a file");
        case.end(self.children, &[], LONG_HEARTBEAT_TIMEOUT + SOON, true, &|_, error| error.is_none());
    }
}

/// Drops one packet in twenty, from the first one on.
pub fn drops(case: &mut Case) {
    let Some(group) = Group::start(case, LONG_HEARTBEAT_TIMEOUT, |network, host| network.drop_packets(host, 20)) else {
        return;
    };
    case.what = format!("5 % of the packets on {} hosts", group.hosts);
    group.during(case, Duration::from_secs(2), |_| {});
}

/// Reduces the rate of the links while the stream runs.
pub fn narrows(case: &mut Case) {
    let Some(group) = Group::start(case, LONG_HEARTBEAT_TIMEOUT, |network, host| network.throttle(host, "1gbit"))
    else {
        return;
    };
    let (hosts, rate) = (group.hosts, format!("{}mbit", 10 + case.below(90)));
    case.what = format!("to {rate} on {hosts} hosts");
    group.during(case, Duration::from_secs(2), |network| {
        (0..hosts).for_each(|host| network.throttle(host, &rate).expect("it succeeded before"));
    });
}

/// Takes a link down for less than the heartbeat timeout.
pub fn link_flaps(case: &mut Case) {
    let Some(group) = Group::start(case, LONG_HEARTBEAT_TIMEOUT, |_, _| Ok(())) else { return };
    let (host, long) = (case.below(group.hosts), Duration::from_millis(300 + case.below(1700) as u64));
    case.what = format!("that of host {host} of {}, for {long:?}", group.hosts);
    group.during(case, Duration::from_millis(500), |network| {
        network.set_link(host, "down").expect("the test's own link");
        thread::sleep(long);
        network.set_link(host, "up").expect("the test's own link");
    });
}

/// Takes a link down for longer than the heartbeat timeout, and maybe up again. Either side loses the other, and at
/// most one goes on.
pub fn partition(case: &mut Case) {
    let Some(mut group) = Group::start(case, HEARTBEAT_TIMEOUT, |_, _| Ok(())) else { return };
    let (host, hosts, heals) = (case.below(group.hosts), group.hosts, case.below(2) == 0);
    case.what = format!("of host {host} from {}{}", hosts - 1, if heals { ", which heals" } else { "" });
    if case.going(&mut group.children) {
        thread::sleep(Duration::from_micros(case.below(50_000) as u64));
        case.faults = 1;
        group.network.set_link(host, "down").expect("the test's own link");
        thread::sleep(HEARTBEAT_TIMEOUT + Duration::from_secs(2));
        if heals {
            group.network.set_link(host, "up").expect("the test's own link");
            thread::sleep(Duration::from_millis(case.below(3000) as u64));
        }
    }
    std::fs::write(&group.until, "").expect("a file");
    let away = |rank: usize| rank % hosts == host;
    let reports = case.end(
        group.children,
        &[],
        HEARTBEAT_TIMEOUT + SOON,
        false,
        &|rank, error| matches!(error, Some(Error::PeerLost { peer, .. }) if away(*peer) != away(rank)),
    );
    case.went_on_as_one(&reports);
}
