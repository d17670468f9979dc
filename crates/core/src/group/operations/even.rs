//! Collectives with even parts, in place and from one buffer to another.

use super::super::handle::Group;
use super::super::request::Request;
use crate::types::{Element, Error, Operation, ReduceOp};

/// # Collectives
///
/// All ranks call a collective, in the same order, with the same element type, lengths, reduction and root. It blocks
/// until this rank's result is complete, which is after all ranks have called it. Results are bit-identical on all
/// ranks and in every run, except for the payload of NaNs; on MPI the library decides. [Failures](Group#failures) says
/// what an error means for the group and the buffers.
///
/// Without a suffix, operations work in place on one buffer. The forms that end in `_into` read `input`, leave it
/// unchanged and write `output`. Where each rank has a part of a buffer, rank `r`'s part is
/// [`partition`](crate::partition())`(len, world_size, r)`, for the length `len` of the whole. The `_v` forms take
/// parts of other sizes.
impl Group {
    /// Reduces `data` element-wise over all ranks and replaces it on every rank by the result. If only one rank needs
    /// the result use [`reduce`](Group::reduce), if every rank needs a part of it
    /// [`reduce_scatter`](Group::reduce_scatter).
    ///
    /// # Errors
    /// [`Error::Mismatch`] if ranks call different operations or pass different lengths, [`Error::Timeout`] if a rank
    /// does not call by the deadline, [`Error::PeerLost`] if a rank was lost, [`Error::Left`] if a rank has left, or
    /// [`Error::Mpi`] if MPI fails. Each [poisons the group](Group#failures), and the contents of `data` are
    /// unspecified.
    #[track_caller]
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllReduce).reduction(op), None, data)
    }

    /// Like [`all_reduce`](Group::all_reduce), from `input` to `output`, which have the same length.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the lengths differ; otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_reduce_into<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllReduce).reduction(op), Some(input), output)
    }

    /// Reduces `data` element-wise over all ranks and replaces it on `root` by the result. It is unchanged elsewhere.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank; otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn reduce<T: Element>(&self, data: &mut [T], op: ReduceOp, root: usize) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Reduce).reduction(op).root(root), None, data)
    }

    /// Like [`reduce`](Group::reduce), from `input` to `output`. On the root both have the same length; on other ranks
    /// the output is not used (pass `&mut []`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank, or if the lengths differ on it; otherwise see
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

    /// Replaces `data` on every rank by the root's `data`, which has the same length.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank; otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Broadcast).root(root), None, data)
    }

    /// Copies the root's `input` to `output` on every rank, the root included. The root passes `Some(input)`, the other
    /// ranks pass `None`; all lengths are equal.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank, if the root passes no input or one whose length differs from
    /// its output's, or if another rank passes an input; otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn broadcast_into<T: Element>(&self, input: Option<&[T]>, output: &mut [T], root: usize) -> Result<(), Error> {
        let request = Request::of::<T>(Operation::Broadcast).root(root);
        request.check_root(self.world_size())?;
        if input.is_some() != (self.rank() == root) {
            return Err(Error::argument("broadcast", format!("only rank {root}, the root, passes an input")));
        }
        self.run(request, input, output)
    }

    /// Collects every rank's part on every rank. `data` has the length of the whole, and rank `r` contributes its own
    /// range [`partition`](crate::partition())`(data.len(), world_size, r)`.
    ///
    /// # Errors
    /// See [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_gather<T: Element>(&self, data: &mut [T]) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllGather), None, data)
    }

    /// Concatenates the `input` of all ranks in rank order, in `output` on every rank. The input is as long as this
    /// rank's [`partition`](crate::partition()) of the output: with `n` ranks and equal inputs, `1/n` of it. For inputs
    /// of other lengths use [`all_gather_v`](Group::all_gather_v).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the input has another length; otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_gather_into<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllGather), Some(input), output)
    }

    /// Reduces `data` element-wise over all ranks and leaves rank `r`'s part of the result in its range
    /// [`partition`](crate::partition())`(data.len(), world_size, r)`. The rest of `data` is unspecified.
    ///
    /// # Errors
    /// See [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn reduce_scatter<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::ReduceScatter).reduction(op), None, data)
    }

    /// Like [`reduce_scatter`](Group::reduce_scatter), from `input` to `output`, which is as long as this rank's
    /// [`partition`](crate::partition()) of the input.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the output has another length; otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn reduce_scatter_into<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::ReduceScatter).reduction(op), Some(input), output)
    }

    /// Exchanges parts between all ranks. `data` consists of `world_size` parts of equal length. Part `r` is sent to
    /// rank `r` and replaced by the part that rank `r` holds for this rank. For parts of different lengths use
    /// [`all_to_all_v`](Group::all_to_all_v).
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
    /// [`Error::InvalidArgument`] if the length is not a multiple of the world size; otherwise see
    /// [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_to_all<T: Element>(&self, data: &mut [T]) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllToAll), None, data)
    }

    /// Like [`all_to_all`](Group::all_to_all), from `input` to `output`, which have the same length.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the lengths differ; otherwise see [`all_to_all`](Group::all_to_all).
    #[track_caller]
    pub fn all_to_all_into<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllToAll), Some(input), output)
    }

    /// Blocks until every rank has called it.
    ///
    /// # Errors
    /// See [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn barrier(&self) -> Result<(), Error> {
        self.run::<u8>(Request::of::<u8>(Operation::Barrier), None, &mut [])
    }
}
