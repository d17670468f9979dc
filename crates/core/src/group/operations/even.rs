//! The operations in even parts, in place and from one buffer to another.

use super::super::handle::Group;
use super::super::request::Request;
use crate::types::{Element, Error, Operation, ReduceOp};

/// # Operations
impl Group {
    /// Replaces `data` on every rank by the element-wise reduction over all ranks.
    ///
    /// After an error the contents of `data` are unspecified.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Timeout`], [`Error::PeerLost`] or [`Error::Left`]; each poisons the group.
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllReduce).reduction(op), None, data)
    }

    /// Like [`all_reduce`](Group::all_reduce), from `input` to `output`, which have the same length.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the lengths differ, else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_reduce_into<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllReduce).reduction(op), Some(input), output)
    }

    /// Replaces `data` on `root` by the element-wise reduction over all ranks. Elsewhere `data` stays as it is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root that is no rank, else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn reduce<T: Element>(&self, data: &mut [T], op: ReduceOp, root: usize) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Reduce).reduction(op).root(root), None, data)
    }

    /// Like [`reduce`](Group::reduce), from `input` to `output`, which must have the input's length on the root and is
    /// not used elsewhere (pass `&mut []`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root that is no rank or an output of another length on it, else as
    /// [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn reduce_into<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
        root: usize,
    ) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Reduce).reduction(op).root(root), Some(input), output)
    }

    /// Replaces `data` on every rank by `root`'s.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root that is no rank, else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Broadcast).root(root), None, data)
    }

    /// Fills `output` on every rank, the root included, with the `input` that `root` gives; the other ranks give
    /// `None`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root that is no rank, a root without an input or with one of another length
    /// than its output, or an input elsewhere; else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn broadcast_into<T: Element>(&self, input: Option<&[T]>, output: &mut [T], root: usize) -> Result<(), Error> {
        let request = Request::of::<T>(Operation::Broadcast).root(root);
        request.check_root(self.world_size())?;
        if input.is_some() != (self.rank() == root) {
            return Err(Error::argument("broadcast", format!("rank {root}, the root, gives the only input")));
        }
        self.run(request, input, output)
    }

    /// Collects every rank's part in `data` on every rank. Rank `r` brings its own part where
    /// [`partition`](crate::partition())`(data.len(), world_size, r)` says.
    ///
    /// # Errors
    /// As [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_gather<T: Element>(&self, data: &mut [T]) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllGather), None, data)
    }

    /// Collects every rank's `input` in `output` on every rank, in the order of ranks. The input is as long as this
    /// rank's [`partition`](crate::partition()) of the output: with `n` ranks and equal inputs, `1/n` of it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the input has another length, else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_gather_into<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllGather), Some(input), output)
    }

    /// Reduces `data` over all ranks and leaves on rank `r` the part that
    /// [`partition`](crate::partition())`(data.len(), world_size, r)` says. The rest of `data` is unspecified.
    ///
    /// # Errors
    /// As [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn reduce_scatter<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::ReduceScatter).reduction(op), None, data)
    }

    /// Like [`reduce_scatter`](Group::reduce_scatter), from `input` to `output`, which is as long as this rank's
    /// [`partition`](crate::partition()) of the input.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the output has another length, else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn reduce_scatter_into<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::ReduceScatter).reduction(op), Some(input), output)
    }

    /// Swaps parts between all ranks: `data` is `world_size` parts of one length, of which part `r` goes to rank `r`,
    /// and part `r` is afterwards what rank `r` had for this one.
    ///
    /// ```
    /// let ranks: Vec<_> = bonfire_core::Group::threads(3)?
    ///     .into_iter()
    ///     .map(|group| std::thread::spawn(move || {
    ///         let mut data = [0, 1, 2].map(|to| 10 * group.rank() as i32 + to);
    ///         group.all_to_all(&mut data).map(|()| data)
    ///     }))
    ///     .collect();
    /// for (to, rank) in (0..).zip(ranks) {
    ///     assert_eq!(rank.join().unwrap()?, [to, 10 + to, 20 + to]);
    /// }
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the length is no multiple of the number of ranks, else as
    /// [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_to_all<T: Element>(&self, data: &mut [T]) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllToAll), None, data)
    }

    /// Like [`all_to_all`](Group::all_to_all), from `input` to `output`, which have the same length.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the lengths differ, else as [`all_to_all`](Group::all_to_all).
    #[track_caller]
    pub fn all_to_all_into<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllToAll), Some(input), output)
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// As [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn barrier(&self) -> Result<(), Error> {
        self.run::<u8>(Request::of::<u8>(Operation::Barrier), None, &mut [])
    }
}
