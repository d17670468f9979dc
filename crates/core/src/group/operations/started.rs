//! Started operations, which return at once.

use super::super::bytes::ByteOperations;
use super::super::handle::Group;
use super::super::progress::Work;
use super::super::request::Request;
use crate::types::{Element, Error, Operation, ReduceOp};

/// # Started operations
///
/// The `start_` forms return at once, so that communication overlaps with computation. Operations run in the order in
/// which they were called, started and blocking ones alike, and one at a time: two ranks that start a send to each
/// other and then the receives wait for each other, see [`start_send`](Group::start_send). A deadline starts when its
/// operation is started. A started operation owns its buffer, which is anything that owns elements, such as a `Vec` or
/// a [`Buffer`](crate::Buffer), and [`Work::wait`] returns it. Starting fails for wrong arguments, or with
/// [`Error::Io`] if the progress thread cannot be started; the buffer is then dropped, and the group stays usable. All
/// other errors come from [`Work::wait`], also if the group is poisoned already.
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
    /// [`Work::wait`] returns all errors of the operation.
    #[track_caller]
    pub fn start_all_reduce<T: Element, B>(&self, buffer: B, op: ReduceOp) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start(Request::of::<T>(Operation::AllReduce).reduction(op), buffer)
    }

    /// Starts [`reduce`](Group::reduce).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank. [`Work::wait`] returns later errors.
    #[track_caller]
    pub fn start_reduce<T: Element, B>(&self, buffer: B, op: ReduceOp, root: usize) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start(Request::of::<T>(Operation::Reduce).reduction(op).root(root), buffer)
    }

    /// Starts [`broadcast`](Group::broadcast).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank. [`Work::wait`] returns later errors.
    #[track_caller]
    pub fn start_broadcast<T: Element, B>(&self, buffer: B, root: usize) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start(Request::of::<T>(Operation::Broadcast).root(root), buffer)
    }

    /// Starts [`all_gather`](Group::all_gather).
    ///
    /// # Errors
    /// [`Work::wait`] returns all errors of the operation.
    #[track_caller]
    pub fn start_all_gather<T: Element, B>(&self, buffer: B) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start(Request::of::<T>(Operation::AllGather), buffer)
    }

    /// Starts [`reduce_scatter`](Group::reduce_scatter).
    ///
    /// # Errors
    /// [`Work::wait`] returns all errors of the operation.
    #[track_caller]
    pub fn start_reduce_scatter<T: Element, B>(&self, buffer: B, op: ReduceOp) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start(Request::of::<T>(Operation::ReduceScatter).reduction(op), buffer)
    }

    /// Starts [`all_to_all`](Group::all_to_all).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the length is not a multiple of the world size. [`Work::wait`] returns later
    /// errors.
    #[track_caller]
    pub fn start_all_to_all<T: Element, B>(&self, buffer: B) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start(Request::of::<T>(Operation::AllToAll), buffer)
    }

    /// Starts [`barrier`](Group::barrier).
    ///
    /// # Errors
    /// [`Work::wait`] returns all errors of the operation.
    #[track_caller]
    pub fn start_barrier(&self) -> Result<Work<()>, Error> {
        self.start_operation(Request::of::<u8>(Operation::Barrier), 0, (), |()| Ok(&mut []))
    }

    /// Starts [`gather`](Group::gather).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank. [`Work::wait`] returns later errors.
    #[track_caller]
    pub fn start_gather<T: Element, B>(&self, buffer: B, root: usize) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start(Request::of::<T>(Operation::Gather).root(root), buffer)
    }

    /// Starts [`scatter`](Group::scatter).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `root` is not a rank. [`Work::wait`] returns later errors.
    #[track_caller]
    pub fn start_scatter<T: Element, B>(&self, buffer: B, root: usize) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        self.start(Request::of::<T>(Operation::Scatter).root(root), buffer)
    }
}
