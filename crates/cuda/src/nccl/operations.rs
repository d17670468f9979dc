//! The operations, and the NCCL calls that each consists of.
//!
//! If parts have one length, NCCL's own operation is called. Uneven parts are one broadcast or one reduction each, all
//! in one NCCL group; gather, scatter and all_to_all are grouped sends and receives.

use std::ffi::{c_int, c_void};
use std::ptr;

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t};

use super::communicator::{Communicator, Submitted};
use super::library::{Functions, IN_PROGRESS, SUCCESS};
use super::types::{Scalar, reduced};
use bonfire_core::internal::Parts;
use bonfire_core::{Error, Operation, ReduceOp};

/// A collective or a transfer. Each variant says which elements are a rank's input and output. Numbers are ranks: the
/// root, or the peer of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// From the whole to the whole.
    AllReduce(ReduceOp),
    /// From the whole to the whole on this root, to nothing elsewhere.
    Reduce(ReduceOp, usize),
    /// From the whole on this root, nothing elsewhere, to the whole.
    Broadcast(usize),
    /// From the rank's part to the whole.
    AllGather,
    /// From the whole to the rank's part.
    ReduceScatter(ReduceOp),
    /// From the whole to the whole, in parts of equal length: part `r` goes to rank `r`, and is received from there.
    /// Input and output must not overlap.
    AllToAll,
    /// From the rank's part to the whole on this root, to nothing elsewhere.
    Gather(usize),
    /// From the whole on this root, nothing elsewhere, to the rank's part.
    Scatter(usize),
    /// From the whole here to the output of another rank, which calls `Recv`.
    Send(usize),
    /// To the whole here from another rank, which calls `Send`.
    Recv(usize),
    /// From the whole here to rank `to`, and `incoming` elements to the output here from rank `from`. Both ranks call
    /// this too, as in a ring. Input and output must not overlap.
    #[allow(missing_docs, reason = "above")]
    Exchange { to: usize, from: usize, incoming: usize },
}

impl Action {
    /// Returns the [`Operation`] of Bonfire that this is.
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
            Action::Exchange { .. } => Operation::Exchange,
        }
    }
}

/// One operation on memory of the GPU.
///
/// Input and output may be the same memory, if the same elements are at the same address: the same whole, or a part in
/// its place in the whole.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// The operation.
    pub action: Action,
    /// The type of the elements.
    pub scalar: Scalar,
    /// The number of elements of the whole.
    pub count: usize,
    /// The number of elements in each rank's part, if parts are not as [`partition`](bonfire_core::partition()) says.
    pub sizes: Option<&'a [usize]>,
    /// Address of the rank's first input element. Unused if it has no input.
    pub input: CUdeviceptr,
    /// Address of the rank's first output element. Unused if it has no output.
    pub output: CUdeviceptr,
}

impl Work<'_> {
    /// The rank's first input element, as NCCL takes it.
    fn input(&self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.input as usize)
    }

    /// The rank's first output element.
    fn output(&self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.output as usize)
    }
}

impl Communicator {
    /// Enqueues an operation on `stream`, after the work that is there. All ranks of the operation call it; it does not
    /// wait for them. See [`Submitted`] for when it is on the stream.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] and [`Error::Library`] for what is not supported, with nothing changed: if all ranks
    /// called the same, all get it. [`Error::Nccl`] for what NCCL refused, which ends the communicator. The error that
    /// ended it before.
    ///
    /// # Safety
    /// Input and output must be memory of the communicator's GPU, with the length that the action says. Nothing else
    /// may write to either, or read what the operation writes, until the stream is past the operation, or the
    /// communicator was aborted and the stream is past it. The stream must belong to that GPU.
    pub unsafe fn submit(&mut self, work: &Work<'_>, stream: CUstream) -> Result<Submitted<'_>, Error> {
        self.check(work)?;
        let (element, op) = match work.action {
            Action::AllReduce(op) | Action::Reduce(op, _) | Action::ReduceScatter(op) => {
                reduced(work.scalar, op, self.library.version)?
            }
            // Operations that only move data move bytes, so they support every type.
            _ => (ncclDataType_t::ncclUint8, ncclRedOp_t::ncclSum),
        };
        self.check_alive()?;
        let (functions, comm, stream) = (&self.library.functions, self.comm, stream.cast());
        let calls = NcclCalls { functions, comm, stream, rank: self.rank, ranks: self.world_size, work, element, op };
        // SAFETY: the communicator is valid; the caller guarantees the rest for memory and stream.
        let (function, code) = unsafe { calls.issue() };
        Ok(Submitted { communicator: self, function, code })
    }

    fn check(&self, work: &Work<'_>) -> Result<(), Error> {
        let Work { action, scalar, count, sizes, input, output } = *work;
        let n = self.world_size;
        let refuse = |reason: String| Err(Error::argument(format!("{} with NCCL", action.operation()), reason));
        let bytes = match count.checked_mul(scalar.size()).and_then(|bytes| CUdeviceptr::try_from(bytes).ok()) {
            Some(bytes) => bytes,
            None => return refuse(format!("{count} elements of {scalar} exceed the address space")),
        };
        let peers = match action {
            Action::Reduce(_, root) | Action::Broadcast(root) | Action::Gather(root) | Action::Scatter(root) => {
                [root, root]
            }
            Action::Exchange { to, from, .. } if to == self.rank || from == self.rank => {
                return refuse("one of the two ranks is this one: copy on the device".into());
            }
            Action::Send(peer) | Action::Recv(peer) if peer == self.rank => {
                return refuse(format!("rank {peer} is this one: copy on the device"));
            }
            Action::Send(peer) | Action::Recv(peer) => [peer, peer],
            Action::Exchange { to, from, .. } => [to, from],
            _ => [0, 0],
        };
        if let Some(peer) = peers.into_iter().find(|peer| *peer >= n) {
            return refuse(format!("{peer} is not a rank of this communicator: give one from 0 to {}", n - 1));
        }
        if action == Action::AllToAll {
            if sizes.is_some() || !count.is_multiple_of(n) {
                return refuse(format!("{count} elements are not {n} parts of equal length: give a multiple of {n}"));
            }
            if input < output.saturating_add(bytes) && output < input.saturating_add(bytes) {
                return refuse("input and output overlap: give each its own memory".into());
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

/// One operation as a sequence of NCCL calls.
struct NcclCalls<'a> {
    functions: &'a Functions,
    comm: ncclComm_t,
    stream: cudaStream_t,
    rank: usize,
    ranks: usize,
    work: &'a Work<'a>,
    element: ncclDataType_t,
    op: ncclRedOp_t,
}

impl NcclCalls<'_> {
    /// Makes the calls. Returns the name of a representative one, and the combined return code.
    ///
    /// # Safety
    /// As for [`Communicator::submit`]. The work must have passed its checks.
    unsafe fn issue(&self) -> (&'static str, c_int) {
        let (functions, comm, stream, rank) = (self.functions, self.comm, self.stream, self.rank);
        let Work { action, count, .. } = *self.work;
        let (input, output) = (self.work.input(), self.work.output());
        let (from, to) = (|start| input.wrapping_byte_add(start), |start| output.wrapping_byte_add(start));
        // SAFETY: guaranteed by the caller. Grouped calls are on parts, which `check` has found to be within the whole.
        unsafe {
            match action {
                Action::AllReduce(_) => {
                    let call = functions.all_reduce;
                    ("ncclAllReduce", call(input, output, count, self.element, self.op, comm, stream))
                }
                Action::Reduce(_, root) => ("ncclReduce", self.reduce(input, count, root)),
                Action::Broadcast(root) => ("ncclBroadcast", self.broadcast(output, count, root)),
                Action::ReduceScatter(_) => match self.even() {
                    Some(len) => {
                        let call = functions.reduce_scatter;
                        ("ncclReduceScatter", call(input, output, len, self.element, self.op, comm, stream))
                    }
                    // Each part is reduced to its owner.
                    None => self.for_parts("ncclReduce", |r, start, len| self.reduce(from(start), len, r)),
                },
                Action::AllGather => match self.even() {
                    Some(len) => {
                        let call = functions.all_gather;
                        let code = call(input, output, self.bytes(len), self.element, comm, stream);
                        ("ncclAllGather", code)
                    }
                    // Each part is broadcast by its owner.
                    None => self.for_parts("ncclBroadcast", |r, start, len| self.broadcast(to(start), len, r)),
                },
                Action::AllToAll => self.for_parts("ncclSend", |r, start, len| {
                    then(self.send(from(start), len, r), || self.receive(to(start), len, r))
                }),
                Action::Gather(root) => self.for_parts("ncclSend", |r, start, len| {
                    let place = if rank == root { to(start) } else { ptr::null_mut() };
                    self.send_or_receive((input, r), (place, root), len)
                }),
                Action::Scatter(root) => self.for_parts("ncclSend", |r, start, len| {
                    let place = if rank == root { from(start) } else { ptr::null_mut() };
                    self.send_or_receive((place, root), (output, r), len)
                }),
                Action::Send(peer) => ("ncclSend", self.send(input, count, peer)),
                Action::Recv(peer) => ("ncclRecv", self.receive(output, count, peer)),
                Action::Exchange { to, from, incoming } => {
                    let both = || then(self.send(input, count, to), || self.receive(output, incoming, from));
                    ("ncclSend", self.grouped(both))
                }
            }
        }
    }

    /// Calls `call` with the rank, the start in bytes and the length of every non-empty part, in one NCCL group.
    fn for_parts(&self, name: &'static str, call: impl Fn(usize, usize, usize) -> c_int) -> (&'static str, c_int) {
        let parts = self.work.sizes.map_or(Parts::Even, Parts::Sizes);
        let of_all = || {
            let parts = (0..self.ranks).map(|rank| (rank, parts.part(self.work.count, self.ranks, rank)));
            parts
                .filter(|(_, part)| !part.is_empty())
                .fold(SUCCESS, |code, (rank, part)| then(code, || call(rank, self.bytes(part.start), part.len())))
        };
        (name, self.grouped(of_all))
    }

    /// Makes these calls in one NCCL group. Returns the combined return code.
    fn grouped(&self, calls: impl FnOnce() -> c_int) -> c_int {
        // SAFETY: this thread begins and ends a group whatever the calls return; otherwise later calls would join it.
        let begun = unsafe { (self.functions.group_start)() };
        let code = calls();
        // SAFETY: as above.
        let ended = unsafe { (self.functions.group_end)() };
        then(then(begun, || code), || ended)
    }

    /// The length of all parts, if they have the same.
    fn even(&self) -> Option<usize> {
        match self.work.sizes {
            None => self.work.count.is_multiple_of(self.ranks).then_some(self.work.count / self.ranks),
            Some(sizes) => sizes.iter().all(|size| *size == sizes[0]).then_some(sizes[0]),
        }
    }

    /// The length in bytes, the unit of operations that only move data.
    fn bytes(&self, len: usize) -> usize {
        len * self.work.scalar.size()
    }

    /// Reduces from here to the output of `root`.
    ///
    /// # Safety
    /// As for [`issue`](Self::issue), of which it is a part: `len` elements must be there.
    unsafe fn reduce(&self, input: *mut c_void, len: usize, root: usize) -> c_int {
        let (call, output) = (self.functions.reduce, self.work.output());
        // SAFETY: guaranteed by the caller.
        unsafe { call(input, output, len, self.element, self.op, c_rank(root), self.comm, self.stream) }
    }

    /// Broadcasts the input of `root` to `output`.
    ///
    /// # Safety
    /// As for [`issue`](Self::issue), of which it is a part: `len` elements must fit there.
    unsafe fn broadcast(&self, output: *mut c_void, len: usize, root: usize) -> c_int {
        let (call, input) = (self.functions.broadcast, if self.rank == root { self.work.input() } else { output });
        // SAFETY: guaranteed by the caller.
        unsafe { call(input, output, self.bytes(len), self.element, c_rank(root), self.comm, self.stream) }
    }

    /// Makes this rank's calls of a transfer between two addresses with their ranks, which may be the same rank.
    ///
    /// # Safety
    /// As for [`issue`](Self::issue), of which it is a part: `len` elements must be at this rank's addresses.
    unsafe fn send_or_receive(&self, from: (*mut c_void, usize), to: (*mut c_void, usize), len: usize) -> c_int {
        let (sends, receives) = (from.1 == self.rank, to.1 == self.rank);
        if sends && receives && from.0 == to.0 {
            return SUCCESS;
        }
        // SAFETY: guaranteed by the caller.
        unsafe {
            let sent = if sends { self.send(from.0, len, to.1) } else { SUCCESS };
            then(sent, || if receives { self.receive(to.0, len, from.1) } else { SUCCESS })
        }
    }

    /// # Safety
    /// As for [`issue`](Self::issue), of which it is a part: `len` elements must be there.
    unsafe fn send(&self, input: *mut c_void, len: usize, to: usize) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { (self.functions.send)(input, self.bytes(len), self.element, c_rank(to), self.comm, self.stream) }
    }

    /// # Safety
    /// As for [`issue`](Self::issue), of which it is a part: `len` elements must fit there.
    unsafe fn receive(&self, output: *mut c_void, len: usize, from: usize) -> c_int {
        // SAFETY: guaranteed by the caller.
        unsafe { (self.functions.receive)(output, self.bytes(len), self.element, c_rank(from), self.comm, self.stream) }
    }
}

/// Makes the next call unless the one before failed. Returns the combined code.
fn then(code: c_int, next: impl FnOnce() -> c_int) -> c_int {
    match code {
        SUCCESS => next(),
        // A busy communicator takes further calls of a group.
        IN_PROGRESS => match next() {
            SUCCESS => IN_PROGRESS,
            code => code,
        },
        code => code,
    }
}

/// A rank as NCCL takes it. There are never so many that it does not fit.
fn c_rank(rank: usize) -> c_int {
    c_int::try_from(rank).unwrap_or(c_int::MAX)
}
