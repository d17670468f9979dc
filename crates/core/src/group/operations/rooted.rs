//! Gather and scatter: the root has the whole, every rank a part.

use super::super::handle::Group;
use super::super::request::Request;
use crate::types::{Element, Error, Operation};

/// # Gather and scatter
impl Group {
    /// Collects every rank's part on `root`. `data` has the length of the whole on every rank, and rank `r` contributes
    /// its own range [`partition`](crate::partition())`(data.len(), world_size, r)`. On other ranks `data` is
    /// unchanged.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank; otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn gather<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Gather).root(root), None, data)
    }

    /// Concatenates the `input` of all ranks in rank order, in `output` on `root`. All inputs have the same length, and
    /// the root's output has `world_size` times as many elements. On other ranks the output is not used (pass
    /// `&mut []`). For inputs of different lengths use [`gather_v`](Group::gather_v).
    ///
    /// ```
    /// let ranks: Vec<_> = bonfire_core::Group::threads(3)?
    ///     .into_iter()
    ///     .map(|group| std::thread::spawn(move || {
    ///         let mut all = vec![0; if group.rank() == 1 { 6 } else { 0 }];
    ///         group.gather_into(&[group.rank() as i32; 2], &mut all, 1).map(|()| all)
    ///     }))
    ///     .collect();
    /// let all: Result<Vec<_>, _> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    /// assert_eq!(all?, [vec![], vec![0, 0, 1, 1, 2, 2], vec![]]);
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank, or if the root's output is not `world_size` times as long as
    /// its input; otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn gather_into<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Gather).root(root), Some(input), output)
    }

    /// Sends each rank its part of the root's `data`: rank `r` receives the range
    /// [`partition`](crate::partition())`(data.len(), world_size, r)`. `data` has the length of the whole on every
    /// rank; on other ranks than the root the rest of it is unchanged.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank; otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn scatter<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Scatter).root(root), None, data)
    }

    /// Fills `output`, which has the same length on all ranks, with this rank's part of the root's `input`, which has
    /// `world_size` times as many elements. On other ranks the input is not used (pass `&[]`). For parts of different
    /// lengths use [`scatter_v`](Group::scatter_v).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank, or if the root's input is not `world_size` times as long as
    /// its output; otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn scatter_into<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Scatter).root(root), Some(input), output)
    }
}
