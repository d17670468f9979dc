//! Where a call's data is, and how it passes through windows: the call becomes as many rounds as its data needs.
//!
//! A kernel of another process can access this rank's window only. So what peers read is copied to the window's staging
//! memory before a round, and what they have written is copied from it afterwards, all on the team's stream. What only
//! this rank accesses stays where it is: both sides of a push; the targets of one-shot, reduce_scatter and scatter; the
//! sources of all_gather and gather. Copies are the driver's: within one GPU's memory they run at its full bandwidth.
//!
//! # Why staging memory can be used again at once
//! Each form but push ends with a meeting, which a rank's kernel leaves when all peers have done their reads and writes
//! of the round. Its stream then copies results out and the next round's data in. No peer accesses the window
//! meanwhile: the first thing that its next kernel does is to wait for this rank's next kernel. A push does not use it.
//!
//! # Parts
//! If ranks have parts, a round takes the next elements of each part, the same number but in the last round. The parts
//! of a round's count, by `partition`, are then its elements of each part: only the last round's parts can differ, in
//! the same way as the whole's.

use super::address::{Address, Copy};
use super::kernel::Form;
use super::runtime::Kept;
use super::window::STAGING_BYTES;
use bonfire_core::internal::Peers;
use bonfire_core::{Call, partition};

/// The number of elements of each part in a round is a multiple of this many, so that all rounds are aligned alike.
const UNIT: usize = 16;

/// Where a call's data is, and the copies before and after the call.
#[derive(Clone, Default)]
pub(crate) struct BufferLayout {
    pub source: Address,
    pub target: Address,
    /// Copies to the source before the call, and from the target after it.
    pub before: Vec<Copy>,
    pub after: Vec<Copy>,
    /// All memory that the call uses, kept until the call is done.
    pub kept: Vec<Kept>,
    /// Of a message, with the elements that it brings.
    pub peers: Peers,
    pub incoming: usize,
}

/// Divides a call of this form into rounds: calls of fewer elements, and where their data is. `staging` is the address
/// of staging memory of [`STAGING_BYTES`].
pub(crate) fn divide(
    call: &Call,
    form: Form,
    (rank, ranks): (usize, usize),
    layout: BufferLayout,
    staging: Address,
) -> Vec<(Call, BufferLayout)> {
    divide_by(STAGING_BYTES, call, form, (rank, ranks), layout, staging)
}

fn divide_by(
    capacity: usize,
    call: &Call,
    form: Form,
    (rank, ranks): (usize, usize),
    layout: BufferLayout,
    staging: Address,
) -> Vec<(Call, BufferLayout)> {
    let is_root = call.root == Some(rank);
    // Whether data is copied to staging memory, and from it.
    let (copied_in, copied_out) = match form {
        Form::Push => return vec![(*call, layout)],
        Form::OneShot | Form::ReduceScatter => (true, false),
        Form::AllGather => (false, true),
        Form::Broadcast => (is_root, !is_root),
        Form::Gather => (false, is_root),
        Form::Scatter => (is_root, false),
        Form::TwoShot | Form::AllToAll => (true, true),
    };
    let width = call.dtype.size();
    let parts = match form {
        Form::ReduceScatter | Form::AllGather | Form::AllToAll | Form::Gather | Form::Scatter => ranks,
        _ => 1,
    };
    let most = capacity / (width * parts) / UNIT * UNIT;
    let mut rounds = Vec::new();
    // Elements of each part that earlier rounds have taken.
    let mut taken = 0;
    loop {
        let rest = call.count - parts * taken;
        let count = rest.min(parts * most);
        let bytes = |elements: usize| elements * width;
        // The parts in the tensor and in staging memory.
        let places = |part: usize| {
            let (whole, here) = (partition(call.count, parts, part), partition(count, parts, part));
            (bytes(whole.start + taken), staging + bytes(here.start), here.len() * width)
        };
        let to_staging = |part| {
            let (whole, to, bytes) = places(part);
            Copy::of(layout.source + whole, to, bytes)
        };
        let from_staging = |part| {
            let (whole, from, bytes) = places(part);
            Copy::of(from, layout.target + whole, bytes)
        };
        let copies = |wanted: bool| if wanted { 0..parts } else { 0..0 };
        // Broadcast reads the root's staging memory and writes that of the others.
        let in_staging = form == Form::Broadcast;
        let mut of_round = *call;
        of_round.count = count;
        rounds.push((
            of_round,
            BufferLayout {
                source: if copied_in || in_staging { staging } else { layout.source + bytes(taken) },
                target: if copied_out || in_staging { staging } else { layout.target + bytes(taken) },
                before: copies(copied_in).map(to_staging).collect(),
                after: copies(copied_out).map(from_staging).collect(),
                kept: layout.kept.clone(),
                ..BufferLayout::default()
            },
        ));
        if count == rest {
            break;
        }
        taken += most;
    }
    if let Some((_, first)) = rounds.first_mut() {
        first.before.splice(0..0, layout.before);
    }
    if let Some((_, last)) = rounds.last_mut() {
        last.after.extend(layout.after);
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::*;
    use bonfire_core::{DType, Operation, ReduceOp};

    /// Memory of one rank, by element: its source and target, and staging memory from `STAGING` on.
    const SOURCE: u64 = 1 << 20;
    const TARGET: u64 = 2 << 20;
    const STAGING: u64 = 3 << 20;
    const WIDTH: usize = 4;
    /// Room for 64 elements.
    const CAPACITY: usize = 64 * WIDTH;

    /// The elements of memory that were written.
    type Memory = std::collections::HashMap<Address, i64>;

    fn copy(memory: &mut Memory, copies: &[Copy]) {
        for Copy { from, to, bytes, .. } in copies {
            for at in (0..*bytes).step_by(WIDTH) {
                let value = memory[&(*from + at)];
                memory.insert(*to + at, value);
            }
        }
    }

    /// Does what a round's kernels do, by their definition. Panics if one accesses what is not its own or staged.
    fn kernels(memories: &mut [Memory], form: Form, rounds: &[(Call, BufferLayout)], root: usize) {
        let n = memories.len();
        let at = |start: Address, i: usize| start + i * WIDTH;
        let staged = |start: Address| assert!(start >= STAGING.into(), "a peer cannot access it");
        let count = rounds[0].0.count;
        let before = memories.to_vec();
        let source = |rank: usize, i: usize| before[rank][&at(rounds[rank].1.source, i)];
        for rank in 0..n {
            let own = partition(count, n, rank);
            let target = rounds[rank].1.target;
            let mut put = |i: usize, value: i64| {
                memories[rank].insert(at(target, i), value);
            };
            let sum = |i: usize| (0..n).map(|peer| source(peer, i)).sum::<i64>();
            match form {
                Form::OneShot | Form::TwoShot => (0..count).for_each(|i| put(i, sum(i))),
                Form::ReduceScatter => own.clone().for_each(|i| put(i - own.start, sum(i))),
                Form::AllGather => (0..n).for_each(|peer| {
                    let part = partition(count, n, peer);
                    part.clone().for_each(|i| put(i, source(peer, i - part.start)));
                }),
                Form::Broadcast => (0..count).for_each(|i| put(i, source(root, i))),
                Form::Gather if rank == root => (0..n).for_each(|peer| {
                    let part = partition(count, n, peer);
                    part.clone().for_each(|i| put(i, source(peer, i - part.start)));
                }),
                Form::Gather => {}
                Form::Scatter => own.clone().for_each(|i| put(i - own.start, source(root, i))),
                Form::AllToAll => (0..count).for_each(|i| {
                    let (peer, j) = (i / (count / n), i % (count / n));
                    put(i, source(peer, rank * (count / n) + j));
                }),
                Form::Push => unreachable!("it has one round"),
            }
            if !matches!(form, Form::AllGather | Form::Gather) && (form != Form::Scatter || rank == root) {
                staged(rounds[rank].1.source);
            }
            if !matches!(form, Form::OneShot | Form::ReduceScatter | Form::Scatter)
                && (form != Form::Gather || rank == root)
            {
                staged(target);
            }
        }
    }

    #[test]
    fn rounds_give_what_one_call_gives() {
        use Operation::{AllGather, AllReduce, AllToAll, Broadcast, Gather, ReduceScatter, Scatter};
        let forms = [
            (Form::OneShot, AllReduce),
            (Form::TwoShot, AllReduce),
            (Form::ReduceScatter, ReduceScatter),
            (Form::AllGather, AllGather),
            (Form::Broadcast, Broadcast),
            (Form::AllToAll, AllToAll),
            (Form::Gather, Gather),
            (Form::Scatter, Scatter),
        ];
        for (n, (form, operation)) in [1, 2, 3].into_iter().flat_map(|n| forms.map(|form| (n, form))) {
            for count in [0, 1, 2, 3, 47, 48, 49, 63, 64, 65, 96, 97, 128, 129, 130, 131, 300, 301] {
                if form == Form::AllToAll && count % n != 0 {
                    continue;
                }
                let root = n - 1;
                let mut call = Call::new(operation, DType::I32, count);
                match operation {
                    AllReduce | ReduceScatter => call = call.reducing(ReduceOp::Sum),
                    Broadcast | Gather | Scatter => call = call.rooted(root),
                    _ => {}
                }
                let value = |rank: usize, i: usize| (rank * 1000 + i) as i64;
                let own = |rank| partition(count, n, rank);
                let mut memories = vec![Memory::new(); n];
                let mut divided = Vec::new();
                for (rank, memory) in memories.iter_mut().enumerate() {
                    let len = match form {
                        Form::AllGather | Form::Gather => own(rank).len(),
                        Form::Scatter if rank != root => 0,
                        _ => count,
                    };
                    memory.extend((0..len).map(|i| (Address::from(SOURCE) + i * WIDTH, value(rank, i))));
                    let target = if form == Form::Broadcast { SOURCE } else { TARGET };
                    let (source, target) = (SOURCE.into(), target.into());
                    let layout = BufferLayout { source, target, ..BufferLayout::default() };
                    divided.push(divide_by(CAPACITY, &call, form, (rank, n), layout, STAGING.into()));
                }
                for round in 0..divided[0].len() {
                    let rounds: Vec<_> = divided.iter_mut().map(|rounds| rounds[round].clone()).collect();
                    let fits =
                        rounds.iter().all(|(of, _)| of.count * WIDTH <= CAPACITY && of.count == rounds[0].0.count);
                    assert!(fits, "{call} on {n}");
                    rounds.iter().zip(&mut memories).for_each(|((_, layout), memory)| copy(memory, &layout.before));
                    kernels(&mut memories, form, &rounds, root);
                    rounds.iter().zip(&mut memories).for_each(|((_, layout), memory)| copy(memory, &layout.after));
                }
                for (rank, memory) in memories.iter().enumerate() {
                    let sum = |i: usize| (0..n).map(|peer| value(peer, i)).sum::<i64>();
                    let expected: Vec<i64> = match form {
                        Form::ReduceScatter => own(rank).map(sum).collect(),
                        Form::Gather if rank != root => Vec::new(),
                        Form::Scatter => own(rank).map(|i| value(root, i)).collect(),
                        Form::AllGather | Form::Gather => {
                            (0..n).flat_map(|peer| (0..own(peer).len()).map(move |i| value(peer, i))).collect()
                        }
                        Form::Broadcast => (0..count).map(|i| value(root, i)).collect(),
                        Form::AllToAll => {
                            (0..count).map(|i| value(i / (count / n), rank * (count / n) + i % (count / n))).collect()
                        }
                        _ => (0..count).map(sum).collect(),
                    };
                    let target = if form == Form::Broadcast { SOURCE } else { TARGET };
                    let result: Vec<i64> =
                        (0..expected.len()).map(|i| memory[&(Address::from(target) + i * WIDTH)]).collect();
                    assert_eq!(result, expected, "{call} on rank {rank} of {n}");
                }
            }
        }
    }
}
