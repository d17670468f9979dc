//! The rendezvous: strangers, duplicate ranks, workers that come early, late or never.

use super::*;

#[test]
fn different_lengths_are_an_error_and_leave_the_data_unchanged() {
    let call = |rank: usize, count| (rank, Call::new(Operation::AllReduce, DType::F32, count).reducing(ReduceOp::Sum));
    let ranks = star(3).into_iter().zip([2, 2, 3].map(|length| vec![1.5; length]));
    let outcomes = all_sum(ranks.collect());
    assert_eq!(
        outcomes[0].0,
        Err(Error::Mismatch { sequence: 0, calls: vec![call(0, 2), call(2, 3)], note: String::new() })
    );
    for (outcome, data) in outcomes {
        assert!(outcome.is_err() && data.iter().all(|value| *value == 1.5), "{outcome:?}: {data:?}");
    }
    // A worker whose coordinator is of another implementation can detect it, too.
    let (ours, mut raw) = before_raw_coordinator();
    raw.write_all(&[1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    let mut data = [1.5; 2];
    let outcome = ours.allreduce_sum(&mut data);
    assert_eq!(outcome, Err(Error::Mismatch { sequence: 0, calls: vec![call(0, 1), call(1, 2)], note: String::new() }));
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
