//! Gradients of a module.

use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};

use super::cargo::Cargo;
use super::claim::Call;
use super::error::CollectiveError;
use super::names::PeerId;
use super::operation::run;
use super::unload;
use bonfire_core::ReduceOp;
use bonfire_core::internal::hash;

/// All-reduces gradients, as burn-optim does with its `collective` feature. Import it to call `grads.all_reduce(..)`.
pub trait GradientsParamsExt: Sized {
    /// Reduces every gradient over all peers. `B` is the backend of the gradients: with autodiff, its inner backend.
    ///
    /// Parameters take their turns by id, so all peers must have gradients of the same parameters: clones of one module
    /// in the threads of a process have them, modules in different processes if they were loaded from one record.
    ///
    /// # Errors
    /// [`CollectiveError::AllReduceShapeMismatch`] on all peers where some have gradients that others lack; else as
    /// [`all_reduce`](crate::all_reduce). A quantised gradient is [`CollectiveError::Other`] on all peers.
    ///
    /// # Panics
    /// As all of `GradientsParams`' methods, if the gradients are those of another backend.
    ///
    /// ```no_run
    /// use bonfire::burn_collective::{CollectiveError, GradientsParamsExt, PeerId, ReduceOperation};
    /// use burn::optim::GradientsParams;
    /// use burn::tensor::backend::Backend;
    ///
    /// fn average<B: Backend>(grads: GradientsParams, peer: PeerId) -> Result<GradientsParams, CollectiveError> {
    ///     grads.all_reduce::<B>(peer, ReduceOperation::Mean)
    /// }
    /// ```
    fn all_reduce<B: Backend>(self, peer: PeerId, op: ReduceOp) -> Result<Self, CollectiveError>;
}

impl GradientsParamsExt for GradientsParams {
    fn all_reduce<B: Backend>(mut self, peer: PeerId, op: ReduceOp) -> Result<Self, CollectiveError> {
        let ids = ids(&self);
        let digest = ids.as_ref().map_or(0, |ids| digest(ids));
        let failure = ids.as_ref().err().cloned().map_or(Ok(None), Err);
        run::<B>(peer, Call::Parameters(digest), failure)?;
        for id in ids? {
            // The number of dimensions is a promise that only shapes in types use: any will do to get at the primitive.
            let gradient = self.remove::<B, 1>(id).map(Tensor::into_primitive);
            let (cargo, device) = match gradient {
                Some(TensorPrimitive::Float(gradient)) => {
                    let device = B::float_device(&gradient);
                    (Cargo::<B>::load(gradient).map(Some), device)
                }
                _ => (Err(CollectiveError::Other(format!("the gradient of {id} is quantised"))), B::Device::default()),
            };
            let (cargo, _) = run(peer, Call::AllReduce(op), cargo)?;
            let reduced = TensorPrimitive::Float(unload(cargo, &device)?);
            self.register::<B, 1>(id, Tensor::from_primitive(reduced));
        }
        Ok(self)
    }
}

/// The ids of the parameters that have gradients, in order. burn shows them in the `Debug` output only.
fn ids(gradients: &GradientsParams) -> Result<Vec<ParamId>, CollectiveError> {
    let ids = listed(&format!("{gradients:?}"));
    if ids.len() == gradients.len() {
        return Ok(ids);
    }
    Err(CollectiveError::Other(format!(
        "{} of {} parameter ids are understood: this version of burn shows them in another way than burn 0.21",
        ids.len(),
        gradients.len()
    )))
}

/// The numbers in every `ParamId { value: 123 }`, sorted.
fn listed(text: &str) -> Vec<ParamId> {
    let numbers = text.split("ParamId { value: ").skip(1);
    let mut ids: Vec<u64> = numbers.filter_map(|rest| rest.split_once(' ')?.0.parse().ok()).collect();
    ids.sort_unstable();
    ids.dedup();
    ids.into_iter().map(ParamId::from).collect()
}

/// The same for the same ids in every build.
fn digest(ids: &[ParamId]) -> u64 {
    hash(ids.iter().flat_map(|id| id.val().to_le_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;

    #[test]
    fn ids_are_found_whatever_their_number_and_rank() {
        let mut gradients = GradientsParams::new();
        assert_eq!(ids(&gradients), Ok(vec![]));
        let device = Default::default();
        for id in [u64::MAX, 0, 77] {
            gradients.register::<Flex, 2>(ParamId::from(id), Tensor::zeros([1, 2], &device));
        }
        assert_eq!(ids(&gradients), Ok([0, 77, u64::MAX].map(ParamId::from).to_vec()));
    }

    #[test]
    fn other_texts_have_no_ids() {
        for text in ["", "ParamId(7)", "ParamId { value: x }", "ParamId { value: "] {
            assert_eq!(listed(text), vec![]);
        }
        assert_ne!(digest(&listed("ParamId { value: 1 }")), digest(&listed("ParamId { value: 256 }")));
    }
}
