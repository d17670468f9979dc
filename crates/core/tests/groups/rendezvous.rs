//! The rendezvous, and the errors when it fails.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bonfire_core::{Algorithm, Builder, Error, Group, ReduceOp, Secret, Selection};
use bonfire_testing::relay::{Recording, between, dial, forward};
use bonfire_testing::{assert_connected, free_address, reason, wire};

/// The rendezvous timeout of ranks that cannot connect.
const SOON: Duration = Duration::from_secs(1);

fn rank(rank: usize, world_size: usize, address: &str) -> Builder {
    let builder = Group::builder().rank(rank).world_size(world_size).address(address);
    builder.rendezvous_timeout(bonfire_testing::DEADLINE).deadline(bonfire_testing::DEADLINE)
}

/// Returns the reason of a rendezvous that failed because its time was up: not before `limit`, and far below any other
/// limit.
fn timed_out(result: Result<Group, Error>, limit: Duration) -> String {
    match result {
        Err(Error::Rendezvous { reason, elapsed, .. }) => {
            assert!(
                elapsed >= limit && elapsed < bonfire_testing::DEADLINE,
                "after {elapsed:?} of {limit:?}: {reason}"
            );
            assert!(reason.contains("BONFIRE_RENDEZVOUS_TIMEOUT"), "{reason}");
            reason
        }
        other => panic!("{other:?} is not a failed rendezvous"),
    }
}

/// Connects all ranks at once, each on a thread of its own. Keeps every group until all ranks have a result.
fn connect(builders: Vec<Builder>) -> Vec<Result<Group, Error>> {
    let ranks: Vec<_> = builders.into_iter().map(|builder| thread::spawn(move || builder.connect())).collect();
    ranks.into_iter().map(|rank| rank.join().expect("connecting does not panic")).collect()
}

/// Plays rank 1: completes the handshake and sends its hello message.
fn pretend(address: &str, world_size: u32) -> TcpStream {
    let mut stream = dial(address);
    stream.write_all(&wire::prologue(wire::VERSION, false, wire::RENDEZVOUS, [1, 0, world_size], 0)).unwrap();
    stream.read_exact(&mut [0; wire::ANSWER]).unwrap();
    stream.write_all(&wire::hello()).unwrap();
    stream
}

/// Required for addresses that are not loopback.
fn secret() -> Secret {
    Secret::new([7; 32]).expect("long enough")
}

#[test]
fn a_duplicate_rank_fails_all_ranks_with_the_same_error() {
    let address = free_address();
    for result in connect([0, 1, 1].map(|r| rank(r, 3, &address).rendezvous_timeout(SOON * 10)).into()) {
        let reason = reason(result);
        assert!(reason.contains("two processes were started as rank 1"), "{reason}");
    }
}

#[test]
fn a_second_rank_0_is_rejected() {
    let address = free_address();
    let results = connect([0, 0].map(|r| rank(r, 2, &address).rendezvous_timeout(SOON)).into());
    let reasons: Vec<String> = results.into_iter().map(reason).collect();
    assert!(reasons.iter().any(|reason| reason.contains("choose another port")), "{reasons:?}");
}

#[test]
fn different_world_sizes_fail_all_ranks_with_the_same_error() {
    for (ours, theirs) in [(2, 3), (3, 2), (2, 1000)] {
        let address = free_address();
        let results = connect(vec![
            rank(0, ours, &address).rendezvous_timeout(SOON * 10),
            rank(1, theirs, &address).rendezvous_timeout(SOON * 10),
        ]);
        for result in results {
            let reason = reason(result);
            assert!(reason.contains(&format!("a world size of {theirs}, rank 0 with {ours}")), "{reason}");
        }
    }
}

#[test]
fn different_algorithm_tables_fail_all_ranks_with_the_same_error() {
    for odd in 0..3 {
        let address = free_address();
        let algorithm = |r| if r == odd { Algorithm::Ring } else { Algorithm::Tree };
        let ranks = (0..3).map(|r| rank(r, 3, &address).algorithms(algorithm(r)).rendezvous_timeout(SOON * 10));
        let reasons: Vec<String> = connect(ranks.collect()).into_iter().map(reason).collect();
        let informed = reasons.iter().filter(|reason| {
            reason.contains("'ring:0-'") && reason.contains("'tree:0-'") && reason.contains("BONFIRE_ALGORITHMS")
        });
        // Rank 0 may have ended before the third rank connects.
        assert!(informed.count() >= 2 && reasons[0].contains("rank 0 '"), "{reasons:?}");
    }
    let address = free_address();
    let table: Selection = "ring:0-99;tree:100-".parse().expect("a table");
    assert_connected(connect((0..3).map(|r| rank(r, 3, &address).algorithms(table.clone())).collect()));
}

#[test]
fn every_rank_of_a_larger_group_gets_an_error_if_one_differs() {
    for odd in 1..4 {
        let address = free_address();
        let ranks = (0..4).map(|r| rank(r, if r == odd { 5 } else { 4 }, &address).rendezvous_timeout(SOON));
        let differs = format!("rank {odd} was started with a world size of 5, rank 0 with 4");
        for (r, result) in connect(ranks.collect()).into_iter().enumerate() {
            let reason = reason(result);
            // Rank 0 may have ended before another rank connects.
            let late = r != 0 && r != odd && reason.contains(&format!("nobody answers at {address}"));
            assert!(reason.contains(&differs) || late, "rank {r}, {odd} differs: {reason}");
        }
    }
}

#[test]
fn invalid_settings_are_rejected_at_once() {
    for r in [2, 3, usize::MAX] {
        let result = rank(r, 2, &free_address()).connect();
        assert!(matches!(result, Err(Error::InvalidArgument { .. })), "rank {r} of 2: {result:?}");
    }
    for address in [
        "",
        "localhost",
        "127.0.0.1",
        ":29500",
        "127.0.0.1:",
        "127.0.0.1:0",
        "127.0.0.1:65536",
        "127.0.0.1:port",
        "::1:29500",
        "[::1]",
        "[::1]:0",
        "[::1:29500",
        "::1]:29500",
        "http://127.0.0.1:29500",
        "127.0.0.1:-1",
    ] {
        for r in [0, 1] {
            let result = rank(r, 2, address).connect();
            assert!(matches!(&result, Err(Error::Config(text)) if text.contains(address)), "'{address}': {result:?}");
        }
    }
}

#[test]
fn an_address_that_does_not_resolve_is_an_error_in_time() {
    for address in ["no such host:29500", "nobody.invalid:29500"] {
        for r in [0, 1] {
            let reason = timed_out(rank(r, 2, address).rendezvous_timeout(SOON / 4).connect(), SOON / 4);
            assert!(reason.contains(address) && reason.contains("does not resolve"), "{reason}");
        }
    }
}

#[test]
fn an_address_in_use_is_reported() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let reason = timed_out(rank(0, 2, &address).rendezvous_timeout(SOON).connect(), SOON);
    assert!(reason.contains(&address) && reason.contains("choose another port"), "{reason}");
}

#[test]
fn an_address_of_another_machine_is_reported() {
    // From a block that is reserved for documentation: no machine has it.
    let of = |r| rank(r, 2, "192.0.2.1:29500").secret(secret()).rendezvous_timeout(SOON).connect();
    let zero = reason(of(0));
    assert!(zero.contains("give an address that this machine has"), "{zero}");
    let one = timed_out(of(1), SOON);
    assert!(one.contains("192.0.2.1:29500") && one.contains("BONFIRE_IFACE"), "{one}");
}

#[test]
fn a_host_of_another_machine_is_an_error_on_that_rank() {
    let address = free_address();
    let ranks = [rank(0, 2, &address), rank(1, 2, &address).host("192.0.2.1")];
    let mut results = connect(ranks.map(|builder| builder.secret(secret()).rendezvous_timeout(SOON)).into());
    let own = reason(results.remove(1));
    assert!(own.contains("192.0.2.1") && own.contains("give an address that this machine has"), "{own}");
    let zero = timed_out(results.remove(0), SOON);
    assert!(zero.contains(&format!("rank 1 did not come; rank 0 listens at {address}")), "{zero}");
}

#[test]
fn an_address_without_a_listener_is_an_error_in_time() {
    let address = free_address();
    let reason = timed_out(rank(1, 2, &address).rendezvous_timeout(SOON).connect(), SOON);
    assert!(reason.contains(&format!("nobody answers at {address}: tried {address} (")), "{reason}");
    assert!(reason.contains(": Connection refused"), "{reason}");
}

#[test]
fn missing_ranks_are_named_in_time() {
    let address = free_address();
    // Rank 2 has a longer timeout: rank 0 tells it which ranks are missing.
    let limits = [(0, SOON), (2, bonfire_testing::DEADLINE)];
    let ranks = limits.map(|(r, limit)| rank(r, 4, &address).rendezvous_timeout(limit));
    let mut results = connect(ranks.into());
    let (two, zero) = (timed_out(results.remove(1), Duration::ZERO), timed_out(results.remove(0), SOON));
    assert!(zero.contains("ranks 1, 3 did not come"), "{zero}");
    assert!(two.contains("ranks 1, 3 did not come"), "{two}");
}

/// In restart.rs they go away, or answer something.
#[test]
fn a_listener_that_never_answers_is_an_error_in_time() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // Twice what a handshake may take.
    let limit = Duration::from_secs(10);
    let reason = timed_out(rank(1, 2, &address).rendezvous_timeout(limit).connect(), limit);
    // Whatever waits for more than a rank's first bytes. They have been sent, and not been read.
    let (mut stream, _) = listener.accept().unwrap();
    assert!(stream.read(&mut [0; 32]).unwrap() > 0);
    assert!(reason.contains(&address) && reason.contains("it did not answer within 5s"), "{reason}");
}

#[test]
fn strangers_are_rejected_and_the_ranks_connect() {
    let address = free_address();
    let zero = thread::spawn({
        let builder = rank(0, 3, &address);
        move || builder.connect()
    });
    let mut silent = vec![dial(&address), dial(&address)];
    drop(dial(&address));
    let huge = [&u32::MAX.to_le_bytes()[..], &[7; 1000]].concat();
    let unfinished = [&100u32.to_le_bytes()[..], &[1; 50]].concat();
    let garbage = [&20u32.to_le_bytes()[..], &[0xee; 20]].concat();
    let other_protocol = wire::prologue(wire::VERSION + 1, false, wire::RENDEZVOUS, [1, 0, 3], 0);
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &huge, &unfinished, &garbage, &other_protocol, &[0; 4], &[0]] {
        let mut stream = dial(&address);
        // The connection may have been closed in the middle of the write.
        let _ = stream.write_all(bytes);
        silent.push(stream);
    }
    let mut groups = connect(vec![rank(1, 3, &address), rank(2, 3, &address)]);
    groups.insert(0, zero.join().unwrap());
    // Rank 0 keeps listening, for data connections, and still rejects strangers.
    for bytes in [&huge[..], &garbage, b"hello?"] {
        let _ = dial(&address).write_all(bytes);
    }
    assert_connected(groups);
    drop(silent);
}

#[test]
fn a_rank_that_disconnects_during_the_rendezvous_fails_its_peers() {
    let address = free_address();
    let others = thread::spawn({
        let builders = vec![rank(0, 4, &address), rank(2, 4, &address).rendezvous_timeout(SOON)];
        move || connect(builders)
    });
    drop(pretend(&address, 4));
    let mut results = others.join().unwrap();
    // Rank 2 may connect after the failure: then no rank answers any more, or none sends anything.
    let reasons: Vec<String> = results.drain(..1).map(reason).collect();
    assert!(reasons[0].contains("rank 1 closed its connection"), "{reasons:?}");
    assert!(matches!(results.remove(0), Err(Error::Rendezvous { rank: 2, .. })));
}

#[test]
fn a_rank_that_dies_between_the_stages_is_an_error_in_time() {
    let address = free_address();
    let others = thread::spawn({
        let builders = [0, 2].map(|r| rank(r, 3, &address).rendezvous_timeout(SOON));
        move || connect(builders.into())
    });
    // A rank 1 that announces an address at which it does not listen.
    let stream = pretend(&address, 3);
    let results = others.join().unwrap();
    let Err(Error::Rendezvous { rank: 2, reason, .. }) = &results[1] else {
        panic!("rank 2 cannot have reached rank 1: {:?}", results[1])
    };
    assert!(reason.contains("nobody answers at 127.0.0.1:1"), "{reason}");
    drop(stream);
}

/// Rank 0 gives up on a connection whose hello does not come in time, and so does the relay here, at once.
#[test]
fn a_rank_whose_hello_comes_too_late_registers_again() {
    let address = free_address();
    let first = AtomicBool::new(true);
    let relayed = between(address.clone(), move |mut dialled, mut target| {
        if !first.swap(false, Ordering::SeqCst) {
            return forward(dialled, target, Recording::default());
        }
        let (mut prologue, mut answer) = ([0; 32], [0; wire::ANSWER]);
        dialled.read_exact(&mut prologue).and_then(|()| target.write_all(&prologue)).unwrap();
        target.read_exact(&mut answer).and_then(|()| dialled.write_all(&answer)).unwrap();
    });
    assert_connected(connect(vec![rank(0, 2, &address), rank(1, 2, &relayed.to_string())]));
}

#[test]
fn a_rank_looks_up_its_own_name_before_it_dials_rank_0() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let reason = reason(rank(1, 2, &address).host("nobody.invalid").rendezvous_timeout(SOON).connect());
    assert!(reason.contains("nobody.invalid") && reason.contains("does not resolve"), "{reason}");
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn late_ranks_are_awaited() {
    // The delay is the injected fault. Nothing depends on its length.
    const LATE: Duration = Duration::from_millis(150);
    for last in [0, 1, 2] {
        let address = free_address();
        let ranks: Vec<_> = (0..3)
            .map(|r| {
                let builder = rank(r, 3, &address);
                thread::spawn(move || {
                    if r == last {
                        thread::sleep(LATE);
                    }
                    builder.connect()
                })
            })
            .collect();
        assert_connected(ranks.into_iter().map(|rank| rank.join().unwrap()).collect());
    }
}

#[test]
fn ranks_connect_by_ipv6_and_by_name() {
    let port = |address: &str| address.rsplit_once(':').unwrap().1.to_owned();
    let mut hosts = vec!["localhost"];
    // Not every machine has IPv6.
    if TcpListener::bind("[::1]:0").is_ok() {
        hosts.push("[::1]");
    }
    for host in hosts {
        let address = format!("{host}:{}", port(&free_address()));
        assert_connected(connect((0..3).map(|r| rank(r, 3, &address)).collect()));
        assert_connected(connect(
            (0..3).map(|r| rank(r, 3, &address).host(if r == 2 { host } else { "localhost" })).collect(),
        ));
    }
}

/// Connects one process for each count, with that number of ranks.
fn connect_processes(counts: &[usize]) -> Vec<Result<Vec<Group>, Error>> {
    let address = free_address();
    let processes: Vec<_> = counts
        .iter()
        .enumerate()
        .map(|(process, &count)| {
            let builder = rank(process, counts.len(), &address);
            thread::spawn(move || builder.connect_ranks(count))
        })
        .collect();
    processes.into_iter().map(|process| process.join().unwrap()).collect()
}

#[test]
fn processes_may_have_several_ranks_each() {
    let processes = connect_processes(&[3, 3]).into_iter().map(Result::unwrap);
    let groups: Vec<_> = processes.flatten().collect();
    assert_eq!(groups.iter().map(Group::rank).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert_connected(groups.into_iter().map(Ok).collect());
    assert_connected(rank(0, 1, "").connect_ranks(3).unwrap().into_iter().map(Ok).collect());
}

#[test]
fn different_numbers_of_ranks_per_process_are_reported() {
    for result in connect_processes(&[1, 2]) {
        let reason = reason(result.map(|mut groups| groups.remove(0)));
        assert!(reason.contains("a world size of 4, rank 0 with 2"), "{reason}");
    }
    let error = rank(0, 2, "127.0.0.1:1").connect_ranks(0).unwrap_err().to_string();
    assert!(error.contains("at least one rank"), "{error}");
    let error = rank(0, usize::MAX, "127.0.0.1:1").connect_ranks(2).unwrap_err().to_string();
    assert!(error.contains("cannot be counted"), "{error}");
}

#[test]
fn a_group_of_one_needs_no_address() {
    let group = Group::builder().rank(0).world_size(1).connect().unwrap();
    let mut data = [2.0f32; 3];
    group.all_reduce(&mut data, ReduceOp::Mean).unwrap();
    assert_eq!(data, [2.0; 3]);
}

#[test]
fn an_address_can_be_reused_after_its_group() {
    let address = free_address();
    for _ in 0..3 {
        assert_connected(connect((0..3).map(|r| rank(r, 3, &address)).collect()));
    }
}

#[test]
fn an_infinite_timeout_never_expires() {
    let address = free_address();
    assert_connected(connect((0..2).map(|r| rank(r, 2, &address).rendezvous_timeout(Duration::MAX)).collect()));
}
