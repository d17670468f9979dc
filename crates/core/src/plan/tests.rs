//! Plans on paper: all ranks' plans are run together against an oracle, with sets of ranks for values.

use std::collections::{BTreeSet, VecDeque};

use super::selection::SELECTABLE;
use super::*;

/// A part's value: which ranks' inputs are in it. Combining a rank's input twice is a mistake that this shows. Of
/// all_to_all, which combines nothing: the input's number among those of all ranks.
type Value = BTreeSet<usize>;

struct World {
    n: usize,
    plans: Vec<Plan>,
    parts: Vec<Vec<Value>>,
    sent: Vec<usize>,
}

impl World {
    fn new(operation: Operation, algorithm: Algorithm, n: usize, root: usize) -> World {
        let plans = (0..n).map(|rank| plan(operation, algorithm, rank, n, root)).collect();
        let start = |rank: usize, part: usize| match operation {
            Operation::AllGather | Operation::Gather if rank != part => Value::new(),
            Operation::Broadcast | Operation::Scatter if rank != root => Value::new(),
            Operation::AllToAll => Value::from([rank * n + part]),
            _ => Value::from([rank]),
        };
        let parts = (0..n).map(|rank| (0..n).map(|part| start(rank, part)).collect()).collect();
        World { n, plans, parts, sent: vec![0; n] }
    }

    /// Runs all plans to their ends; panics where they disagree, wait for each other in a circle, or combine twice.
    fn run(&mut self) {
        type Message = (usize, Range<usize>, Vec<Value>);
        let n = self.n;
        let steps: Vec<Vec<Step>> =
            self.plans.iter().map(|p| [&p.agree[..], &p.reduce, &p.distribute].concat()).collect();
        let mut next = vec![0; n];
        let mut sent_step = vec![false; n];
        let mut wires: Vec<VecDeque<Message>> = vec![VecDeque::new(); n * n];
        loop {
            let mut progress = false;
            for rank in 0..n {
                let Some(step) = steps[rank].get(next[rank]) else { continue };
                if let Some((to, parts)) = step.send.clone().filter(|_| !sent_step[rank]) {
                    assert_ne!(to, rank);
                    let values = self.parts[rank][parts.clone()].to_vec();
                    self.sent[rank] += parts.len();
                    wires[rank * n + to].push_back((next[rank], parts, values));
                    progress = true;
                }
                sent_step[rank] = true;
                if let Some((from, parts, combine)) = &step.receive {
                    let Some((_, theirs, values)) = wires[from * n + rank].pop_front() else { continue };
                    // All_to_all has parts of one length; elsewhere a part has its own.
                    let fits = if *combine == Combine::Swap { theirs.len() == parts.len() } else { theirs == *parts };
                    assert!(fits, "rank {rank} expects {parts:?}, rank {from} sends {theirs:?}");
                    for (part, value) in parts.clone().zip(values) {
                        let mine = &mut self.parts[rank][part];
                        if matches!(combine, Combine::Replace | Combine::Swap) {
                            *mine = value;
                        } else {
                            assert!(mine.is_disjoint(&value), "rank {rank} combines an input twice");
                            mine.extend(value);
                        }
                    }
                }
                next[rank] += 1;
                sent_step[rank] = false;
                progress = true;
            }
            if !progress {
                break;
            }
        }
        for rank in 0..n {
            assert_eq!(next[rank], steps[rank].len(), "rank {rank} of {n} waits for ever");
        }
        assert!(wires.iter().all(VecDeque::is_empty), "a message nobody takes");
    }
}

fn each(mut check: impl FnMut(Operation, Algorithm, usize, usize)) {
    for operation in SELECTABLE {
        for algorithm in Algorithm::ALL.iter().copied() {
            for n in 1..=17 {
                let rooted = matches!(
                    operation,
                    Operation::Reduce | Operation::Broadcast | Operation::Gather | Operation::Scatter
                );
                for root in 0..if rooted { n } else { 1 } {
                    check(operation, algorithm, n, root);
                }
            }
        }
    }
}

#[test]
fn every_plan_gives_every_rank_what_the_operation_promises() {
    each(|operation, algorithm, n, root| {
        let mut world = World::new(operation, algorithm, n, root);
        world.run();
        let all: Value = (0..n).collect();
        for rank in 0..n {
            for part in 0..n {
                let want = match operation {
                    Operation::AllReduce => all.clone(),
                    Operation::Reduce if rank == root => all.clone(),
                    Operation::ReduceScatter if rank == part => all.clone(),
                    Operation::Broadcast => Value::from([root]),
                    Operation::AllGather => Value::from([part]),
                    Operation::Gather if rank == root => Value::from([part]),
                    Operation::Scatter if rank == part => Value::from([root]),
                    Operation::AllToAll => Value::from([part * n + rank]),
                    _ => continue,
                };
                assert_eq!(world.parts[rank][part], want, "{operation} {algorithm:?} n={n} root={root} rank={rank}");
            }
        }
    });
}

#[test]
fn parts_are_finished_by_exactly_one_rank_or_by_all_that_hold_the_same() {
    each(|operation, algorithm, n, root| {
        if !matches!(operation, Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter) {
            return;
        }
        let plans: Vec<_> = (0..n).map(|rank| plan(operation, algorithm, rank, n, root)).collect();
        let owners = |part: usize| plans.iter().filter(|p| p.owned.contains(&part)).count();
        let full = algorithm == Algorithm::Doubling && operation == Operation::AllReduce;
        for part in 0..n {
            let want = if full { 1 << n.ilog2() } else { 1 };
            assert_eq!(owners(part), want, "{operation} {algorithm:?} n={n} root={root} part={part}");
        }
    });
}

#[test]
fn every_rank_hears_from_every_rank_before_it_ends() {
    each(|operation, algorithm, n, root| {
        let plans: Vec<_> = (0..n).map(|rank| plan(operation, algorithm, rank, n, root)).collect();
        let mut heard: Vec<Value> = (0..n).map(|rank| Value::from([rank])).collect();
        let mut wires: Vec<VecDeque<Value>> = vec![VecDeque::new(); n * n];
        let steps: Vec<Vec<Step>> = plans.iter().map(|p| [&p.agree[..], &p.reduce, &p.distribute].concat()).collect();
        let (mut next, mut sent) = (vec![0; n], vec![false; n]);
        while (0..n).any(|rank| next[rank] < steps[rank].len()) {
            for rank in 0..n {
                let Some(step) = steps[rank].get(next[rank]) else { continue };
                if let Some((to, _)) = step.send.clone().filter(|_| !sent[rank]) {
                    wires[rank * n + to].push_back(heard[rank].clone());
                }
                sent[rank] = true;
                if let Some((from, ..)) = &step.receive {
                    let Some(news) = wires[from * n + rank].pop_front() else { continue };
                    heard[rank].extend(news);
                }
                next[rank] += 1;
                sent[rank] = false;
            }
        }
        for (rank, heard) in heard.iter().enumerate() {
            assert_eq!(heard.len(), n, "{operation} {algorithm:?} n={n} root={root}: rank {rank} can end too early");
        }
    });
}

#[test]
fn direct_plans_combine_only_what_they_own_and_steps_never_overlap() {
    each(|operation, algorithm, n, root| {
        for rank in 0..n {
            let plan = plan(operation, algorithm, rank, n, root);
            for step in plan.reduce.iter().chain(&plan.distribute) {
                if let (Some((_, out)), Some((_, into, Combine::Replace))) = (&step.send, &step.receive) {
                    assert!(out.end <= into.start || into.end <= out.start, "{operation} {algorithm:?} n={n}");
                }
                if let Some((from, into, Combine::Swap)) = &step.receive {
                    assert_eq!(step.send, Some((*from, into.clone())), "{operation} {algorithm:?} n={n}");
                }
                if let (Algorithm::Direct, Some((_, into, Combine::Fold))) = (algorithm, &step.receive) {
                    assert_eq!(*into, plan.owned);
                }
            }
        }
    });
}

#[test]
fn large_buffers_move_the_least_bytes_that_an_all_reduce_can() {
    for algorithm in [Algorithm::Ring, Algorithm::Direct, Algorithm::Halving] {
        for n in [2, 3, 4, 5, 8, 16] {
            let mut world = World::new(Operation::AllReduce, algorithm, n, 0);
            world.run();
            if algorithm != Algorithm::Halving || n.is_power_of_two() {
                assert_eq!(world.sent, vec![2 * (n - 1); n], "{algorithm:?} on {n} ranks");
            }
        }
    }
}
