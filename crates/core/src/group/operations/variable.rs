//! Collectives with variable-size parts.
//!
//! They run on the engines and plans of the even forms, at the same speed: plans refer to parts and not to elements,
//! and engines take [`Parts`](crate::types::Parts). Only on several hosts do they run in another way, as plans between
//! all ranks over TCP.
//!
//! # Ranks with different sizes
//!
//! Ranks must agree on all sizes, not only on their sum. A call carries a fingerprint of 31 bits, which misses one
//! mistake in two thousand million. Threads then compare the sizes themselves, since they write to each other's
//! buffers. Over TCP the messages have other lengths. In shared memory such ranks may return wrong results, or wait for
//! each other until the deadline, but stay within their own buffers.

use super::super::check;
use super::super::handle::Group;
use super::super::request::Request;
use crate::sync::Deadline;
use crate::types::{Element, Error, Operation, ReduceOp};

/// # Variable-size parts
///
/// Like the operations of the same names, but the part of rank `r` has `sizes[r]` elements, which may be 0, and the
/// whole has as many as all parts together. The forms that end in `_into` take the sizes, the same on all ranks. The
/// short forms exchange the sizes first, by one small operation more, and allocate the result; use them if the ranks do
/// not know each other's sizes.
///
/// Sizes that differ between ranks and have the same sum are compared by a fingerprint of 31 bits. It misses one
/// mistake in two thousand million; in shared memory the results may then be wrong, or the operation times out.
impl Group {
    /// Concatenates the `input` of all ranks in rank order, in `output` on every rank.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is not one size per rank, or if the sizes do not fit input and output.
    /// [`Error::Mismatch`] if ranks pass different sizes. Otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_gather_v_into<T: Element>(&self, input: &[T], sizes: &[usize], output: &mut [T]) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllGather).sizes(sizes), Some(input), output)
    }

    /// Concatenates the `input` of all ranks in rank order, on every rank. Returns it with the length of each rank's
    /// input.
    ///
    /// ```
    /// let ranks: Vec<_> = bonfire_core::Group::threads(3)?
    ///     .into_iter()
    ///     .map(|group| std::thread::spawn(move || group.all_gather_v(&vec![group.rank() as i32; group.rank()])))
    ///     .collect();
    /// for rank in ranks {
    ///     assert_eq!(rank.join().unwrap()?, (vec![1, 2, 2], vec![0, 1, 2]));
    /// }
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Io`] on all ranks, and a poisoned group, if a rank has no memory for the result.
    /// Otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_gather_v<T: Element>(&self, input: &[T]) -> Result<(Vec<T>, Vec<usize>), Error> {
        let deadline = Deadline::after(self.deadline());
        let sizes = self.gather_sizes("all_gather_v", input.len())?;
        let mut output = self.output("all_gather_v", sizes.iter().sum())?;
        self.within(&deadline).all_gather_v_into(input, &sizes, &mut output)?;
        Ok((output, sizes))
    }

    /// Reduces `input`, the whole, element-wise over all ranks and fills `output` with this rank's part of the result.
    ///
    /// # Errors
    /// See [`all_gather_v_into`](Group::all_gather_v_into).
    #[track_caller]
    pub fn reduce_scatter_v_into<T: Element>(
        &self,
        input: &[T],
        sizes: &[usize],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::ReduceScatter).reduction(op).sizes(sizes), Some(input), output)
    }

    /// Reduces `input`, the whole, element-wise over all ranks and returns this rank's part, of `own` elements.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if the parts of all ranks together do not have the length of every
    /// rank's input. [`Error::Io`] as in [`all_gather_v`](Group::all_gather_v). Otherwise see
    /// [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn reduce_scatter_v<T: Element>(&self, input: &[T], own: usize, op: ReduceOp) -> Result<Vec<T>, Error> {
        let deadline = Deadline::after(self.deadline());
        let (n, mine) = (self.world_size(), [own, input.len()].map(|size| size as u64));
        let mut all = vec![0u64; 2 * n];
        self.all_gather_into(&mine, &mut all)?;
        let sizes = check::received_sizes("reduce_scatter_v", all.iter().copied().step_by(2))?;
        let count = check::sizes("reduce_scatter_v", &sizes, self.world_size())?;
        // All ranks see the same sizes and return the same error.
        if let Some(rank) = (0..n).find(|rank| all[2 * rank + 1] != count as u64) {
            let (len, operation) = (all[2 * rank + 1], "reduce_scatter_v");
            let reason = format!("rank {rank} has an input of {len} elements, but all parts together have {count}");
            return Err(Error::argument(operation, reason));
        }
        let mut output = self.output("reduce_scatter_v", own)?;
        self.within(&deadline).reduce_scatter_v_into(input, &sizes, &mut output, op)?;
        Ok(output)
    }

    /// Concatenates the `input` of all ranks in rank order, in `output` on `root`. On other ranks the output is not
    /// used (pass `&mut []`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank; otherwise see
    /// [`all_gather_v_into`](Group::all_gather_v_into).
    #[track_caller]
    pub fn gather_v_into<T: Element>(
        &self,
        input: &[T],
        sizes: &[usize],
        output: &mut [T],
        root: usize,
    ) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Gather).root(root).sizes(sizes), Some(input), output)
    }

    /// Concatenates the `input` of all ranks in rank order, on `root`. Returns it there with the length of each rank's
    /// input, and `None` on other ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank. [`Error::Io`] as in [`all_gather_v`](Group::all_gather_v).
    /// Otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    #[expect(clippy::type_complexity, reason = "the result of `all_gather_v`, on one rank")]
    pub fn gather_v<T: Element>(&self, input: &[T], root: usize) -> Result<Option<(Vec<T>, Vec<usize>)>, Error> {
        check::rank("gather_v", "root", root, self.world_size())?;
        let deadline = Deadline::after(self.deadline());
        let sizes = self.gather_sizes("gather_v", input.len())?;
        let here = self.rank() == root;
        let mut output = self.output("gather_v", if here { sizes.iter().sum() } else { 0 })?;
        self.within(&deadline).gather_v_into(input, &sizes, &mut output, root)?;
        Ok(here.then_some((output, sizes)))
    }

    /// Fills `output` with this rank's part of the root's `input`. On other ranks the input is not used (pass `&[]`).
    ///
    /// # Errors
    /// See [`gather_v_into`](Group::gather_v_into).
    #[track_caller]
    pub fn scatter_v_into<T: Element>(
        &self,
        input: &[T],
        sizes: &[usize],
        output: &mut [T],
        root: usize,
    ) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Scatter).root(root).sizes(sizes), Some(input), output)
    }

    /// Returns this rank's part of the root's input. The root passes all parts in rank order, and their sizes; the
    /// other ranks pass `None`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank, if the root passes no input or sizes that do not fit it, or
    /// if another rank passes an input. [`Error::Io`] as in [`all_gather_v`](Group::all_gather_v). Otherwise see
    /// [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn scatter_v<T: Element>(&self, input: Option<(&[T], &[usize])>, root: usize) -> Result<Vec<T>, Error> {
        check::rank("scatter_v", "root", root, self.world_size())?;
        let mut sizes = vec![0u64; self.world_size()];
        match input {
            Some((input, given)) if self.rank() == root => {
                check::len("scatter_v", "input", input.len(), check::sizes("scatter_v", given, self.world_size())?)?;
                sizes = given.iter().map(|size| *size as u64).collect();
            }
            None if self.rank() != root => {}
            _ => return Err(Error::argument("scatter_v", format!("only rank {root}, the root, passes an input"))),
        }
        let deadline = Deadline::after(self.deadline());
        self.broadcast(&mut sizes, root)?;
        let sizes = check::received_sizes("scatter_v", sizes)?;
        let mut output = self.output("scatter_v", sizes[self.rank()])?;
        self.within(&deadline).scatter_v_into(input.map_or(&[], |(input, _)| input), &sizes, &mut output, root)?;
        Ok(output)
    }

    /// Gathers the size of every rank's part.
    #[track_caller]
    fn gather_sizes(&self, operation: &str, own: usize) -> Result<Vec<usize>, Error> {
        let mut sizes = vec![0u64; self.world_size()];
        self.all_gather_into(&[own as u64], &mut sizes)?;
        let sizes = check::received_sizes(operation, sizes)?;
        check::sizes(operation, &sizes, self.world_size())?;
        Ok(sizes)
    }
}
