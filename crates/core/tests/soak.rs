//! A soak: operations of random kind, type, size and form on a group and two subgroups that share ranks and are all in use at
//! once, every result compared bit for bit.
//!
//! `BONFIRE_SOAK` says how many operations, over all kinds of groups together, and `BONFIRE_SOAK_SEED` which ones.

#[path = "soak/case.rs"]
mod case;
#[path = "soak/hand.rs"]
mod hand;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bonfire_core::{DType, Group, Operation};
use bonfire_testing::transport::Random;
use bonfire_testing::{Kind, doors, run_ranks};
use case::{Case, GROUPS, below, hash};
use half::{bf16, f16};
use hand::{Arrivals, Check, Form, Hand};

const KINDS: [Kind; 4] = [Kind::Threads, Kind::Tcp, Kind::Shm, Kind::Hosts(&[0, 0, 1, 1])];

/// What ranks have done so far, counted by the draws that all of them make.
#[derive(Clone, Copy, Default)]
struct Tally {
    operations: usize,
    reduced: usize,
    moved: usize,
    barriers: [usize; GROUPS.len()],
    /// The most KiB of memory that the process was seen to hold in the first half and in the second.
    memory: [usize; 2],
}

impl Tally {
    /// The next operations, on one group or on several at once.
    fn step(&mut self, random: &mut Random, step: usize) -> Vec<Case> {
        let groups: &[usize] = [&[0][..], &[1], &[2], &[0, 1], &[0, 2], &[1, 2], &[1, 2], &[0, 1, 2]][below(random, 8)];
        let mut cases: Vec<_> = groups.iter().map(|group| Case::draw(random, step, *group)).collect();
        for case in &mut cases {
            self.operations += 1;
            *if case.call.reduction.is_some() { &mut self.reduced } else { &mut self.moved } += case.call.bytes();
            self.barriers[case.group] += usize::from(case.call.operation == Operation::Barrier);
            case.barriers = self.barriers[case.group];
        }
        cases
    }
}

/// The operations of the rank that has these groups. No operation waits for one of another group: of those that are
/// called at once only the last may block, and whatever is waited for, every rank has then started, or it will without
/// waiting for this one.
fn soak(
    seed: u64,
    operations: usize,
    rank: usize,
    groups: &[Option<Group>],
    arrived: &Arc<Arrivals>,
) -> Result<Tally, String> {
    let (mut shared, mut own) = (Random(hash(seed, 0)), Random(hash(seed, 1 + rank as u64)));
    let (mut tally, mut step) = (Tally::default(), 0);
    let mut pending: Vec<(Case, Form, Check)> = Vec::new();
    let end = |(case, form, check): (Case, Form, Check)| {
        let group = GROUPS[case.group];
        check().map_err(|e| {
            format!("step {} on rank {rank}, {form:?} in the group of {group:?}: {e}: {case:?}", case.step)
        })
    };
    while tally.operations < operations {
        let mut cases = tally.step(&mut shared, step);
        cases.retain(|case| groups[case.group].is_some());
        if step % 64 == 0 {
            let peak = &mut tally.memory[usize::from(tally.operations > operations / 2)];
            *peak = holdings()[2].max(*peak);
        }
        step += 1;
        // Another order on each rank.
        while !cases.is_empty() {
            let case = cases.swap_remove(below(&mut own, cases.len()));
            let form = match below(&mut own, 4) {
                0 if cases.is_empty() => Form::InPlace,
                1 if cases.is_empty() => Form::Into,
                _ => Form::Started,
            };
            let group = groups[case.group].clone().expect("this rank has it");
            // A buffer works with every group. Most often it is from the one that uses it.
            let other = groups[below(&mut own, GROUPS.len())].clone().filter(|_| below(&mut own, 8) == 0);
            let hand = Hand { case, lender: other.unwrap_or_else(|| group.clone()), group, random: &mut own };
            let check = match case.call.dtype {
                DType::F32 => hand.call::<f32>(form, arrived),
                DType::F64 => hand.call::<f64>(form, arrived),
                DType::F16 => hand.call::<f16>(form, arrived),
                DType::BF16 => hand.call::<bf16>(form, arrived),
                DType::I8 => hand.call::<i8>(form, arrived),
                DType::I16 => hand.call::<i16>(form, arrived),
                DType::I32 => hand.call::<i32>(form, arrived),
                DType::I64 => hand.call::<i64>(form, arrived),
                DType::U8 => hand.call::<u8>(form, arrived),
                DType::U16 => hand.call::<u16>(form, arrived),
                DType::U32 => hand.call::<u32>(form, arrived),
                DType::U64 => hand.call::<u64>(form, arrived),
                other => panic!("no case is of {other}"),
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

/// Threads and open files of this process, and KiB of memory that it holds. Only Linux tells them.
fn holdings() -> [usize; 3] {
    let entries = |folder: &str| std::fs::read_dir(folder).map_or(0, Iterator::count);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let memory =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim_end_matches("kB").trim().parse().ok());
    [entries("/proc/self/task"), entries("/proc/self/fd"), memory.unwrap_or(0)]
}

/// A kind of groups, from before they are made until nothing is left of them.
fn run(kind: Kind, seed: u64, operations: usize) {
    let before = holdings();
    let (arrived, start) = (Arc::new(Arrivals::default()), Instant::now());
    let ranks = doors(kind, GROUPS[0], |builder| builder).into_iter().enumerate().map(|(rank, door)| {
        let arrived = arrived.clone();
        thread::spawn(move || {
            let all = door();
            let part =
                |members: &[usize]| members.contains(&rank).then(|| all.subgroup(members).expect("members come"));
            let groups = [Some(all.clone()), part(GROUPS[1]), part(GROUPS[2])];
            drop(all);
            soak(seed, operations, rank, &groups, &arrived)
        })
    });
    let ranks: Vec<_> = ranks.collect();
    let results: Vec<_> = ranks.into_iter().map(|rank| rank.join().expect("a rank does not panic")).collect();
    let errors: Vec<_> = results.iter().filter_map(|result| result.as_ref().err().cloned()).collect();
    let again = format!("BONFIRE_SOAK_SEED={seed} BONFIRE_SOAK={} repeats it", operations * KINDS.len());
    // One of them is the cause; other ranks then lose that one, by its number in their group.
    assert!(errors.is_empty(), "{kind:?}, {again}:\n{}", errors.join("\n"));
    let Tally { operations, reduced, moved, memory, .. } = results[0].clone().expect("there are no errors");
    println!(
        "soak: {kind:?}: {operations} operations, {} MiB reduced, {} MiB moved, {:.1} s, wrong 0 (seed {seed})",
        reduced >> 20,
        moved >> 20,
        start.elapsed().as_secs_f64()
    );

    // Memory that a group keeps grows to what its largest operation needs: a few operations say nothing.
    let [earlier, later] = memory;
    let bounded = operations < 10_000 || later < earlier + earlier / 4 + (64 << 10);
    assert!(bounded, "{kind:?}, {again}: up to {earlier} KiB of memory in the first half, {later} in the second");
    // Threads and sockets end by themselves once the last handle is gone.
    let begun = Instant::now();
    let left = |left: &[usize; 3]| format!("{} threads and {} open files", left[0], left[1]);
    loop {
        let now = holdings();
        if now[0] <= before[0] && now[1] <= before[1] {
            break;
        }
        let (before, now) = (left(&before), left(&now));
        assert!(begun.elapsed() < Duration::from_secs(2), "{kind:?}: {before} before, and {now} afterwards");
        thread::yield_now();
    }
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{variable} is a number")))
}

#[test]
fn everything_at_once_gives_the_right_bits() {
    let (seed, operations) = (number("BONFIRE_SOAK_SEED", 1), number("BONFIRE_SOAK", 3000) as usize);
    // What a process opens once, and keeps: sockets for its signals.
    run_ranks(Kind::Tcp, 2, |group| group.barrier()).into_iter().for_each(|done| done.expect("both are there"));
    for kind in KINDS {
        run(kind, seed, operations.div_ceil(KINDS.len()));
    }
}
