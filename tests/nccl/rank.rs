//! A rank with a communicator and a stream, and the check of every operation against the oracle.

use super::*;

/// A stream of the library: how much work was submitted to it, and how much of that is done.
#[derive(Default)]
pub struct Stream([AtomicU64; 2]);

impl Stream {
    pub fn raw(&self) -> CUstream {
        (&raw const self.0).cast_mut().cast()
    }

    pub fn is_idle(&self) -> bool {
        self.0[1].load(Ordering::SeqCst) == self.0[0].load(Ordering::SeqCst)
    }
}

pub fn site(work: &Work<'_>) -> Site {
    let dtype = if let Scalar::Of(dtype) = work.scalar { dtype } else { DType::U8 };
    let (operation, count) = (work.action.operation(), work.count);
    Site::new(Call::new(operation, dtype, count), 7)
}

pub fn perform(
    communicator: &mut Communicator,
    stream: &Stream,
    work: Work<'_>,
    deadline: &Deadline,
) -> Result<(), Error> {
    // SAFETY: the tests' memory lives until the stream has passed the work or the communicator has ended.
    unsafe { communicator.submit(&work, stream.raw())? }.settle(site(&work), deadline)?;
    communicator.wait(site(&work), deadline, || Ok(stream.is_idle()))
}

/// One rank with all that an operation needs.
pub struct Rank {
    pub group: Group,
    pub communicator: Communicator,
    pub stream: Stream,
}

impl Rank {
    pub fn new(group: Group) -> Self {
        Rank { communicator: connect(&group), group, stream: Stream::default() }
    }

    pub fn run<T: Element>(
        &mut self,
        action: Action,
        count: usize,
        sizes: Option<&[usize]>,
        from: *const T,
        to: *mut T,
    ) {
        let (input, output) = (from.expose_provenance() as u64, to.expose_provenance() as u64);
        let work = Work { action, scalar: Scalar::Of(T::DTYPE), count, sizes, input, output };
        perform(&mut self.communicator, &self.stream, work, &soon()).unwrap();
    }

    /// Compares every operation on one type and length with the group's.
    pub fn check<T: Element>(&mut self, len: usize, of: impl Fn(u8) -> T) {
        let (n, rank, group) = (self.group.world_size(), self.group.rank(), self.group.clone());
        let own: Vec<T> = (0..len).map(|i| of(((i + 3 * rank) % 4) as u8)).collect();
        let blank = vec![of(99); len];
        let part = partition(len, n, rank);
        let root = n / 2;
        for op in ReduceOp::ALL.iter().copied() {
            // No float is a third, so NCCL's mean of three ranks differs from Bonfire's.
            if nccl::reduction(Scalar::Of(T::DTYPE), op).is_err() || (op == ReduceOp::Mean && n == 3) {
                continue;
            }
            let mut whole = own.clone();
            group.all_reduce(&mut whole, op).unwrap();
            let mut output = blank.clone();
            self.run(Action::AllReduce(op), len, None, own.as_ptr(), output.as_mut_ptr());
            assert_eq!(output, whole, "all_reduce {op}");
            let mut both = own.clone();
            let place = both.as_mut_ptr();
            self.run(Action::AllReduce(op), len, None, place, place);
            assert_eq!(both, whole, "all_reduce {op} in place");

            let mut output = blank.clone();
            self.run(Action::Reduce(op, root), len, None, own.as_ptr(), output.as_mut_ptr());
            assert_eq!(output, if rank == root { whole.clone() } else { blank.clone() }, "reduce {op}");

            let mut output = blank[part.clone()].to_vec();
            self.run(Action::ReduceScatter(op), len, None, own.as_ptr(), output.as_mut_ptr());
            assert_eq!(output, whole[part.clone()], "reduce_scatter {op}");
        }

        let mut from_root = own.clone();
        group.broadcast(&mut from_root, root).unwrap();
        let mut output = blank.clone();
        self.run(Action::Broadcast(root), len, None, own.as_ptr(), output.as_mut_ptr());
        assert_eq!(output, from_root, "broadcast");

        let mut whole = own.clone();
        group.all_gather(&mut whole).unwrap();
        let mut output = blank.clone();
        self.run(Action::AllGather, len, None, own[part.clone()].as_ptr(), output.as_mut_ptr());
        assert_eq!(output, whole, "all_gather");
        let mut both = own.clone();
        let place = both.as_mut_ptr();
        self.run(Action::AllGather, len, None, place.wrapping_add(part.start), place);
        assert_eq!(both, whole, "all_gather in place");

        let mut output = blank.clone();
        self.run(Action::Gather(root), len, None, own[part.clone()].as_ptr(), output.as_mut_ptr());
        assert_eq!(output, if rank == root { whole.clone() } else { blank.clone() }, "gather");
        let mut output = blank[part.clone()].to_vec();
        self.run(Action::Scatter(root), len, None, own.as_ptr(), output.as_mut_ptr());
        assert_eq!(output, from_root[part.clone()], "scatter");
        let mut both = own.clone();
        let place = both.as_mut_ptr();
        self.run(Action::Scatter(root), len, None, place, place.wrapping_add(part.start));
        self.run(Action::Gather(root), len, None, place.wrapping_add(part.start), place);
        if rank == root {
            assert_eq!(both, own, "scatter and gather in place");
        }

        if len.is_multiple_of(n) {
            let mut swapped = own.clone();
            group.all_to_all(&mut swapped).unwrap();
            let mut output = blank.clone();
            self.run(Action::AllToAll, len, None, own.as_ptr(), output.as_mut_ptr());
            assert_eq!(output, swapped, "all_to_all");
        }
        self.check_parts(&own, of(99));
        self.check_ring(&own, of(99));
    }

    /// Variable-size parts, some of them empty.
    fn check_parts<T: Element>(&mut self, own: &[T], blank: T) {
        let (n, rank, group) = (self.group.world_size(), self.group.rank(), self.group.clone());
        let mut sizes = vec![0; n];
        sizes[0] = own.len() / 3;
        sizes[n - 1] += own.len() - own.len() / 3;
        let start: usize = sizes[..rank].iter().sum();
        let part = start..start + sizes[rank];
        let len = own.len();

        let mut whole = vec![blank; len];
        group.all_gather_v_into(&own[part.clone()], &sizes, &mut whole).unwrap();
        let mut output = vec![blank; len];
        self.run(Action::AllGather, len, Some(&sizes), own[part.clone()].as_ptr(), output.as_mut_ptr());
        assert_eq!(output, whole, "all_gather_v");

        if nccl::reduction(Scalar::Of(T::DTYPE), ReduceOp::Sum).is_ok() {
            let mut reduced = own.to_vec();
            group.all_reduce(&mut reduced, ReduceOp::Sum).unwrap();
            let mut output = vec![blank; part.len()];
            let action = Action::ReduceScatter(ReduceOp::Sum);
            self.run(action, len, Some(&sizes), own.as_ptr(), output.as_mut_ptr());
            assert_eq!(output, reduced[part.clone()], "reduce_scatter_v");
        }

        let mut output = vec![blank; len];
        self.run(Action::Gather(0), len, Some(&sizes), own[part.clone()].as_ptr(), output.as_mut_ptr());
        assert_eq!(output, if rank == 0 { whole } else { vec![blank; len] }, "gather_v");
        let mut from_root = own.to_vec();
        group.broadcast(&mut from_root, 0).unwrap();
        let mut output = vec![blank; part.len()];
        self.run(Action::Scatter(0), len, Some(&sizes), own.as_ptr(), output.as_mut_ptr());
        assert_eq!(output, from_root[part], "scatter_v");
    }

    /// Every rank sends to the next one.
    fn check_ring<T: Element>(&mut self, own: &[T], blank: T) {
        let (n, rank, len) = (self.group.world_size(), self.group.rank(), own.len());
        if n == 1 {
            return;
        }
        let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
        let mut output = vec![blank; len];
        if rank == 0 {
            self.run(Action::Send(next), len, None, own.as_ptr(), output.as_mut_ptr());
        }
        self.run(Action::Recv(previous), len, None, own.as_ptr(), output.as_mut_ptr());
        if rank != 0 {
            self.run(Action::Send(next), len, None, own.as_ptr(), output.as_mut_ptr());
        }
        let mut all = vec![blank; len * n];
        self.group.all_gather_v_into(own, &vec![len; n], &mut all).unwrap();
        assert_eq!(output, all[previous * len..][..len], "send and receive");
        // Rank `r` sends `r` elements less than all.
        let from_previous = len.saturating_sub(previous);
        let mut output = vec![blank; len];
        let action = Action::Exchange { to: next, from: previous, incoming: from_previous };
        self.run(action, len.saturating_sub(rank), None, own.as_ptr(), output.as_mut_ptr());
        assert_eq!(output[..from_previous], all[previous * len..][..from_previous], "exchange");
        assert!(output[from_previous..].iter().all(|element| *element == blank), "exchange wrote too much");
    }
}
