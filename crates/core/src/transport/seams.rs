//! The interfaces below a group: [`Transport`] moves bytes between two ranks, [`Collectives`] runs whole operations.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::sync::Deadline;
use crate::types::{Call, Error, Fault, Locate, Parts, Site, Whereabouts};

/// Moves bytes between two ranks: one rank's endpoint of a transport.
///
/// Implement it to run groups on a network or a library of your own. [`Group::on`](crate::Group::on) runs every
/// operation on it as a plan, a fixed sequence of messages. The first five methods are required. With
/// [`fail`](Self::fail) and [`leave`](Self::leave) peers learn of a rank that is gone before their deadlines.
///
/// # Contract
/// * **Order.** Messages from one rank to another are received in the order in which they were sent. All messages of an
///   operation carry the same tag, so only their order tells them apart.
/// * **Blocking.** `send` may return before the receiver takes the bytes, or wait until it does. Plans work with both.
/// * **Empty messages** are delivered like any other: they tell the receiver that the sender has begun the operation.
/// * **Deadlines.** A method that waits returns by its deadline, then with [`Fault::Timeout`] and the missing ranks.
/// * **Threads.** All methods may be called from any thread. At most one of `send`, `recv` and `exchange` runs at a
///   time; the other methods may be called while it does.
/// * **Faults.** A peer that has left in order is [`Fault::Left`], one that is gone otherwise is [`Fault::Lost`]. The
///   first fault is final: the group calls `fail`, moves no more messages, and returns the fault as an [`Error`] with
///   operation, rank and elapsed time.
///
/// # A lost message
/// If the transport implements [`fail`](Self::fail), all ranks return the same error. If it does not, the rank that
/// lost the message returns [`Error::PeerLost`]. Once it has left, every other rank returns [`Error::Left`], at the
/// latest in the next operation that needs all ranks. Both are tested with the loss of every single message of every
/// operation, form and algorithm.
pub trait Transport: Send + Sync {
    /// Returns this rank, from 0 to `world_size() - 1`. Always the same.
    fn rank(&self) -> usize;

    /// Returns the number of ranks. Always the same.
    fn world_size(&self) -> usize;

    /// Sends `bytes`, which may be empty, with the tag `tag` to `to`, which is another rank.
    ///
    /// The tag names the operation. It travels with the message ([`Site::to_bytes`]), so that the receiver can compare
    /// it with the operation that it is in.
    fn send(&self, tag: &Site, to: usize, bytes: &[u8], deadline: &Deadline) -> Result<(), Fault>;

    /// Receives the next message from `from`, which is another rank, and fills `bytes` with it. After a fault the
    /// contents of `bytes` do not matter.
    ///
    /// The message must have the tag `tag` and exactly `bytes.len()` bytes. Any other message is [`Fault::Unexpected`],
    /// with the tag that it carries: the two ranks called different operations.
    fn recv(&self, tag: &Site, from: usize, bytes: &mut [u8], deadline: &Deadline) -> Result<(), Fault>;

    /// Does a [`send`](Self::send) to one rank and a [`recv`](Self::recv) from one, which may be the same, at once.
    ///
    /// Both directions must make progress independently: two ranks call this with each other, and all ranks around a
    /// ring. Where `send` never waits for the receiver, a `send` followed by a `recv` is enough.
    fn exchange(
        &self,
        tag: &Site,
        outgoing: (usize, &[u8]),
        incoming: (usize, &mut [u8]),
        deadline: &Deadline,
    ) -> Result<(), Fault>;

    /// Prepares for a collective that begins on this rank, before its first message. Does nothing by default.
    ///
    /// A transport with control connections answers here the peers that asked what this rank called. It returns a fault
    /// at once if the group has failed or a rank that the operation needs has left.
    fn begin(&self, _site: &Site) -> Result<(), Fault> {
        Ok(())
    }

    /// Returns the reason, if one is known, why peers may not complete an operation that all ranks have begun: a
    /// failure of the group other than a mismatch of calls, or a peer that is gone. Does not communicate or wait.
    ///
    /// `None` by default.
    fn known_failure(&self) -> Option<Fault> {
        None
    }

    /// Tells the peers that this rank failed with `error`, so that they need not wait until their deadlines. Does
    /// nothing by default. It may be called more than once.
    ///
    /// This rank has completed the first `completed` collectives. A peer that is still in one of them can complete it,
    /// because all ranks have begun it; a peer in a later one returns [`Fault::Failed`] with this error.
    fn fail(&self, _error: &Error, _completed: u64) {}

    /// Leaves the group in order: this rank sends and receives nothing more. Peers that need it get [`Fault::Left`].
    ///
    /// Called when the rank's last handle of the group is dropped, also after a failure. Does nothing by default.
    fn leave(&self) {}

    /// Returns the address of `peer` for error messages, if it has one. `None` by default.
    fn address(&self, _peer: usize) -> Option<String> {
        None
    }
}

/// Where the ranks of a group are in their programs, as they tell each other when one of them waits for long.
pub trait Neighbours: Send + Sync {
    /// Sets what tells where this rank is. Called once.
    fn locate_by(&self, own: Arc<dyn Locate>);

    /// Returns where those of these ranks are of which it is known. Does not communicate.
    fn whereabouts(&self, ranks: &[usize]) -> Vec<(usize, Whereabouts)>;
}

/// The memory of one operation on one rank, as bytes. The *whole* has `call.count` elements.
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
    /// The input; `None` if the operation is in place, with the input in `output`.
    pub input: Option<&'a [u8]>,
    /// The output.
    pub output: &'a mut [u8],
    /// How the whole is split among the ranks.
    pub parts: Parts<'a>,
}

/// An engine: runs whole operations.
pub trait Collectives: Send + Sync {
    /// Runs the operation.
    fn run(&self, site: &Site, buffers: &mut Buffers<'_>, deadline: &Deadline) -> Result<(), Fault>;

    /// Whether this engine supports the call. If not, a plan runs it. The answer is the same on all ranks.
    fn supports(&self, _call: &Call) -> bool {
        true
    }

    /// Agrees on a call that a plan runs, because the group's table says so or this engine does not support it.
    ///
    /// Ranks that disagree may take different paths, so some of them may be in `run`. An engine whose `run` waits for
    /// all ranks therefore compares the calls here too, unless the transport detects mismatches itself.
    fn agree_before_plan(&self, _site: &Site, _deadline: &Deadline) -> Result<(), Fault> {
        Ok(())
    }

    /// Whether an operation keeps all others of this process waiting until it has ended, also those of other groups.
    fn blocks_process(&self) -> bool {
        false
    }

    /// Allocates zeroed memory for a buffer of `bytes` bytes in which this engine's operations are faster than in
    /// ordinary memory. `None` where they are not.
    fn allocate(&self, _bytes: usize) -> Option<io::Result<Box<dyn Storage>>> {
        None
    }
}

/// The memory of one buffer.
///
/// # Safety
/// `start` returns the same pointer in every call. It is aligned to a page, and valid for reads and writes of as many
/// bytes as were asked for until the storage is dropped. In this process only operations that borrow it access it.
pub unsafe trait Storage: Send + Sync {
    /// Returns the start of the memory.
    fn start(&self) -> NonNull<u8>;
}
