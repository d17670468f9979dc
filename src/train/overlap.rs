//! What overlapped steps keep from one to the next.

use std::sync::Arc;

use burn::tensor::backend::AutodiffBackend;

use super::agree::{Parameter, lane};
use super::bucket::{BucketTable, Limits, buckets};
use super::reduction::Reducer;
use crate::tensor::device::connect;
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group};

/// What overlapped steps share.
pub(super) struct Overlap<B: AutodiffBackend> {
    /// Reduces gradients over the lane. A step in progress has it.
    pub reducer: Option<Reducer<B>>,
    pub lane: Group,
    pub buckets: BucketTable,
    /// Whether the buckets are final: the order of gradients is known.
    pub tuned: bool,
}

impl<B: AutodiffBackend> Overlap<B> {
    pub fn new(main: &Reducer<B>) -> Result<Overlap<B>, Error> {
        main.group.check_concurrent("DataParallel::step")?;
        let (lane, parameters) = (lane(&main.group)?, &main.parameters);
        // Now, since gradients are sent in the backward pass: burn-autodiff holds the graph's lock there, which other
        // ranks of this process may need before they send theirs.
        if let Some(parameter) = parameters.first() {
            connect::<B::InnerBackend>(&lane, &parameter.device)?;
        }
        // The last layers first: the backward pass computes their gradients first.
        let items = parameters.iter().enumerate().rev().filter(|(_, parameter)| parameter.trained);
        let limits = Limits::of(main.on_devices);
        let buckets = buckets(items.map(|(position, parameter)| parameter.item(position)), limits).into();
        Ok(Overlap { reducer: Some(main.over(lane.clone())), lane, buckets, tuned: false })
    }

    pub fn set_parameters(&mut self, parameters: Arc<[Parameter<B>]>) {
        if let Some(reducer) = &mut self.reducer {
            reducer.parameters = parameters;
        }
    }

    /// Returns the buckets if they are final.
    pub fn tuned_buckets(&self) -> Option<&BucketTable> {
        self.tuned.then_some(&self.buckets)
    }
}
