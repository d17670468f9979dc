//! Every operation on slices, on every type, compared with exact arithmetic.

use bonfire_core::{Group, ReduceOp, partition};
use half::{bf16, f16};

use crate::oracle::{Sample, all_reduced, input, parcel};
use crate::variable_size;

/// Checks all_to_all with parts of `part` elements. Ranks choose in place or out of place independently.
fn check_all_to_all<T: Sample>(group: &Group, part: usize) {
    let (rank, n) = (group.rank(), group.world_size());
    let parts = |value: &dyn Fn(usize, usize) -> T| -> Vec<T> {
        (0..n).flat_map(|other| (0..part).map(move |i| value(other, i))).collect()
    };
    let mine = parts(&|to, i| parcel(rank, to, i));
    let want = parts(&|from, i| parcel(from, rank, i));
    for (form, in_place) in [("in place", true), ("into", false), ("mixed", rank % 2 == 0), ("mixed", rank % 2 == 1)] {
        let mut output = if in_place { mine.clone() } else { vec![T::zeroed(); part * n] };
        if in_place {
            group.all_to_all(&mut output).unwrap();
        } else {
            group.all_to_all_into(&mine, &mut output).unwrap();
        }
        assert_eq!(output, want, "all_to_all {form} of {} x {part} * {n} on rank {rank}", T::DTYPE);
    }
}

/// Checks every operation in every form on one length, the same on all ranks.
///
/// # Panics
/// If a result is wrong, or an operation fails.
pub fn check<T: Sample>(group: &Group, len: usize) {
    let (rank, n) = (group.rank(), group.world_size());
    let own = partition(len, n, rank);
    let mine: Vec<T> = input(rank, len);
    let label = |what: &str| format!("{what} of {} x {len} on rank {rank} of {n}", T::DTYPE);
    let root = len % n;
    for op in ReduceOp::ALL.iter().copied() {
        let want: Vec<T> = all_reduced(op, n, 0..len);

        let mut data = mine.clone();
        group.all_reduce(&mut data, op).unwrap();
        assert_eq!(data, want, "{}", label("all_reduce"));
        let mut output = vec![T::zeroed(); len];
        group.all_reduce_into(&mine, &mut output, op).unwrap();
        assert_eq!(output, want, "{}", label("all_reduce_into"));

        let mut data = mine.clone();
        group.reduce(&mut data, op, root).unwrap();
        assert_eq!(data, if rank == root { &want[..] } else { &mine[..] }, "{}", label("reduce"));
        let mut output = vec![T::zeroed(); if rank == root { len } else { 0 }];
        group.reduce_into(&mine, &mut output, op, root).unwrap();
        assert_eq!(output, if rank == root { &want[..] } else { &[] }, "{}", label("reduce_into"));

        let mut data = mine.clone();
        group.reduce_scatter(&mut data, op).unwrap();
        assert_eq!(data[own.clone()], want[own.clone()], "{}", label("reduce_scatter"));
        let mut output = vec![T::zeroed(); own.len()];
        group.reduce_scatter_into(&mine, &mut output, op).unwrap();
        assert_eq!(output, want[own.clone()], "{}", label("reduce_scatter_into"));
    }

    let want: Vec<T> = input(root, len);
    let mut data = mine.clone();
    group.broadcast(&mut data, root).unwrap();
    assert_eq!(data, want, "{}", label("broadcast"));
    let mut output = vec![T::zeroed(); len];
    group.broadcast_into((rank == root).then_some(&mine[..]), &mut output, root).unwrap();
    assert_eq!(output, want, "{}", label("broadcast_into"));

    let want: Vec<T> = (0..n).flat_map(|r| input::<T>(r, len)[partition(len, n, r)].to_vec()).collect();
    let mut data = vec![T::zeroed(); len];
    data[own.clone()].copy_from_slice(&mine[own.clone()]);
    group.all_gather(&mut data).unwrap();
    assert_eq!(data, want, "{}", label("all_gather"));
    let mut output = vec![T::zeroed(); len];
    group.all_gather_into(&mine[own], &mut output).unwrap();
    assert_eq!(output, want, "{}", label("all_gather_into"));

    check_all_to_all::<T>(group, len.div_ceil(n));

    if n > 1 {
        let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
        let mut data = vec![T::zeroed(); len];
        // Even ranks send first and odd ranks receive first, so the ranks never wait for each other in a cycle.
        if rank % 2 == 0 {
            group.send(&mine, next).unwrap();
            group.recv(&mut data, previous).unwrap();
        } else {
            group.recv(&mut data, previous).unwrap();
            group.send(&mine, next).unwrap();
        }
        assert_eq!(data, input::<T>(previous, len), "{}", label("send and recv"));
    }
    group.barrier().unwrap();
}

/// Checks reductions of negative numbers in each signed type: those of the other checks are positive, which an unsigned
/// reduction would get right too.
///
/// # Panics
/// If a result is wrong, or an operation fails.
pub fn check_negative(group: &Group) {
    negative::<i8>(group);
    negative::<i16>(group);
    negative::<i32>(group);
    negative::<i64>(group);
    negative::<f16>(group);
    negative::<bf16>(group);
    negative::<f32>(group);
    negative::<f64>(group);
}

/// Rank `r` has `r - 1`: numbers of both signs, which an unsigned type orders otherwise. In `Mean` all have -3, so that
/// it is exact.
fn negative<T: Sample>(group: &Group) {
    let (rank, n) = (group.rank() as i128, group.world_size() as i128);
    for (op, own, want) in [
        (ReduceOp::Sum, rank - 1, n * (n - 3) / 2),
        (ReduceOp::Max, rank - 1, n - 2),
        (ReduceOp::Min, rank - 1, -1),
        (ReduceOp::Mean, -3, -3),
    ] {
        let mut data = [T::of(own); 5];
        group.all_reduce(&mut data, op).unwrap();
        assert_eq!(data, [T::of(want); 5], "{op:?} of negative {} on rank {rank}", T::DTYPE);
    }
}

/// Returns lengths around those at which the parts of `n` ranks change.
pub fn lengths(n: usize) -> Vec<usize> {
    let mut lengths = vec![0, 1, n - 1, n, n + 1, 5, 6, 7, 11, 1000];
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// Checks every operation on every element type. All ranks call it with the same lengths.
///
/// # Panics
/// If a result is wrong, or an operation fails.
pub fn check_all_types(group: &Group, lengths: &[usize]) {
    for len in lengths {
        check::<f32>(group, *len);
        check::<f64>(group, *len);
        check::<f16>(group, *len);
        check::<bf16>(group, *len);
        check::<i8>(group, *len);
        check::<i16>(group, *len);
        check::<i32>(group, *len);
        check::<i64>(group, *len);
        check::<u8>(group, *len);
        check::<u16>(group, *len);
        check::<u32>(group, *len);
        check::<u64>(group, *len);
        variable_size::check::<f32>(group, *len);
        variable_size::check::<bf16>(group, *len);
        variable_size::check::<i64>(group, *len);
        variable_size::check::<u8>(group, *len);
    }
}
