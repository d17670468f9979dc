//! Buckets whose operations are in flight, on the host or on a collective device.

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

use super::bucket::Bucket;
use crate::tensor::device::{Completion, PendingTensors};
use bonfire_core::{Error, Work};

/// An operation on a bucket in flight.
pub(super) enum InFlight<B: Backend> {
    Host(Work<Bucket>),
    Device(PendingTensors<FloatTensor<B>>),
}

/// What an operation has made.
pub(super) enum Elements<B: Backend> {
    Host(Bucket),
    /// On a collective device: a tensor for each target of the operation.
    Device(Vec<FloatTensor<B>>),
}

impl<B: Backend> InFlight<B> {
    /// Whether [`wait`](Self::wait) would return at once. It is not known of operations on devices.
    pub fn is_finished(&self) -> bool {
        matches!(self, InFlight::Host(work) if work.is_finished())
    }

    pub fn wait(self) -> Result<Elements<B>, Error> {
        match self {
            InFlight::Host(work) => work.wait().map(Elements::Host).map_err(|(error, _)| error),
            InFlight::Device(pending) => pending.wait().map(Elements::Device),
        }
    }

    /// As [`wait`](Self::wait), but returns tensors on a device that waits for the operation itself, and waits for the
    /// operation before it. So while the device works, the host finds the next work for it. The operation before comes
    /// first: only who waits for it learns of a peer that was lost in it.
    pub fn follow(self, unconfirmed: &mut Unconfirmed) -> Result<Elements<B>, Error> {
        unconfirmed.confirm()?;
        let InFlight::Device(pending) = self else { return self.wait() };
        let (tensors, completion) = pending.follow()?;
        unconfirmed.0 = completion;
        Ok(Elements::Device(tensors))
    }
}

/// An operation whose tensors are in use already. Whether they are right is known once it is confirmed, which must be
/// before anything that lasts is made of them.
#[derive(Default)]
pub(super) struct Unconfirmed(Option<Completion>);

impl Unconfirmed {
    /// Waits until the operation has ended.
    pub fn confirm(&mut self) -> Result<(), Error> {
        self.0.take().map_or(Ok(()), |completion| completion())
    }
}
