//! Every operation on slices.
//!
//! Operations come in place (`all_reduce`), out of place (`all_reduce_into`) and started (`start_all_reduce`), which
//! returns at once, owns its buffer meanwhile and gives it back from [`Work::wait`].
//!
//! Collective operations must be called by all ranks, in the same order, with the same element type, count, reduction
//! and root. Their results have the same bits on all ranks and in every run.

mod agreed;
mod batch;
mod execute;
#[cfg(all(feature = "shm", target_os = "linux"))]
mod hosts;
mod message;
mod pairs;
mod rooted;
mod varied;

use std::panic::Location;

use bytemuck::{cast_slice, cast_slice_mut};

pub use self::batch::Batch;
use crate::group::{Group, Work};
use crate::transport::Buffers;
use crate::types::{Call, Element, Error, Operation, Parts, ReduceOp, partition};

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
        self.run(call::<T>(Operation::AllReduce, data.len(), Some(op), None), None, data)
    }

    /// Like [`all_reduce`](Group::all_reduce), from `input` to `output`, which have the same length.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the lengths differ, else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_reduce_into<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<(), Error> {
        expect("all_reduce", "output", output.len(), input.len())?;
        self.run(call::<T>(Operation::AllReduce, input.len(), Some(op), None), Some(input), output)
    }

    /// Replaces `data` on `root` by the element-wise reduction over all ranks. Elsewhere `data` stays as it is.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root that is no rank, else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn reduce<T: Element>(&self, data: &mut [T], op: ReduceOp, root: usize) -> Result<(), Error> {
        self.check_rank("reduce", "root", root)?;
        self.run(call::<T>(Operation::Reduce, data.len(), Some(op), Some(root)), None, data)
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
        self.check_rank("reduce", "root", root)?;
        let output = if self.rank() == root { output } else { &mut [] };
        if self.rank() == root {
            expect("reduce", "output", output.len(), input.len())?;
        }
        self.run(call::<T>(Operation::Reduce, input.len(), Some(op), Some(root)), Some(input), output)
    }

    /// Replaces `data` on every rank by `root`'s.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root that is no rank, else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<(), Error> {
        self.check_rank("broadcast", "root", root)?;
        self.run(call::<T>(Operation::Broadcast, data.len(), None, Some(root)), None, data)
    }

    /// Fills `output` on every rank, the root included, with the `input` that `root` gives; the other ranks give
    /// `None`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a root that is no rank, a root without an input or with one of another length
    /// than its output, or an input elsewhere; else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn broadcast_into<T: Element>(&self, input: Option<&[T]>, output: &mut [T], root: usize) -> Result<(), Error> {
        self.check_rank("broadcast", "root", root)?;
        match input {
            Some(input) if self.rank() == root => expect("broadcast", "output", output.len(), input.len())?,
            None if self.rank() != root => {}
            _ => return Err(Error::argument("broadcast", format!("rank {root}, the root, gives the only input"))),
        }
        self.run(call::<T>(Operation::Broadcast, output.len(), None, Some(root)), input, output)
    }

    /// Collects every rank's part in `data` on every rank. Rank `r` brings its own part where
    /// [`partition`](crate::partition())`(data.len(), world_size, r)` says.
    ///
    /// # Errors
    /// As [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_gather<T: Element>(&self, data: &mut [T]) -> Result<(), Error> {
        self.run(call::<T>(Operation::AllGather, data.len(), None, None), None, data)
    }

    /// Collects every rank's `input` in `output` on every rank, in the order of ranks. The input is as long as this
    /// rank's [`partition`](crate::partition()) of the output: with `n` ranks and equal inputs, `1/n` of it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the input has another length, else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_gather_into<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        let own = partition(output.len(), self.world_size(), self.rank()).len();
        expect("all_gather", "input", input.len(), own)?;
        self.run(call::<T>(Operation::AllGather, output.len(), None, None), Some(input), output)
    }

    /// Reduces `data` over all ranks and leaves on rank `r` the part that
    /// [`partition`](crate::partition())`(data.len(), world_size, r)` says. The rest of `data` is unspecified.
    ///
    /// # Errors
    /// As [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn reduce_scatter<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<(), Error> {
        self.run(call::<T>(Operation::ReduceScatter, data.len(), Some(op), None), None, data)
    }

    /// Like [`reduce_scatter`](Group::reduce_scatter), from `input` to `output`, which is as long as this rank's
    /// [`partition`](crate::partition()) of the input.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the output has another length, else as [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn reduce_scatter_into<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<(), Error> {
        let own = partition(input.len(), self.world_size(), self.rank()).len();
        expect("reduce_scatter", "output", output.len(), own)?;
        self.run(call::<T>(Operation::ReduceScatter, input.len(), Some(op), None), Some(input), output)
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
        self.check_parts(data.len())?;
        self.run(call::<T>(Operation::AllToAll, data.len(), None, None), None, data)
    }

    /// Like [`all_to_all`](Group::all_to_all), from `input` to `output`, which have the same length.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where the lengths differ, else as [`all_to_all`](Group::all_to_all).
    #[track_caller]
    pub fn all_to_all_into<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<(), Error> {
        self.check_parts(input.len())?;
        expect("all_to_all", "output", output.len(), input.len())?;
        self.run(call::<T>(Operation::AllToAll, input.len(), None, None), Some(input), output)
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// As [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn barrier(&self) -> Result<(), Error> {
        self.run::<u8>(call::<u8>(Operation::Barrier, 0, None, None), None, &mut [])
    }

    #[track_caller]
    fn run<T: Element>(&self, call: Call, input: Option<&[T]>, output: &mut [T]) -> Result<(), Error> {
        self.run_in(call, Parts::Even, input, output)
    }

    #[track_caller]
    fn run_in<T: Element>(
        &self,
        call: Call,
        parts: Parts<'_>,
        input: Option<&[T]>,
        output: &mut [T],
    ) -> Result<(), Error> {
        let buffers = Buffers { input: input.map(cast_slice), output: cast_slice_mut(output), parts };
        let at = Location::caller();
        let _turn = self.turn();
        self.core.collective(self.stamp(call), buffers, self.deadline(), at, execute::plans)
    }
}

/// # Started operations
///
/// They return at once and run in the order in which they were started, also against the blocking ones. A buffer is
/// anything that owns elements, such as a `Vec`.
impl Group {
    /// Starts [`all_reduce`](Group::all_reduce).
    ///
    /// ```
    /// # let group = bonfire_core::Group::threads(1)?.remove(0);
    /// let work = group.start_all_reduce(vec![1.0f32; 1024], bonfire_core::ReduceOp::Sum)?;
    /// // ... compute something else ...
    /// let reduced = work.wait().map_err(|(error, _buffer)| error)?;
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// Wrong arguments; whatever comes later is returned by [`Work::wait`].
    #[track_caller]
    pub fn start_all_reduce<T: Element, B>(&self, buffer: B, op: ReduceOp) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start(buffer, move |len| call::<T>(Operation::AllReduce, len, Some(op), None))
    }

    /// Starts [`reduce`](Group::reduce).
    ///
    /// # Errors
    /// Wrong arguments; whatever comes later is returned by [`Work::wait`].
    #[track_caller]
    pub fn start_reduce<T: Element, B>(&self, buffer: B, op: ReduceOp, root: usize) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.check_rank("reduce", "root", root)?;
        self.start(buffer, move |len| call::<T>(Operation::Reduce, len, Some(op), Some(root)))
    }

    /// Starts [`broadcast`](Group::broadcast).
    ///
    /// # Errors
    /// Wrong arguments; whatever comes later is returned by [`Work::wait`].
    #[track_caller]
    pub fn start_broadcast<T: Element, B>(&self, buffer: B, root: usize) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.check_rank("broadcast", "root", root)?;
        self.start(buffer, move |len| call::<T>(Operation::Broadcast, len, None, Some(root)))
    }

    /// Starts [`all_gather`](Group::all_gather).
    ///
    /// # Errors
    /// Whatever comes later is returned by [`Work::wait`].
    #[track_caller]
    pub fn start_all_gather<T: Element, B>(&self, buffer: B) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start(buffer, move |len| call::<T>(Operation::AllGather, len, None, None))
    }

    /// Starts [`reduce_scatter`](Group::reduce_scatter).
    ///
    /// # Errors
    /// Whatever comes later is returned by [`Work::wait`].
    #[track_caller]
    pub fn start_reduce_scatter<T: Element, B>(&self, buffer: B, op: ReduceOp) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start(buffer, move |len| call::<T>(Operation::ReduceScatter, len, Some(op), None))
    }

    /// Starts [`all_to_all`](Group::all_to_all).
    ///
    /// # Errors
    /// Wrong arguments; whatever comes later is returned by [`Work::wait`].
    #[track_caller]
    pub fn start_all_to_all<T: Element, B>(&self, mut buffer: B) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.check_parts(buffer.as_mut().len())?;
        self.start(buffer, move |len| call::<T>(Operation::AllToAll, len, None, None))
    }

    /// Starts [`barrier`](Group::barrier).
    ///
    /// # Errors
    /// Whatever comes later is returned by [`Work::wait`].
    #[track_caller]
    pub fn start_barrier(&self) -> Result<Work<()>, Error> {
        let (deadline, at) = (self.deadline(), Location::caller());
        Ok(self.progress()?.start(&self.core, (), move |core, ()| {
            let buffers = Buffers { input: None, output: &mut [], parts: Parts::Even };
            core.collective(call::<u8>(Operation::Barrier, 0, None, None), buffers, deadline, at, execute::plans)
        }))
    }

    /// Starts `call` on the bytes that `fill` gives when its turn has come. They are as many as the call says, and
    /// aligned for its elements.
    #[track_caller]
    #[doc(hidden)]
    pub fn start_filled<B: Send + 'static>(
        &self,
        call: Call,
        buffer: B,
        fill: impl for<'a> FnOnce(&'a mut B) -> Result<&'a mut [u8], Error> + Send + 'static,
    ) -> Result<Work<B>, Error> {
        let (deadline, at) = (self.deadline(), Location::caller());
        Ok(self.progress()?.start(&self.core, buffer, move |core, buffer| {
            let output = fill(buffer).map_err(|error| core.abandon(error))?;
            core.collective(call, Buffers { input: None, output, parts: Parts::Even }, deadline, at, execute::plans)
        }))
    }

    #[track_caller]
    fn start<T: Element, B>(
        &self,
        buffer: B,
        call: impl FnOnce(usize) -> Call + Send + 'static,
    ) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        let (deadline, at) = (self.deadline(), Location::caller());
        Ok(self.progress()?.start(&self.core, buffer, move |core, buffer| {
            let output = buffer.as_mut();
            let call = call(output.len());
            let buffers = Buffers { input: None, output: cast_slice_mut(output), parts: Parts::Even };
            core.collective(call, buffers, deadline, at, execute::plans)
        }))
    }
}

impl Group {
    #[doc(hidden)]
    pub fn check_rank(&self, operation: &str, what: &str, rank: usize) -> Result<(), Error> {
        if rank < self.world_size() {
            return Ok(());
        }
        let n = self.world_size();
        Err(Error::argument(operation, format!("{what} {rank} is no rank of this group: give one from 0 to {}", n - 1)))
    }

    #[doc(hidden)]
    pub fn check_parts(&self, len: usize) -> Result<(), Error> {
        let n = self.world_size();
        if len.is_multiple_of(n) {
            return Ok(());
        }
        let reason = format!("{len} elements are no {n} parts of one length: give a multiple of {n}");
        Err(Error::argument("all_to_all", reason))
    }
}

fn call<T: Element>(operation: Operation, count: usize, reduction: Option<ReduceOp>, root: Option<usize>) -> Call {
    Call { operation, dtype: T::DTYPE, count, reduction, root, sizes: None }
}

fn expect(operation: &str, what: &str, len: usize, right: usize) -> Result<(), Error> {
    if len == right {
        return Ok(());
    }
    Err(Error::argument(operation, format!("the {what} has {len} elements and must have {right}")))
}
