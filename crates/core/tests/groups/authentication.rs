//! Authentication: only ranks with the secret are admitted. In every test the job beside it completes.

#[cfg(target_os = "linux")]
mod floods;
#[cfg(target_os = "linux")]
mod strangers;

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use bonfire_core::{Builder, Error, Group, ReduceOp, Secret, TransportKind};
use bonfire_testing::relay::{Recording, dial, relay};
use bonfire_testing::{free_address, reason, wire};

/// The rendezvous timeout of ranks that cannot connect.
const SOON: Duration = Duration::from_secs(1);

/// An address that no machine has (RFC 5737).
const ELSEWHERE: &str = "192.0.2.1:29500";

fn secret(seed: u8) -> Secret {
    Secret::new([seed; 32]).expect("long enough")
}

/// A rank with the secret that all tests use.
fn rank(rank: usize, world_size: usize, address: &str) -> Builder {
    bare(rank, world_size, address).secret(secret(1))
}

fn bare(rank: usize, world_size: usize, address: &str) -> Builder {
    let builder = Group::builder().rank(rank).world_size(world_size).address(address).transport(TransportKind::Tcp);
    builder.rendezvous_timeout(bonfire_testing::DEADLINE).deadline(bonfire_testing::DEADLINE)
}

type Connecting = thread::JoinHandle<Result<Group, Error>>;

fn connecting(builder: Builder) -> Connecting {
    thread::spawn(move || builder.connect())
}

/// Checks that the ranks connect and compute the right results.
fn assert_all_connect(ranks: Vec<Connecting>) {
    bonfire_testing::assert_connected(ranks.into_iter().map(|rank| rank.join().unwrap()).collect());
}

/// Reads all bytes until the other end closes.
fn rest(mut stream: &TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Err(e) if e.kind() != ErrorKind::ConnectionReset => panic!("{e}"),
        _ => bytes,
    }
}

/// Lets `answer` play rank 0 on each connection of a rank 1 with the secret, until the rank's time is up. Returns the
/// rank's error.
fn met_by(mut answer: impl FnMut(TcpStream)) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let one = thread::spawn({
        let (builder, address) = (rank(1, 2, &address).rendezvous_timeout(SOON), address.clone());
        move || {
            let result = builder.connect();
            // The listener waits for a connection, of which this is the last.
            drop(dial(&address));
            result
        }
    });
    loop {
        let (stream, _) = listener.accept().unwrap();
        // A rank speaks first.
        if !stream.peek(&mut [0]).is_ok_and(|count| count > 0) {
            break;
        }
        answer(stream);
    }
    match one.join().unwrap() {
        Err(Error::Rendezvous { reason, elapsed, .. }) => {
            assert!(elapsed >= SOON && reason.contains(&format!("tried {address} (")), "after {elapsed:?}: {reason}");
            reason
        }
        other => panic!("{other:?}"),
    }
}

/// Records the connections of a rank to rank 0, for every purpose: the bytes that it sends and those that it receives.
fn recorded() -> Vec<(Vec<u8>, Vec<u8>)> {
    let address = free_address();
    let (relayed, recordings) = relay(address.clone());
    // Ranks that share a machine reach rank 0 at the address that they dialled, also for data.
    assert_all_connect(vec![connecting(rank(0, 2, &address)), connecting(rank(1, 2, &relayed.to_string()))]);
    let recordings = recordings.lock().unwrap();
    recordings.iter().map(|r| (r.there.lock().unwrap().clone(), r.back.lock().unwrap().clone())).collect()
}

/// Starts rank 0 of three, calls `other` with its address, and then connects the other ranks.
fn beside(other: impl FnOnce(&str)) {
    let address = free_address();
    let zero = connecting(rank(0, 3, &address));
    other(&address);
    assert_all_connect(vec![zero, connecting(rank(1, 3, &address)), connecting(rank(2, 3, &address))]);
}

#[test]
fn ranks_with_the_secret_connect_and_compute() {
    for kind in [TransportKind::Tcp, TransportKind::Auto, TransportKind::Shm] {
        let address = free_address();
        assert_all_connect(
            (0..4).map(|r| connecting(rank(r, 4, &address).transport(kind).tcp_connections(3))).collect(),
        );
    }
    // Threads of one process need no secret.
    let groups = rank(0, 1, "").connect_ranks(2).unwrap();
    bonfire_testing::assert_connected(groups.into_iter().map(Ok).collect());
}

/// Connects two ranks that refuse each other. Returns their errors, which come when the time is up and not before.
fn refused(zero: Builder, one: Builder) -> [String; 2] {
    let ranks = [zero, one].map(|builder| connecting(builder.rendezvous_timeout(SOON)));
    ranks.map(|rank| match rank.join().unwrap() {
        Err(Error::Rendezvous { reason, elapsed, .. }) => {
            assert!(elapsed >= SOON, "after {elapsed:?}: {reason}");
            reason
        }
        other => panic!("{other:?}"),
    })
}

/// Checks that the errors of two ranks say what each has tried, and what answered.
fn assert_both_say(address: &str, [zero, one]: [String; 2], [zero_says, one_says]: [&str; 2]) {
    let listens = format!("rank 1 did not come; rank 0 listens at {address} (refused connections from 127.0.0.1 (");
    assert!(zero.contains(&listens) && zero.contains(&format!(": {zero_says}")), "{zero}");
    let tried = format!("rank 0 cannot be reached at {address}: tried {address} (");
    assert!(one.contains(&tried) && one.contains(&format!(": {one_says}")), "{one}");
    assert!([zero, one].iter().all(|text| text.contains("BONFIRE_SECRET_FILE")), "the remedy");
}

#[test]
fn a_different_secret_is_reported_by_both_sides() {
    beside(|address| {
        for r in [1, 2] {
            let text = reason(bare(r, 3, address).secret(secret(2)).rendezvous_timeout(SOON).connect());
            assert!(text.contains("another secret") && text.contains("BONFIRE_SECRET_FILE"), "{text}");
        }
    });
    let address = free_address();
    let both = refused(rank(0, 2, &address), bare(1, 2, &address).secret(secret(2)));
    assert_both_say(&address, both, ["it has another secret", "it has another secret"]);
}

#[test]
fn a_missing_secret_is_reported_by_both_sides() {
    beside(|address| {
        let text = reason(bare(1, 3, address).rendezvous_timeout(SOON).connect());
        assert!(text.contains("it has a secret, and this rank none") && text.contains("BONFIRE_SECRET_FILE"), "{text}");
    });
    let (theirs, ours) = ("it has a secret, and this rank none", "it has no secret, and this rank has one");
    let address = free_address();
    let both = refused(bare(0, 2, &address), rank(1, 2, &address));
    assert_both_say(&address, both, [theirs, ours]);
    let address = free_address();
    let both = refused(rank(0, 2, &address), bare(1, 2, &address));
    assert_both_say(&address, both, [ours, theirs]);
}

#[test]
fn without_a_secret_only_loopback_is_allowed() {
    let refused = |result: Result<Group, Error>| match result {
        Err(Error::Config(text)) => {
            assert!(text.contains("BONFIRE_SECRET_FILE") && text.contains("Builder::secret"), "{text}");
            text
        }
        other => panic!("{other:?}"),
    };
    // Rank 0 would listen, and the others would dial.
    for (r, address) in [(0, ELSEWHERE), (1, ELSEWHERE), (0, "0.0.0.0:29500"), (0, "[::]:29500"), (1, "[fe80::1]:1")] {
        let text = refused(bare(r, 2, address).connect());
        assert!(text.contains("is not loopback"), "{text}");
    }
    // Another rank would listen.
    let address = free_address();
    let zero = connecting(bare(0, 2, &address).rendezvous_timeout(SOON));
    for host in ["192.0.2.1", "0.0.0.0"] {
        refused(bare(1, 2, &address).host(host).connect());
    }
    reason(zero.join().unwrap());
    assert_all_connect(vec![{
        let address = free_address();
        let ranks = vec![connecting(bare(0, 2, &address)), connecting(bare(1, 2, &address))];
        assert_all_connect(ranks);
        connecting(bare(0, 1, ""))
    }]);
}

#[test]
fn every_address_may_be_used_with_a_secret() {
    // 0.0.0.0 is reached by loopback too.
    let port = free_address().rsplit_once(':').unwrap().1.to_owned();
    let everywhere = rank(0, 3, &format!("0.0.0.0:{port}"));
    let others = (1..3).map(|r| connecting(rank(r, 3, &format!("127.0.0.1:{port}")).host("0.0.0.0")));
    assert_all_connect([connecting(everywhere)].into_iter().chain(others).collect());
}

#[test]
fn different_protocol_versions_are_reported_on_both_sides() {
    for version in [1, wire::VERSION - 1, wire::VERSION + 1, u16::MAX] {
        let address = free_address();
        let zero = connecting(rank(0, 2, &address).rendezvous_timeout(SOON));
        let mut stream = dial(&address);
        // In other versions only the first eight bytes have a known meaning.
        stream.write_all(&wire::prologue(version, true, wire::RENDEZVOUS, [1, 0, 2], 0)[..8]).unwrap();
        let answer = rest(&stream);
        assert_eq!((&answer[..4], &answer[4..6]), (&b"BNFA"[..], &wire::VERSION.to_le_bytes()[..]));
        let text = reason(zero.join().unwrap());
        let both =
            format!("it speaks version {version} of Bonfire's protocol, and this rank version {}", wire::VERSION);
        assert!(text.contains(&both) && text.contains("rank 1 did not come"), "{text}");

        let mut answer = b"BNFA".to_vec();
        answer.extend(version.to_le_bytes());
        answer.extend([5, 0]);
        let text = met_by(|mut stream| drop(stream.write_all(&answer)));
        assert!(text.contains(&both), "{text}");
    }
    beside(|address| {
        dial(address).write_all(&wire::prologue(wire::VERSION + 1, true, wire::RENDEZVOUS, [1, 0, 3], 0)).unwrap();
    });
}

#[test]
fn another_byte_order_is_reported_on_both_sides() {
    let address = free_address();
    let zero = connecting(rank(0, 2, &address).rendezvous_timeout(SOON));
    let mut stream = dial(&address);
    let mut prologue = wire::prologue(wire::VERSION, true, wire::RENDEZVOUS, [1, 0, 2], 0);
    prologue[wire::BYTE_ORDER] ^= 3;
    stream.write_all(&prologue).unwrap();
    // The number of this refusal: the other rank gives the same reason.
    assert_eq!(rest(&stream), [&b"BNFA"[..], &wire::VERSION.to_le_bytes()[..], &[5, 0]].concat());
    let text = reason(zero.join().unwrap());
    assert!(text.contains("its processor has another byte order than this rank's"), "{text}");
    assert!(text.contains("rank 1 did not come"), "{text}");
}

#[test]
fn a_replayed_rank_gets_no_information() {
    let recordings = recorded();
    // At least one connection of the rendezvous and one for data.
    assert!(recordings.len() >= 2, "{}", recordings.len());
    for purpose in [wire::RENDEZVOUS, wire::DATA] {
        assert!(recordings.iter().any(|(there, _)| there[7] == purpose), "no recording of {purpose}");
    }
    beside(|address| {
        for (there, back) in &recordings {
            let mut stream = dial(address);
            // All at once: the listener reads what it needs.
            let _ = stream.write_all(there);
            let answer = rest(&stream);
            if there[7] == wire::RENDEZVOUS {
                // It answers with numbers of its own, and then sends nothing more: no table of addresses.
                assert_eq!((answer.len(), &answer[..8]), (64, &back[..8]));
                assert_ne!(answer[8..], back[8..64]);
            } else {
                assert_eq!(answer.len(), 8, "a refusal");
            }
        }
    });
}

#[test]
fn a_replayed_data_connection_is_not_accepted_while_its_group_lives() {
    let address = free_address();
    let (relayed, recordings) = relay(address.clone());
    let ranks = [rank(0, 2, &address), rank(1, 2, &relayed.to_string())].map(connecting);
    let groups = ranks.map(|rank| rank.join().unwrap().unwrap());
    let operate = |groups: &[Group; 2]| {
        thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let mut data = vec![group.rank() as i32 + 1; 300_000];
                    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    assert_eq!(data, vec![3; 300_000]);
                });
            }
        });
    };
    operate(&groups);
    let recordings: Vec<Recording> = recordings.lock().unwrap().clone();
    let data = recordings.iter().map(|r| r.there.lock().unwrap().clone()).find(|there| there[7] == wire::DATA);
    let data = data.expect("a data connection went through the relay");
    let streams: Vec<TcpStream> = (0..3)
        .map(|_| {
            let mut stream = dial(&address);
            let _ = stream.write_all(&data);
            // The answer, without the byte that accepts a connection.
            assert_eq!(rest(&stream).len(), 64);
            stream
        })
        .collect();
    operate(&groups);
    drop(streams);
}

#[test]
fn a_replayed_listener_is_not_believed() {
    let recordings = recorded();
    let (_, back) = recordings.iter().find(|(there, _)| there[7] == wire::RENDEZVOUS).unwrap();
    let text = met_by(|mut stream| {
        let _ = stream.write_all(back);
        // The prologue, the first handshake message, and nothing after them.
        assert_eq!(rest(&stream).len(), 80);
    });
    assert!(text.contains("another secret"), "{text}");
}

#[test]
fn a_rank_does_not_believe_its_own_reflected_messages() {
    let mut bytes = [0; 80];
    let text = met_by(|mut stream| {
        stream.read_exact(&mut bytes).unwrap();
        let _ = stream.write_all(&bytes);
    });
    assert!(text.contains("does not speak Bonfire's protocol"), "{text}");

    // Its own message is no proof, even behind a valid header.
    let text = met_by(|mut stream| {
        stream.read_exact(&mut bytes).unwrap();
        let head = [&b"BNFA"[..], &bytes[4..6], &[0, 0]].concat();
        let _ = stream.write_all(&[&head, &bytes[32..], &[0; 8]].concat());
    });
    assert!(text.contains("another secret"), "{text}");

    // Rank 0's own message is no proof to rank 0.
    beside(|address| {
        let (there, _) = recorded().swap_remove(0);
        let mut stream = dial(address);
        stream.write_all(&there[..80]).unwrap();
        let mut answer = [0; 64];
        stream.read_exact(&mut answer).unwrap();
        stream.write_all(&answer[48..]).unwrap();
        assert!(rest(&stream).is_empty());
    });
}

#[test]
fn garbage_and_stalled_connections_are_rejected() {
    let prologue = wire::prologue(wire::VERSION, true, wire::RENDEZVOUS, [1, 0, 3], 0);
    let mut open_streams = Vec::new();
    beside(|address| {
        let lengths = [&u32::MAX.to_le_bytes()[..], &[7; 100_000]].concat();
        let garbled = [&prologue[..], &[9; 48]].concat();
        let misplaced = wire::prologue(wire::VERSION, false, wire::CONTROL, [1, 0, 3], 0);
        for bytes in
            [b"GET / HTTP/1.1\r\n\r\n", &lengths[..], &garbled, &[0xff; 32], &misplaced, &[], &prologue, b"BNFR"]
        {
            let mut stream = dial(address);
            // The connection may have been closed in the middle of the write.
            let _ = stream.write_all(bytes);
            open_streams.push(stream);
        }
    });
}
