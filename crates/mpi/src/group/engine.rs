//! Collectives that run as MPI's own.
//!
//! Each operation is one MPI function, the form with counts and displacements where parts differ. Plans run what MPI
//! cannot: counts beyond 31 bits, and means of 64-bit integers, which need 128 bits.
//!
//! # Bit-identical results
//!
//! MPI's standard recommends bit-identical results and does not require them. They are certain where sums are exact in
//! any order. Open MPI gave the same bits on all ranks and in all runs of the tests. Of two NaNs a sum may keep either.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr;

use bonfire_core::error::Site;
use bonfire_core::internal::{Buffers, Kernel, Parts, Scratch, kernel};
use bonfire_core::{Call, DType, Deadline, Error, Fault, Operation, ReduceOp};
use mpi_sys as mpi;

use super::Mpi;
use super::comm::count;
use super::types::{self, Accumulator};

/// Memory that operations need besides the caller's. Reused by all operations.
#[derive(Default)]
pub(super) struct EngineMemory {
    /// A copy of the input, in the form that MPI needs.
    whole: Scratch,
    /// A result that still has to be converted.
    result: Scratch,
    /// Elements of each rank's part, and the index of its first one.
    counts: Vec<c_int>,
    starts: Vec<c_int>,
}

/// Whether MPI can run the call: the count must fit 31 bits, and a reduction needs an exact enough element type.
pub(super) fn supports(call: &Call) -> bool {
    count(call.count).is_ok() && call.reduction.is_none_or(|op| types::accumulator(call.dtype, op).is_some())
}

/// One operation on one rank.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    pub mpi: &'a Mpi,
    pub site: &'a Site,
    pub deadline: &'a Deadline,
}

/// Calls an MPI function in its blocking form, or in its non-blocking form, which returns a request.
macro_rules! run {
    ($run:ident, $blocking:ident or $nonblocking:ident, $($argument:expr),* $(,)?) => {
        $run.mpi.call(stringify!($blocking), $run.site, $run.deadline, |request| match request {
            // SAFETY: each address has as many elements as the counts say: `fits` has compared the caller's memory with
            // the call in `Mpi::run`, and other memory is allocated to fit. All of it is borrowed until the operation
            // is done, exclusively where it is written.
            None => unsafe { mpi::$blocking($($argument),*) },
            // SAFETY: as above.
            Some(request) => unsafe { mpi::$nonblocking($($argument),*, request) },
        })
    };
}

impl Run<'_> {
    /// Runs the operation on buffers that [`fits`] accepts. Returns once MPI is done with the caller's memory.
    pub fn run(self, memory: &mut EngineMemory, buffers: &mut Buffers<'_>) -> Result<(), Fault> {
        let call = &self.site.call;
        let comm = self.mpi.comm.raw();
        match (call.operation, call.reduction) {
            (Operation::Barrier, _) => run!(self, MPI_Barrier or MPI_Ibarrier, comm),
            (Operation::Broadcast, _) => {
                if let Some(input) = buffers.input.filter(|_| self.is_root()) {
                    buffers.output.copy_from_slice(input);
                }
                let (data, elements) = (target(buffers.output), c_count(call.count)?);
                let (element, root) = (types::moved(call.dtype.size()), self.root());
                run!(self, MPI_Bcast or MPI_Ibcast, data, elements, element, root, comm)
            }
            (_, Some(op)) => {
                let kernel = kernel(call.dtype, op);
                if call.operation == Operation::ReduceScatter {
                    self.fill_counts(memory, buffers.parts)?;
                }
                match types::accumulator(call.dtype, op) {
                    Some(Accumulator::Same) => self.reduce(op, &kernel, memory, buffers),
                    Some(Accumulator::Wide(wide)) => self.reduce_wide((wide, op), &kernel, memory, buffers),
                    None => Err(self.unsupported()),
                }
            }
            (_, None) => {
                self.fill_counts(memory, buffers.parts)?;
                self.gather(memory, buffers)
            }
        }
    }

    /// A reduction of the caller's elements as they are. Each rank works in place or not, as its caller does: in
    /// practice MPI allows that for reductions, and only for them (see `gather`).
    fn reduce(
        self,
        op: ReduceOp,
        kernel: &Kernel,
        memory: &mut EngineMemory,
        buffers: &mut Buffers<'_>,
    ) -> Result<(), Fault> {
        let scatters = self.site.call.operation == Operation::ReduceScatter;
        let in_place = self.mpi.library.in_place();
        let input = match (buffers.input, in_place) {
            (Some(input), _) => source(input),
            (None, _) if !self.gets_result() => source(buffers.output),
            // Not in place: MPI would store this rank's part of the result at the start of the whole.
            (None, Some(in_place)) if !scatters => in_place,
            (None, _) => source(copy(&mut memory.whole, buffers.output)?),
        };
        let own = self.own(buffers.parts);
        let output = match buffers.input {
            None if scatters => &mut buffers.output[own],
            _ => &mut *buffers.output,
        };
        self.reduction((self.site.call.dtype, op), input, target(output), &memory.counts)?;
        if let Some(divide) = kernel.divide.filter(|_| self.gets_result()) {
            divide(output, self.ranks());
        }
        Ok(())
    }

    /// A reduction in a wider element type. The result is rounded once.
    fn reduce_wide(
        self,
        (wide, op): (DType, ReduceOp),
        kernel: &Kernel,
        memory: &mut EngineMemory,
        buffers: &mut Buffers<'_>,
    ) -> Result<(), Fault> {
        let call = &self.site.call;
        let own = self.own(buffers.parts);
        let scatters = call.operation == Operation::ReduceScatter;
        let EngineMemory { whole, result, counts, .. } = memory;
        let widened = whole.bytes(call.count * kernel.accumulator)?;
        (kernel.load)(widened, buffers.input.unwrap_or(buffers.output));
        let elements = if scatters { own.len() / call.dtype.size() } else { call.count };
        let sums = result.bytes(elements * kernel.accumulator)?;
        self.reduction((wide, op), source(widened), target(sums), counts)?;
        if self.gets_result() {
            let output = match buffers.input {
                None if scatters => &mut buffers.output[own],
                _ => &mut *buffers.output,
            };
            (kernel.store)(output, sums, self.ranks());
        }
        Ok(())
    }

    /// Calls MPI's reduction of elements of `dtype`.
    fn reduction(
        self,
        (dtype, op): (DType, ReduceOp),
        input: *const c_void,
        output: *mut c_void,
        counts: &[c_int],
    ) -> Result<(), Fault> {
        let call = &self.site.call;
        let (comm, root, elements) = (self.mpi.comm.raw(), self.root(), c_count(call.count)?);
        let (element, op) = (types::reduced(dtype, op), types::operation(dtype, op)?);
        match call.operation {
            Operation::AllReduce => {
                run!(self, MPI_Allreduce or MPI_Iallreduce, input, output, elements, element, op, comm)
            }
            Operation::Reduce => {
                run!(self, MPI_Reduce or MPI_Ireduce, input, output, elements, element, op, root, comm)
            }
            Operation::ReduceScatter => match even(counts) {
                Some(each) => run!(
                    self,
                    MPI_Reduce_scatter_block or MPI_Ireduce_scatter_block,
                    input,
                    output,
                    each,
                    element,
                    op,
                    comm
                ),
                None => {
                    let counts = counts.as_ptr();
                    run!(self, MPI_Reduce_scatter or MPI_Ireduce_scatter, input, output, counts, element, op, comm)
                }
            },
            _ => Err(self.unsupported()),
        }
    }

    /// Operations that move parts. An input that is in the output is copied, because MPI does not allow that some ranks
    /// work in place and others do not.
    fn gather(self, memory: &mut EngineMemory, buffers: &mut Buffers<'_>) -> Result<(), Fault> {
        let call = &self.site.call;
        let EngineMemory { whole, counts, starts, .. } = memory;
        let even = even(counts);
        let (counts, starts) = (counts.as_ptr(), starts.as_ptr());
        let (comm, root, element) = (self.mpi.comm.raw(), self.root(), types::moved(call.dtype.size()));
        let own = self.own(buffers.parts);
        let elements = c_count(own.len() / call.dtype.size())?;
        let input = match (buffers.input, call.operation) {
            (Some(input), _) => source(input),
            (None, Operation::AllGather | Operation::Gather) => source(copy(whole, &buffers.output[own.clone()])?),
            (None, Operation::Scatter) if !self.is_root() => ptr::null(),
            (None, _) => source(copy(whole, buffers.output)?),
        };
        let output = match (buffers.input, call.operation) {
            (None, Operation::Scatter) => target(&mut buffers.output[own]),
            _ => target(buffers.output),
        };
        match (call.operation, even) {
            (Operation::AllGather, Some(each)) => {
                run!(self, MPI_Allgather or MPI_Iallgather, input, each, element, output, each, element, comm)
            }
            (Operation::AllGather, None) => run!(
                self,
                MPI_Allgatherv or MPI_Iallgatherv,
                input,
                elements,
                element,
                output,
                counts,
                starts,
                element,
                comm
            ),
            (Operation::Gather, _) => run!(
                self,
                MPI_Gatherv or MPI_Igatherv,
                input,
                elements,
                element,
                output,
                counts,
                starts,
                element,
                root,
                comm
            ),
            (Operation::Scatter, _) => run!(
                self,
                MPI_Scatterv or MPI_Iscatterv,
                input,
                counts,
                starts,
                element,
                output,
                elements,
                element,
                root,
                comm
            ),
            (Operation::AllToAll, Some(each)) => {
                run!(self, MPI_Alltoall or MPI_Ialltoall, input, each, element, output, each, element, comm)
            }
            _ => Err(self.unsupported()),
        }
    }

    fn rank(self) -> usize {
        self.mpi.comm.rank
    }

    fn ranks(self) -> usize {
        self.mpi.comm.size
    }

    fn root(self) -> c_int {
        self.site.call.root.unwrap_or(0) as c_int
    }

    fn is_root(self) -> bool {
        self.site.call.root == Some(self.rank())
    }

    /// Whether this rank gets the result or a part of it.
    fn gets_result(self) -> bool {
        self.site.call.root.is_none_or(|root| root == self.rank())
    }

    /// This rank's part of the whole, in bytes.
    fn own(self, parts: Parts<'_>) -> Range<usize> {
        own(&self.site.call, parts, self.rank(), self.ranks())
    }

    /// Fills in `counts` and `starts`.
    fn fill_counts(self, memory: &mut EngineMemory, parts: Parts<'_>) -> Result<(), Fault> {
        let EngineMemory { counts, starts, .. } = memory;
        counts.clear();
        starts.clear();
        for rank in 0..self.ranks() {
            let part = parts.part(self.site.call.count, self.ranks(), rank);
            counts.push(c_count(part.len())?);
            starts.push(c_count(part.start)?);
        }
        Ok(())
    }

    fn unsupported(self) -> Fault {
        Fault::Failed(Error::argument(self.site.call.operation, "MPI has no such operation"))
    }
}

/// Addresses for empty buffers. MPI requires valid and distinct addresses even for these. Rust's empty slices have the
/// same address for input and output, which for single bytes is the value of `MPI_IN_PLACE` in some libraries.
static EMPTY: [u64; 2] = [0; 2];

/// The address of bytes that MPI reads.
fn source(bytes: &[u8]) -> *const c_void {
    if bytes.is_empty() { (&raw const EMPTY[0]).cast() } else { bytes.as_ptr().cast() }
}

/// The address of bytes that MPI writes.
fn target(bytes: &mut [u8]) -> *mut c_void {
    if bytes.is_empty() { (&raw const EMPTY[1]).cast_mut().cast() } else { bytes.as_mut_ptr().cast() }
}

fn copy<'a>(to: &'a mut Scratch, bytes: &[u8]) -> Result<&'a [u8], Fault> {
    let to = to.bytes(bytes.len())?;
    to.copy_from_slice(bytes);
    Ok(to)
}

fn c_count(len: usize) -> Result<c_int, Fault> {
    count(len).map_err(Fault::Failed)
}

/// The length of all parts, if it is the same.
fn even(counts: &[c_int]) -> Option<c_int> {
    let first = *counts.first()?;
    counts.iter().all(|count| *count == first).then_some(first)
}

/// The part of `rank`, in bytes.
fn own(call: &Call, parts: Parts<'_>, rank: usize, ranks: usize) -> Range<usize> {
    let part = parts.part(call.count, ranks, rank);
    part.start * call.dtype.size()..part.end * call.dtype.size()
}

/// Rejects buffers that do not have the lengths that [`Buffers`] lists: MPI would access memory past their ends.
pub(super) fn fits(call: &Call, buffers: &Buffers<'_>, rank: usize, ranks: usize) -> Result<(), Error> {
    let whole = call.bytes();
    let part = own(call, buffers.parts, rank, ranks).len();
    let root = call.root.is_none_or(|root| root == rank);
    let at_root = |bytes: usize| if root { bytes } else { 0 };
    let covered = buffers.parts.start(call.count, ranks, ranks) == call.count;
    let (input, output) = match (call.operation, buffers.input.is_some()) {
        (Operation::Barrier, _) => (0, 0),
        (Operation::AllReduce | Operation::AllToAll, _) | (_, false) => (whole, whole),
        (Operation::Broadcast, _) => (at_root(whole), whole),
        (Operation::Reduce, _) => (whole, at_root(whole)),
        (Operation::AllGather, _) => (part, whole),
        (Operation::Gather, _) => (part, at_root(whole)),
        (Operation::ReduceScatter, _) => (whole, part),
        (Operation::Scatter, _) => (at_root(whole), part),
        _ => return Err(Error::argument(call.operation, "MPI has no such operation")),
    };
    let given = buffers.input.map(<[u8]>::len);
    // On a rank that is not the root, a buffer that it does not need may have any length.
    let lengths_match = given.is_none_or(|given| given == input || !root && input == 0)
        && (buffers.output.len() == output || !root && output == 0);
    if covered && lengths_match {
        return Ok(());
    }
    let given =
        given.map_or(String::new(), |given| format!("an input of {given} bytes, where {input} are needed, and "));
    let reason = format!("{given}an output of {} bytes, where {output} are needed", buffers.output.len());
    Err(Error::argument(call.operation, reason))
}
