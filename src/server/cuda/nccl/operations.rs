//! The operations, each as the calls of NCCL that it is made of.

use std::ffi::{c_int, c_void};

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t};

use super::communicator::{Communicator, Submitted};
use super::library::{Functions, IN_PROGRESS, SUCCESS};
use super::types::{Scalar, reduced};
use bonfire_core::internal::Parts;
use bonfire_core::{Error, Operation, ReduceOp};

/// What the ranks do. Which elements of input and output that is on each rank:
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// From the whole to the whole.
    AllReduce(ReduceOp),
    /// From the whole to the whole on this root, and to nothing elsewhere.
    Reduce(ReduceOp, usize),
    /// From the whole on this root, and nothing elsewhere, to the whole.
    Broadcast(usize),
    /// From the rank's part to the whole.
    AllGather,
    /// From the whole to the rank's part.
    ReduceScatter(ReduceOp),
    /// From the whole to the whole, which are parts of one length: part `r` goes to rank `r`, and comes from there.
    /// Input and output may not overlap.
    AllToAll,
    /// From the rank's part to the whole on this root, and to nothing elsewhere.
    Gather(usize),
    /// From the whole on this root, and nothing elsewhere, to the rank's part.
    Scatter(usize),
    /// From the whole here to the output of another rank, which calls `Recv`.
    Send(usize),
    /// To the whole here from another rank.
    Recv(usize),
}

impl Action {
    /// The operation of Bonfire's that this is.
    pub const fn operation(self) -> Operation {
        match self {
            Action::AllReduce(_) => Operation::AllReduce,
            Action::Reduce(..) => Operation::Reduce,
            Action::Broadcast(_) => Operation::Broadcast,
            Action::AllGather => Operation::AllGather,
            Action::ReduceScatter(_) => Operation::ReduceScatter,
            Action::AllToAll => Operation::AllToAll,
            Action::Gather(_) => Operation::Gather,
            Action::Scatter(_) => Operation::Scatter,
            Action::Send(_) | Action::Recv(_) => Operation::Send,
        }
    }
}

/// One operation on memory of the GPU.
///
/// Input and output may be the same elements of the same memory: the same whole, or a part that is at its place in the
/// whole.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// What to do.
    pub action: Action,
    /// The type of the elements.
    pub scalar: Scalar,
    /// The number of elements of the whole.
    pub count: usize,
    /// How many elements each rank's part has, where parts are not as [`partition`](crate::partition()) says.
    pub sizes: Option<&'a [usize]>,
    /// The address of the first element that the rank brings. Not used where it brings none.
    pub input: CUdeviceptr,
    /// The address of the first element that the rank gets. Not used where it gets none.
    pub output: CUdeviceptr,
}

impl Communicator {
    /// Puts an operation on `stream`, behind what is there. See [`Submitted`] for when it is there.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] and [`Error::Library`] for what cannot be done, with nothing changed: where all ranks
    /// called the same, all get it. [`Error::Nccl`] for what NCCL refused, which ends the communicator. What ended it
    /// before.
    ///
    /// # Safety
    /// Input and output are memory of the communicator's GPU, as long as the action says, that nothing else writes to,
    /// or reads what is written of, until the stream is past the operation, or the communicator was aborted and the
    /// stream is past it. The stream is one of that GPU's.
    pub unsafe fn submit(&mut self, work: &Work<'_>, stream: CUstream) -> Result<Submitted<'_>, Error> {
        self.check(work)?;
        let (element, op) = match work.action {
            Action::AllReduce(op) | Action::Reduce(op, _) | Action::ReduceScatter(op) => {
                reduced(work.scalar, op, self.library.version)?
            }
            // What is only moved is moved as bytes, so every type is.
            _ => (ncclDataType_t::ncclUint8, ncclRedOp_t::ncclSum),
        };
        self.sound()?;
        let (functions, comm, stream) = (&self.library.functions, self.comm, stream.cast());
        let calls = Calls { functions, comm, stream, rank: self.rank, ranks: self.world_size, work, element, op };
        // SAFETY: the communicator is there, and memory and stream are what the caller promises.
        let (function, code) = unsafe { calls.make() };
        Ok(Submitted { communicator: self, function, code })
    }

    fn check(&self, work: &Work<'_>) -> Result<(), Error> {
        let Work { action, scalar, count, sizes, input, output } = *work;
        let n = self.world_size;
        let refuse = |reason: String| Err(Error::argument(format!("{} with NCCL", action.operation()), reason));
        let bytes = match count.checked_mul(scalar.size()).and_then(|bytes| CUdeviceptr::try_from(bytes).ok()) {
            Some(bytes) => bytes,
            None => return refuse(format!("{count} elements of {scalar} are more than memory has")),
        };
        let peer = match action {
            Action::Reduce(_, root) | Action::Broadcast(root) | Action::Gather(root) | Action::Scatter(root) => root,
            Action::Send(peer) | Action::Recv(peer) if peer == self.rank => {
                return refuse(format!("rank {peer} is this one: copy on the device"));
            }
            Action::Send(peer) | Action::Recv(peer) => peer,
            _ => 0,
        };
        if peer >= n {
            return refuse(format!("{peer} is no rank of this communicator: give one from 0 to {}", n - 1));
        }
        if action == Action::AllToAll {
            if sizes.is_some() || !count.is_multiple_of(n) {
                return refuse(format!("{count} elements are no {n} parts of one length: give a multiple of {n}"));
            }
            if input < output.saturating_add(bytes) && output < input.saturating_add(bytes) {
                return refuse("input and output overlap: give memory of its own to each".into());
            }
        }
        match sizes {
            Some(sizes) if sizes.len() != n => refuse(format!("{} sizes are given for {n} ranks", sizes.len())),
            Some(sizes) if sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size)) != Some(count) => {
                refuse(format!("the ranks' sizes do not add up to {count} elements"))
            }
            _ => Ok(()),
        }
    }
}

/// One operation as calls of NCCL.
struct Calls<'a> {
    functions: &'a Functions,
    comm: ncclComm_t,
    stream: cudaStream_t,
    rank: usize,
    ranks: usize,
    work: &'a Work<'a>,
    element: ncclDataType_t,
    op: ncclRedOp_t,
}

impl Calls<'_> {
    /// Makes them, and gives the name of one that says what they are, and what came of them.
    ///
    /// # Safety
    /// As [`Communicator::submit`], whose checks the work has passed.
    unsafe fn make(&self) -> (&'static str, c_int) {
        let (functions, comm, stream, rank) = (self.functions, self.comm, self.stream, self.rank);
        let Work { action, count, .. } = *self.work;
        let (input, output) = (self.work.input, self.work.output);
        // SAFETY: as the caller promises. Grouped calls are on parts, which `check` has found to be within the whole.
        unsafe {
            match action {
                Action::AllReduce(_) => {
                    let call = functions.all_reduce;
                    ("ncclAllReduce", call(at(input), at(output), count, self.element, self.op, comm, stream))
                }
                Action::Reduce(_, root) => ("ncclReduce", self.reduce(input, count, root)),
                Action::Broadcast(root) => ("ncclBroadcast", self.broadcast(output, count, root)),
                Action::ReduceScatter(_) => match self.even() {
                    Some(len) => {
                        let call = functions.reduce_scatter;
                        ("ncclReduceScatter", call(at(input), at(output), len, self.element, self.op, comm, stream))
                    }
                    // Every part is reduced to the rank that it belongs to.
                    None => self.for_parts("ncclReduce", |r, start, len| self.reduce(input + start, len, r)),
                },
                Action::AllGather => match self.even() {
                    Some(len) => {
                        let call = functions.all_gather;
                        let code = call(at(input), at(output), self.bytes(len), self.element, comm, stream);
                        ("ncclAllGather", code)
                    }
                    // Every part is brought to all by the rank that it belongs to.
                    None => self.for_parts("ncclBroadcast", |r, start, len| self.broadcast(output + start, len, r)),
                },
                Action::AllToAll => self.for_parts("ncclSend", |r, start, len| {
                    then(self.send(input + start, len, r), || self.receive(output + start, len, r))
                }),
                Action::Gather(root) => self.for_parts("ncclSend", |r, start, len| {
                    let place = if rank == root { output + start } else { 0 };
                    self.hand_over((input, r), (place, root), len)
                }),
                Action::Scatter(root) => self.for_parts("ncclSend", |r, start, len| {
                    let place = if rank == root { input + start } else { 0 };
                    self.hand_over((place, root), (output, r), len)
                }),
                Action::Send(to) => ("ncclSend", self.send(input, count, to)),
                Action::Recv(from) => ("ncclRecv", self.receive(output, count, from)),
            }
        }
    }

    /// `call` with the rank, the start in bytes and the length of every part that is not empty, all at once.
    fn for_parts(
        &self,
        name: &'static str,
        call: impl Fn(usize, CUdeviceptr, usize) -> c_int,
    ) -> (&'static str, c_int) {
        let parts = self.work.sizes.map_or(Parts::Even, Parts::Sizes);
        let mut code = SUCCESS;
        // SAFETY: a group is begun and ended by this thread, whatever the calls return: else later calls would be in
        // it.
        let begun = unsafe { (self.functions.group_start)() };
        for rank in 0..self.ranks {
            let part = parts.part(self.work.count, self.ranks, rank);
            if !part.is_empty() {
                code = then(code, || call(rank, self.bytes(part.start) as CUdeviceptr, part.len()));
            }
        }
        // SAFETY: as above.
        let ended = unsafe { (self.functions.group_end)() };
        (name, then(then(begun, || code), || ended))
    }

    /// The length of all parts, where they have one.
    fn even(&self) -> Option<usize> {
        match self.work.sizes {
            None => self.work.count.is_multiple_of(self.ranks).then_some(self.work.count / self.ranks),
            Some(sizes) => sizes.iter().all(|size| *size == sizes[0]).then_some(sizes[0]),
        }
    }

    /// The length in units of what is moved.
    fn bytes(&self, len: usize) -> usize {
        len * self.work.scalar.size()
    }

    /// Reduces from here to the output of `root`.
    unsafe fn reduce(&self, input: CUdeviceptr, len: usize, root: usize) -> c_int {
        let (call, output) = (self.functions.reduce, at(self.work.output));
        // SAFETY: as the caller promises.
        unsafe { call(at(input), output, len, self.element, self.op, number(root), self.comm, self.stream) }
    }

    /// Brings the input of `root` to here.
    unsafe fn broadcast(&self, output: CUdeviceptr, len: usize, root: usize) -> c_int {
        let (call, input) = (self.functions.broadcast, if self.rank == root { self.work.input } else { output });
        // SAFETY: as the caller promises.
        unsafe { call(at(input), at(output), self.bytes(len), self.element, number(root), self.comm, self.stream) }
    }

    /// Sends from a place on one rank to a place on another, or the same, as far as this one has to do with it.
    unsafe fn hand_over(&self, from: (CUdeviceptr, usize), to: (CUdeviceptr, usize), len: usize) -> c_int {
        let (sends, receives) = (from.1 == self.rank, to.1 == self.rank);
        if sends && receives && from.0 == to.0 {
            return SUCCESS;
        }
        // SAFETY: as the caller promises.
        unsafe {
            let sent = if sends { self.send(from.0, len, to.1) } else { SUCCESS };
            then(sent, || if receives { self.receive(to.0, len, from.1) } else { SUCCESS })
        }
    }

    unsafe fn send(&self, input: CUdeviceptr, len: usize, to: usize) -> c_int {
        // SAFETY: as the caller promises.
        unsafe { (self.functions.send)(at(input), self.bytes(len), self.element, number(to), self.comm, self.stream) }
    }

    unsafe fn receive(&self, output: CUdeviceptr, len: usize, from: usize) -> c_int {
        // SAFETY: as the caller promises.
        unsafe {
            (self.functions.receive)(at(output), self.bytes(len), self.element, number(from), self.comm, self.stream)
        }
    }
}

/// The next call, where the one before did not fail; what came of both.
fn then(code: c_int, next: impl FnOnce() -> c_int) -> c_int {
    match code {
        SUCCESS => next(),
        // A communicator that is at work takes further calls of a group.
        IN_PROGRESS => match next() {
            SUCCESS => IN_PROGRESS,
            code => code,
        },
        code => code,
    }
}

/// An address as NCCL takes it.
fn at(address: CUdeviceptr) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// A rank as NCCL takes it. There are never so many that it does not fit.
fn number(rank: usize) -> c_int {
    c_int::try_from(rank).unwrap_or(c_int::MAX)
}
