//! The wire of yscv's `TcpTransport`: what its page says, what was mended, and peers that were written from the page alone.
#![cfg(unix)]

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bonfire_core::yscv::{TcpTransport, TcpTransportBuilder, loopback_pair};
use bonfire_core::{Call, DType, Error, Operation, ReduceOp};
use bonfire_testing::{DEADLINE as LONG, free_address};

/// For what will not come.
const SOON: Duration = Duration::from_millis(200);

fn patient() -> TcpTransportBuilder {
    TcpTransport::builder().rendezvous_timeout(LONG).deadline(LONG)
}

fn hasty() -> TcpTransportBuilder {
    TcpTransport::builder().rendezvous_timeout(SOON).deadline(SOON)
}

type Coming = JoinHandle<Result<TcpTransport, Error>>;

/// A coordinator that waits for its workers on a thread, and where.
fn coordinator(builder: TcpTransportBuilder, world_size: usize) -> (Coming, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (thread::spawn(move || builder.coordinator_on(listener, world_size)), address)
}

fn worker(address: &str, rank: usize) -> TcpTransport {
    patient().worker(address, rank).unwrap()
}

/// Ours, by rank.
fn star(world_size: usize) -> Vec<TcpTransport> {
    let (coming, address) = coordinator(patient(), world_size);
    let workers: Vec<_> = (1..world_size).map(|rank| worker(&address, rank)).collect();
    std::iter::once(coming.join().unwrap().unwrap()).chain(workers).collect()
}

/// A worker by hand.
fn raw_worker(address: &str, rank: u32) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.set_write_timeout(Some(LONG)).unwrap();
    stream.write_all(&rank.to_le_bytes()).unwrap();
    stream
}

/// Our coordinator with one worker by hand.
fn before_raw_worker(builder: TcpTransportBuilder) -> (TcpTransport, TcpStream) {
    let (coming, address) = coordinator(builder, 2);
    let raw = raw_worker(&address, 1);
    (coming.join().unwrap().unwrap(), raw)
}

/// Our worker of rank 1 with a coordinator by hand, which has read the rank.
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
fn hears_the_end(stream: &mut TcpStream) {
    match stream.read_to_end(&mut Vec::new()) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), ErrorKind::ConnectionReset),
    }
}

/// Runs `allreduce_sum` on each, and gives outcomes and data.
fn all_sum(ranks: Vec<(TcpTransport, Vec<f32>)>) -> Vec<(Result<(), Error>, Vec<f32>)> {
    let sum = |(rank, mut data): (TcpTransport, Vec<f32>)| thread::spawn(move || (rank.allreduce_sum(&mut data), data));
    let threads: Vec<_> = ranks.into_iter().map(sum).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

// What yscv's page says.

#[test]
fn the_coordinator_blocks_until_all_workers_have_connected() {
    let (coming, address) = coordinator(patient(), 3);
    let _first = raw_worker(&address, 1);
    assert!(!coming.is_finished(), "rank 2 is missing");
    let _second = raw_worker(&address, 2);
    assert_eq!(coming.join().unwrap().unwrap().world_size(), 3);
}

#[test]
fn a_worker_announces_its_rank_as_a_little_endian_u32_and_then_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = worker(&listener.local_addr().unwrap().to_string(), 0x0102);
    let mut raw = listener.accept().unwrap().0;
    drop(ours);
    let mut said = Vec::new();
    raw.read_to_end(&mut said).unwrap();
    assert_eq!(said, [2, 1, 0, 0]);
}

#[test]
fn a_message_is_a_little_endian_u32_count_and_so_many_little_endian_f32() {
    let values = [1.0, -2.5, f32::from_bits(0x7fa0_1234)];
    let message = [3, 0, 0, 0, 0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0, 0x34, 0x12, 0xa0, 0x7f];
    for (ours, mut raw) in [before_raw_worker(patient()), before_raw_coordinator()] {
        ours.send(0, &values).unwrap();
        assert_eq!(bytes(&mut raw), message);
        raw.write_all(&message).unwrap();
        assert_eq!(bits(&ours.recv(0).unwrap()), bits(&values), "also what is not a number keeps its bits");
        ours.send(0, &[]).unwrap();
        assert_eq!(bytes(&mut raw), [0; 4], "an empty message is its count");
        raw.write_all(&[0; 4]).unwrap();
        assert_eq!(ours.recv(0).unwrap(), [0.0; 0]);
    }
}

#[test]
fn peer_i_of_the_coordinator_is_rank_i_plus_1_whoever_came_first() {
    let (coming, address) = coordinator(patient(), 4);
    let workers = [2, 3, 1].map(|rank| (rank, worker(&address, rank)));
    let coordinator = coming.join().unwrap().unwrap();
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
fn a_peer_that_is_none_is_refused_and_harms_nothing() {
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
fn sums_are_taken_in_the_order_of_ranks_and_have_the_same_bits_everywhere() {
    // In another order they would be other numbers.
    let inputs = [vec![1e8, 1.0], vec![1.0, 1e8], vec![-1e8, -1e8]];
    let sums = [(1e8f32 + 1.0) - 1e8, (1.0f32 + 1e8) - 1e8];
    for (outcome, data) in all_sum(star(3).into_iter().zip(inputs).collect()) {
        outcome.unwrap();
        assert_eq!(bits(&data), bits(&sums));
    }
}

#[test]
fn a_rank_alone_keeps_what_it_has() {
    let alone = TcpTransport::coordinator("127.0.0.1:0", 1).unwrap();
    let mut data = [1.0, f32::NAN];
    alone.allreduce_sum(&mut data).unwrap();
    assert_eq!(bits(&data), bits(&[1.0, f32::NAN]));
    assert_eq!((alone.rank(), alone.world_size()), (0, 1));
}

#[test]
fn rank_0_is_no_worker_s_and_a_world_is_not_empty() {
    for world_size in [0, 1 << 17, usize::MAX] {
        let refused = hasty().coordinator("127.0.0.1:0", world_size);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{world_size}: {refused:?}");
    }
    for (rank, world_size) in [(0, 2), (2, 2), (7, 3), (1, 0), (usize::MAX, usize::MAX)] {
        let refused = hasty().worker_of("127.0.0.1:9", rank, world_size);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{rank} of {world_size}: {refused:?}");
    }
    assert!(matches!(hasty().worker("127.0.0.1:9", 0), Err(Error::InvalidArgument { .. })));
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
fn lengths_that_differ_are_an_error_and_leave_the_data_as_they_were() {
    let call = |rank: usize, count| (rank, Call::new(Operation::AllReduce, DType::F32, count).reducing(ReduceOp::Sum));
    let ranks = star(3).into_iter().zip([2, 2, 3].map(|length| vec![1.5; length]));
    let outcomes = all_sum(ranks.collect());
    assert_eq!(outcomes[0].0, Err(Error::Mismatch { sequence: 0, calls: vec![call(0, 2), call(2, 3)] }));
    for (outcome, data) in outcomes {
        assert!(outcome.is_err() && data.iter().all(|value| *value == 1.5), "{outcome:?}: {data:?}");
    }
    // A worker whose coordinator is of another make can see it, too.
    let (ours, mut raw) = before_raw_coordinator();
    raw.write_all(&[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let mut data = [1.5; 2];
    let outcome = ours.allreduce_sum(&mut data);
    assert_eq!(outcome, Err(Error::Mismatch { sequence: 0, calls: vec![call(0, 1), call(1, 2)] }));
    assert_eq!(data, [1.5; 2]);
}

// What was mended.

#[test]
fn ranks_that_cannot_be_and_those_that_are_there_are_turned_away_and_the_rendezvous_goes_on() {
    let (coming, address) = coordinator(patient(), 3);
    let first = worker(&address, 1);
    for rank in [0, 3, u32::MAX, 1] {
        hears_the_end(&mut raw_worker(&address, rank));
    }
    let second = worker(&address, 2);
    let coordinator = coming.join().unwrap().unwrap();
    for (outcome, data) in all_sum([coordinator, first, second].map(|rank| (rank, vec![1.0])).into()) {
        outcome.unwrap();
        assert_eq!(data, [3.0]);
    }
}

#[test]
fn a_worker_that_was_turned_away_learns_it_from_its_first_message() {
    let (coming, address) = coordinator(patient(), 3);
    // Which of the two is taken, they cannot know.
    let twins = [1, 1].map(|rank| worker(&address, rank));
    let twins = twins.map(|twin| thread::spawn(move || twin.recv(0)));
    let _last = worker(&address, 2);
    let coordinator = coming.join().unwrap().unwrap();
    coordinator.send(0, &[7.0]).unwrap();
    let mut heard = twins.map(|twin| twin.join().unwrap());
    heard.sort_by_key(Result::is_err);
    assert_eq!(heard[0], Ok(vec![7.0]));
    let error = heard[1].as_ref().unwrap_err().to_string();
    assert!(error.contains("a rank that another one has"), "{error}");
}

#[test]
fn strangers_neither_end_the_rendezvous_nor_hold_it_up() {
    // Those that say nothing would be waited for longer than this one is.
    let (coming, address) = coordinator(patient().rendezvous_timeout(Duration::from_secs(4)), 2);
    let connect = || TcpStream::connect(&address).unwrap();
    let mut silent: Vec<_> = (0..100).map(|_| connect()).collect();
    silent[70].write_all(&[1, 0]).unwrap();
    drop(connect());
    connect().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let ours = worker(&address, 1);
    let coordinator = coming.join().unwrap().unwrap();
    coordinator.send(0, &[1.0]).unwrap();
    assert_eq!(ours.recv(0).unwrap(), [1.0]);
    silent.iter_mut().for_each(hears_the_end);
}

#[test]
fn a_worker_that_left_before_all_had_come_gives_up_its_rank() {
    let (coming, address) = coordinator(patient(), 3);
    drop(raw_worker(&address, 1));
    drop(raw_worker(&address, 2));
    let workers = [2, 1].map(|rank| worker(&address, rank));
    let coordinator = coming.join().unwrap().unwrap();
    for (outcome, data) in all_sum(std::iter::once(coordinator).chain(workers).map(|rank| (rank, vec![1.0])).collect())
    {
        outcome.unwrap();
        assert_eq!(data, [3.0]);
    }
}

#[test]
fn a_rendezvous_in_vain_names_the_missing_and_counts_those_turned_away() {
    let (coming, address) = coordinator(patient().rendezvous_timeout(8 * SOON), 4);
    let (_there, _silent) = (raw_worker(&address, 2), TcpStream::connect(&address).unwrap());
    [9, 2].into_iter().for_each(|rank| hears_the_end(&mut raw_worker(&address, rank)));
    let error = coming.join().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Rendezvous { rank: 0, .. }), "{error}");
    let error = error.to_string();
    assert!(error.contains("ranks 1, 3 did not come, and 3 connections were turned away"), "{error}");
    assert!(error.contains("it says that it is rank 2, which is there already"), "{error}");
}

#[test]
fn a_worker_dials_until_the_coordinator_listens_or_its_time_is_up() {
    let error = hasty().worker("nobody.invalid:29500", 1).unwrap_err();
    assert!(matches!(&error, Error::Rendezvous { rank: 1, .. }), "{error}");
    let address = free_address();
    let error = hasty().worker(&address, 1).unwrap_err();
    assert!(error.to_string().contains("nobody answers there"), "{error}");
    let dialling = {
        let address = address.clone();
        thread::spawn(move || worker(&address, 1))
    };
    let coordinator = patient().coordinator(&address, 2).unwrap();
    dialling.join().unwrap().send(0, &[2.0]).unwrap();
    assert_eq!(coordinator.recv(0).unwrap(), [2.0]);
}

#[test]
fn addresses_that_cannot_be_are_refused_at_once() {
    for address in ["", "127.0.0.1", "127.0.0.1:port", "::1:29500", "[::1]", "127.0.0.1:65536"] {
        let results = [patient().coordinator(address, 2), patient().worker(address, 1)];
        assert!(results.iter().all(|result| matches!(result, Err(Error::InvalidArgument { .. }))), "{results:?}");
    }
    assert!(matches!(patient().worker("127.0.0.1:0", 1), Err(Error::InvalidArgument { .. })));
    let error = patient().coordinator("192.0.2.1:0", 2).unwrap_err();
    assert!(error.to_string().contains("give an address that this machine has"), "{error}");
}

#[test]
fn a_coordinator_listens_on_loopback_where_only_a_port_is_given() {
    let address = free_address();
    let port = address.rsplit_once(':').unwrap().1.to_owned();
    let bind_addr = format!(":{port}");
    let coming = thread::spawn(move || patient().coordinator(&bind_addr, 3));
    let first = worker(&port, 1);
    // It still listens. If it did so everywhere, this address would be taken.
    assert!(TcpListener::bind(format!("127.0.0.2:{port}")).is_ok());
    let _second = worker(&address, 2);
    first.send(0, &[3.0]).unwrap();
    assert_eq!(coming.join().unwrap().unwrap().recv(0).unwrap(), [3.0]);
}

#[test]
fn a_worker_knows_the_world_size_where_it_was_told_and_else_the_least_it_can_be() {
    let (coming, address) = coordinator(patient(), 4);
    let told = patient().worker_of(&address, 1, 4).unwrap();
    let untold = [2, 3].map(|rank| worker(&address, rank));
    assert_eq!(told.world_size(), 4);
    assert_eq!(untold.each_ref().map(TcpTransport::world_size), [3, 4]);
    let coordinator = coming.join().unwrap().unwrap();
    assert_eq!(coordinator.world_size(), 4);
    // The way to learn it.
    let ranks = [coordinator, told].into_iter().chain(untold).map(|rank| (rank, vec![1.0]));
    assert!(all_sum(ranks.collect()).into_iter().all(|(outcome, data)| outcome.is_ok() && data == [4.0]));
}

#[test]
fn a_deadline_holds_for_the_whole_message_however_its_bytes_trickle() {
    let (ours, mut raw) = before_raw_worker(patient().deadline(SOON));
    let trickle = thread::spawn(move || {
        let message = [200u32.to_le_bytes().to_vec(), vec![0; 800]].concat();
        for byte in message {
            // What trickles takes time. Each byte comes well in time by itself.
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
fn a_message_that_is_late_as_a_whole_can_still_be_received() {
    let (ours, mut raw) = before_raw_worker(patient().deadline(SOON));
    let error = ours.recv(0).unwrap_err().to_string();
    assert!(error.contains("timed out") && error.contains("before a message"), "{error}");
    raw.write_all(&[1, 0, 0, 0, 0, 0, 0x80, 0x3f]).unwrap();
    assert_eq!(ours.recv(0).unwrap(), [1.0]);
}

#[test]
fn a_send_ends_by_its_deadline_where_nobody_receives() {
    let (ours, _raw) = before_raw_worker(patient().deadline(SOON));
    let error = ours.send(0, &vec![0.0; 16 << 20]).unwrap_err().to_string();
    assert!(error.contains("timed out") && error.contains("in the middle of a message"), "{error}");
}

#[test]
fn after_half_a_message_every_call_repeats_the_first_cause() {
    let (ours, mut raw) = before_raw_worker(patient());
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
        let (ours, mut raw) = before_raw_worker(patient().largest_message(limit));
        raw.write_all(&count.to_le_bytes()).unwrap();
        let error = ours.recv(0).unwrap_err().to_string();
        assert!(error.contains(&format!("{count} values, and at most {limit}")), "{error}");
        hears_the_end(&mut raw);
    }
}

#[test]
fn a_send_does_not_wait_for_a_receive_of_the_same_peer() {
    let (ours, mut raw) = before_raw_worker(patient());
    thread::scope(|scope| {
        // The answer comes only after what is sent meanwhile.
        let receiving = scope.spawn(|| ours.recv(0));
        ours.send(0, &[1.0]).unwrap();
        let message: [u8; 8] = bytes(&mut raw);
        assert!(!receiving.is_finished());
        raw.write_all(&message).unwrap();
        assert_eq!(receiving.join().unwrap().unwrap(), [1.0]);
    });
}

#[test]
fn two_ends_may_send_each_other_more_than_the_system_keeps_if_they_receive_meanwhile() {
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
fn large_sums_do_not_lock_each_other_up() {
    let ranks: Vec<_> = star(4).into_iter().map(|rank| (rank, vec![1.0; 1 << 20])).collect();
    for (outcome, data) in all_sum(ranks) {
        outcome.unwrap();
        assert!(data == vec![4.0; 1 << 20]);
    }
}

#[test]
fn sums_of_two_threads_do_not_mix() {
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
fn a_coordinator_that_fails_in_the_middle_does_not_leave_its_workers_waiting() {
    // Rank 1 dies before its values, or with half of them, or gives too few; rank 2 is blocked in sending, as nobody has
    // read from it yet.
    for said in [&[][..], &[0, 0, 64, 0, 1, 2], &[1, 0, 0, 0, 0, 0, 0, 0]] {
        let (coming, address) = coordinator(patient(), 3);
        let (mut first, second) = (raw_worker(&address, 1), worker(&address, 2));
        let coordinator = coming.join().unwrap().unwrap();
        let kept = thread::spawn(move || {
            let mut data = vec![1.0; 4 << 20];
            let outcome = coordinator.allreduce_sum(&mut data);
            assert!(data == vec![1.0; 4 << 20]);
            // It is kept: what follows is not because it was dropped.
            (coordinator, outcome)
        });
        let blocked = thread::spawn(move || {
            let mut data = vec![2.0; 4 << 20];
            let outcome = second.allreduce_sum(&mut data);
            assert!(data == vec![2.0; 4 << 20]);
            outcome.unwrap_err().to_string()
        });
        first.write_all(said).unwrap();
        if said.len() < 8 {
            drop(first);
        }
        let error = blocked.join().unwrap();
        assert!(!error.contains("timed out"), "{error}");
        let (coordinator, outcome) = kept.join().unwrap();
        let cause = outcome.unwrap_err();
        // The peer that did nothing wrong is closed as well.
        assert_eq!(coordinator.send(1, &[1.0]), Err(cause.clone()));
        assert_eq!(coordinator.allreduce_sum(&mut [1.0]), Err(cause));
    }
}

#[test]
fn data_are_as_they_were_where_the_sums_reached_only_some() {
    let (coming, address) = coordinator(patient(), 3);
    let (mut first, mut second) = (raw_worker(&address, 1), raw_worker(&address, 2));
    let coordinator = coming.join().unwrap().unwrap();
    // More than the system keeps for one that does not read.
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
fn a_peer_in_python_is_a_worker_of_ours() {
    let (coming, address) = coordinator(patient(), 3);
    let mut peer = python(&["worker", &address, "2", "0.25", "-8"]);
    let ours = worker(&address, 1);
    let coordinator = coming.join().unwrap().unwrap();
    let outcomes = all_sum(vec![(coordinator, vec![1.0, 2.0]), (ours, vec![10.0, 20.0])]);
    assert_eq!(outcomes, [(Ok(()), vec![11.25, 14.0]), (Ok(()), vec![11.25, 14.0])]);
    assert_eq!(line(&mut BufReader::new(peer.stdout.take().unwrap())), "11.25 14.0");
    assert!(peer.wait().unwrap().success());
}

#[test]
#[ignore = "needs python3"]
fn a_peer_in_python_coordinates_ours() {
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
