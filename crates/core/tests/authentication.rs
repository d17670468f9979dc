//! Who is let in: ranks with the secret, and nobody else. In every test the job beside it completes.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bonfire_core::{Builder, Error, Group, Medium, ReduceOp, Secret};
use bonfire_testing::relay::{Recording, dial, relay};
use bonfire_testing::{free_address, reason, wire};

/// For ranks that will not find each other.
const SOON: Duration = Duration::from_secs(1);

/// An address that is no machine's (RFC 5737).
const ELSEWHERE: &str = "192.0.2.1:29500";

fn secret(seed: u8) -> Secret {
    Secret::new([seed; 32]).expect("long enough")
}

/// A rank with the secret of all tests.
fn rank(rank: usize, world_size: usize, address: &str) -> Builder {
    bare(rank, world_size, address).secret(secret(1))
}

fn bare(rank: usize, world_size: usize, address: &str) -> Builder {
    let builder = Group::builder().rank(rank).world_size(world_size).address(address).transport(Medium::Tcp);
    builder.rendezvous_timeout(bonfire_testing::DEADLINE).deadline(bonfire_testing::DEADLINE)
}

type Connecting = thread::JoinHandle<Result<Group, Error>>;

fn connecting(builder: Builder) -> Connecting {
    thread::spawn(move || builder.connect())
}

/// The ranks find each other, and what they compute then is right.
fn works(ranks: Vec<Connecting>) {
    bonfire_testing::works(ranks.into_iter().map(|rank| rank.join().unwrap()).collect());
}

/// All that comes until the other end closes.
fn rest(mut stream: &TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Err(e) if e.kind() != ErrorKind::ConnectionReset => panic!("{e}"),
        _ => bytes,
    }
}

/// What a recorded rank said to rank 0, for every purpose, and what it heard.
fn recorded() -> Vec<(Vec<u8>, Vec<u8>)> {
    let address = free_address();
    let (relayed, recordings) = relay(address.clone());
    // Threads that share a machine reach rank 0 by the address that they dialled it at, also for data.
    works(vec![connecting(rank(0, 2, &address)), connecting(rank(1, 2, &relayed.to_string()))]);
    let recordings = recordings.lock().unwrap();
    recordings.iter().map(|r| (r.there.lock().unwrap().clone(), r.back.lock().unwrap().clone())).collect()
}

/// Starts rank 0 of three, does something to it, and has the others come.
fn beside(other: impl FnOnce(&str)) {
    let address = free_address();
    let zero = connecting(rank(0, 3, &address));
    other(&address);
    works(vec![zero, connecting(rank(1, 3, &address)), connecting(rank(2, 3, &address))]);
}

#[test]
fn ranks_with_the_secret_find_each_other_and_compute() {
    for medium in [Medium::Tcp, Medium::Auto, Medium::Shm] {
        let address = free_address();
        works((0..4).map(|r| connecting(rank(r, 4, &address).transport(medium).tcp_connections(3))).collect());
    }
    // Threads have none, and need none.
    let groups = rank(0, 1, "").connect_ranks(2).unwrap();
    bonfire_testing::works(groups.into_iter().map(Ok).collect());
}

#[test]
fn another_secret_is_named_to_its_rank_and_by_rank_0() {
    beside(|address| {
        for r in [1, 2] {
            let said = reason(bare(r, 3, address).secret(secret(2)).connect());
            assert!(said.contains("another secret") && said.contains("BONFIRE_SECRET_FILE"), "{said}");
        }
    });
    let address = free_address();
    let zero = connecting(rank(0, 2, &address).rendezvous_timeout(SOON));
    reason(bare(1, 2, &address).secret(secret(2)).connect());
    let said = reason(zero.join().unwrap());
    assert!(said.contains("rank 1 did not come") && said.contains("another secret"), "{said}");
}

#[test]
fn no_secret_on_one_side_is_named_on_both() {
    beside(|address| {
        let said = reason(bare(1, 3, address).connect());
        assert!(said.contains("it has a secret, and this rank none") && said.contains("BONFIRE_SECRET_FILE"), "{said}");
    });
    let address = free_address();
    let zero = connecting(bare(0, 2, &address).rendezvous_timeout(SOON));
    let said = reason(rank(1, 2, &address).connect());
    assert!(said.contains("it has no secret, and this rank has one"), "{said}");
    let said = reason(zero.join().unwrap());
    assert!(said.contains("rank 1 did not come") && said.contains("it has a secret, and this rank none"), "{said}");
}

#[test]
fn without_a_secret_only_loopback_is_used() {
    let refused = |result: Result<Group, Error>| match result {
        Err(Error::Config(text)) => {
            assert!(text.contains("BONFIRE_SECRET_FILE") && text.contains("Builder::secret"), "{text}");
            text
        }
        other => panic!("{other:?}"),
    };
    // Rank 0 would listen, and the others would dial.
    for (r, address) in [(0, ELSEWHERE), (1, ELSEWHERE), (0, "0.0.0.0:29500"), (0, "[::]:29500"), (1, "[fe80::1]:1")] {
        let said = refused(bare(r, 2, address).connect());
        assert!(said.contains("is not loopback"), "{said}");
    }
    // Another rank would listen.
    let address = free_address();
    let zero = connecting(bare(0, 2, &address).rendezvous_timeout(SOON));
    for host in ["192.0.2.1", "0.0.0.0"] {
        refused(bare(1, 2, &address).host(host).connect());
    }
    reason(zero.join().unwrap());
    works(vec![{
        let address = free_address();
        let ranks = vec![connecting(bare(0, 2, &address)), connecting(bare(1, 2, &address))];
        works(ranks);
        connecting(bare(0, 1, ""))
    }]);
}

#[test]
fn every_address_may_be_used_with_a_secret() {
    // 0.0.0.0 is reached by loopback too.
    let port = free_address().rsplit_once(':').unwrap().1.to_owned();
    let everywhere = rank(0, 3, &format!("0.0.0.0:{port}"));
    let others = (1..3).map(|r| connecting(rank(r, 3, &format!("127.0.0.1:{port}")).host("0.0.0.0")));
    works([connecting(everywhere)].into_iter().chain(others).collect());
}

#[test]
fn other_versions_are_named_on_both_sides() {
    for version in [1, wire::VERSION - 1, wire::VERSION + 1, u16::MAX] {
        let address = free_address();
        let zero = connecting(rank(0, 2, &address).rendezvous_timeout(SOON));
        let mut stream = dial(&address);
        // What follows the first eight bytes is nobody's business in another version.
        stream.write_all(&wire::opening(version, true, wire::RENDEZVOUS, [1, 0, 2], 0)[..8]).unwrap();
        let answer = rest(&stream);
        assert_eq!((&answer[..4], &answer[4..6]), (&b"BNFA"[..], &wire::VERSION.to_le_bytes()[..]));
        let said = reason(zero.join().unwrap());
        let both =
            format!("it speaks version {version} of Bonfire's protocol, and this rank version {}", wire::VERSION);
        assert!(said.contains(&both) && said.contains("rank 1 did not come"), "{said}");

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let one = connecting(rank(1, 2, &address));
        let (mut stream, _) = listener.accept().unwrap();
        let mut answer = b"BNFA".to_vec();
        answer.extend(version.to_le_bytes());
        answer.extend([5, 0]);
        stream.write_all(&answer).unwrap();
        let said = reason(one.join().unwrap());
        assert!(said.contains(&both), "{said}");
    }
    beside(|address| {
        dial(address).write_all(&wire::opening(wire::VERSION + 1, true, wire::RENDEZVOUS, [1, 0, 3], 0)).unwrap();
    });
}

#[test]
fn a_recorded_rank_gets_nothing_when_it_is_repeated() {
    let recordings = recorded();
    // The rendezvous, and data.
    assert!(recordings.len() >= 2, "{}", recordings.len());
    for purpose in [wire::RENDEZVOUS, wire::DATA] {
        assert!(recordings.iter().any(|(there, _)| there[7] == purpose), "no recording of {purpose}");
    }
    beside(|address| {
        for (there, back) in &recordings {
            let mut stream = dial(address);
            // All at once: the listener reads what it wants.
            let _ = stream.write_all(there);
            let answer = rest(&stream);
            if there[7] == wire::RENDEZVOUS {
                // It answers, with numbers of its own, and then says no more: no table of addresses.
                assert_eq!((answer.len(), &answer[..8]), (64, &back[..8]));
                assert_ne!(answer[8..], back[8..64]);
            } else {
                assert_eq!(answer.len(), 8, "a refusal");
            }
        }
    });
}

#[test]
fn a_recorded_data_connection_gets_nothing_while_its_group_lives() {
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
            // The answer, and not the byte by which a connection is taken over.
            assert_eq!(rest(&stream).len(), 64);
            stream
        })
        .collect();
    operate(&groups);
    drop(streams);
}

#[test]
fn a_recorded_listener_proves_nothing() {
    let recordings = recorded();
    let (_, back) = recordings.iter().find(|(there, _)| there[7] == wire::RENDEZVOUS).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = connecting(rank(1, 2, &listener.local_addr().unwrap().to_string()));
    let (mut stream, _) = listener.accept().unwrap();
    stream.write_all(back).unwrap();
    let said = reason(one.join().unwrap());
    assert!(said.contains("another secret"), "{said}");
    // The opening, the first message, and nothing after them.
    assert_eq!(rest(&stream).len(), 80);
}

#[test]
fn a_rank_that_hears_itself_does_not_believe_it() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = connecting(rank(1, 2, &listener.local_addr().unwrap().to_string()));
    let (mut stream, _) = listener.accept().unwrap();
    let mut words = [0; 80];
    stream.read_exact(&mut words).unwrap();
    stream.write_all(&words).unwrap();
    let said = reason(one.join().unwrap());
    assert!(said.contains("does not speak Bonfire's protocol"), "{said}");

    // With a head that lets it go on, its own proof is none.
    let one = connecting(rank(1, 2, &listener.local_addr().unwrap().to_string()));
    let (mut stream, _) = listener.accept().unwrap();
    stream.read_exact(&mut words).unwrap();
    let head = [&b"BNFA"[..], &words[4..6], &[0, 0]].concat();
    stream.write_all(&[&head, &words[32..], &[0; 8]].concat()).unwrap();
    let said = reason(one.join().unwrap());
    assert!(said.contains("another secret"), "{said}");

    // What rank 0 says is no proof to rank 0.
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
fn garbage_and_stalled_connections_are_turned_away() {
    let begun = wire::opening(wire::VERSION, true, wire::RENDEZVOUS, [1, 0, 3], 0);
    let mut held = Vec::new();
    beside(|address| {
        let lengths = [&u32::MAX.to_le_bytes()[..], &[7; 100_000]].concat();
        let garbled = [&begun[..], &[9; 48]].concat();
        let misplaced = wire::opening(wire::VERSION, false, wire::CONTROL, [1, 0, 3], 0);
        for words in [b"GET / HTTP/1.1\r\n\r\n", &lengths[..], &garbled, &[0xff; 32], &misplaced, &[], &begun, b"BNFR"]
        {
            let mut stream = dial(address);
            // It may have been turned away in the middle of its words.
            let _ = stream.write_all(words);
            held.push(stream);
        }
    });
}

#[test]
fn floods_keep_no_rank_out() {
    let begun = wire::opening(wire::VERSION, true, wire::RENDEZVOUS, [1, 0, 3], 0);
    let mut held = Vec::new();
    beside(|address| {
        // Several times as many as may wait at once, which all say nothing, or begin and go on no further.
        for number in 0..400 {
            let mut stream = dial(address);
            if number % 2 == 0 {
                let _ = stream.write_all(&begun);
            }
            held.push(stream);
        }
    });
    // Those that waited longest had to go.
    held.truncate(100);
    for stream in held {
        rest(&stream);
    }
}

#[test]
fn a_steady_flood_keeps_no_rank_out() {
    let address = free_address();
    let ranks: Vec<_> = (0..4).map(|r| connecting(rank(r, 4, &address))).collect();
    let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let floods: Vec<_> = (0..2)
        .map(|_| {
            let (address, over) = (address.clone(), over.clone());
            thread::spawn(move || {
                let mut held = std::collections::VecDeque::new();
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    held.extend(TcpStream::connect(&address));
                    if held.len() > 150 {
                        held.pop_front();
                    }
                }
            })
        })
        .collect();
    works(ranks);
    over.store(true, std::sync::atomic::Ordering::Relaxed);
    floods.into_iter().for_each(|flood| flood.join().unwrap());
}
