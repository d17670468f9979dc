//! Zero-copy operations on buffers in shared memory, with the slots or the windows as the fallback.
//!
//! Every slot has the offsets of the rank's buffers in its arena. If all buffers that peers access are there, each rank
//! does its share as between threads: it reduces its part straight from all inputs and stores it to all outputs. No
//! rank is done before all are. Otherwise the operation uses the slots, if all contributions are there, or the windows.
//! A rank that lends all its buffers puts nothing into its slot and stages nothing in advance. So if another rank lends
//! fewer, the operation uses the windows, and peers wait for the first rank's first chunk. All ranks see the same
//! offsets and decide alike.
//!
//! Ranks store to their peers' outputs, because fetching instead, with each rank writing only its own memory, took 1.2
//! to 3 times as long.
//!
//! A rank that lends its memory must still be able to return without its peers. If a rank is stopped or killed in the
//! middle of an operation, the others give up at their deadlines. But a stopped rank may resume, and then it still
//! reads inputs and stores to outputs:
//! * *Reads.* The owner's caller may have overwritten an input. So a rank that gives up after it has published its slot
//!   sets `gave_up` before it returns. A rank reports its share as done only after it has found that no rank had given
//!   up by then, so all that it read was still valid.
//! * *Stores.* They go to the file. So a rank that gives up replaces its output by private pages with the same
//!   contents, and never uses that part of the file again. No peer can access the memory that its caller gets back. An
//!   output that shares pages with other data is therefore not lent.

use std::ptr::null_mut;

use super::chunks::WindowOperation;
use super::control::LentOffsets;
use super::segment::ALIGNMENT;
use super::{Phase, Shm, small};
use crate::sync::{Deadline, Ordering, fence, lock};
use crate::transport::Buffers;
use crate::transport::direct::{self, RankBuffers};
use crate::types::{Call, Fault, Parts};

/// Whether the rank lends all buffers that its peers access.
fn lends_all(call: &Call, rank: usize, lent: LentOffsets) -> bool {
    direct::lends(call, rank).iter().zip(lent).all(|(lends, lent)| !lends || lent.is_some())
}

/// Revokes lent memory from the peers when dropped, which happens after a failure or a panic.
struct Revocation<'a> {
    shm: &'a Shm,
    lent: LentOffsets,
    bytes: usize,
}

impl Drop for Revocation<'_> {
    fn drop(&mut self) {
        if self.lent == [None; 2] {
            return;
        }
        self.shm.arena.close();
        self.shm.control(self.shm.rank).gave_up.0.store(1, Ordering::Relaxed);
        // The caller's writes to the input come after this fence. A peer that reads any of them passes its acquire
        // fence (in `large`) after that, and then sees `gave_up`.
        fence(Ordering::Release);
        let Some(start) = self.lent[1] else { return };
        let end = (start + self.bytes).next_multiple_of(ALIGNMENT);
        // SAFETY: the range is this operation's output, which is borrowed exclusively. `find_unshared` has checked that
        // nothing else is on its pages.
        unsafe { self.shm.segment.detach(self.shm.rank, &(start..end)) };
    }
}

impl Shm {
    /// Runs any operation except a barrier, of any size.
    pub(super) fn large(&self, phase: &Phase, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault> {
        let (call, rank) = (&phase.call, self.rank);
        let own = self.lend(call, buffers);
        let parts = buffers.parts;
        let mut flow = lock(&self.flow);
        let mut pass = WindowOperation::new(self, phase, buffers, deadline, &mut flow);
        // A rank that lends all its buffers may need no window.
        let begun = direct::contributes(call, rank) && !lends_all(call, rank, own);
        let fits = small::fits(call, parts, self.world_size());
        if begun && fits {
            self.write_contribution(phase, buffers);
        } else if begun {
            pass.begin()?;
        }
        let words = own.map(|at| at.map_or(0, |at| at as u64 + 1));
        for (word, value) in self.slot(rank, phase).lent.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        let mut revocation = Revocation { shm: self, lent: own, bytes: call.bytes() };
        self.publish(phase);
        self.agree(phase, deadline)?;
        let (mut all, mut late) = (true, false);
        pass.flow.lent.clear();
        for peer in 0..self.world_size() {
            let lent = self.read_lent(phase, peer)?;
            let lends_all = lends_all(call, peer, lent);
            all &= lends_all;
            late |= lends_all && direct::contributes(call, peer);
            pass.flow.lent.push(lent);
        }
        if all {
            let WindowOperation { flow, input, output, .. } = pass;
            flow.step += 1;
            self.direct(call, parts, RankBuffers { input, output }, &flow.lent);
            // Between the reads of the inputs and those of `gave_up`; the partner is the fence in `Revocation`.
            fence(Ordering::Acquire);
            self.wait(phase, deadline, |peer| self.control(peer).gave_up.0.load(Ordering::Relaxed) == 0)?;
            self.done(flow.step);
            self.wait_for_step(phase, deadline, flow.step, |_| true)?;
        } else if fits && !late {
            // No contributing rank lends, so all contributions are in the slots.
            self.compute_result(phase, buffers);
        } else {
            pass.run(begun && !fits, late)?;
        }
        revocation.lent = [None; 2];
        Ok(())
    }

    /// Carries out this rank's share straight between the buffers.
    fn direct(&self, call: &Call, parts: Parts<'_>, own: RankBuffers, lent: &[LentOffsets]) {
        let buffers_of = |rank: usize| {
            let at = |lent: Option<usize>| lent.map_or(null_mut(), |at| self.segment.arena(rank, at).as_ptr());
            if rank == self.rank {
                own
            } else {
                RankBuffers { input: at(lent[rank][0]).cast_const(), output: at(lent[rank][1]) }
            }
        };
        // SAFETY: all ranks have made this call, and every rank lends what `lends` names, as checked by `large`. This
        // rank's buffers are the caller's. Those of peers are within their arenas, which stay mapped, and any bits
        // there are valid elements. A sound peer does not access its buffers until all are done. A broken one only
        // changes elements.
        unsafe { direct::share(call, parts, self.rank, self.world_size(), buffers_of) };
    }

    /// The buffers that peers access and that this rank can lend.
    fn lend(&self, call: &Call, buffers: &Buffers<'_>) -> LentOffsets {
        let [input, output] = direct::lends(call, self.rank);
        let source = buffers.input.unwrap_or(buffers.output);
        // A buffer that peers write must be revocable.
        let written = output.then(|| self.arena.find_unshared(buffers.output.as_ptr(), buffers.output.len())).flatten();
        let read = input.then(|| self.arena.find(source.as_ptr(), source.len())).flatten();
        [read, written]
    }

    /// Reads from the rank's slot what it lends. The slot is published.
    fn read_lent(&self, phase: &Phase, rank: usize) -> Result<LentOffsets, Fault> {
        let (call, size) = (&phase.call, self.segment.arena_size());
        let mut lent = [None; 2];
        for ((at, lends), word) in lent.iter_mut().zip(direct::lends(call, rank)).zip(&self.slot(rank, phase).lent) {
            // Relaxed: `agree` has acquired the slot's number.
            let word = word.load(Ordering::Relaxed);
            if !lends || word == 0 {
                continue;
            }
            let begin = usize::try_from(word - 1).unwrap_or(usize::MAX);
            let within = begin.checked_add(call.bytes()).is_some_and(|end| end <= size);
            if !within || !begin.is_multiple_of(call.dtype.size()) {
                let reason = "the buffer offset that it wrote to shared memory is invalid".into();
                return Err(Fault::Lost { peer: self.members[rank], reason });
            }
            *at = Some(begin);
        }
        Ok(lent)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::super::Segment;
    use super::*;
    use crate::control::GroupStatus;
    use crate::transport::tcp::Tcp;
    use crate::transport::{Collectives, Storage};
    use crate::types::{DType, Operation, ReduceOp, Site};

    const COUNT: usize = 50_000;
    const SITE: Site = Site {
        call: Call {
            operation: Operation::AllReduce,
            dtype: DType::F32,
            count: COUNT,
            reduction: Some(ReduceOp::Sum),
            root: None,
            sizes: None,
        },
        sequence: 0,
    };

    /// Two ranks in one process, each with its own mapping of the segment.
    fn pair() -> [Shm; 2] {
        let (zero, file) = Segment::create(2).unwrap();
        let one = Segment::open(&file, 2).unwrap();
        let mut rank = 0..;
        [zero, one].map(|segment| {
            let rank = rank.next().unwrap();
            let tcp = Tcp::unconnected(rank, Arc::new(GroupStatus::new(2).unwrap()), 2);
            Shm::new(segment, rank, vec![0, 1], Arc::new(tcp))
        })
    }

    const PHASE: Phase = Phase { call: SITE.call, sequence: 0, site: SITE };

    fn bytes(storage: &mut Box<dyn Storage>) -> &mut [u8] {
        // SAFETY: the storage was allocated with this many bytes, and is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(storage.start().as_ptr(), SITE.call.bytes()) }
    }

    fn run(shm: &Shm, output: &mut [u8], limit: Duration) -> Result<(), Fault> {
        shm.run(&SITE, &mut Buffers { input: None, output, parts: Parts::Even }, &Deadline::after(limit))
    }

    #[test]
    fn an_invalid_offset_ends_the_operation() {
        let size = |shm: &Shm| shm.segment.arena_size() as u64;
        let last = |shm: &Shm| size(shm) - SITE.call.bytes() as u64;
        for word in 0..4 {
            let [zero, one] = pair();
            let lie = [u64::MAX, last(&one) + 4 + 1, 2 + 1, size(&one) + 1][word];
            let mut mine = zero.allocate(SITE.call.bytes()).unwrap().unwrap();
            one.slot(1, &PHASE).lent[0].store(1, Ordering::Relaxed);
            one.slot(1, &PHASE).lent[1].store(1, Ordering::Relaxed);
            one.slot(1, &PHASE).lent[word % 2].store(lie, Ordering::Relaxed);
            one.publish(&PHASE);
            let fault = run(&zero, bytes(&mut mine), Duration::from_secs(60)).unwrap_err();
            assert!(matches!(&fault, Fault::Lost { peer: 1, reason } if reason.contains("offset")), "{lie}: {fault:?}");
        }
        let [zero, one] = pair();
        one.slot(1, &PHASE).lent[0].store(last(&one) + 1, Ordering::Relaxed);
        assert_eq!(zero.read_lent(&PHASE, 1), Ok([Some(last(&one) as usize), None]));
    }

    #[test]
    fn writes_of_a_late_peer_after_a_failure_are_not_visible() {
        let [zero, one] = pair();
        let mut mine = zero.allocate(SITE.call.bytes()).unwrap().unwrap();
        bytes(&mut mine).fill(7);
        let fault = run(&zero, bytes(&mut mine), Duration::from_millis(1)).unwrap_err();
        assert_eq!(fault, Fault::Timeout { missing: vec![1] });
        // The address at which rank 1 would have stored its part of the result.
        let offset = one.read_lent(&PHASE, 0).unwrap()[1].expect("rank 0 lent its output");
        // SAFETY: rank 1's own mapping lives as long as the rank, and nothing else uses it.
        unsafe { one.segment.arena(0, offset).write_bytes(9, SITE.call.bytes()) };
        assert!(bytes(&mut mine).iter().all(|byte| *byte == 7));
        // This part of the file is not used again.
        assert!(zero.allocate(SITE.call.bytes()).is_none());
        drop(mine);
        assert!(zero.allocate(SITE.call.bytes()).is_none());
    }

    #[test]
    fn reads_of_a_late_peer_after_a_failure_give_no_result() {
        let [zero, one] = pair();
        let [mut mine, mut theirs] = [&zero, &one].map(|rank| rank.allocate(SITE.call.bytes()).unwrap().unwrap());
        // Rank 1 stops after it has published its slot, with the first buffer in its arena.
        one.slot(1, &PHASE).lent.iter().for_each(|word| word.store(1, Ordering::Relaxed));
        one.publish(&PHASE);
        let fault = run(&zero, bytes(&mut mine), Duration::from_millis(1)).unwrap_err();
        assert_eq!(fault, Fault::Timeout { missing: vec![1] });
        // It resumes after rank 0, which had done its share, has given up.
        let fault = run(&one, bytes(&mut theirs), Duration::from_millis(1)).unwrap_err();
        assert_eq!(fault, Fault::Timeout { missing: vec![0] });
    }

    #[test]
    fn dropped_memory_is_reused_and_zeroed() {
        let [zero, _one] = pair();
        let mut first = zero.allocate(SITE.call.bytes()).unwrap().unwrap();
        bytes(&mut first).fill(7);
        let address = first.start();
        drop(first);
        let mut second = zero.allocate(SITE.call.bytes()).unwrap().unwrap();
        assert_eq!(second.start(), address);
        assert!(bytes(&mut second).iter().all(|byte| *byte == 0));
        let third = zero.allocate(SITE.call.bytes()).unwrap().unwrap();
        assert!(third.start().addr().get() - address.addr().get() >= SITE.call.bytes());
    }
}
