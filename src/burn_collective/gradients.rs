//! All-reduce of a module's gradients.

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor, TensorPrimitive};

use super::claim::CollectiveCall;
use super::error::CollectiveError;
use super::into_tensor;
use super::names::PeerId;
use super::operation::run;
use super::payload::Payload;
use bonfire_core::ReduceOp;
use bonfire_core::internal::hash;

/// An extension trait to all-reduce gradients, as burn-optim does with its feature `collective`. Import it to call
/// `grads.all_reduce(..)`.
pub trait GradientsParamsExt: Sized {
    /// Reduces every gradient over all peers. `B` is the backend of the gradients: with autodiff, its inner backend. It
    /// runs one operation for each gradient; [`DataParallel::sync`](crate::DataParallel::sync) puts them into buckets
    /// and weights uneven shards.
    ///
    /// Gradients are reduced in the order of their parameter ids, so all peers must have gradients of the same
    /// parameter ids. Clones of one module in the threads of a process have the same ids, and the same values if it was
    /// [`initialized`] before. Modules in different processes have both if they were loaded from one record.
    ///
    /// # Errors
    /// [`CollectiveError::AllReduceShapeMismatch`] on all peers if some lack gradients that others have;
    /// [`CollectiveError::Other`] on all peers for a quantised gradient; otherwise as
    /// [`all_reduce`](crate::all_reduce).
    ///
    /// # Panics
    /// If the gradients are those of another backend, as all methods of `GradientsParams`.
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
        run::<B>(peer, CollectiveCall::Parameters(digest), failure)?;
        for id in ids? {
            // The primitive does not depend on the type's number of dimensions, so any number gives access to it.
            let gradient = self.remove::<B, 1>(id).map(Tensor::into_primitive);
            let (payload, device) = match gradient {
                Some(TensorPrimitive::Float(gradient)) => {
                    let device = B::float_device(&gradient);
                    (Payload::<B>::in_place_or_read(gradient).map(Some), device)
                }
                _ => (Err(CollectiveError::Other(format!("the gradient of {id} is quantised"))), B::Device::default()),
            };
            let (payload, _) = run(peer, CollectiveCall::AllReduce(op), payload)?;
            let reduced = TensorPrimitive::Float(into_tensor(payload, &device)?);
            self.register::<B, 1>(id, Tensor::from_primitive(reduced));
        }
        Ok(self)
    }
}

/// Gives a model's parameters their initial values now: clones of it have the same ones. burn 0.21 draws them at a
/// parameter's first use, for each clone again ([burn#5040](https://github.com/tracel-ai/burn/issues/5040)). So peers
/// that get clones of a model which was never used would train models with other weights.
///
/// ```
/// use bonfire::burn_collective::initialized;
/// use burn::backend::Flex;
/// use burn::nn::LinearConfig;
///
/// let model = initialized::<Flex, _>(LinearConfig::new(2, 2).init(&Default::default()));
/// assert_eq!(model.clone().weight.to_data(), model.weight.to_data());
/// ```
pub fn initialized<B: Backend, M: Module<B>>(model: M) -> M {
    model.visit(&mut Initialize);
    model
}

/// Uses each parameter.
struct Initialize;

impl<B: Backend> ModuleVisitor<B> for Initialize {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        param.val();
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        param.val();
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        param.val();
    }
}

/// Returns the sorted ids of the parameters that have gradients. burn exposes them in the `Debug` output only.
fn ids(gradients: &GradientsParams) -> Result<Vec<ParamId>, CollectiveError> {
    let ids = parse_ids(&format!("{gradients:?}"));
    if ids.len() == gradients.len() {
        return Ok(ids);
    }
    Err(CollectiveError::Other(format!(
        "{} of {} parameter ids could be read: this version of burn prints them differently than burn 0.21",
        ids.len(),
        gradients.len()
    )))
}

/// Parses the number of every `ParamId { value: 123 }` and returns them sorted.
fn parse_ids(text: &str) -> Vec<ParamId> {
    let numbers = text.split("ParamId { value: ").skip(1);
    let mut ids: Vec<u64> = numbers.filter_map(|rest| rest.split_once(' ')?.0.parse().ok()).collect();
    ids.sort_unstable();
    ids.dedup();
    ids.into_iter().map(ParamId::from).collect()
}

/// Hashes the ids. The hash is the same in every build.
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
    fn text_without_ids_gives_none() {
        for text in ["", "ParamId(7)", "ParamId { value: x }", "ParamId { value: "] {
            assert_eq!(parse_ids(text), vec![]);
        }
        assert_ne!(digest(&parse_ids("ParamId { value: 1 }")), digest(&parse_ids("ParamId { value: 256 }")));
    }
}
