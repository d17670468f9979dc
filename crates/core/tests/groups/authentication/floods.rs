//! Floods of connections: they keep no rank out, fill no log, and leave nothing behind.

use std::collections::VecDeque;
use std::io::Write;
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bonfire_testing::process::{Process, is_child, send_line};
use bonfire_testing::relay::dial;
use bonfire_testing::resources::Resources;
use bonfire_testing::{free_address, logged, wire};

use super::{assert_all_connect, beside, connecting, rank, rest};

/// Longer than any deadline in a flood.
const LIMIT: Duration = Duration::from_secs(240);

/// Most warnings: for each end, one of each reason that a connection from this machine can be refused for.
const WARNINGS: usize = 12;

/// More than an allocator keeps, in KiB, and less than the connections of a flood would take.
const SLACK: usize = 16 << 10;

/// Connections that one flood holds open at a time.
const OPEN: usize = 150;

/// Runs a flood in a process of its own, and checks what it leaves behind and what the ranks log.
fn in_a_process(name: &str, flood: fn()) {
    if !is_child() {
        let process = Process::start(&format!("authentication::floods::{name}"), &[]);
        assert_eq!(process.read_line_within(LIMIT).as_deref(), Ok("right"), "{name}");
        return;
    }
    logged::record();
    // Opens what a process opens once and keeps.
    flood();
    logged::clear();
    let before = Resources::now();
    flood();
    let (now, more) = Resources::settle(&before);
    assert!(more.is_empty(), "{more:?}");
    assert!(now.memory < before.memory + SLACK, "{} KiB, {} before", now.memory, before.memory);
    let lines = logged::lines();
    assert!(lines.len() <= WARNINGS, "{lines:#?}");
    send_line("right");
}

#[test]
fn a_flood_of_connections_keeps_no_rank_out() {
    in_a_process("a_flood_of_connections_keeps_no_rank_out", || {
        let prologue = wire::prologue(wire::VERSION, true, wire::RENDEZVOUS, [1, 0, 3], 0);
        let mut open_streams = Vec::new();
        beside(|address| {
            // Several times the capacity of the accept queue. All stay silent, or stop after the prologue.
            for number in 0..400 {
                let mut stream = dial(address);
                if number % 2 == 0 {
                    let _ = stream.write_all(&prologue);
                }
                open_streams.push(stream);
            }
        });
        // Those that waited longest had to be closed.
        open_streams.truncate(100);
        for stream in open_streams {
            rest(&stream);
        }
    });
}

#[test]
fn a_steady_flood_of_connections_keeps_no_rank_out() {
    in_a_process("a_steady_flood_of_connections_keeps_no_rank_out", || {
        let address = free_address();
        let ranks: Vec<_> = (0..4).map(|r| connecting(rank(r, 4, &address))).collect();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| flood(&address, &over));
            }
            assert_all_connect(ranks);
            over.store(true, Ordering::Relaxed);
        });
    });
}

/// Opens connections, and closes the oldest ones, until it is over.
#[expect(clippy::disallowed_methods, reason = "the strangers of this test dial like any program")]
fn flood(address: &str, over: &AtomicBool) {
    let mut open_streams = VecDeque::new();
    while !over.load(Ordering::Relaxed) {
        open_streams.extend(TcpStream::connect(address));
        if open_streams.len() > OPEN {
            open_streams.pop_front();
        }
    }
}
