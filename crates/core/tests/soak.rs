//! A soak test: operations of random kind, type, size and form on a group and two overlapping subgroups, all of them in
//! use at once. Every result is compared bit for bit.
//!
//! `BONFIRE_SOAK` is the number of operations on groups of four ranks, over all kinds together; a twenty-fifth part as
//! many run on groups of 17 and of 32 ranks. `BONFIRE_SOAK_SEED` selects them.

#[path = "soak/case.rs"]
mod case;
#[path = "soak/hand.rs"]
mod hand;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bonfire_core::{DType, Group, Operation};
use bonfire_testing::settings::number;
use bonfire_testing::transport::Random;
use bonfire_testing::{Kind, joins, run_ranks};
use case::{Case, GROUPS, below, hash, members};
use half::{bf16, f16};
use hand::{Arrivals, Check, Form, RankCall};

/// Each kind of group of four ranks, and whether its control connections form a star.
const KINDS: [(Kind, bool); 7] = [
    (Kind::Threads, false),
    (Kind::Tcp, false),
    (Kind::Tcp, true),
    (Kind::Shm, false),
    (Kind::Shm, true),
    (Kind::Hosts(&[0, 0, 1, 1]), false),
    (Kind::Hosts(&[0, 0, 1, 1]), true),
];

/// Kinds of groups that are stars because of their size.
const LARGE: [(Kind, usize); 5] =
    [(Kind::Tcp, 17), (Kind::Tcp, 32), (Kind::Shm, 17), (Kind::Shm, 32), (Kind::Hosts(&[0, 0, 1, 1]), 17)];

/// Totals so far, counted from the random draws that all ranks make alike.
#[derive(Clone, Copy, Default)]
struct Tally {
    operations: usize,
    reduced: usize,
    moved: usize,
    barriers: [usize; GROUPS],
    /// Peak resident memory in KiB, sampled in the first half of the run and in the second.
    memory: [usize; 2],
}

impl Tally {
    /// Draws the next operations: one operation on one group, or on each of several groups at once.
    fn step(&mut self, random: &mut Random, step: usize, world_size: usize) -> Vec<Case> {
        let groups: &[usize] = [&[0][..], &[1], &[2], &[0, 1], &[0, 2], &[1, 2], &[1, 2], &[0, 1, 2]][below(random, 8)];
        let mut cases: Vec<_> = groups.iter().map(|group| Case::draw(random, step, *group, world_size)).collect();
        for case in &mut cases {
            self.operations += 1;
            *if case.call.reduction.is_some() { &mut self.reduced } else { &mut self.moved } += case.call.bytes();
            self.barriers[case.group] += usize::from(case.call.operation == Operation::Barrier);
            case.barriers = self.barriers[case.group];
        }
        cases
    }
}

/// Runs the operations of one rank. No operation waits for one of another group: of those that are called at once only
/// the last may block. All ranks have started every operation that this rank waits for, or will start it without
/// waiting for this rank.
fn soak(
    seed: u64,
    operations: usize,
    (rank, world_size): (usize, usize),
    groups: &[Option<Group>],
    arrived: &Arc<Arrivals>,
) -> Result<Tally, String> {
    let (mut shared, mut own) = (Random(hash(seed, 0)), Random(hash(seed, 1 + rank as u64)));
    let (mut tally, mut step) = (Tally::default(), 0);
    let mut pending: Vec<(Case, Form, Check)> = Vec::new();
    let end = |(case, form, check): (Case, Form, Check)| {
        let group = members(case.group, world_size);
        check().map_err(|e| {
            format!("step {} on rank {rank}, {form:?} in the group of {group:?}: {e}: {case:?}", case.step)
        })
    };
    while tally.operations < operations {
        let mut cases = tally.step(&mut shared, step, world_size);
        cases.retain(|case| groups[case.group].is_some());
        if step % 64 == 0 {
            let peak = &mut tally.memory[usize::from(tally.operations > operations / 2)];
            *peak = resource_usage()[2].max(*peak);
        }
        step += 1;
        // In a different order on each rank.
        while !cases.is_empty() {
            let case = cases.swap_remove(below(&mut own, cases.len()));
            let form = match below(&mut own, 4) {
                0 if cases.is_empty() => Form::InPlace,
                1 if cases.is_empty() => Form::Into,
                _ => Form::Started,
            };
            let group = groups[case.group].clone().expect("this rank is a member");
            // A buffer works with every group. Usually the group that uses it has allocated it.
            let other = groups[below(&mut own, GROUPS)].clone().filter(|_| below(&mut own, 8) == 0);
            let call = RankCall { case, allocator: other.unwrap_or_else(|| group.clone()), group, random: &mut own };
            let check = match case.call.dtype {
                DType::F32 => call.run::<f32>(form, arrived),
                DType::F64 => call.run::<f64>(form, arrived),
                DType::F16 => call.run::<f16>(form, arrived),
                DType::BF16 => call.run::<bf16>(form, arrived),
                DType::I8 => call.run::<i8>(form, arrived),
                DType::I16 => call.run::<i16>(form, arrived),
                DType::I32 => call.run::<i32>(form, arrived),
                DType::I64 => call.run::<i64>(form, arrived),
                DType::U8 => call.run::<u8>(form, arrived),
                DType::U16 => call.run::<u16>(form, arrived),
                DType::U32 => call.run::<u32>(form, arrived),
                DType::U64 => call.run::<u64>(form, arrived),
                other => panic!("no case has type {other}"),
            };
            let check = check.unwrap_or_else(|error| Box::new(|| Err(error)));
            if form == Form::Started { pending.push((case, form, check)) } else { end((case, form, check))? }
        }
        let left = if tally.operations < operations { below(&mut own, 8) } else { 0 };
        while pending.len() > left {
            end(pending.swap_remove(below(&mut own, pending.len())))?;
        }
    }
    Ok(tally)
}

/// Returns threads and open files of this process, and its resident memory in KiB. Only Linux reports them.
fn resource_usage() -> [usize; 3] {
    let entries = |folder: &str| std::fs::read_dir(folder).map_or(0, Iterator::count);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let memory =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim_end_matches("kB").trim().parse().ok());
    [entries("/proc/self/task"), entries("/proc/self/fd"), memory.unwrap_or(0)]
}

/// Runs the soak on one kind of group, and checks that nothing remains of the groups afterwards.
fn run((kind, n, star): (Kind, usize, bool), seed: u64, operations: usize) {
    let before = resource_usage();
    let label = format!("{kind:?}, {n} ranks{}", if star { ", star" } else { "" });
    let (arrived, start) = (Arc::new(Arrivals::default()), Instant::now());
    let all: Vec<_> = members(0, n).collect();
    let ranks = joins(kind, &all, |builder| if star { builder.full_mesh_limit(2) } else { builder })
        .into_iter()
        .enumerate()
        .map(|(rank, endpoint)| {
            let arrived = arrived.clone();
            thread::spawn(move || {
                let all = endpoint();
                let part = |group| {
                    let members: Vec<_> = members(group, n).collect();
                    members.contains(&rank).then(|| all.subgroup(&members).expect("members agree"))
                };
                let groups = [Some(all.clone()), part(1), part(2)];
                drop(all);
                soak(seed, operations, (rank, n), &groups, &arrived)
            })
        });
    let ranks: Vec<_> = ranks.collect();
    let results: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect();
    let errors: Vec<_> = results.iter().filter_map(|result| result.as_ref().err().cloned()).collect();
    let again = format!("BONFIRE_SOAK_SEED={seed} repeats it, with the same BONFIRE_SOAK");
    // One error is the cause. The other ranks then lose the rank that had it, by its number in their group.
    assert!(errors.is_empty(), "{label}, {again}:\n{}", errors.join("\n"));
    let Tally { operations, reduced, moved, memory, .. } = results[0].clone().expect("there are no errors");
    println!(
        "soak: {label}: {operations} operations, {} MiB reduced, {} MiB moved, {:.1} s, wrong 0 (seed {seed})",
        reduced >> 20,
        moved >> 20,
        start.elapsed().as_secs_f64()
    );

    // The memory of a group grows to what its largest operation needs, so that a short run proves nothing.
    let [earlier, later] = memory;
    let bounded = operations < 10_000 || later < earlier + earlier / 4 + (64 << 10);
    assert!(bounded, "{label}, {again}: up to {earlier} KiB of memory in the first half, {later} in the second");
    // Threads and sockets end on their own after the last handle is dropped.
    let begun = Instant::now();
    let left = |left: &[usize; 3]| format!("{} threads and {} open files", left[0], left[1]);
    loop {
        let now = resource_usage();
        if now[0] <= before[0] && now[1] <= before[1] {
            break;
        }
        let (before, now) = (left(&before), left(&now));
        assert!(begun.elapsed() < Duration::from_secs(2), "{label}: {before} before, and {now} afterwards");
        thread::yield_now();
    }
}

/// One test, because threads and open files are counted.
#[test]
fn mixed_operations_on_overlapping_groups_are_exact() {
    let (seed, operations) =
        (number("BONFIRE_SOAK_SEED").unwrap_or(1), number("BONFIRE_SOAK").unwrap_or(3000) as usize);
    // Opens what a process opens once and keeps: sockets for its signals.
    run_ranks(Kind::Tcp, 2, |group| group.barrier()).into_iter().for_each(|done| done.expect("both are there"));
    for (kind, star) in KINDS {
        run((kind, 4, star), seed, operations.div_ceil(KINDS.len()));
    }
    // An operation of so many ranks takes far longer on a few cores.
    for (kind, n) in LARGE {
        run((kind, n, false), seed, operations.div_ceil(25 * LARGE.len()));
    }
}
