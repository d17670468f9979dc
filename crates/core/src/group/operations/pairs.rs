//! What every pair of ranks does for itself.

use bytemuck::{cast_slice, cast_slice_mut};

use super::super::buffer::zeroed;
use super::super::bytes::ByteOperations;
use super::super::check;
use super::super::handle::Group;
use super::super::request::Request;
use crate::types::{Element, Error, Operation};

/// # Between pairs of ranks
impl Group {
    /// Swaps parts of any sizes between all ranks: `input` has `send[r]` elements for rank `r`, in the order of ranks, and
    /// `output` gets the `recv[r]` elements that rank `r` has for this one. Each rank must expect from another what that
    /// one has for it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the sizes are not as many as ranks, or do not fit input and output;
    /// [`Error::Mismatch`] where two ranks have different sizes for what is between them; else as
    /// [`all_reduce`](Group::all_reduce).
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

    /// Swaps parts of any sizes between all ranks: `input` has `send[r]` elements for rank `r`, in the order of ranks. Gives
    /// what the ranks have for this one, in the order of ranks, and how many elements each has.
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
    /// [`Error::InvalidArgument`] where the sizes are not as many as ranks, or do not fit the input; else as
    /// [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_to_all_v<T: Element>(&self, input: &[T], send: &[usize]) -> Result<(Vec<T>, Vec<usize>), Error> {
        check::len("all_to_all_v", "input", input.len(), check::sizes("all_to_all_v", send, self.world_size())?)?;
        let mut sizes: Vec<u64> = send.iter().map(|size| *size as u64).collect();
        self.all_to_all(&mut sizes)?;
        let recv = check::told("all_to_all_v", sizes)?;
        let mut output = zeroed("all_to_all_v", check::sizes("all_to_all_v", &recv, self.world_size())?)?;
        self.all_to_all_v_into(input, send, &mut output, &recv)?;
        Ok((output, recv))
    }

    /// Sends `outgoing` to rank `to` and receives `incoming` from rank `from`, at once: two ranks may exchange with each
    /// other, and all ranks around a ring. Each must call it, or one that fits. The lengths may differ. A rank may exchange
    /// with itself.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where `to` or `from` is no rank, or only one of them is the caller; [`Error::Mismatch`]
    /// where the other sends another type or length; else as [`all_reduce`](Group::all_reduce).
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
