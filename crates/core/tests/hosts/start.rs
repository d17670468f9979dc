//! How ranks on two hosts find each other: every way to name rank 0's host, with everything that may be in the way.
//!
//! Ranks 0 and 2 are on one host, rank 1 on another. They meet, or each of them says in time what it has tried.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::thread;
use std::time::Duration;

use bonfire_core::{Builder, Error, ReduceOp};
use bonfire_testing::process::{Process, is_child, report, send_line};
use bonfire_testing::{DEADLINE, in_parallel};

use super::network::Network;

const SERVES: &str = "BONFIRE_TEST_SERVES";
const NAME: &str = "start::ranks_on_two_hosts_meet_or_say_why_not";

/// Seconds that ranks have which do not meet.
const SOON: u32 = 2;

/// The delay of a late rank: an injected fault, on whose length nothing depends.
const LATE: Duration = Duration::from_millis(300);

/// Cases at the same time: they mostly wait.
const WIDTH: usize = 6;

/// How the ranks name rank 0's host: as a numeric address, or by a name with these addresses on rank 0's host, and on
/// the other one.
struct Naming {
    what: &'static str,
    numeric: Option<&'static str>,
    here: &'static [&'static str],
    there: &'static [&'static str],
}

const fn numeric(what: &'static str, address: &'static str) -> Naming {
    Naming { what, numeric: Some(address), here: &[], there: &[] }
}

const fn name(what: &'static str, here: &'static [&'static str], there: &'static [&'static str]) -> Naming {
    Naming { what, numeric: None, here, there }
}

/// No host has the addresses that end with 99.
const NAMINGS: [Naming; 10] = [
    numeric("an IPv4 address", "10.78.1.1"),
    numeric("an IPv6 address", "[fd78:1::1]"),
    name("one address", &["10.78.1.1"], &["10.78.1.1"]),
    name("both families", &["fd78:1::1", "10.78.1.1"], &["fd78:1::1", "10.78.1.1"]),
    name("two links", &["10.78.1.1", "10.78.2.1"], &["10.78.1.1", "10.78.2.1"]),
    name("the second link only, from the other host", &["10.78.1.1", "10.78.2.1"], &["10.78.2.1"]),
    name("IPv6 only from the other host", &["10.78.1.1", "fd78:2::1"], &["fd78:2::1"]),
    name("a silent address first", &["10.78.1.1"], &["10.78.1.99", "fd78:1::99", "10.78.1.1"]),
    name("an address at which rank 0 does not listen", &["10.78.1.1"], &["fd78:1::1", "10.78.2.1", "10.78.1.1"]),
    name("loopback on its own host", &["127.0.1.1"], &["10.78.2.1"]),
];

/// What is in the way.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Obstacle {
    Nothing,
    /// This rank starts later.
    Late(usize),
    /// A web server at the port, which ends.
    Server,
    /// Another job at the port, which ends.
    Job,
    /// A web server at the port on the first own address of a name only, and it stays.
    ServerAtOne,
}

const OBSTACLES: [Obstacle; 5] =
    [Obstacle::Nothing, Obstacle::Late(0), Obstacle::Late(1), Obstacle::Server, Obstacle::Job];

/// What two ranks are given that do not meet, and what their errors say. The address is that of both ranks, `PORT` the
/// port of the case.
struct Failing {
    what: &'static str,
    addresses: [&'static str; 2],
    seeds: [u8; 2],
    /// Whether rank 0 is started at all.
    zero: bool,
    server: bool,
    says: [&'static [&'static str]; 2],
}

const SILENT: Failing =
    Failing { what: "", addresses: ["10.78.1.1:PORT"; 2], seeds: [1; 2], zero: true, server: false, says: [&[], &[]] };

const FAILING: [Failing; 8] = [
    Failing {
        what: "no rank 0, by a name with several addresses",
        addresses: ["name4:PORT"; 2],
        zero: false,
        says: [&[], &["nobody answers at name4:PORT", "10.78.1.1:PORT (", "10.78.2.1:PORT (", "BONFIRE_IFACE"]],
        ..SILENT
    },
    Failing {
        what: "no rank 0, at an address that no host has",
        addresses: ["10.78.1.99:PORT"; 2],
        zero: false,
        says: [&[], &["nobody answers at 10.78.1.99:PORT", "BONFIRE_ADDRESS", "BONFIRE_IFACE"]],
        ..SILENT
    },
    Failing {
        what: "another port",
        addresses: ["10.78.1.1:PORT", "10.78.1.1:9"],
        says: [
            &["rank 1 did not come; rank 0 listens at 10.78.1.1:PORT"],
            &["nobody answers at 10.78.1.1:9", "Connection refused"],
        ],
        ..SILENT
    },
    Failing {
        what: "another address of rank 0's host",
        addresses: ["10.78.1.1:PORT", "10.78.2.1:PORT"],
        says: [
            &["rank 1 did not come; rank 0 listens at 10.78.1.1:PORT"],
            &["nobody answers at 10.78.2.1:PORT", "Connection refused", "BONFIRE_IFACE on rank 0"],
        ],
        ..SILENT
    },
    Failing {
        what: "another secret",
        seeds: [1, 2],
        says: [
            &["rank 1 did not come", "refused connections from 10.78.1.2 (", ": it has another secret"],
            &["tried 10.78.1.1:PORT (", ": it has another secret"],
        ],
        ..SILENT
    },
    Failing {
        what: "a server that stays",
        server: true,
        says: [
            &["tried 10.78.1.1:PORT (", ": Address already in use", "end the job that still listens there"],
            &["tried 10.78.1.1:PORT (", ": it does not speak Bonfire's protocol"],
        ],
        ..SILENT
    },
    Failing {
        what: "a name that the other host does not know",
        addresses: ["10.78.1.1:PORT", "no-name.invalid:PORT"],
        says: [&["rank 1 did not come; rank 0 listens at 10.78.1.1:PORT"], &["no-name.invalid", "does not resolve"]],
        ..SILENT
    },
    Failing {
        what: "a name of another host",
        addresses: ["name7:PORT", "10.78.1.99:PORT"],
        says: [&["rank 1 did not come; rank 0 listens at 10.78.1.1:PORT"], &["nobody answers at 10.78.1.99:PORT"]],
        ..SILENT
    },
];

/// A rank on a host.
fn rank(network: &Network, (rank, n): (usize, usize), address: &str, seed: u8, seconds: u32) -> Process {
    let variables = [
        ("BONFIRE_RANK", rank.to_string()),
        ("BONFIRE_WORLD_SIZE", n.to_string()),
        ("BONFIRE_ADDRESS", address.to_owned()),
        ("BONFIRE_SECRET", char::from(b'a' + seed).to_string().repeat(32)),
        ("BONFIRE_RENDEZVOUS_TIMEOUT", seconds.to_string()),
        ("BONFIRE_DEADLINE", "60".to_owned()),
    ];
    Process::start_by(&network.on(rank % 2), NAME, &variables)
}

/// A web server at an address of rank 0's host.
fn server(network: &Network, address: String) -> Process {
    let server = Process::start_by(&network.on(0), NAME, &[(SERVES, address)]);
    assert_eq!(server.read_line(), "listening");
    server
}

/// What a rank does: it meets the others, over connections of each kind, and waits until its job is over.
fn meet() -> Result<String, Error> {
    let group = Builder::from_env()?.connect()?;
    let sum = |group: &bonfire_core::Group| {
        let mut data = vec![1u64 << group.rank(); 50_000];
        group.all_reduce(&mut data, ReduceOp::Sum).map(|()| data[49_999])
    };
    let all = sum(&group)?;
    // For which each rank listens anew.
    let some = sum(&group.subgroup(&(0..group.world_size()).collect::<Vec<_>>())?)?;
    Ok(format!("{all} {some}"))
}

/// Serves until it is killed.
fn serve(address: &str) {
    let listener = TcpListener::bind(address.parse::<SocketAddr>().expect("an address")).expect("a free address");
    send_line("listening");
    for stream in listener.incoming() {
        let mut stream = stream.expect("a connection");
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
        let _ = stream.read_to_end(&mut Vec::new());
        send_line("served");
    }
}

fn meets(network: &Network, (number, naming): (usize, &Naming), obstacle: Obstacle, port: usize) {
    let address = match naming.numeric {
        Some(address) => format!("{address}:{port}"),
        None => format!("name{number}:{port}"),
    };
    // The first on rank 0's host.
    let own =
        naming.here.first().map(|ip| SocketAddr::new(ip.parse().expect("an IP address"), port as u16).to_string());
    let server = match obstacle {
        // Rank 1 may reach its host at any address.
        Obstacle::Server => Some(server(network, format!("[::]:{port}"))),
        Obstacle::ServerAtOne => own.map(|own| server(network, own)),
        _ => None,
    };
    // The ranks of another job, all of them on the same host.
    let job = (obstacle == Obstacle::Job).then(|| {
        let ranks = [0, 2].map(|r| rank(network, (r, 3), &address, 2, 60));
        thread::sleep(LATE);
        ranks
    });
    let late = |r| obstacle == Obstacle::Late(r);
    let mut ranks: Vec<Option<Process>> =
        (0..3).map(|r| (!late(r)).then(|| rank(network, (r, 3), &address, 1, 60))).collect();
    if let Some(server) = server.as_ref().filter(|_| obstacle == Obstacle::Server) {
        (0..6).for_each(|_| assert_eq!(server.read_line(), "served"));
    } else if matches!(obstacle, Obstacle::Late(_) | Obstacle::Job) {
        thread::sleep(LATE);
    }
    drop(job);
    let server = server.filter(|_| obstacle == Obstacle::ServerAtOne);
    for (r, late) in ranks.iter_mut().enumerate() {
        late.get_or_insert_with(|| rank(network, (r, 3), &address, 1, 60));
    }
    for (r, process) in ranks.iter().flatten().enumerate() {
        let outcome = process.outcome();
        assert_eq!(outcome, Ok("7 7".into()), "{}, {obstacle:?}: rank {r} at {address}", naming.what);
    }
    drop(server);
}

fn says_why(network: &Network, case: &Failing, port: usize) {
    let at = |text: &str| text.replace("PORT", &port.to_string());
    let _server = case.server.then(|| server(network, at(case.addresses[0])));
    let started = |r: usize| {
        let started = r == 1 || case.zero;
        started.then(|| rank(network, (r, 2), &at(case.addresses[r]), case.seeds[r], SOON))
    };
    let ranks = [0, 1].map(started);
    for (process, says) in ranks.iter().zip(case.says) {
        let Some(process) = process else { continue };
        let outcome = process.outcome();
        let Err(Error::Rendezvous { reason, elapsed, .. }) = outcome else { panic!("{}: {outcome:?}", case.what) };
        let limit = Duration::from_secs(SOON.into());
        assert!(elapsed >= limit && elapsed < DEADLINE, "{}, after {elapsed:?}: {reason}", case.what);
        for words in says {
            assert!(reason.contains(&at(words)), "{}: {words:?} is not in: {reason}", case.what);
        }
    }
}

/// A case by number: whether it meets, and its parts.
enum Case {
    Meets(usize, Obstacle),
    Fails(&'static Failing),
}

#[test]
#[ignore = "needs root, iproute2 and network namespaces"]
fn ranks_on_two_hosts_meet_or_say_why_not() {
    if is_child() {
        return match std::env::var(SERVES) {
            Ok(address) => serve(&address),
            Err(_) => report(&meet()),
        };
    }
    let owned = |addresses: &[&str]| addresses.iter().map(|address| (*address).to_owned()).collect::<Vec<_>>();
    let names: Vec<_> = NAMINGS
        .iter()
        .enumerate()
        .map(|(number, naming)| (format!("name{number}"), [owned(naming.here), owned(naming.there)]))
        .collect();
    let network = Network::new(&names);
    let all = (0..NAMINGS.len()).flat_map(|number| OBSTACLES.map(|obstacle| Case::Meets(number, obstacle)));
    // Names with an address left for rank 0 that the other host knows, too.
    let some = [3, 4, 5, 6].map(|number| Case::Meets(number, Obstacle::ServerAtOne));
    let cases: Vec<(usize, Case)> = all.chain(some).chain(FAILING.iter().map(Case::Fails)).enumerate().collect();
    in_parallel(&cases, WIDTH, |(number, case)| match case {
        Case::Meets(naming, obstacle) => meets(&network, (*naming, &NAMINGS[*naming]), *obstacle, 20_000 + number),
        Case::Fails(case) => says_why(&network, case, 20_000 + number),
    });
    println!("{} cases", cases.len());
}
