//! Deadlines, messages larger than the buffers of the system, and failures in the middle of an operation.

use super::*;

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
