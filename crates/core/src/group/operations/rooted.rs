//! One rank has the whole, every rank a part.

use super::super::handle::Group;
use super::super::request::Request;
use crate::types::{Element, Error, Operation};

/// # Parts of a whole on one rank
impl Group {
    /// Collects every rank's part in `data` on `root`. Rank `r` brings its own part where
    /// [`partition`](crate::partition())`(data.len(), world_size, r)` says. Elsewhere than on the root `data` stays as it
    /// is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root that is no rank, else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn gather<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Gather).root(root), None, data)
    }

    /// Collects every rank's `input`, all of one length, in `output` on `root`, in the order of ranks. The output is not
    /// used elsewhere (pass `&mut []`).
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
    /// [`Error::InvalidArgument`] for a root that is no rank or an output of another length on it, else as
    /// [`all_reduce`](Group::all_reduce). Where the ranks bring different lengths: see [`gather_v`](Group::gather_v).
    #[track_caller]
    pub fn gather_into<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Gather).root(root), Some(input), output)
    }

    /// Gives every rank its part of `root`'s `data`, where
    /// [`partition`](crate::partition())`(data.len(), world_size, rank)` says. Elsewhere than on the root the rest of `data`
    /// stays as it is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root that is no rank, else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn scatter<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Scatter).root(root), None, data)
    }

    /// Fills `output`, of one length on all ranks, with this rank's part of `root`'s `input`. The input is not used
    /// elsewhere (pass `&[]`).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root that is no rank or an input of another length on it, else as
    /// [`all_reduce`](Group::all_reduce). Where ranks get different lengths: see [`scatter_v`](Group::scatter_v).
    #[track_caller]
    pub fn scatter_into<T: Element>(&self, input: &[T], output: &mut [T], root: usize) -> Result<(), Error> {
        self.run(Request::of::<T>(Operation::Scatter).root(root), Some(input), output)
    }
}
