//! Visits every state that a few faults can lead to: all orders of messages, and each fault at each moment, also after
//! a rank has agreed. Random tests reach more ranks and faults, but not every order.
//!
//! A lost connection and a later death of the same peer arrive as two events, in this order and with anything between
//! them: a look-up that finds out late that the peer has ended. A star needs no runs of its own, because survivors talk
//! over connections between any two, in order; what rank 0 had still to relay is lost as in a crash.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::{Event, Step, World};

/// How many faults of each kind are left.
#[derive(Clone, Copy, Default, Hash)]
struct Budget {
    crashes: u8,
    losses: u8,
    again: u8,
    hung: u8,
}

/// Searches all runs of `n` ranks with at most these faults. Returns the number of states. Only their hashes are kept:
/// with 64 bits, ten million states miss one with a probability of 3 in a million.
fn search(n: usize, faults: Budget) -> usize {
    let only_crashes = faults.losses + faults.hung == 0;
    let mut seen = HashSet::new();
    let mut open = vec![(World::new(n), faults)];
    while let Some((world, left)) = open.pop() {
        let steps = world.steps();
        if steps.is_empty() {
            world.check_ended();
            if only_crashes {
                world.check_survivors();
            }
        }
        let plain = steps.into_iter().map(|step| (step, 0, left));
        for (step, cut, left) in plain.chain(possible_faults(&world, left)) {
            let mut next = world.clone();
            next.take(step, cut);
            next.check_groups();
            let mut hasher = DefaultHasher::new();
            (&next, left).hash(&mut hasher);
            if seen.insert(hasher.finish()) {
                open.push((next, left));
            }
        }
    }
    seen.len()
}

/// The faults that can happen now: the step, how many messages a crash leaves in flight, and the faults left after it.
fn possible_faults(world: &World, left: Budget) -> Vec<(Step, usize, Budget)> {
    let n = world.n();
    let mut faults = Vec::new();
    for rank in 0..n {
        if left.crashes > 0 && !world.nodes[rank].dead {
            let in_flight = (0..n).map(|to| world.wires[rank * n + to].len()).max().unwrap_or(0);
            let left = Budget { crashes: left.crashes - 1, ..left };
            faults.extend((0..=in_flight).map(|cut| (Step::Crash(rank), cut, left)));
        }
        if left.losses > 0 {
            let peers = (0..n).filter(|peer| *peer != rank && !lost(world, *peer, rank));
            let left = Budget { losses: left.losses - 1, ..left };
            faults.extend(peers.map(|peer| (Step::Lose(rank, peer), 0, left)));
        }
        if left.again > 0 && world.calls(rank) {
            let left = Budget { again: left.again - 1, ..left };
            faults.extend([0, 1].map(|cut| (Step::Again(rank), cut, left)));
        }
        if left.hung > 0 && world.calls(rank) {
            faults.push((Step::LeaveOut(rank), 0, Budget { hung: left.hung - 1, ..left }));
        }
    }
    faults
}

/// Whether the end of a connection is the next event on it.
fn lost(world: &World, from: usize, to: usize) -> bool {
    matches!(world.wires[from * world.n() + to].front(), Some(Event::Gone(_)))
}

/// Searches each of these runs: ranks, crashes, losses, repeated calls, ranks left out.
fn search_all(runs: &[[u8; 5]]) {
    for [n, crashes, losses, again, hung] in runs.iter().copied() {
        let states = search(n.into(), Budget { crashes, losses, again, hung });
        println!(
            "{n} ranks, {crashes} crashes, {losses} losses, {again} repeated calls, {hung} left out: {states} states"
        );
    }
}

#[test]
fn every_order_of_messages_with_a_few_faults() {
    search_all(&[
        [2, 1, 1, 1, 1],
        [3, 0, 0, 0, 0],
        [3, 1, 0, 0, 0],
        [3, 0, 1, 0, 0],
        [3, 0, 0, 1, 0],
        [3, 0, 0, 0, 1],
        [3, 2, 0, 0, 0],
    ]);
}

#[test]
#[ignore = "takes minutes"]
fn every_order_of_messages_with_more_faults() {
    search_all(&[
        [2, 2, 2, 2, 2],
        [3, 1, 1, 0, 0],
        [3, 1, 0, 1, 0],
        [3, 1, 0, 0, 1],
        [3, 0, 1, 0, 1],
        [3, 0, 1, 1, 0],
        [4, 0, 0, 0, 0],
    ]);
}
