//! Buckets whose operations are in flight, on the host or on a collective device.

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

use super::bucket::Bucket;
use crate::tensor::device::PendingTensors;
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
            InFlight::Device(pending) => pending().map(Elements::Device),
        }
    }
}
