//! A network that loses all packets above a size. The hosts are network namespaces of this machine with a router in
//! between, which drops packets above its MTU, and does not say so.

use std::fs::File;
use std::thread;

use bonfire_core::{Builder, Error, ReduceOp};
use bonfire_testing::process::{Process, is_child, report, send_line};
use tempfile::NamedTempFile;

use super::network::ip;

const NAME: &str = "large_packets::a_network_that_loses_large_packets_is_named_and_small_packets_pass";

/// Seconds that an operation has: more than this test waits for an error.
const DEADLINE: &str = "1000";
/// For operations on connections that are open already.
const SHORT_DEADLINE: &str = "5";

/// In which direction the router has a smaller MTU than the hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loses {
    Nothing,
    /// To rank 0, at which rank 1 dials.
    ToZero,
    ToOne,
    Both,
}

/// Two hosts and a router. Host `h` (0 or 1) has the address `10.79.h.1`. Dropping it deletes them.
struct Routed {
    name: String,
    /// See [`GATE`].
    gate: NamedTempFile,
}

impl Routed {
    fn new(what: &str) -> Routed {
        let gate = NamedTempFile::new().expect("a file");
        gate.as_file().lock().expect("one's own file");
        let routed = Routed { name: format!("bonfire-{what}-{}", std::process::id()), gate };
        let router = routed.namespace("r");
        ip(&format!("netns add {router}"));
        for h in [0, 1] {
            let host = routed.namespace(h);
            ip(&format!("netns add {host}"));
            ip(&format!("-n {host} link set lo up"));
            ip(&format!("link add far netns {host} type veth peer name port{h} netns {router}"));
            ip(&format!("-n {host} addr add 10.79.{h}.1/24 dev far"));
            ip(&format!("-n {router} addr add 10.79.{h}.254/24 dev port{h}"));
            ip(&format!("-n {host} link set far up"));
            ip(&format!("-n {router} link set port{h} up"));
            ip(&format!("-n {host} route add default via 10.79.{h}.254"));
        }
        // Its messages that packets are too large.
        ip(&format!("-n {router} rule add ipproto icmp type blackhole"));
        ip(&format!("netns exec {router} sysctl -q -w net.ipv4.ip_forward=1"));
        routed
    }

    fn namespace(&self, of: impl std::fmt::Display) -> String {
        format!("{}-{of}", self.name)
    }

    /// Has the router drop packets of more than 1,400 bytes in these directions.
    fn lose(&self, loses: Loses) {
        for (h, one) in [(0, Loses::ToZero), (1, Loses::ToOne)] {
            let mtu = if [one, Loses::Both].contains(&loses) { "mtu lock 1400" } else { "" };
            ip(&format!("-n {} route replace 10.79.{h}.0/24 dev port{h} {mtu}", self.namespace("r")));
        }
    }

    /// Sets the MTU of both hosts' interfaces.
    fn set_mtu(&self, mtu: u32) {
        [0, 1].iter().for_each(|h| ip(&format!("-n {} link set far mtu {mtu}", self.namespace(h))));
    }

    fn ranks(&self, port: u16, deadline: &str) -> [Process; 2] {
        [0, 1].map(|rank| {
            let variables = [
                ("BONFIRE_RANK", rank.to_string()),
                ("BONFIRE_WORLD_SIZE", "2".to_owned()),
                ("BONFIRE_ADDRESS", format!("10.79.0.1:{port}")),
                ("BONFIRE_HOST", format!("10.79.{rank}.1")),
                ("BONFIRE_SECRET", "s".repeat(32)),
                ("BONFIRE_DEADLINE", deadline.to_owned()),
                (GATE, self.gate.path().display().to_string()),
            ];
            let on = ["ip", "netns", "exec", &self.namespace(rank)].map(String::from);
            Process::start_by(&on, NAME, &variables)
        })
    }
}

impl Drop for Routed {
    fn drop(&mut self) {
        for name in ["0", "1", "r"] {
            let _ = std::process::Command::new("ip").args(["netns", "del", &self.namespace(name)]).status();
        }
    }
}

/// The variable with a file that is locked until ranks may make their second operation.
const GATE: &str = "BONFIRE_TEST_GATE";

/// What a rank does: an operation for which it connects, and another on the same connections.
fn operate() -> Result<String, Error> {
    let group = Builder::from_env()?.connect()?;
    let sum = || {
        let mut data = vec![1u64 << group.rank(); 500_000];
        group.all_reduce(&mut data, ReduceOp::Sum).map(|()| data[499_999])
    };
    sum()?;
    send_line("connected");
    let gate = std::env::var(GATE).expect("set by the parent");
    File::open(gate).and_then(|gate| gate.lock_shared()).expect("the parent's file");
    sum().map(|sum| sum.to_string())
}

/// Checks that both ranks report that their packets do not arrive, with these words each.
fn fails(ranks: &[Process; 2], what: &str, words: &[&str]) {
    for (rank, process) in ranks.iter().enumerate() {
        let outcome = process.outcome();
        let Err(error) = &outcome else { panic!("{what}, rank {rank}: {outcome:?}") };
        let Error::Stalled { rank: one, peer, .. } = error else { panic!("{what}, rank {rank}: {error}") };
        assert_eq!([*one.min(peer), *one.max(peer)], [0, 1], "{what}, rank {rank}: {error}");
        for words in words {
            assert!(error.to_string().contains(words), "{what}, rank {rank}: {words:?} is not in: {error}");
        }
    }
}

#[test]
#[ignore = "needs root, iproute2 and network namespaces"]
fn a_network_that_loses_large_packets_is_named_and_small_packets_pass() {
    if is_child() {
        return report(&operate());
    }
    // A network each: what is waited for takes 10 s and more.
    thread::scope(|scope| {
        for (loses, deadline) in [
            (Loses::Both, DEADLINE),
            (Loses::ToZero, DEADLINE),
            (Loses::ToOne, DEADLINE),
            // The deadline may come first.
            (Loses::Both, SHORT_DEADLINE),
        ] {
            scope.spawn(move || {
                let what = format!("{loses:?}-{deadline}");
                let routed = Routed::new(&what);
                routed.lose(loses);
                let words = ["small packets pass, and those of 1500 bytes, the MTU of far, are lost", "BONFIRE_IFACE"];
                fails(&routed.ranks(20_000, deadline), &what, &words);
            });
        }
        scope.spawn(small_packets_pass);
    });
}

fn small_packets_pass() {
    let routed = Routed::new("pass");
    let connected = |ranks: &[Process; 2]| ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "connected"));
    let succeed = |port| {
        let ranks = routed.ranks(port, DEADLINE);
        connected(&ranks);
        routed.gate.as_file().unlock().expect("one's own file");
        ranks.iter().for_each(|rank| assert_eq!(rank.outcome(), Ok("3".into())));
        routed.gate.as_file().lock().expect("one's own file");
    };
    // What the error advises.
    routed.lose(Loses::Both);
    routed.set_mtu(1400);
    succeed(20_000);
    routed.set_mtu(1500);
    routed.lose(Loses::Nothing);
    succeed(20_001);
    // The way changes when all are connected.
    let ranks = routed.ranks(20_002, SHORT_DEADLINE);
    connected(&ranks);
    routed.lose(Loses::Both);
    routed.gate.as_file().unlock().expect("one's own file");
    let words =
        &["all ranks have called it, and ", " bytes that this rank has sent were not acknowledged", "dev far mtu"];
    fails(&ranks, "a changed way", words);
}
