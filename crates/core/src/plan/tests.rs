//! Simulates the plans of all ranks together and compares the results with an oracle.

use std::collections::{BTreeSet, VecDeque};

use super::selection::SELECTABLE;
use super::*;

/// The value of a part: the ranks whose inputs are in it, so combining an input twice shows. For all_to_all, which
/// combines nothing: the number of the input among those of all ranks.
type Value = BTreeSet<usize>;

struct Simulation {
    n: usize,
    plans: Vec<Plan>,
    parts: Vec<Vec<Value>>,
    sent: Vec<usize>,
}

impl Simulation {
    fn new(operation: Operation, algorithm: Algorithm, n: usize, root: usize) -> Simulation {
        let plans = (0..n).map(|rank| plan(operation, algorithm, rank, n, root)).collect();
        let start = |rank: usize, part: usize| match operation {
            Operation::AllGather | Operation::Gather if rank != part => Value::new(),
            Operation::Broadcast | Operation::Scatter if rank != root => Value::new(),
            Operation::AllToAll => Value::from([rank * n + part]),
            _ => Value::from([rank]),
        };
        let parts = (0..n).map(|rank| (0..n).map(|part| start(rank, part)).collect()).collect();
        Simulation { n, plans, parts, sent: vec![0; n] }
    }

    /// Runs all plans to their ends. Panics if they disagree, deadlock, or combine an input twice.
    fn run(&mut self) {
        type Message = (usize, Range<usize>, Vec<Value>);
        let n = self.n;
        let steps: Vec<Vec<Step>> =
            self.plans.iter().map(|p| [&p.agree[..], &p.reduce, &p.distribute].concat()).collect();
        let mut next = vec![0; n];
        let mut sent_step = vec![false; n];
        let mut channels: Vec<VecDeque<Message>> = vec![VecDeque::new(); n * n];
        loop {
            let mut progress = false;
            for rank in 0..n {
                let Some(step) = steps[rank].get(next[rank]) else { continue };
                if let Some((to, parts)) = step.send.clone().filter(|_| !sent_step[rank]) {
                    assert_ne!(to, rank);
                    let values = self.parts[rank][parts.clone()].to_vec();
                    self.sent[rank] += parts.len();
                    channels[rank * n + to].push_back((next[rank], parts, values));
                    progress = true;
                }
                sent_step[rank] = true;
                if let Some((from, parts, combine)) = &step.receive {
                    let Some((_, theirs, values)) = channels[from * n + rank].pop_front() else { continue };
                    // In an all_to_all all parts have the same length; elsewhere each has its own.
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
            assert_eq!(next[rank], steps[rank].len(), "rank {rank} of {n} is in a deadlock");
        }
        assert!(channels.iter().all(VecDeque::is_empty), "a message is never received");
    }
}

fn for_each_plan(mut check: impl FnMut(Operation, Algorithm, usize, usize)) {
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
fn every_plan_computes_the_result_of_its_operation() {
    for_each_plan(|operation, algorithm, n, root| {
        let mut sim = Simulation::new(operation, algorithm, n, root);
        sim.run();
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
                assert_eq!(sim.parts[rank][part], want, "{operation} {algorithm:?} n={n} root={root} rank={rank}");
            }
        }
    });
}

#[test]
fn each_part_is_completed_by_one_rank_or_by_all_its_replicas() {
    for_each_plan(|operation, algorithm, n, root| {
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
fn no_rank_ends_before_a_chain_of_messages_from_every_rank() {
    for_each_plan(|operation, algorithm, n, root| {
        let plans: Vec<_> = (0..n).map(|rank| plan(operation, algorithm, rank, n, root)).collect();
        let mut origins: Vec<Value> = (0..n).map(|rank| Value::from([rank])).collect();
        let mut channels: Vec<VecDeque<Value>> = vec![VecDeque::new(); n * n];
        let steps: Vec<Vec<Step>> = plans.iter().map(|p| [&p.agree[..], &p.reduce, &p.distribute].concat()).collect();
        let (mut next, mut sent) = (vec![0; n], vec![false; n]);
        while (0..n).any(|rank| next[rank] < steps[rank].len()) {
            for rank in 0..n {
                let Some(step) = steps[rank].get(next[rank]) else { continue };
                if let Some((to, _)) = step.send.clone().filter(|_| !sent[rank]) {
                    channels[rank * n + to].push_back(origins[rank].clone());
                }
                sent[rank] = true;
                if let Some((from, ..)) = &step.receive {
                    let Some(received) = channels[from * n + rank].pop_front() else { continue };
                    origins[rank].extend(received);
                }
                next[rank] += 1;
                sent[rank] = false;
            }
        }
        for (rank, origins) in origins.iter().enumerate() {
            assert_eq!(origins.len(), n, "{operation} {algorithm:?} n={n} root={root}: rank {rank} can end too early");
        }
    });
}

#[test]
fn direct_plans_combine_only_what_they_own_and_steps_never_overlap() {
    for_each_plan(|operation, algorithm, n, root| {
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
fn large_all_reduces_send_the_fewest_bytes_possible() {
    for algorithm in [Algorithm::Ring, Algorithm::Direct, Algorithm::Halving] {
        for n in [2, 3, 4, 5, 8, 16] {
            let mut sim = Simulation::new(Operation::AllReduce, algorithm, n, 0);
            sim.run();
            if algorithm != Algorithm::Halving || n.is_power_of_two() {
                assert_eq!(sim.sent, vec![2 * (n - 1); n], "{algorithm:?} on {n} ranks");
            }
        }
    }
}
