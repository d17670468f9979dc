//! Parts of any sizes.
//!
//! The forms that end in `_into` take the sizes from the caller, the same on all ranks: `sizes[r]` is the number of elements
//! of rank `r`'s part, 0 too. The short forms exchange the sizes first, which is an operation more, and give new vectors.

use super::super::buffer::zeroed;
use super::super::check;
use super::super::handle::Group;
use super::super::request::Request;
use crate::types::{Element, Error, Operation, ReduceOp};

/// # Parts of any sizes
///
/// As the operations of the same names, with `sizes[r]` elements for rank `r`, 0 too. Where the name ends in `_into` the caller
/// knows the sizes, the same on all ranks; the short forms find them out, by one small operation more.
impl Group {
    /// Collects every rank's `input` in `output` on every rank, in the order of ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the sizes are not as many as ranks, or do not fit input and output;
    /// [`Error::Mismatch`] where ranks give different ones; else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_gather_v_into<T: Element>(&self, input: &[T], sizes: &[usize], output: &mut [T]) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::AllGather).sizes(sizes), Some(input), output)
    }

    /// Every rank's `input`, one after the other, and how many elements each rank brought.
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
    /// As [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_gather_v<T: Element>(&self, input: &[T]) -> Result<(Vec<T>, Vec<usize>), Error> {
        let sizes = self.gather_sizes("all_gather_v", input.len())?;
        let mut output = zeroed("all_gather_v", sizes.iter().sum())?;
        self.all_gather_v_into(input, &sizes, &mut output)?;
        Ok((output, sizes))
    }

    /// Reduces `input`, which is the whole on every rank, and leaves on each its part.
    ///
    /// # Errors
    /// As [`all_gather_v_into`](Group::all_gather_v_into).
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

    /// This rank's part, of `own` elements, of the reduction of `input`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks where their parts are not as long together as the input of one of them; else
    /// as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn reduce_scatter_v<T: Element>(&self, input: &[T], own: usize, op: ReduceOp) -> Result<Vec<T>, Error> {
        let (n, mine) = (self.world_size(), [own, input.len()].map(|size| size as u64));
        let mut all = vec![0u64; 2 * n];
        self.all_gather_into(&mine, &mut all)?;
        let sizes = check::told("reduce_scatter_v", all.iter().copied().step_by(2))?;
        let count = check::sizes("reduce_scatter_v", &sizes, self.world_size())?;
        // Everybody sees everybody's, so nobody goes on alone.
        if let Some(rank) = (0..n).find(|rank| all[2 * rank + 1] != count as u64) {
            let (len, operation) = (all[2 * rank + 1], "reduce_scatter_v");
            let reason = format!("rank {rank} has an input of {len} elements, and all parts together have {count}");
            return Err(Error::argument(operation, reason));
        }
        let mut output = zeroed("reduce_scatter_v", own)?;
        self.reduce_scatter_v_into(input, &sizes, &mut output, op)?;
        Ok(output)
    }

    /// Collects every rank's `input` in `output` on `root`. The output is not used elsewhere.
    ///
    /// # Errors
    /// As [`all_gather_v_into`](Group::all_gather_v_into), and for a root that is no rank.
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

    /// On `root` every rank's `input`, one after the other, and how many elements each rank brought; `None` elsewhere.
    ///
    /// # Errors
    /// As [`gather`](Group::gather).
    #[track_caller]
    #[expect(clippy::type_complexity, reason = "what `all_gather_v` gives, on one rank")]
    pub fn gather_v<T: Element>(&self, input: &[T], root: usize) -> Result<Option<(Vec<T>, Vec<usize>)>, Error> {
        check::rank("gather_v", "root", root, self.world_size())?;
        let sizes = self.gather_sizes("gather_v", input.len())?;
        let here = self.rank() == root;
        let mut output = zeroed("gather_v", if here { sizes.iter().sum() } else { 0 })?;
        self.gather_v_into(input, &sizes, &mut output, root)?;
        Ok(here.then_some((output, sizes)))
    }

    /// Fills `output` with this rank's part of `root`'s `input`, which is not used elsewhere.
    ///
    /// # Errors
    /// As [`gather_v_into`](Group::gather_v_into).
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

    /// This rank's part of what `root` gives: all parts one after the other, and their sizes. The other ranks give `None`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root that is no rank or gives nothing, sizes on it that do not fit, and an input
    /// elsewhere; else as [`scatter`](Group::scatter).
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
            _ => return Err(Error::argument("scatter_v", format!("rank {root}, the root, gives the only input"))),
        }
        self.broadcast(&mut sizes, root)?;
        let sizes = check::told("scatter_v", sizes)?;
        let mut output = zeroed("scatter_v", sizes[self.rank()])?;
        self.scatter_v_into(input.map_or(&[], |(input, _)| input), &sizes, &mut output, root)?;
        Ok(output)
    }

    /// Every rank's size.
    #[track_caller]
    fn gather_sizes(&self, operation: &str, own: usize) -> Result<Vec<usize>, Error> {
        let mut sizes = vec![0u64; self.world_size()];
        self.all_gather_into(&[own as u64], &mut sizes)?;
        let sizes = check::told(operation, sizes)?;
        check::sizes(operation, &sizes, self.world_size())?;
        Ok(sizes)
    }
}
