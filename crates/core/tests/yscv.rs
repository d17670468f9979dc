//! The wire protocol of yscv's `TcpTransport`: what its documentation says, what Bonfire fixes, and peers that were
//! written from the documentation alone.
#![cfg(unix)]

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bonfire_core::yscv::{TcpTransport, TcpTransportBuilder, loopback_pair};
use bonfire_core::{Call, DType, Error, Operation, ReduceOp};
use bonfire_testing::relay::dial;
use bonfire_testing::{DEADLINE as LONG, free_address};

/// The timeout where a peer sends nothing.
const SOON: Duration = Duration::from_millis(200);

fn builder() -> TcpTransportBuilder {
    TcpTransport::builder().rendezvous_timeout(LONG).deadline(LONG)
}

fn short_builder() -> TcpTransportBuilder {
    TcpTransport::builder().rendezvous_timeout(SOON).deadline(SOON)
}

type Connecting = JoinHandle<Result<TcpTransport, Error>>;

/// Starts a coordinator, which waits for its workers on a thread, and returns it with its address.
fn coordinator(builder: TcpTransportBuilder, world_size: usize) -> (Connecting, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (thread::spawn(move || builder.coordinator_on(listener, world_size)), address)
}

fn worker(address: &str, rank: usize) -> TcpTransport {
    builder().worker(address, rank).unwrap()
}

/// A coordinator and its workers, by rank.
fn star(world_size: usize) -> Vec<TcpTransport> {
    let (connecting, address) = coordinator(builder(), world_size);
    let workers: Vec<_> = (1..world_size).map(|rank| worker(&address, rank)).collect();
    std::iter::once(connecting.join().unwrap().unwrap()).chain(workers).collect()
}

/// A worker that is a raw stream.
fn raw_worker(address: &str, rank: u32) -> TcpStream {
    let mut stream = dial(address);
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.set_write_timeout(Some(LONG)).unwrap();
    stream.write_all(&rank.to_le_bytes()).unwrap();
    stream
}

/// A coordinator with one raw worker.
fn before_raw_worker(builder: TcpTransportBuilder) -> (TcpTransport, TcpStream) {
    let (connecting, address) = coordinator(builder, 2);
    let raw = raw_worker(&address, 1);
    (connecting.join().unwrap().unwrap(), raw)
}

/// A worker of rank 1 with a raw coordinator, which has read the rank.
fn before_raw_coordinator() -> (TcpTransport, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = worker(&listener.local_addr().unwrap().to_string(), 1);
    let mut raw = listener.accept().unwrap().0;
    raw.set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(bytes::<4>(&mut raw), [1, 0, 0, 0]);
    (ours, raw)
}

fn bytes<const N: usize>(stream: &mut TcpStream) -> [u8; N] {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Waits until the other end has closed.
fn expect_close(stream: &mut TcpStream) {
    match stream.read_to_end(&mut Vec::new()) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset),
    }
}

/// Runs `allreduce_sum` on each rank, and returns outcomes and data.
fn all_sum(ranks: Vec<(TcpTransport, Vec<f32>)>) -> Vec<(Result<(), Error>, Vec<f32>)> {
    let sum = |(rank, mut data): (TcpTransport, Vec<f32>)| thread::spawn(move || (rank.allreduce_sum(&mut data), data));
    let threads: Vec<_> = ranks.into_iter().map(sum).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

// What yscv's documentation says.

#[test]
fn the_coordinator_blocks_until_all_workers_have_connected() {
    let (connecting, address) = coordinator(builder(), 3);
    let _first = raw_worker(&address, 1);
    assert!(!connecting.is_finished(), "rank 2 is missing");
    let _second = raw_worker(&address, 2);
    assert_eq!(connecting.join().unwrap().unwrap().world_size(), 3);
}

#[test]
fn a_worker_announces_its_rank_as_a_little_endian_u32_and_then_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = worker(&listener.local_addr().unwrap().to_string(), 0x0102);
    let mut raw = listener.accept().unwrap().0;
    drop(ours);
    let mut received = Vec::new();
    raw.read_to_end(&mut received).unwrap();
    assert_eq!(received, [2, 1, 0, 0]);
}

#[test]
fn a_message_is_a_little_endian_u32_count_and_so_many_little_endian_f32() {
    let values = [1.0, -2.5, f32::from_bits(0x7fa0_1234)];
    let message = [3, 0, 0, 0, 0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0, 0x34, 0x12, 0xa0, 0x7f];
    for (ours, mut raw) in [before_raw_worker(builder()), before_raw_coordinator()] {
        ours.send(0, &values).unwrap();
        assert_eq!(bytes(&mut raw), message);
        raw.write_all(&message).unwrap();
        assert_eq!(bits(&ours.recv(0).unwrap()), bits(&values), "a NaN keeps its bits, too");
        ours.send(0, &[]).unwrap();
        assert_eq!(bytes(&mut raw), [0; 4], "an empty message is its count");
        raw.write_all(&[0; 4]).unwrap();
        assert_eq!(ours.recv(0).unwrap(), [0.0; 0]);
    }
}

#[test]
fn peer_i_of_the_coordinator_is_rank_i_plus_1_in_any_order_of_arrival() {
    let (connecting, address) = coordinator(builder(), 4);
    let workers = [2, 3, 1].map(|rank| (rank, worker(&address, rank)));
    let coordinator = connecting.join().unwrap().unwrap();
    assert_eq!(coordinator.rank(), 0);
    for (rank, worker) in workers {
        assert_eq!(worker.rank(), rank);
        coordinator.send(rank - 1, &[rank as f32]).unwrap();
        assert_eq!(worker.recv(0).unwrap(), [rank as f32], "a worker's peer 0 is the coordinator");
        worker.send(0, &[-(rank as f32)]).unwrap();
        assert_eq!(coordinator.recv(rank - 1).unwrap(), [-(rank as f32)]);
    }
}

#[test]
fn an_invalid_peer_is_rejected_without_harm() {
    let (coordinator, worker) = loopback_pair().unwrap();
    for (ours, other) in [(&coordinator, &worker), (&worker, &coordinator)] {
        for peer in [1, usize::MAX] {
            assert!(matches!(ours.send(peer, &[1.0]), Err(Error::InvalidArgument { .. })));
            assert!(matches!(ours.recv(peer), Err(Error::InvalidArgument { .. })));
        }
        ours.send(0, &[4.0]).unwrap();
        assert_eq!(other.recv(0).unwrap(), [4.0]);
    }
}

#[test]
fn allreduce_sum_sums_in_place_over_all_ranks_many_times_and_at_any_length() {
    for world_size in 1..=5 {
        let threads: Vec<_> = star(world_size)
            .into_iter()
            .map(|rank| {
                thread::spawn(move || {
                    for length in [0, 1, 7, 16_384, 16_385, 1000] {
                        let mut data: Vec<f32> = (0..length).map(|i| (rank.rank() * 1000 + i) as f32).collect();
                        rank.allreduce_sum(&mut data).unwrap();
                        let (n, of_ranks) = (world_size, (0..world_size).sum::<usize>() * 1000);
                        let sums: Vec<f32> = (0..length).map(|i| (of_ranks + n * i) as f32).collect();
                        assert_eq!(data, sums, "{length} values");
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn sums_are_taken_in_the_order_of_ranks_and_are_bit_identical() {
    // In a different order they would be different numbers.
    let inputs = [vec![1e8, 1.0], vec![1.0, 1e8], vec![-1e8, -1e8]];
    let sums = [(1e8f32 + 1.0) - 1e8, (1.0f32 + 1e8) - 1e8];
    for (outcome, data) in all_sum(star(3).into_iter().zip(inputs).collect()) {
        outcome.unwrap();
        assert_eq!(bits(&data), bits(&sums));
    }
}

#[test]
fn a_single_rank_keeps_its_data() {
    let alone = TcpTransport::coordinator("127.0.0.1:0", 1).unwrap();
    let mut data = [1.0, f32::NAN];
    alone.allreduce_sum(&mut data).unwrap();
    assert_eq!(bits(&data), bits(&[1.0, f32::NAN]));
    assert_eq!((alone.rank(), alone.world_size()), (0, 1));
}

#[test]
fn invalid_ranks_and_world_sizes_are_rejected() {
    for world_size in [0, 1 << 17, usize::MAX] {
        let refused = short_builder().coordinator("127.0.0.1:0", world_size);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{world_size}: {refused:?}");
    }
    for (rank, world_size) in [(0, 2), (2, 2), (7, 3), (1, 0), (usize::MAX, usize::MAX)] {
        let refused = short_builder().worker_of("127.0.0.1:9", rank, world_size);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{rank} of {world_size}: {refused:?}");
    }
    assert!(matches!(short_builder().worker("127.0.0.1:9", 0), Err(Error::InvalidArgument { .. })));
}

#[test]
fn a_loopback_pair_is_the_coordinator_and_its_worker() {
    let (coordinator, worker) = loopback_pair().unwrap();
    assert_eq!((coordinator.rank(), coordinator.world_size()), (0, 2));
    assert_eq!((worker.rank(), worker.world_size()), (1, 2));
}

#[test]
fn a_transport_is_send_and_sync() {
    fn check<T: Send + Sync + std::panic::UnwindSafe + std::panic::RefUnwindSafe>() {}
    check::<TcpTransport>();
}

#[test]
fn different_lengths_are_an_error_and_leave_the_data_unchanged() {
    let call = |rank: usize, count| (rank, Call::new(Operation::AllReduce, DType::F32, count).reducing(ReduceOp::Sum));
    let ranks = star(3).into_iter().zip([2, 2, 3].map(|length| vec![1.5; length]));
    let outcomes = all_sum(ranks.collect());
    assert_eq!(outcomes[0].0, Err(Error::Mismatch { sequence: 0, calls: vec![call(0, 2), call(2, 3)] }));
    for (outcome, data) in outcomes {
        assert!(outcome.is_err() && data.iter().all(|value| *value == 1.5), "{outcome:?}: {data:?}");
    }
    // A worker whose coordinator is of another implementation can detect it, too.
    let (ours, mut raw) = before_raw_coordinator();
    raw.write_all(&[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let mut data = [1.5; 2];
    let outcome = ours.allreduce_sum(&mut data);
    assert_eq!(outcome, Err(Error::Mismatch { sequence: 0, calls: vec![call(0, 1), call(1, 2)] }));
    assert_eq!(data, [1.5; 2]);
}

// What Bonfire fixes.

#[test]
fn invalid_and_duplicate_ranks_are_rejected_and_the_rendezvous_continues() {
    let (connecting, address) = coordinator(builder(), 3);
    let first = worker(&address, 1);
    for rank in [0, 3, u32::MAX, 1] {
        expect_close(&mut raw_worker(&address, rank));
    }
    let second = worker(&address, 2);
    let coordinator = connecting.join().unwrap().unwrap();
    for (outcome, data) in all_sum([coordinator, first, second].map(|rank| (rank, vec![1.0])).into()) {
        outcome.unwrap();
        assert_eq!(data, [3.0]);
    }
}

#[test]
fn a_rejected_worker_learns_it_from_its_first_message() {
    let (connecting, address) = coordinator(builder(), 3);
    // Neither of the two can know which one is accepted.
    let twins = [1, 1].map(|rank| worker(&address, rank));
    let twins = twins.map(|twin| thread::spawn(move || twin.recv(0)));
    let _last = worker(&address, 2);
    let coordinator = connecting.join().unwrap().unwrap();
    coordinator.send(0, &[7.0]).unwrap();
    let mut results = twins.map(|twin| twin.join().unwrap());
    results.sort_by_key(Result::is_err);
    assert_eq!(results[0], Ok(vec![7.0]));
    let error = results[1].as_ref().unwrap_err().to_string();
    assert!(error.contains("a rank that another one has"), "{error}");
}

#[test]
fn strangers_neither_end_nor_delay_the_rendezvous() {
    // Waiting for the silent ones would take longer than this timeout.
    let (connecting, address) = coordinator(builder().rendezvous_timeout(Duration::from_secs(4)), 2);
    let connect = || dial(&address);
    let mut silent: Vec<_> = (0..100).map(|_| connect()).collect();
    silent[70].write_all(&[1, 0]).unwrap();
    drop(connect());
    connect().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let ours = worker(&address, 1);
    let coordinator = connecting.join().unwrap().unwrap();
    coordinator.send(0, &[1.0]).unwrap();
    assert_eq!(ours.recv(0).unwrap(), [1.0]);
    silent.iter_mut().for_each(expect_close);
}

#[test]
fn a_worker_that_disconnects_during_the_rendezvous_frees_its_rank() {
    let (connecting, address) = coordinator(builder(), 3);
    drop(raw_worker(&address, 1));
    drop(raw_worker(&address, 2));
    let workers = [2, 1].map(|rank| worker(&address, rank));
    let coordinator = connecting.join().unwrap().unwrap();
    for (outcome, data) in all_sum(std::iter::once(coordinator).chain(workers).map(|rank| (rank, vec![1.0])).collect())
    {
        outcome.unwrap();
        assert_eq!(data, [3.0]);
    }
}

#[test]
fn a_failed_rendezvous_names_missing_ranks_and_counts_rejected_connections() {
    let (connecting, address) = coordinator(builder().rendezvous_timeout(8 * SOON), 4);
    let (_there, _silent) = (raw_worker(&address, 2), dial(&address));
    [9, 2].into_iter().for_each(|rank| expect_close(&mut raw_worker(&address, rank)));
    let error = connecting.join().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Rendezvous { rank: 0, .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains("ranks 1, 3 did not come, and 3 connections were turned away"), "{error}");
    assert!(error.contains("it says that it is rank 2, which is there already"), "{error}");
}

#[test]
fn a_worker_dials_until_the_coordinator_listens_or_its_timeout_expires() {
    let error = short_builder().worker("nobody.invalid:29500", 1).unwrap_err();
    assert!(matches!(&error, Error::Rendezvous { rank: 1, .. }), "{error}");
    let address = free_address();
    let error = short_builder().worker(&address, 1).unwrap_err();
    assert!(error.to_string().contains("nobody answers there"), "{error}");
    let dialling = {
        let address = address.clone();
        thread::spawn(move || worker(&address, 1))
    };
    let coordinator = builder().coordinator(&address, 2).unwrap();
    dialling.join().unwrap().send(0, &[2.0]).unwrap();
    assert_eq!(coordinator.recv(0).unwrap(), [2.0]);
}

#[test]
fn invalid_addresses_are_rejected_at_once() {
    for address in ["", "127.0.0.1", "127.0.0.1:port", "::1:29500", "[::1]", "127.0.0.1:65536"] {
        let results = [builder().coordinator(address, 2), builder().worker(address, 1)];
        assert!(results.iter().all(|result| matches!(result, Err(Error::InvalidArgument { .. }))), "{results:?}");
    }
    assert!(matches!(builder().worker("127.0.0.1:0", 1), Err(Error::InvalidArgument { .. })));
    let error = builder().coordinator("192.0.2.1:0", 2).unwrap_err();
    assert!(error.to_string().contains("give an address that this machine has"), "{error}");
}

#[test]
fn a_coordinator_that_is_given_only_a_port_listens_on_loopback() {
    let address = free_address();
    let port = address.rsplit_once(':').unwrap().1.to_owned();
    let bind_addr = format!(":{port}");
    let connecting = thread::spawn(move || builder().coordinator(&bind_addr, 3));
    let first = worker(&port, 1);
    // It still listens. If it listened on all addresses, this one would be in use.
    assert!(TcpListener::bind(format!("127.0.0.2:{port}")).is_ok());
    let _second = worker(&address, 2);
    first.send(0, &[3.0]).unwrap();
    assert_eq!(connecting.join().unwrap().unwrap().recv(0).unwrap(), [3.0]);
}

#[test]
fn a_worker_has_the_world_size_that_it_is_given_or_the_least_possible() {
    let (connecting, address) = coordinator(builder(), 4);
    let informed = builder().worker_of(&address, 1, 4).unwrap();
    let uninformed = [2, 3].map(|rank| worker(&address, rank));
    assert_eq!(informed.world_size(), 4);
    assert_eq!(uninformed.each_ref().map(TcpTransport::world_size), [3, 4]);
    let coordinator = connecting.join().unwrap().unwrap();
    assert_eq!(coordinator.world_size(), 4);
    // This is the way to learn the world size.
    let ranks = [coordinator, informed].into_iter().chain(uninformed).map(|rank| (rank, vec![1.0]));
    assert!(all_sum(ranks.collect()).into_iter().all(|(outcome, data)| outcome.is_ok() && data == [4.0]));
}

#[test]
fn a_deadline_covers_the_whole_message_even_if_bytes_trickle_in() {
    let (ours, mut raw) = before_raw_worker(builder().deadline(SOON));
    let trickle = thread::spawn(move || {
        let message = [200u32.to_le_bytes().to_vec(), vec![0; 800]].concat();
        for byte in message {
            // The delay is the injected fault. Each byte by itself arrives well in time.
            thread::sleep(SOON / 50);
            if raw.write_all(&[byte]).is_err() {
                break;
            }
        }
    });
    let error = ours.recv(0).unwrap_err();
    assert!(error.to_string().contains("in the middle of a message"), "{error}");
    assert!(error.to_string().contains("timed out"), "{error}");
    drop(ours);
    trickle.join().unwrap();
}

#[test]
fn a_message_that_arrives_after_a_timeout_can_still_be_received() {
    let (ours, mut raw) = before_raw_worker(builder().deadline(SOON));
    let error = ours.recv(0).unwrap_err().to_string();
    assert!(error.contains("timed out") && error.contains("before a message"), "{error}");
    raw.write_all(&[1, 0, 0, 0, 0, 0, 0x80, 0x3f]).unwrap();
    assert_eq!(ours.recv(0).unwrap(), [1.0]);
}

#[test]
fn a_send_without_a_receiver_ends_by_its_deadline() {
    let (ours, _raw) = before_raw_worker(builder().deadline(SOON));
    let error = ours.send(0, &vec![0.0; 16 << 20]).unwrap_err().to_string();
    assert!(error.contains("timed out") && error.contains("in the middle of a message"), "{error}");
}

#[test]
fn after_half_a_message_every_call_returns_the_first_error() {
    let (ours, mut raw) = before_raw_worker(builder());
    raw.write_all(&[2, 0, 0, 0, 1, 2, 3, 4]).unwrap();
    drop(raw);
    let first = ours.recv(0).unwrap_err();
    assert!(first.to_string().contains("closed the connection in the middle of a message"), "{first}");
    assert_eq!(ours.recv(0), Err(first.clone()));
    assert_eq!(ours.send(0, &[1.0]), Err(first.clone()));
    let mut data = [5.0];
    assert_eq!(ours.allreduce_sum(&mut data), Err(first));
    assert_eq!(data, [5.0]);
}

#[test]
fn counts_beyond_the_limit_are_refused_before_anything_is_allocated() {
    for (limit, count) in [(1 << 28, u32::MAX), (10, 11)] {
        let (ours, mut raw) = before_raw_worker(builder().largest_message(limit));
        raw.write_all(&count.to_le_bytes()).unwrap();
        let error = ours.recv(0).unwrap_err().to_string();
        assert!(error.contains(&format!("{count} values, and at most {limit}")), "{error}");
        expect_close(&mut raw);
    }
}

#[test]
fn a_send_does_not_wait_for_a_receive_from_the_same_peer() {
    let (ours, mut raw) = before_raw_worker(builder());
    thread::scope(|scope| {
        // The peer answers only after it has read what is sent meanwhile.
        let receiving = scope.spawn(|| ours.recv(0));
        ours.send(0, &[1.0]).unwrap();
        let message: [u8; 8] = bytes(&mut raw);
        assert!(!receiving.is_finished());
        raw.write_all(&message).unwrap();
        assert_eq!(receiving.join().unwrap().unwrap(), [1.0]);
    });
}

#[test]
fn both_ends_may_send_more_than_the_system_buffers_if_they_receive_meanwhile() {
    let (coordinator, worker) = loopback_pair().unwrap();
    let large = vec![0.5; 4 << 20];
    thread::scope(|scope| {
        for ours in [&coordinator, &worker] {
            scope.spawn(|| ours.send(0, &large).unwrap());
            scope.spawn(|| assert!(ours.recv(0).unwrap() == large));
        }
    });
}

#[test]
fn large_sums_do_not_deadlock() {
    let ranks: Vec<_> = star(4).into_iter().map(|rank| (rank, vec![1.0; 1 << 20])).collect();
    for (outcome, data) in all_sum(ranks) {
        outcome.unwrap();
        assert!(data == vec![4.0; 1 << 20]);
    }
}

#[test]
fn concurrent_sums_of_two_threads_do_not_interfere() {
    let (coordinator, worker) = loopback_pair().unwrap();
    thread::scope(|scope| {
        for ours in [&coordinator, &worker, &coordinator, &worker] {
            scope.spawn(move || {
                for _ in 0..100 {
                    let mut data = vec![1.0; 1000];
                    ours.allreduce_sum(&mut data).unwrap();
                    assert_eq!(data, [2.0; 1000]);
                }
            });
        }
    });
}

#[test]
fn a_coordinator_that_fails_during_a_sum_does_not_leave_its_workers_waiting() {
    // Rank 1 disconnects before its values, or after half of them, or sends too few. Rank 2 blocks in its send, since
    // the coordinator has not read from it yet.
    for sent in [&[][..], &[0, 0, 64, 0, 1, 2], &[1, 0, 0, 0, 0, 0, 0, 0]] {
        let (connecting, address) = coordinator(builder(), 3);
        let (mut first, second) = (raw_worker(&address, 1), worker(&address, 2));
        let coordinator = connecting.join().unwrap().unwrap();
        let failing = thread::spawn(move || {
            let mut data = vec![1.0; 4 << 20];
            let outcome = coordinator.allreduce_sum(&mut data);
            assert!(data == vec![1.0; 4 << 20]);
            // Returned, so that what follows is not the effect of a drop.
            (coordinator, outcome)
        });
        let blocked = thread::spawn(move || {
            let mut data = vec![2.0; 4 << 20];
            let outcome = second.allreduce_sum(&mut data);
            assert!(data == vec![2.0; 4 << 20]);
            outcome.unwrap_err().to_string()
        });
        first.write_all(sent).unwrap();
        if sent.len() < 8 {
            drop(first);
        }
        let error = blocked.join().unwrap();
        assert!(!error.contains("timed out"), "{error}");
        let (coordinator, outcome) = failing.join().unwrap();
        let cause = outcome.unwrap_err();
        // The connection to the correct peer is closed as well.
        assert_eq!(coordinator.send(1, &[1.0]), Err(cause.clone()));
        assert_eq!(coordinator.allreduce_sum(&mut [1.0]), Err(cause));
    }
}

#[test]
fn data_are_unchanged_if_the_sums_reached_only_some_workers() {
    let (connecting, address) = coordinator(builder(), 3);
    let (mut first, mut second) = (raw_worker(&address, 1), raw_worker(&address, 2));
    let coordinator = connecting.join().unwrap().unwrap();
    // More than the system buffers for a peer that does not read.
    let length = 16 << 20;
    let message = [(length as u32).to_le_bytes().to_vec(), vec![0; 4 * length]].concat();
    let summing = thread::spawn(move || {
        let mut data = vec![1.0; length];
        let outcome = coordinator.allreduce_sum(&mut data);
        (outcome, data == vec![1.0; length])
    });
    first.write_all(&message).unwrap();
    second.write_all(&message).unwrap();
    first.read_exact(&mut vec![0; message.len()]).unwrap();
    assert_eq!(bytes(&mut second), (length as u32).to_le_bytes());
    drop(second);
    let (outcome, untouched) = summing.join().unwrap();
    assert!(outcome.unwrap_err().to_string().contains("rank 2 at"));
    assert!(untouched);
}

// A peer in another language.

/// Starts `peer.py`.
fn python(arguments: &[&str]) -> Child {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/yscv/peer.py");
    let child = Command::new("python3").arg(script).args(arguments).stdout(Stdio::piped()).spawn();
    child.expect("python3 is needed for a peer in another language")
}

fn line(output: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    line.trim().into()
}

#[test]
#[ignore = "needs python3"]
fn a_python_worker_joins_a_coordinator_in_rust() {
    let (connecting, address) = coordinator(builder(), 3);
    let mut peer = python(&["worker", &address, "2", "0.25", "-8"]);
    let ours = worker(&address, 1);
    let coordinator = connecting.join().unwrap().unwrap();
    let outcomes = all_sum(vec![(coordinator, vec![1.0, 2.0]), (ours, vec![10.0, 20.0])]);
    assert_eq!(outcomes, [(Ok(()), vec![11.25, 14.0]), (Ok(()), vec![11.25, 14.0])]);
    assert_eq!(line(&mut BufReader::new(peer.stdout.take().unwrap())), "11.25 14.0");
    assert!(peer.wait().unwrap().success());
}

#[test]
#[ignore = "needs python3"]
fn a_python_coordinator_serves_workers_in_rust() {
    let mut peer = python(&["coordinator", "127.0.0.1:0", "3", "0.25", "-8"]);
    let mut output = BufReader::new(peer.stdout.take().unwrap());
    let address = format!("127.0.0.1:{}", line(&mut output));
    let ours = [2, 1].map(|rank| (worker(&address, rank), vec![10.0, rank as f32]));
    for (outcome, data) in all_sum(ours.into()) {
        assert_eq!((outcome, data), (Ok(()), vec![20.25, -5.0]));
    }
    assert_eq!(line(&mut output), "20.25 -5.0");
    assert!(peer.wait().unwrap().success());
}
