//! Exchanges in which every pair of ranks has sizes of its own.

use bytemuck::{cast_slice, cast_slice_mut};

use super::super::bytes::ByteOperations;
use super::super::check;
use super::super::handle::Group;
use super::super::request::Request;
use crate::sync::Deadline;
use crate::types::{Element, Error, Operation};

/// # Pairwise exchanges
///
/// All ranks call the `all_to_all_v` forms. An [`exchange`](Group::exchange) needs only this rank and its peers.
impl Group {
    /// Exchanges variable-size parts between all ranks. `input` consists of `send[r]` elements for each rank `r`,
    /// `output` of `recv[r]` elements from each rank `r`, both in rank order. `recv[r]` must equal what rank `r` sends
    /// to this rank.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is not one size per rank, if the sizes do not fit input and output, or if
    /// this rank's two sizes for itself differ. [`Error::Mismatch`] if two ranks disagree on the size of a part between
    /// them. Otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_to_all_v_into<T: Element>(
        &self,
        input: &[T],
        send: &[usize],
        output: &mut [T],
        recv: &[usize],
    ) -> Result<(), Error> {
        let request = Request::of::<T>(Operation::AllToAllV);
        self.operate_pairs(request, (cast_slice(input), send), (cast_slice_mut(output), recv))
    }

    /// Exchanges variable-size parts between all ranks, after one small operation that exchanges their sizes. `input`
    /// consists of `send[r]` elements for each rank `r`, in rank order. Returns the elements from all ranks in rank
    /// order, and the number of elements from each. If the sizes are known use
    /// [`all_to_all_v_into`](Group::all_to_all_v_into).
    ///
    /// ```
    /// let ranks: Vec<_> = bonfire_core::Group::threads(2)?
    ///     .into_iter()
    ///     .map(|group| std::thread::spawn(move || match group.rank() {
    ///         0 => group.all_to_all_v(&[1, 2, 3], &[1, 2]),
    ///         _ => group.all_to_all_v(&[4], &[0, 1]),
    ///     }))
    ///     .collect();
    /// let results: Result<Vec<_>, _> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    /// assert_eq!(results?, [(vec![1], vec![1, 0]), (vec![2, 3, 4], vec![2, 1])]);
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is not one size per rank, or if the sizes do not fit the input.
    /// [`Error::Io`] as in [`all_gather_v`](Group::all_gather_v). Otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_to_all_v<T: Element>(&self, input: &[T], send: &[usize]) -> Result<(Vec<T>, Vec<usize>), Error> {
        check::len("all_to_all_v", "input", input.len(), check::sizes("all_to_all_v", send, self.world_size())?)?;
        let mut sizes: Vec<u64> = send.iter().map(|size| *size as u64).collect();
        let deadline = Deadline::after(self.deadline());
        self.all_to_all(&mut sizes)?;
        let recv = check::received_sizes("all_to_all_v", sizes)?;
        let mut output = self.output("all_to_all_v", check::sizes("all_to_all_v", &recv, self.world_size())?)?;
        self.within(&deadline).all_to_all_v_into(input, send, &mut output, &recv)?;
        Ok((output, recv))
    }

    /// Sends `outgoing` to rank `to` and receives `incoming` from rank `from` at the same time, so two ranks may
    /// exchange with each other, and all ranks around a ring. Both peers call `exchange` too: rank `to` with an
    /// `incoming` of the length of `outgoing`, rank `from` with an `outgoing` of the length of `incoming`. A rank may
    /// exchange with itself: then `to` and `from` are both this rank, and the lengths are equal.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `to` or `from` is not a rank, if only one of them is this rank, or if both are and
    /// the lengths differ. [`Error::Mismatch`] if the peer sends another type or length. Otherwise see
    /// [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn exchange<T: Element>(
        &self,
        outgoing: &[T],
        to: usize,
        incoming: &mut [T],
        from: usize,
    ) -> Result<(), Error> {
        let request = Request::of::<T>(Operation::Exchange);
        self.operate_exchange(request, (cast_slice(outgoing), to), (cast_slice_mut(incoming), from))
    }
}
