//! Gather, scatter, variable-size operations (`_v`), exchanges between pairs of ranks, and batches.

use std::ops::Range;

use bonfire_core::{Group, ReduceOp, partition};

use crate::oracle::{Sample, all_reduced, input};

/// Sizes of all ranks' parts, by `len`: all elements on one rank, every other part empty, growing, or shrinking.
fn sizes(n: usize, len: usize) -> Vec<usize> {
    let size = |rank: usize| match len % 4 {
        0 => len * usize::from(rank == len / 4 % n),
        1 => (len / n + 1) * usize::from(rank.is_multiple_of(2)),
        2 => rank * len / (n * n),
        _ => len / (rank + 1),
    };
    (0..n).map(size).collect()
}

fn part(sizes: &[usize], rank: usize) -> Range<usize> {
    let start = sizes[..rank].iter().sum();
    start..start + sizes[rank]
}

/// How many elements rank `from` sends to rank `to`.
fn between(from: usize, to: usize, len: usize) -> usize {
    (from * 5 + to * 3 + len) % 4 * (len / 7 + 1)
}

/// Checks gather, scatter, exchanges between pairs, and the operations with parts of uneven sizes.
///
/// # Panics
/// If a result is wrong, or an operation fails.
pub fn check<T: Sample>(group: &Group, len: usize) {
    let (rank, n) = (group.rank(), group.world_size());
    let label = |what: &str| format!("{what} of {} x {len} on rank {rank} of {n}", T::DTYPE);
    check_even::<T>(group, len, (len + 1) % n, &label);
    check_sizes::<T>(group, len);
    check_pairs::<T>(group, len, &label);
}

fn check_even<T: Sample>(group: &Group, len: usize, root: usize, label: &impl Fn(&str) -> String) {
    let (rank, n) = (group.rank(), group.world_size());
    let own = partition(len, n, rank);
    let mine: Vec<T> = input(rank, len);
    let all: Vec<T> = (0..n).flat_map(|r| input::<T>(r, len)[partition(len, n, r)].to_vec()).collect();

    let mut data = mine.clone();
    group.gather(&mut data, root).unwrap();
    assert_eq!(data, if rank == root { &all[..] } else { &mine[..] }, "{}", label("gather"));
    let whole: Vec<T> = (0..n).flat_map(|r| input::<T>(r, len)).collect();
    let mut output = vec![T::zeroed(); if rank == root { n * len } else { 0 }];
    group.gather_into(&mine, &mut output, root).unwrap();
    assert_eq!(output, if rank == root { &whole[..] } else { &[] }, "{}", label("gather_into"));

    let mut data = mine.clone();
    group.scatter(&mut data, root).unwrap();
    let mut want = mine.clone();
    want[own.clone()].copy_from_slice(&input::<T>(root, len)[own]);
    assert_eq!(data, want, "{}", label("scatter"));
    let mut output = vec![T::zeroed(); len];
    group.scatter_into(if rank == root { &whole } else { &[] }, &mut output, root).unwrap();
    assert_eq!(output, mine, "{}", label("scatter_into"));
}

/// Checks the operations with parts of uneven sizes.
///
/// # Panics
/// If a result is wrong, or an operation fails.
pub fn check_sizes<T: Sample>(group: &Group, len: usize) {
    let (rank, n) = (group.rank(), group.world_size());
    let label = |what: &str| format!("{what} of {} x {len} on rank {rank} of {n}", T::DTYPE);
    let (sizes, root) = (&sizes(n, len)[..], (len + 1) % n);
    let (len, own) = (sizes.iter().sum(), part(sizes, rank));
    let mine: Vec<T> = input(rank, own.len());
    let all: Vec<T> = (0..n).flat_map(|r| input::<T>(r, sizes[r])).collect();

    let mut output = vec![T::zeroed(); len];
    group.all_gather_v_into(&mine, sizes, &mut output).unwrap();
    assert_eq!(output, all, "{}", label("all_gather_v_into"));
    assert_eq!(group.all_gather_v(&mine).unwrap(), (all.clone(), sizes.to_vec()), "{}", label("all_gather_v"));

    for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
        let want: Vec<T> = all_reduced(op, n, own.clone());
        let (whole, mut output) = (input::<T>(rank, len), vec![T::zeroed(); own.len()]);
        group.reduce_scatter_v_into(&whole, sizes, &mut output, op).unwrap();
        assert_eq!(output, want, "{}", label("reduce_scatter_v_into"));
        assert_eq!(group.reduce_scatter_v(&whole, own.len(), op).unwrap(), want, "{}", label("reduce_scatter_v"));
    }

    let is_root = rank == root;
    let mut output = vec![T::zeroed(); if is_root { len } else { 0 }];
    group.gather_v_into(&mine, sizes, &mut output, root).unwrap();
    assert_eq!(output, if is_root { &all[..] } else { &[] }, "{}", label("gather_v_into"));
    let gathered = group.gather_v(&mine, root).unwrap();
    assert_eq!(gathered, is_root.then(|| (all.clone(), sizes.to_vec())), "{}", label("gather_v"));

    let mut output = vec![T::zeroed(); own.len()];
    group.scatter_v_into(if is_root { &all } else { &[] }, sizes, &mut output, root).unwrap();
    assert_eq!(output, mine, "{}", label("scatter_v_into"));
    let scattered = group.scatter_v(is_root.then_some((&all[..], sizes)), root).unwrap();
    assert_eq!(scattered, mine, "{}", label("scatter_v"));
}

fn check_pairs<T: Sample>(group: &Group, len: usize, label: &impl Fn(&str) -> String) {
    let (rank, n) = (group.rank(), group.world_size());
    // Every pair of up to 9 ranks starts at a value of its own.
    let parcel =
        |from: usize, to: usize| (0..between(from, to, len)).map(move |i| T::of(((from * 9 + to + i) % 120) as i128));
    let send: Vec<usize> = (0..n).map(|to| between(rank, to, len)).collect();
    let receive: Vec<usize> = (0..n).map(|from| between(from, rank, len)).collect();
    let mine: Vec<T> = (0..n).flat_map(|to| parcel(rank, to)).collect();
    let want: Vec<T> = (0..n).flat_map(|from| parcel(from, rank)).collect();
    let mut output = vec![T::zeroed(); want.len()];
    group.all_to_all_v_into(&mine, &send, &mut output, &receive).unwrap();
    assert_eq!(output, want, "{}", label("all_to_all_v_into"));
    assert_eq!(group.all_to_all_v(&mine, &send).unwrap(), (want, receive), "{}", label("all_to_all_v"));

    // Around the ring, with a different length on each rank.
    let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
    let mine: Vec<T> = input(rank, len + rank);
    let mut data = vec![T::zeroed(); len + previous];
    group.exchange(&mine, next, &mut data, previous).unwrap();
    assert_eq!(data, input::<T>(previous, len + previous), "{}", label("exchange"));
}

/// Checks operations of several kinds and types in one batch, with messages in an order in which ranks would wait for
/// each other one by one.
///
/// # Panics
/// If a result is wrong, or an operation fails.
pub fn check_batch(group: &Group, len: usize) {
    let (rank, n) = (group.rank(), group.world_size());
    let root = len % n;
    let (mut sums, mut more): (Vec<f32>, Vec<f32>) = (input(rank, len), input(rank, len + 5));
    let (mut most, mut whole): (Vec<i16>, Vec<i16>) = (input(rank, 2 * len), input(rank, 7));
    let (mut reduced_at_root, mut from_root): (Vec<f64>, Vec<u8>) = (input(rank, len), input(rank, len + 1));
    // Two messages of different lengths to every other rank. Every rank sends and receives in a different order.
    let others = || (1..n).map(move |distance| (rank + distance) % n);
    let lengths = |from: usize, to: usize| [between(from, to, len), (from + 2 * to) % 5];
    let outgoing: Vec<_> = others().map(|to| (to, lengths(rank, to).map(|len| input::<u32>(rank, len)))).collect();
    let mut incoming: Vec<_> =
        others().rev().map(|from| (from, lengths(from, rank).map(|len| vec![0u32; len]))).collect();
    let mut batch = group.batch();
    for (from, data) in &mut incoming {
        batch = data.iter_mut().fold(batch, |batch, data| batch.recv(data, *from));
    }
    batch = batch.all_reduce(&mut sums, ReduceOp::Sum).all_reduce(&mut most, ReduceOp::Max);
    batch = batch.all_reduce(&mut more, ReduceOp::Sum).all_reduce(&mut whole, ReduceOp::Sum);
    batch = batch.reduce(&mut reduced_at_root, ReduceOp::Mean, root).broadcast(&mut from_root, root);
    for (to, data) in &outgoing {
        batch = data.iter().fold(batch, |batch, data| batch.send(data, *to));
    }
    batch.run().unwrap();
    assert_eq!(sums, all_reduced::<f32>(ReduceOp::Sum, n, 0..len));
    assert_eq!(more, all_reduced::<f32>(ReduceOp::Sum, n, 0..len + 5));
    assert_eq!(most, all_reduced::<i16>(ReduceOp::Max, n, 0..2 * len));
    assert_eq!(whole, all_reduced::<i16>(ReduceOp::Sum, n, 0..7));
    let mean: Vec<f64> = all_reduced(ReduceOp::Mean, n, 0..len);
    assert_eq!(reduced_at_root, if rank == root { mean } else { input(rank, len) });
    assert_eq!(from_root, input::<u8>(root, len + 1));
    for (from, data) in incoming {
        assert_eq!(data, lengths(from, rank).map(|len| input::<u32>(from, len)), "from {from} to {rank}");
    }
}
