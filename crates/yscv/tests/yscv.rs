//! The wire protocol of yscv's `TcpTransport`: what its documentation says, what Bonfire fixes, and peers that were
//! written from the documentation alone.
#![cfg(unix)]

#[path = "yscv/rendezvous.rs"]
mod rendezvous;
#[path = "yscv/waiting.rs"]
mod waiting;

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bonfire_core::{Call, DType, Error, Operation, ReduceOp};
use bonfire_testing::relay::dial;
use bonfire_testing::{DEADLINE as LONG, free_address};
use bonfire_yscv::{TcpTransport, TcpTransportBuilder, loopback_pair};
use tokio::runtime::Builder;

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

#[test]
fn a_pair_can_be_created_and_used_in_tasks_of_each_runtime_of_tokio() {
    for mut runtime in [Builder::new_current_thread(), Builder::new_multi_thread()] {
        let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
        let sums = runtime.block_on(async {
            let (one, other) = tokio::spawn(async { loopback_pair() }).await.unwrap().unwrap();
            let other = thread::spawn(move || {
                let mut data = [2.0];
                other.allreduce_sum(&mut data).map(|()| data)
            });
            let one = tokio::spawn(async move {
                let mut data = [1.0];
                one.allreduce_sum(&mut data).map(|()| data)
            });
            (one.await.unwrap(), other.join().unwrap())
        });
        assert_eq!(sums, (Ok([3.0]), Ok([3.0])));
    }
}
