//! Custom transports: one from outside the crate runs every operation, and if it fails, no rank hangs.

#[path = "transport/faults.rs"]
mod faults;

use std::sync::Arc;

use bonfire_core::{Algorithm, Builder, Element, Group, ReduceOp, Transport, partition};
use bonfire_testing::transport::{Channels, Faults, run_on_channels};
use half::{bf16, f16};

/// Checks every operation in every form. Values are small whole numbers, which are exact in all types.
fn every_operation<T: Element + From<u8>>(group: &Group, len: usize) {
    let (rank, n) = (group.rank(), group.world_size());
    let own = partition(len, n, rank);
    let value = |rank: usize, i: usize| ((rank + i) % 3 + 1) as u8;
    let mine: Vec<T> = (0..len).map(|i| value(rank, i).into()).collect();
    let label = format!("{} x {len} on rank {rank} of {n}", T::DTYPE);
    let root = n - 1;
    for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min, ReduceOp::Product] {
        let want: Vec<T> = (0..len)
            .map(|i| {
                let values = (0..n).map(|rank| value(rank, i));
                let reduced: u8 = match op {
                    ReduceOp::Max => values.fold(0, u8::max),
                    ReduceOp::Min => values.fold(u8::MAX, u8::min),
                    ReduceOp::Product => values.product(),
                    _ => values.sum(),
                };
                reduced.into()
            })
            .collect();
        let mut data = mine.clone();
        group.all_reduce(&mut data, op).unwrap();
        assert_eq!(data, want, "all_reduce of {label}");
        let mut data = vec![T::from(0); len];
        group.all_reduce_into(&mine, &mut data, op).unwrap();
        assert_eq!(data, want, "all_reduce_into of {label}");
        let mut data = mine.clone();
        group.reduce(&mut data, op, root).unwrap();
        assert_eq!(data, if rank == root { &want[..] } else { &mine[..] }, "reduce of {label}");
        let mut data = vec![T::from(0); if rank == root { len } else { 0 }];
        group.reduce_into(&mine, &mut data, op, root).unwrap();
        assert_eq!(data, if rank == root { &want[..] } else { &[] }, "reduce_into of {label}");
        let mut data = mine.clone();
        group.reduce_scatter(&mut data, op).unwrap();
        assert_eq!(data[own.clone()], want[own.clone()], "reduce_scatter of {label}");
        let mut data = vec![T::from(0); own.len()];
        group.reduce_scatter_into(&mine, &mut data, op).unwrap();
        assert_eq!(data, want[own.clone()], "reduce_scatter_into of {label}");
    }
    // The mean of equal values is exact in all types.
    let mut data = vec![T::from(5); len];
    group.all_reduce(&mut data, ReduceOp::Mean).unwrap();
    assert_eq!(data, vec![T::from(5); len], "mean of {label}");
    let from_root: Vec<T> = (0..len).map(|i| value(root, i).into()).collect();
    let mut data = mine.clone();
    group.broadcast(&mut data, root).unwrap();
    assert_eq!(data, from_root, "broadcast of {label}");
    let mut data = vec![T::from(0); len];
    group.broadcast_into((rank == root).then_some(&mine[..]), &mut data, root).unwrap();
    assert_eq!(data, from_root, "broadcast_into of {label}");
    let gathered: Vec<T> = (0..n).flat_map(|r| partition(len, n, r).map(move |i| value(r, i).into())).collect();
    let mut data = mine.clone();
    group.all_gather(&mut data).unwrap();
    assert_eq!(data, gathered, "all_gather of {label}");
    let mut data = vec![T::from(0); len];
    group.all_gather_into(&mine[own], &mut data).unwrap();
    assert_eq!(data, gathered, "all_gather_into of {label}");
    let part = len / n;
    let input: Vec<T> = (0..n * part).map(|i| ((rank * 37 + i) as u8).into()).collect();
    let swapped = (0..n).flat_map(|from| (0..part).map(move |i| T::from((from * 37 + rank * part + i) as u8)));
    let swapped: Vec<T> = swapped.collect();
    let mut data = input.clone();
    group.all_to_all(&mut data).unwrap();
    assert_eq!(data, swapped, "all_to_all of {label}");
    let mut data = vec![T::from(0); input.len()];
    group.all_to_all_into(&input, &mut data).unwrap();
    assert_eq!(data, swapped, "all_to_all_into of {label}");
    group.barrier().unwrap();
    // These channels are unbounded, so all ranks may send first.
    if n > 1 {
        let mut data = vec![T::from(0); len];
        group.send(&mine, (rank + 1) % n).unwrap();
        group.recv(&mut data, (rank + n - 1) % n).unwrap();
        assert!(data.into_iter().eq((0..len).map(|i| value((rank + n - 1) % n, i).into())), "messages of {label}");
    }
}

/// `i8` does not implement `From<u8>`, so it has a check of its own: the mean and the sum of negative numbers.
fn signed_bytes(group: &Group) {
    let n = group.world_size() as i8;
    let mut data = [-3i8; 5];
    group.all_reduce(&mut data, ReduceOp::Mean).unwrap();
    assert_eq!(data, [-3; 5]);
    group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
    assert_eq!(data, [-3 * n; 5]);
}

fn every_type(group: &Group) {
    for len in [0, 1, 5, 6, 1000] {
        every_operation::<f32>(group, len);
        every_operation::<f64>(group, len);
        every_operation::<f16>(group, len);
        every_operation::<bf16>(group, len);
        every_operation::<i16>(group, len);
        every_operation::<i32>(group, len);
        every_operation::<i64>(group, len);
        every_operation::<u8>(group, len);
        every_operation::<u16>(group, len);
        every_operation::<u32>(group, len);
        every_operation::<u64>(group, len);
    }
    every_operation::<f32>(group, 100_000);
    signed_bytes(group);
}

#[test]
fn a_custom_transport_runs_every_operation() {
    for n in 1..=5 {
        run_on_channels(n, |builder| builder, |_| Faults::default(), |group| every_type(&group));
    }
}

#[test]
fn a_custom_transport_runs_every_algorithm() {
    for algorithm in Algorithm::ALL.iter().copied() {
        for n in 2..=5 {
            let settings = |builder: Builder| builder.algorithms(algorithm);
            run_on_channels(n, settings, |_| Faults::default(), |group| every_type(&group));
        }
    }
}

#[test]
fn a_transport_can_be_a_trait_object() {
    let mut ends = Channels::group(1);
    let object: Arc<dyn Transport> = Arc::new(ends.remove(0));
    let group = Group::on(object);
    assert_eq!((group.rank(), group.world_size()), (0, 1));
    every_type(&group);
}

#[test]
fn started_operations_run_on_a_custom_transport() {
    run_on_channels(
        3,
        |builder| builder,
        |_| Faults::default(),
        |group| {
            let works: Vec<_> =
                (0..20).map(|i| group.start_all_reduce(vec![i as u64; 100], ReduceOp::Sum).unwrap()).collect();
            drop(group);
            for (i, work) in works.into_iter().enumerate().rev() {
                assert_eq!(work.wait().map_err(|(error, _)| error).unwrap(), vec![3 * i as u64; 100]);
            }
        },
    );
}
