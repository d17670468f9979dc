//! Groups that asynchronous code creates, uses and drops, on both of tokio's runtimes.

use std::thread;

use bonfire_core::{Error, Group, ReduceOp, TransportKind};
use bonfire_testing::{DEADLINE, free_address};
use tokio::runtime::{Builder, Runtime};

/// Each of tokio's runtimes.
fn runtimes() -> [fn() -> Runtime; 2] {
    [
        || Builder::new_current_thread().enable_all().build().unwrap(),
        || Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap(),
    ]
}

/// Calls `f` in a task on a runtime.
fn in_task<T: Send + 'static>(runtime: fn() -> Runtime, f: impl FnOnce() -> T + Send + 'static) -> T {
    runtime().block_on(async { tokio::spawn(async { f() }).await.unwrap() })
}

#[test]
fn groups_can_be_created_split_and_shrunk_in_tasks() {
    for runtime in runtimes() {
        for kind in [TransportKind::Tcp, TransportKind::Shm] {
            let builder = Group::builder().address(free_address()).world_size(3).transport(kind);
            let builder = builder.rendezvous_timeout(DEADLINE).deadline(DEADLINE);
            let rank = |rank: usize| {
                let builder = builder.clone().rank(rank);
                let act = move || {
                    let sum = |group: &Group| {
                        let mut data = vec![group.rank() as i64; 10_000];
                        group.all_reduce(&mut data, ReduceOp::Sum)?;
                        Ok::<_, Error>((data[0], data[9_999]))
                    };
                    let group = builder.connect()?;
                    let part = group.split(Some(u64::from(group.rank() == 0)), 0)?.expect("every rank has a color");
                    let sums = [sum(&group)?, sum(&part)?];
                    drop(part);
                    let shrunk = group.shrink()?;
                    Ok::<_, Error>((sums, sum(&shrunk)?))
                };
                thread::spawn(move || in_task(runtime, act))
            };
            let ranks: Vec<_> = (0..3).map(rank).collect();
            for (rank, result) in ranks.into_iter().map(|rank| rank.join().unwrap()).enumerate() {
                let part = if rank == 0 { (0, 0) } else { (1, 1) };
                assert_eq!(result, Ok(([(3, 3), part], (3, 3))), "rank {rank}, {kind}");
            }
        }
    }
}

#[test]
fn a_failed_rendezvous_in_a_task_is_an_error() {
    for runtime in runtimes() {
        let builder = Group::builder().address(free_address()).world_size(2).rank(1);
        let error =
            in_task(runtime, move || builder.rendezvous_timeout(std::time::Duration::from_millis(10)).connect());
        assert!(matches!(error, Err(Error::Rendezvous { rank: 1, .. })), "{error:?}");
    }
}
