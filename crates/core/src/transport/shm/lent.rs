//! All but the smallest operations: straight between the ranks' buffers where these are in shared memory, else in the
//! offers where everything fits there, else through the windows.
//!
//! Every offer says where the rank's buffers are in its arena. Where all are that peers have to reach, each rank does its
//! share as between threads: it reduces its part straight from all inputs and stores it to all outputs. Nobody is done
//! before all are.
//!
//! That a rank lends its memory must not bind it to its peers. If one is stopped, or killed, in the middle, the others give
//! up in time; but the stopped one may go on, and still reads inputs and stores to outputs. What it reads, the owner's caller
//! may have overwritten. So a rank that gives up after its offer was out says so before it returns, and a rank says that it
//! has done its share only after it has found that nobody had given up: whatever it read was in time. What it stores goes to
//! the file. So a rank that gives up puts pages of its own in the place of its output, with the same contents, and never
//! uses that part of the file again: what its caller gets back is out of every peer's reach.

use std::ptr::null_mut;

use super::chunks::Pass;
use super::control::Lent;
use super::segment::GRAIN;
use super::{Phase, Shm, small};
use crate::sync::{Deadline, Ordering, fence, lock};
use crate::transport::Buffers;
use crate::transport::direct::{self, Place};
use crate::types::{Call, Fault, Parts};

/// Whether the rank lends all that peers have to reach.
fn whole(call: &Call, rank: usize, lent: Lent) -> bool {
    direct::lends(call, rank).iter().zip(lent).all(|(lends, lent)| !lends || lent.is_some())
}

/// Takes what was lent back from the peers when dropped: after a failure, or a panic.
struct Recall<'a> {
    shm: &'a Shm,
    lent: Lent,
    bytes: usize,
}

impl Drop for Recall<'_> {
    fn drop(&mut self) {
        if self.lent == [None; 2] {
            return;
        }
        self.shm.arena.close();
        self.shm.control(self.shm.rank).gave_up.0.store(1, Ordering::Relaxed);
        // What the caller writes to the input comes after this fence. A peer that reads any of it has its own fence after
        // that, and then sees that this rank gave up.
        fence(Ordering::Release);
        let Some(start) = self.lent[1] else { return };
        let end = (start + self.bytes).next_multiple_of(GRAIN);
        // SAFETY: the range is this operation's output, which is borrowed exclusively, and nothing else is on its pages:
        // `find_alone` has seen to it.
        unsafe { self.shm.segment.detach(self.shm.rank, &(start..end)) };
    }
}

impl Shm {
    /// Runs any operation but a barrier, of any size.
    pub(super) fn large(&self, phase: &Phase, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault> {
        let (call, rank) = (&phase.call, self.rank);
        let mine = self.lend(call, buffers);
        let parts = buffers.parts;
        let mut flow = lock(&self.flow);
        let mut pass = Pass::new(self, phase, buffers, deadline, &mut flow);
        // A rank that lends all may need no window.
        let begun = direct::brings(call, rank) && !whole(call, rank, mine);
        let fits = small::fits(call, parts, self.world_size());
        if begun && fits {
            self.bring(phase, buffers);
        } else if begun {
            pass.begin()?;
        }
        let words = mine.map(|at| at.map_or(0, |at| at as u64 + 1));
        for (word, value) in self.offer(rank, phase).lent.iter().zip(words) {
            word.store(value, Ordering::Relaxed);
        }
        let mut recall = Recall { shm: self, lent: mine, bytes: call.bytes() };
        self.publish(phase);
        self.agree(phase, deadline)?;
        let (mut all, mut late) = (true, false);
        pass.flow.lent.clear();
        for peer in 0..self.world_size() {
            let lent = self.lent(phase, peer)?;
            let whole = whole(call, peer, lent);
            all &= whole;
            late |= whole && direct::brings(call, peer);
            pass.flow.lent.push(lent);
        }
        if all {
            let Pass { flow, input, output, .. } = pass;
            flow.step += 1;
            self.direct(call, parts, Place { input, output }, &flow.lent);
            // Between what was read and the look for those who gave up, see `Recall`.
            fence(Ordering::Acquire);
            self.wait(phase, deadline, |peer| self.control(peer).gave_up.0.load(Ordering::Relaxed) == 0)?;
            self.done(flow.step);
            self.wait_for_step(phase, deadline, flow.step, |_| true)?;
        } else if fits && !late {
            // Nobody lends, and the offers have all there is.
            self.result(phase, buffers);
        } else {
            pass.run(begun && !fits, late)?;
        }
        recall.lent = [None; 2];
        Ok(())
    }

    /// Does this rank's share straight between the buffers.
    fn direct(&self, call: &Call, parts: Parts<'_>, own: Place, lent: &[Lent]) {
        let place = |rank: usize| {
            let at = |lent: Option<usize>| lent.map_or(null_mut(), |at| self.segment.arena(rank, at).as_ptr());
            if rank == self.rank {
                own
            } else {
                Place { input: at(lent[rank][0]).cast_const(), output: at(lent[rank][1]) }
            }
        };
        // SAFETY: all ranks have made this call, and every rank lends what `lends` names: `large` has seen to both. Of
        // this rank they are the caller's buffers. Of the others they are within their arenas, which stay mapped, and
        // whatever is there are elements. A sound peer leaves its buffers alone until all are done; what a broken one
        // does to them, it does to the elements only.
        unsafe { direct::share(call, parts, self.rank, self.world_size(), place) };
    }

    /// What this rank can lend of what its peers have to reach.
    fn lend(&self, call: &Call, buffers: &Buffers<'_>) -> Lent {
        let [input, output] = direct::lends(call, self.rank);
        let in_place = buffers.input.unwrap_or(buffers.output);
        // What peers write must be something that can be taken back.
        let written = output.then(|| self.arena.find_alone(buffers.output.as_ptr(), buffers.output.len())).flatten();
        let read = input.then(|| self.arena.find(in_place.as_ptr(), in_place.len())).flatten();
        [read, written]
    }

    /// What the rank's offer says that it lends. It is published.
    fn lent(&self, phase: &Phase, rank: usize) -> Result<Lent, Fault> {
        let (call, size) = (&phase.call, self.segment.arena_size());
        let mut lent = [None; 2];
        for ((at, lends), word) in lent.iter_mut().zip(direct::lends(call, rank)).zip(&self.offer(rank, phase).lent) {
            // Relaxed: `agree` has seen the offer's number.
            let word = word.load(Ordering::Relaxed);
            if !lends || word == 0 {
                continue;
            }
            let begin = usize::try_from(word - 1).unwrap_or(usize::MAX);
            let within = begin.checked_add(call.bytes()).is_some_and(|end| end <= size);
            if !within || !begin.is_multiple_of(call.dtype.size()) {
                let reason = "what it wrote to shared memory as its buffer's place is none".into();
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
    use crate::control::Board;
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

    /// Two ranks of one process, each with a mapping of its own.
    fn pair() -> [Shm; 2] {
        let (zero, file) = Segment::create(2).unwrap();
        let one = Segment::open(&file, 2).unwrap();
        let mut rank = 0..;
        [zero, one].map(|segment| {
            let rank = rank.next().unwrap();
            let tcp = Tcp::unconnected(rank, Arc::new(Board::new(2).unwrap()), 2);
            Shm::new(segment, rank, vec![0, 1], Arc::new(tcp))
        })
    }

    const PHASE: Phase = Phase { call: SITE.call, sequence: 0, whole: SITE };

    fn bytes(storage: &mut Box<dyn Storage>) -> &mut [u8] {
        // SAFETY: so many were asked for, and the borrow is of what alone has them.
        unsafe { std::slice::from_raw_parts_mut(storage.start().as_ptr(), SITE.call.bytes()) }
    }

    fn run(shm: &Shm, output: &mut [u8], limit: Duration) -> Result<(), Fault> {
        shm.run(&SITE, &mut Buffers { input: None, output, parts: Parts::Even }, &Deadline::after(limit))
    }

    #[test]
    fn a_place_that_is_none_ends_the_operation() {
        let size = |shm: &Shm| shm.segment.arena_size() as u64;
        let last = |shm: &Shm| size(shm) - SITE.call.bytes() as u64;
        for word in 0..4 {
            let [zero, one] = pair();
            let lie = [u64::MAX, last(&one) + 4 + 1, 2 + 1, size(&one) + 1][word];
            let mut mine = zero.allocate(SITE.call.bytes()).unwrap().unwrap();
            one.offer(1, &PHASE).lent[0].store(1, Ordering::Relaxed);
            one.offer(1, &PHASE).lent[1].store(1, Ordering::Relaxed);
            one.offer(1, &PHASE).lent[word % 2].store(lie, Ordering::Relaxed);
            one.publish(&PHASE);
            let fault = run(&zero, bytes(&mut mine), Duration::from_secs(60)).unwrap_err();
            assert!(matches!(&fault, Fault::Lost { peer: 1, reason } if reason.contains("place")), "{lie}: {fault:?}");
        }
        let [zero, one] = pair();
        one.offer(1, &PHASE).lent[0].store(last(&one) + 1, Ordering::Relaxed);
        assert_eq!(zero.lent(&PHASE, 1), Ok([Some(last(&one) as usize), None]));
    }

    #[test]
    fn what_a_late_peer_writes_after_a_failure_is_not_seen() {
        let [zero, one] = pair();
        let mut mine = zero.allocate(SITE.call.bytes()).unwrap().unwrap();
        bytes(&mut mine).fill(7);
        let fault = run(&zero, bytes(&mut mine), Duration::from_millis(1)).unwrap_err();
        assert_eq!(fault, Fault::Timeout { missing: vec![1] });
        // Where rank 1 would have stored its part of the result.
        let place = one.lent(&PHASE, 0).unwrap()[1].expect("rank 0 lent its output");
        // SAFETY: rank 1's own mapping is there for as long as the rank, and nobody else uses it.
        unsafe { one.segment.arena(0, place).write_bytes(9, SITE.call.bytes()) };
        assert!(bytes(&mut mine).iter().all(|byte| *byte == 7));
        // The place in the file is not given away again.
        assert!(zero.allocate(SITE.call.bytes()).is_none());
        drop(mine);
        assert!(zero.allocate(SITE.call.bytes()).is_none());
    }

    #[test]
    fn what_a_late_peer_reads_after_a_failure_is_no_result() {
        let [zero, one] = pair();
        let [mut mine, mut theirs] = [&zero, &one].map(|rank| rank.allocate(SITE.call.bytes()).unwrap().unwrap());
        // Rank 1 stops after its offer, whose buffer is the first in its arena.
        one.offer(1, &PHASE).lent.iter().for_each(|word| word.store(1, Ordering::Relaxed));
        one.publish(&PHASE);
        let fault = run(&zero, bytes(&mut mine), Duration::from_millis(1)).unwrap_err();
        assert_eq!(fault, Fault::Timeout { missing: vec![1] });
        // It goes on when rank 0, which had done its share, has given up.
        let fault = run(&one, bytes(&mut theirs), Duration::from_millis(1)).unwrap_err();
        assert_eq!(fault, Fault::Timeout { missing: vec![0] });
    }

    #[test]
    fn dropped_memory_is_used_again_and_zeroed() {
        let [zero, _one] = pair();
        let mut first = zero.allocate(SITE.call.bytes()).unwrap().unwrap();
        bytes(&mut first).fill(7);
        let place = first.start();
        drop(first);
        let mut second = zero.allocate(SITE.call.bytes()).unwrap().unwrap();
        assert_eq!(second.start(), place);
        assert!(bytes(&mut second).iter().all(|byte| *byte == 0));
        let third = zero.allocate(SITE.call.bytes()).unwrap().unwrap();
        assert!(third.start().addr().get() - place.addr().get() >= SITE.call.bytes());
    }
}
