//! What every pair of ranks does for itself.

use std::panic::Location;

use bytemuck::{cast_slice, cast_slice_mut};

use super::varied::lengths;
use super::{call, expect};
use crate::group::{Group, zeroed};
use crate::sync::Deadline;
use crate::transport::Buffers;
use crate::types::{Element, Error, Operation, Parts, Tag};

/// # Between pairs of ranks
impl Group {
    /// Swaps parts of any sizes between all ranks: `input` has `send[r]` elements for rank `r`, in the order of ranks, and
    /// `output` gets the `receive[r]` elements that rank `r` has for this one. Each rank must expect from another what that
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
        receive: &[usize],
    ) -> Result<(), Error> {
        let operation = "all_to_all_v";
        let (sent, received) = (self.check_sizes(operation, send)?, self.check_sizes(operation, receive)?);
        expect(operation, "input", input.len(), sent)?;
        expect(operation, "output", output.len(), received)?;
        let (rank, n, size) = (self.rank(), self.world_size(), size_of::<T>());
        if send[rank] != receive[rank] {
            let reason = format!("{} elements for this rank itself, which expects {}", send[rank], receive[rank]);
            return Err(Error::argument(operation, reason));
        }
        let part = |sizes: &[usize], index: usize| {
            let part = Parts::Sizes(sizes).part(0, n, index);
            part.start * size..part.end * size
        };
        let (input, output): (&[u8], &mut [u8]) = (cast_slice(input), cast_slice_mut(output));
        let at = Location::caller();
        let _turn = self.turn();
        let nothing = Buffers { input: None, output: &mut [], parts: Parts::Even };
        let call = self.stamp(call::<T>(Operation::AllToAllV, 0, None, None));
        self.core.collective(call, nothing, self.deadline(), at, |core, _, site, _, deadline, _| {
            let tag = Tag { group: 0, sequence: site.sequence, call: site.call };
            output[part(receive, rank)].copy_from_slice(&input[part(send, rank)]);
            // Every rank hears from every other, also where there is nothing for it.
            for distance in 1..n {
                let (to, from) = ((rank + distance) % n, (rank + n - distance) % n);
                let (outgoing, incoming) = (&input[part(send, to)], &mut output[part(receive, from)]);
                core.transport().exchange(&tag, (to, outgoing), (from, incoming), deadline)?;
            }
            Ok(())
        })
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
        expect("all_to_all_v", "input", input.len(), self.check_sizes("all_to_all_v", send)?)?;
        let mut sizes: Vec<u64> = send.iter().map(|size| *size as u64).collect();
        self.all_to_all(&mut sizes)?;
        let receive = lengths("all_to_all_v", sizes)?;
        let mut output = zeroed("all_to_all_v", self.check_sizes("all_to_all_v", &receive)?)?;
        self.all_to_all_v_into(input, send, &mut output, &receive)?;
        Ok((output, receive))
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
        self.check_rank("exchange", "receiver", to)?;
        self.check_rank("exchange", "sender", from)?;
        if (to == self.rank()) != (from == self.rank()) {
            let reason = "a rank that sends to itself receives from itself: give two other ranks, or none";
            return Err(Error::argument("exchange", reason));
        }
        if to == self.rank() {
            expect("exchange", "incoming buffer", incoming.len(), outgoing.len())?;
            incoming.copy_from_slice(outgoing);
            return Ok(());
        }
        let at = Location::caller();
        let _turn = self.turn();
        let call = call::<T>(Operation::Exchange, 0, None, None);
        let buffers = (Some((to, cast_slice(outgoing))), Some((from, cast_slice_mut(incoming))));
        self.core.exchange(call, buffers, &Deadline::after(self.deadline()), at)
    }
}
