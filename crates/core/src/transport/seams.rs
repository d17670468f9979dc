//! What a transport and an engine are.

use std::io;
use std::ptr::NonNull;

use crate::sync::Deadline;
use crate::types::{Call, Error, Fault, Parts, Site};

/// Moves bytes between two ranks. All methods may be called from any thread, one message operation at a time.
///
/// Messages between two ranks arrive in the order in which they were sent. `send` may return before the receiver takes
/// the bytes, or wait for it. Every method that waits returns by its deadline.
pub trait Transport: Send + Sync {
    /// The caller's rank, below `world_size`.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// Sends `bytes` under `tag` to rank `to`.
    fn send(&self, tag: &Site, to: usize, bytes: &[u8], deadline: &Deadline) -> Result<(), Fault>;

    /// Receives exactly `bytes.len()` bytes from rank `from` whose tag must equal `tag`; a message with another tag or
    /// length is [`Fault::Unexpected`].
    fn recv(&self, tag: &Site, from: usize, bytes: &mut [u8], deadline: &Deadline) -> Result<(), Fault>;

    /// Sends and receives at once, so that two ranks may exchange with each other, and all ranks around a ring.
    fn exchange(
        &self,
        tag: &Site,
        outgoing: (usize, &[u8]),
        incoming: (usize, &mut [u8]),
        deadline: &Deadline,
    ) -> Result<(), Fault>;

    /// An operation begins. A transport that can reach peers beside the data uses it to answer their questions, and
    /// refuses at once where a rank that the operation needs has left or the group has failed.
    fn begin(&self, _site: &Site) -> Result<(), Fault> {
        Ok(())
    }

    /// What has happened, as far as the transport knows without moving anything, that may keep peers from ending what all
    /// have begun: a failure, or a peer that is gone. That ranks then called different things is none.
    fn trouble(&self) -> Option<Fault> {
        None
    }

    /// This rank failed with `error`, having completed so many collectives: a transport that can tells the peers, so that
    /// they need not run into their deadlines. One that is still in a collective that this rank has completed can finish
    /// it, since all ranks are in it.
    fn fail(&self, _error: &Error, _completed: u64) {}

    /// This rank leaves in order; nothing is sent or received after it.
    fn leave(&self) {}

    /// Where `peer` is, for error messages.
    fn address(&self, _peer: usize) -> Option<String> {
        None
    }
}

/// The memory of one operation on one rank, as bytes. `call.count` of the operation is the length of the whole.
///
/// | operation | `input` | `output` |
/// |---|---|---|
/// | all_reduce | whole | whole |
/// | reduce | whole | whole on the root, else empty; in place: whole on all, written on the root only |
/// | broadcast | whole, on the root only | whole |
/// | all_gather | own part | whole |
/// | reduce_scatter | whole | own part; in place: whole, of which the own part is the result |
/// | all_to_all | whole | whole |
/// | gather | own part | whole on the root, else empty; in place: whole on all |
/// | scatter | whole on the root, else empty | own part; in place: whole on all |
pub struct Buffers<'a> {
    /// Where the input is, unless it is in the output (in place).
    pub input: Option<&'a [u8]>,
    /// Where the result goes.
    pub output: &'a mut [u8],
    /// What a part is: `call.count` elements are split so.
    pub parts: Parts<'a>,
}

/// Runs whole operations.
pub trait Collectives: Send + Sync {
    /// Runs the operation.
    fn run(&self, site: &Site, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault>;

    /// Whether this engine runs such an operation. Where it does not, a plan does. The same on all ranks.
    fn serves(&self, _call: &Call) -> bool {
        true
    }

    /// A plan runs this operation: the group's table says so, or this engine does not serve it. An engine on which ranks wait for all others compares their
    /// calls here, unless the transport finds out in its own way: of ranks that disagree, some may be in `run`.
    fn stand_aside(&self, _site: &Site, _deadline: &Deadline) -> Result<(), Fault> {
        Ok(())
    }

    /// Zeroed memory for a buffer of so many bytes, in which this engine's operations are faster than elsewhere; `None`
    /// where they would not be.
    fn allocate(&self, _bytes: usize) -> Option<io::Result<Box<dyn Storage>>> {
        None
    }
}

/// Memory of one buffer.
///
/// # Safety
/// What `start` gives is the same in every call, aligned to a page, and valid for reading and writing as many bytes as
/// were asked for until the storage is dropped. In this process nobody else accesses it but operations that borrow it.
pub unsafe trait Storage: Send + Sync {
    /// Where it begins.
    fn start(&self) -> NonNull<u8>;
}
