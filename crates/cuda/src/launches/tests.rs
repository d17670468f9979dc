//! Tests of the order of launches.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use super::*;

/// GPUs that no other test and no device uses.
const GPUS: [usize; 2] = [1000, 1001];

fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

#[test]
fn two_groups_launch_in_one_order_on_all_gpus() {
    const CALLS: u64 = 2000;
    let launched = GPUS.map(|_| Mutex::new(Vec::new()));
    let groups = [1, 2].map(|group| Launches::of_group(group, GPUS.to_vec()).unwrap());
    thread::scope(|scope| {
        for (group, i) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let (launches, gpu, launched) = (&groups[group], GPUS[i], &launched[i]);
            scope.spawn(move || {
                for sequence in 0..CALLS {
                    launches.append(sequence).unwrap();
                    let _turn = launches.turn(gpu, sequence, &soon()).unwrap();
                    lock(launched).push((group, sequence));
                }
            });
        }
    });
    let [first, second] = launched.map(|launched| lock(&launched).clone());
    assert_eq!(first.len(), 2 * CALLS as usize);
    assert_eq!(first, second);
}

#[test]
fn a_call_that_never_comes_leaves_when_its_group_fails_or_ends() {
    for fails in [true, false] {
        let [absent, other] = [3, 4].map(|group| Launches::of_group(group, GPUS.to_vec()).unwrap());
        absent.append(0).unwrap();
        other.append(0).unwrap();
        thread::scope(|scope| {
            let launched = scope.spawn(|| other.turn(GPUS[0], 0, &soon()).map(drop));
            let error = Error::broken("test", "on purpose");
            if fails {
                absent.fail(&error);
                assert_eq!(absent.append(1), Err(error));
            } else {
                drop(absent);
            }
            assert_eq!(launched.join().unwrap(), Ok(()));
        });
    }
}

/// Groups with ranks in several processes, of which each has one GPU and one clock, as far as this process can imitate
/// them: what each GPU launches is in one order, whatever was proposed and whenever it was settled.
#[test]
fn calls_of_several_processes_launch_in_one_order_on_all_gpus() {
    const CALLS: usize = 500;
    let gpus = [1010, 1011, 1012];
    // Each pair of GPUs, and all of them.
    let groups: [&[usize]; 4] = [&[0, 1], &[1, 2], &[0, 2], &[0, 1, 2]];
    let launched = gpus.map(|_| Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for (number, ranks) in groups.into_iter().enumerate() {
            let barrier = Arc::new(Barrier::new(ranks.len()));
            let latest: Arc<Vec<AtomicU64>> = Arc::new((0..CALLS).map(|_| AtomicU64::new(0)).collect());
            for (rank, gpu) in ranks.iter().enumerate() {
                let (barrier, latest, launched) = (barrier.clone(), latest.clone(), &launched[*gpu]);
                scope.spawn(move || {
                    for call in 0..CALLS {
                        let ticket = Ticket::new(gpus[*gpu], 100 + number as u64, rank);
                        barrier.wait();
                        latest[call].fetch_max(ticket.propose(), Ordering::SeqCst);
                        barrier.wait();
                        ticket.turn(latest[call].load(Ordering::SeqCst), &soon(), || None).unwrap();
                        lock(launched).push((number, call));
                    }
                });
            }
        }
    });
    let launched = launched.map(|launched| lock(&launched).clone());
    for (one, other) in [(0, 1), (1, 2), (0, 2)] {
        let common = |gpu: usize, other: usize| {
            let both =
                |(number, _): &&(usize, usize)| groups[*number].contains(&gpu) && groups[*number].contains(&other);
            launched[gpu].iter().filter(both).copied().collect::<Vec<_>>()
        };
        assert_eq!(common(one, other).len(), 2 * CALLS);
        assert_eq!(common(one, other), common(other, one));
    }
}

#[test]
fn a_call_waits_for_an_earlier_one_that_is_not_settled() {
    const GPU: usize = 1020;
    let [first, second, third] = [7, 8, 9].map(|group| Ticket::new(GPU, group, 0));
    let proposed = [&first, &second, &third].map(Ticket::propose);
    assert!(proposed[0] < proposed[1] && proposed[1] < proposed[2]);
    let order = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let (started, begun) = channel();
        for (ticket, name, time) in [(second, 2, proposed[1]), (third, 3, proposed[1])] {
            let (order, started) = (&order, started.clone());
            scope.spawn(move || {
                started.send(()).unwrap();
                ticket.turn(time, &soon(), || None).unwrap();
                lock(order).push(name);
            });
        }
        begun.recv().unwrap();
        begun.recv().unwrap();
        // Later than both, which were settled at one time and come in the order of their groups.
        first.turn(proposed[2] + 5, &soon(), || None).unwrap();
        lock(&order).push(1);
        drop(first);
    });
    assert_eq!(*lock(&order), [2, 3, 1]);
}

#[test]
fn a_ticket_that_is_dropped_or_whose_team_fails_keeps_nothing_waiting() {
    const GPU: usize = 1021;
    let [dropped, failed, next] = [7, 8, 9].map(|group| Ticket::new(GPU, group, 0));
    let proposed = [&dropped, &failed, &next].map(Ticket::propose);
    let error = Error::broken("test", "on purpose");
    assert_eq!(failed.turn(proposed[1], &soon(), || Some(error.clone())), Err(error.clone()));
    drop((dropped, failed));
    assert_eq!(next.turn(proposed[2], &soon(), || None), Ok(()));
}

#[test]
fn a_call_that_waits_for_its_turn_ends_when_its_team_fails() {
    const GPU: usize = 1022;
    let [hung, waiting] = [7, 8].map(|group| Ticket::new(GPU, group, 0));
    let proposed = [&hung, &waiting].map(Ticket::propose);
    let (failure, error) = (Mutex::new(None), Error::broken("test", "on purpose"));
    thread::scope(|scope| {
        let (looked, looks) = channel();
        let failure = &failure;
        let turn = scope.spawn(move || {
            waiting.turn(proposed[1], &soon(), || {
                let failure = lock(failure).clone();
                looked.send(()).unwrap();
                failure
            })
        });
        looks.recv().unwrap();
        *lock(failure) = Some(error.clone());
        wake();
        assert_eq!(turn.join().unwrap(), Err(error));
    });
    // The deadline of a call counts too.
    let later = Ticket::new(GPU, 9, 0);
    let time = later.propose();
    assert_eq!(later.turn(time, &Deadline::after(Duration::ZERO), || None), Ok(()));
}
