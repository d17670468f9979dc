//! The parameters of a model, and a model that is the same on all ranks.

use std::any::Any;
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

use burn::module::{AutodiffModule, Param, ParamId, Parameter as Value};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Float, Shape, Tensor, TensorMetadata, TensorPrimitive};

use super::walk::{FloatParameter, Map, Place, Visit, map, visit, visit_floats};
use crate::tensor::autodiff::hook::is_tracked;
use crate::tensor::host::{Kind, Source, TensorSpec, data, float};
use crate::tensor::operation::broadcast;
use bonfire_core::internal::{AgreedOperations, ByteOperations, Request};
use bonfire_core::{Error, Group, Operation};
use bonfire_train::parameters::{self, Description, NOTHING, digest, warn_of_unclear};
use bonfire_train::protocol::{Header, Problem};

/// A parameter of floats. Its gradients can be exchanged.
#[derive(Clone, Debug)]
pub(super) struct Parameter<B: AutodiffBackend> {
    pub id: ParamId,
    pub path: String,
    pub shape: Shape,
    pub dtype: DType,
    /// The element type in which it is exchanged.
    pub element: bonfire_core::DType,
    pub device: B::Device,
    /// Whether it needed a gradient at the start.
    pub trained: bool,
    /// The block that contains it: see [`ShardedBlock`](super::ShardedBlock).
    pub block: usize,
}

/// Tensors of parameters, with their positions.
type Placed<B> = Vec<(usize, FloatTensor<B>)>;

/// The parameters of a model by position, which is the same on all ranks; their ids are not. Of several with one id the
/// first counts, as in burn's optimizers.
#[derive(Clone, Debug)]
pub(super) struct Parameters<B: AutodiffBackend> {
    list: Arc<[Parameter<B>]>,
    positions: Arc<HashMap<ParamId, usize>>,
}

impl<B: AutodiffBackend> Deref for Parameters<B> {
    type Target = [Parameter<B>];

    fn deref(&self) -> &[Parameter<B>] {
        &self.list
    }
}

impl<B: AutodiffBackend> FromIterator<Parameter<B>> for Parameters<B> {
    fn from_iter<I: IntoIterator<Item = Parameter<B>>>(parameters: I) -> Self {
        let (mut list, mut positions) = (Vec::new(), HashMap::new());
        for parameter in parameters {
            positions.entry(parameter.id).or_insert_with(|| {
                list.push(parameter);
                list.len() - 1
            });
        }
        Parameters { list: list.into(), positions: positions.into() }
    }
}

impl<B: AutodiffBackend> Parameters<B> {
    /// Returns the descriptions of all parameters of a model, of every kind, and those of floats.
    pub fn of<M: AutodiffModule<B>>(model: &M) -> (Vec<Description>, Parameters<B>) {
        let Collector { described, floats, .. } = describe(model);
        (described, floats.into_iter().collect())
    }

    /// As [`of`](Self::of), with descriptions that tell the blocks.
    pub fn in_blocks<M: AutodiffModule<B>>(model: &M) -> (Vec<Description>, Parameters<B>) {
        let Collector { mut described, floats, blocks } = describe(model);
        for (description, block) in described.iter_mut().zip(blocks).filter(|(_, block)| *block > 0) {
            description.what += &format!(" in block {block}");
        }
        (described, floats.into_iter().collect())
    }

    pub fn position(&self, id: ParamId) -> Option<usize> {
        self.positions.get(&id).copied()
    }

    /// Returns the parameters as the engine knows them.
    pub fn described(&self) -> Arc<[parameters::Parameter]> {
        let described = self.iter().map(|parameter| parameters::Parameter {
            path: parameter.path.clone(),
            shape: parameter.shape.as_slice().to_vec(),
            dtype: parameter.element,
        });
        described.collect()
    }

    /// Whether the parameters needed gradients at the start, by position.
    pub fn trained(&self) -> Vec<bool> {
        self.iter().map(|parameter| parameter.trained).collect()
    }

    /// Returns a rank's tensors of these parameters in a model. `shape` returns that of the one at a position.
    pub fn in_model<'s, M: AutodiffModule<B>>(&self, model: &M, shape: impl Fn(usize) -> &'s [usize]) -> InModel<B> {
        let count = self.len();
        let mut found =
            InModel { values: vec![None; count], trained: vec![false; count], unknown: Vec::new(), twice: None };
        let mut seen = vec![false; count];
        visit_floats(model, |parameter| {
            let Some(position) = self.position(parameter.id) else {
                found.unknown.extend(parameter.trained.then_some(parameter.value));
                return;
            };
            if seen[position] && (parameter.trained || found.trained[position]) {
                found.twice.get_or_insert(position);
            }
            found.trained[position] |= parameter.trained;
            if !std::mem::replace(&mut seen[position], true) {
                let fits = parameter.value.shape().as_slice() == shape(position)
                    && parameter.value.dtype() == self[position].dtype;
                found.values[position] = fits.then_some(parameter.value);
            }
        });
        found
    }

    /// Takes the gradients of these parameters, with their positions. Returns whether there were others.
    pub fn take(&self, mut gradients: GradientsParams) -> (Placed<B::InnerBackend>, bool) {
        let taken = self.iter().enumerate().filter_map(|(position, parameter)| {
            // Gradients are stored without their number of dimensions.
            let gradient = gradients.remove::<B::InnerBackend, 1>(parameter.id)?;
            Some((position, gradient.into_primitive().tensor()))
        });
        let taken = taken.collect();
        (taken, !gradients.is_empty())
    }

    /// Returns the gradient of the parameter at a position.
    pub fn gradient(&self, gradients: &GradientsParams, position: usize) -> Option<FloatTensor<B::InnerBackend>> {
        Some(gradients.get::<B::InnerBackend, 1>(self[position].id)?.into_primitive().tensor())
    }

    /// Changes the gradients of these parameters.
    pub fn map_gradients(
        &self,
        gradients: &mut GradientsParams,
        f: impl Fn(FloatTensor<B::InnerBackend>) -> FloatTensor<B::InnerBackend>,
    ) {
        for parameter in self.iter() {
            if let Some(gradient) = gradients.remove::<B::InnerBackend, 1>(parameter.id) {
                let changed = f(gradient.into_primitive().tensor());
                let changed = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(changed));
                gradients.register(parameter.id, changed);
            }
        }
    }

    /// Returns gradients by position as burn's optimizers take them.
    pub fn gradients(
        &self,
        gradients: impl IntoIterator<Item = (usize, FloatTensor<B::InnerBackend>)>,
    ) -> GradientsParams {
        let mut by_id = GradientsParams::new();
        for (position, gradient) in gradients {
            let gradient = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(gradient));
            by_id.register(self[position].id, gradient);
        }
        by_id
    }
}

/// A rank's tensors of parameters in a model.
pub(super) struct InModel<B: Backend> {
    /// By position. `None` where the model lacks the parameter, or has it with another shape or element type.
    pub values: Vec<Option<FloatTensor<B>>>,
    /// By position, whether it needs a gradient.
    pub trained: Vec<bool>,
    /// Parameters that need a gradient, and that the model did not have at the start.
    pub unknown: Vec<FloatTensor<B>>,
    /// A parameter that needs a gradient, and that the model has twice.
    pub twice: Option<usize>,
}

impl<B: AutodiffBackend> InModel<B> {
    /// Returns the header of a step with this model. If parameters are sharded, it may have one twice, and needs those
    /// that are frozen.
    pub fn header(&self, parameters: &Parameters<B>, sharded: bool) -> Header {
        let lacks = |position: &usize| {
            let counts = sharded || self.trained[*position] || parameters[*position].trained;
            counts && self.values[*position].is_none()
        };
        let mut header = Header::new(self.trained.clone());
        header.problem = (0..self.values.len()).find(lacks).map(Problem::Changed);
        header.problem = header.problem.or((!self.unknown.is_empty()).then_some(Problem::Unknown));
        header.problem = header.problem.or(self.twice.filter(|_| !sharded).map(Problem::Duplicate));
        header
    }

    /// Returns the digests of the values that need a gradient, by position. Others are states, which differ between
    /// ranks, or frozen, which no step changes.
    pub fn digests(&self) -> Result<Vec<u64>, Error> {
        let digest = |(value, trained): (&Option<FloatTensor<B>>, &bool)| match value {
            Some(value) if *trained => {
                let value = TensorPrimitive::Float(B::inner(value.clone()));
                let (source, _) = Source::read::<B::InnerBackend, Float>("reading a parameter", value)?;
                Ok(digest(source.bytes()))
            }
            _ => Ok(NOTHING),
        };
        self.values.iter().zip(&self.trained).map(digest).collect()
    }
}

/// Whether the tensors of a program's model say that they are trained.
pub(super) struct Needs(Vec<(ParamId, Option<bool>)>);

impl Needs {
    /// Reads a model as the program has made it, before its values get leaves of their own.
    pub fn of<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Needs {
        let mut needs = Vec::new();
        visit_floats(model, |parameter: FloatParameter<B>| {
            let is_result = !parameter.trained && is_tracked::<B>(parameter.value);
            needs.push((parameter.id, (!is_result).then_some(parameter.trained)));
        });
        Needs(needs)
    }

    /// Names in the log those that say something else than what the ranks do with these parameters.
    pub fn warn<B: AutodiffBackend>(&self, group: &Group, operation: &str, parameters: &Parameters<B>) {
        let unclear = self.0.iter().filter_map(|(id, needs)| {
            let parameter = &parameters[parameters.position(*id)?];
            (*needs != Some(parameter.trained)).then_some((parameter.path.as_str(), parameter.trained))
        });
        warn_of_unclear(group, operation, unclear);
    }
}

/// Fails if the model has a parameter that needs a gradient twice, under one id: burn's optimizers update only one.
pub(super) fn check_untied<B: AutodiffBackend, M: AutodiffModule<B>>(operation: &str, model: &M) -> Result<(), Error> {
    let floats = describe::<B, M>(model).floats;
    for (i, one) in floats.iter().enumerate() {
        if let Some(other) = floats[..i].iter().find(|other| other.id == one.id && (other.trained || one.trained)) {
            let reason = format!(
                "`{}` and `{}` are one parameter, and a burn optimizer updates only one of them; give each its own \
                 parameters, use one module twice, or train with `FullyShardedParallel`, which keeps them tied",
                other.path, one.path
            );
            return Err(Error::argument(operation, reason));
        }
    }
    Ok(())
}

fn describe<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> Collector<B> {
    visit(model, Collector { described: Vec::new(), blocks: Vec::new(), floats: Vec::new() })
}

/// Describes parameters, in visiting order.
struct Collector<B: AutodiffBackend> {
    described: Vec<Description>,
    blocks: Vec<usize>,
    floats: Vec<Parameter<B>>,
}

impl<B: AutodiffBackend> Visit<B> for Collector<B> {
    fn parameter<const D: usize, K: Kind<B> + 'static>(&mut self, place: &Place, param: &Param<Tensor<B, D, K>>)
    where
        Tensor<B, D, K>: Value,
    {
        let (path, value, trained) = (place.path(), param.val(), param.is_require_grad());
        let (dtype, shape, block) = (value.dtype(), value.shape(), place.blocks.block());
        let mut kind = K::name().to_lowercase();
        if let Some(element) = float(dtype).filter(|_| K::holds(DType::F32)) {
            kind.insert_str(0, if trained { "trained " } else { "untrained " });
            let (path, shape, device) = (path.clone(), shape.clone(), value.device());
            self.floats.push(Parameter { id: param.id, path, shape, dtype, element, device, trained, block });
        }
        let dtype = format!("{dtype:?}").to_lowercase();
        self.described.push(Description { path, what: format!("{kind} {dtype} {:?}", shape.as_slice()) });
        self.blocks.push(block);
    }
}

/// Rebuilds the model with running states and leaves of its own. Clones of a model share them, so threads that train
/// clones would lock each other out of burn's backward pass. The rebuilt model lacks the mappings for loading and
/// saving, which are returned beside it; [`restore`] puts them back.
pub(super) fn rebuild<B: AutodiffBackend, M: AutodiffModule<B>>(model: M) -> (M, Identities) {
    let mut identities = visit(&model, Identities(Vec::new()));
    let rebuilt = M::from_inner(model.valid());
    // Only leaves show whether they need a gradient: what a mapping has made of one is none.
    let leaves = visit(&rebuilt, Identities(Vec::new()));
    identities.0.iter_mut().zip(leaves.0).for_each(|(identity, leaf)| identity.trained = leaf.trained);
    (rebuilt, identities)
}

/// Returns the model with the ids, the need for gradients and the mappings of these identities.
pub(super) fn restore<B: AutodiffBackend, M: AutodiffModule<B>>(model: M, identities: Identities) -> M {
    map(model, &mut Restore(identities.0.into_iter()))
}

/// Returns the model with `root`'s values in all parameters, and with these identities.
pub(super) fn broadcast_parameters<B: AutodiffBackend, M: AutodiffModule<B>>(
    group: &Group,
    model: M,
    identities: Identities,
    root: usize,
) -> Result<M, Error> {
    let mut receive = Receive { source: (group, root), failure: None };
    let model = map(model.valid(), &mut receive);
    match receive.failure {
        // The others may be waiting for a value of this rank.
        Some(error) => Err(group.abandon(error)),
        None => Ok(restore(M::from_inner(model), identities)),
    }
}

/// What parameters are besides their values, in visiting order.
pub(super) struct Identities(Vec<Identity>);

struct Identity {
    id: ParamId,
    /// Whether it needs a gradient.
    trained: bool,
    mapper: Box<dyn Any>,
}

impl Identities {
    /// Returns the ids as numbers.
    pub fn ids(&self) -> Vec<u64> {
        self.0.iter().map(|identity| identity.id.val()).collect()
    }

    pub fn set_ids(&mut self, ids: &[u64]) {
        self.0.iter_mut().zip(ids).for_each(|(identity, id)| identity.id = (*id).into());
    }
}

impl<B: Backend> Visit<B> for Identities {
    fn parameter<const D: usize, K: Kind<B> + 'static>(&mut self, _: &Place, param: &Param<Tensor<B, D, K>>)
    where
        Tensor<B, D, K>: Value,
    {
        let (id, value, mapper) = param.clone().consume();
        self.0.push(Identity { id, trained: value.is_require_grad(), mapper: Box::new(mapper) });
    }
}

struct Restore(std::vec::IntoIter<Identity>);

impl<B: Backend> Map<B> for Restore {
    fn parameter<const D: usize, K: Kind<B> + 'static>(
        &mut self,
        _: &Place,
        param: Param<Tensor<B, D, K>>,
    ) -> Param<Tensor<B, D, K>>
    where
        Tensor<B, D, K>: Value,
    {
        let Some(Identity { id, trained, mapper }) = self.0.next() else { return param };
        let (_, value, own) = param.consume();
        let mapper = mapper.downcast().map_or(own, |mapper| *mapper);
        Param::from_mapped_value(id, Value::set_require_grad(value, trained), mapper)
    }
}

/// Replaces values by those of a rank of the group. After a failure the model is of no use.
struct Receive<'a> {
    source: (&'a Group, usize),
    failure: Option<Error>,
}

impl<I: Backend> Map<I> for Receive<'_> {
    fn parameter<const D: usize, K: Kind<I> + 'static>(
        &mut self,
        _: &Place,
        param: Param<Tensor<I, D, K>>,
    ) -> Param<Tensor<I, D, K>>
    where
        Tensor<I, D, K>: Value,
    {
        if self.failure.is_some() {
            return param;
        }
        let (id, value, mapper) = param.consume();
        let options = (value.device(), value.dtype());
        let value = receive(value, self.source).unwrap_or_else(|error| {
            self.failure = Some(error);
            Tensor::empty([0; D], (&options.0, options.1))
        });
        Param::from_mapped_value(id, value, mapper)
    }
}

fn receive<I: Backend, const D: usize, K: Kind<I>>(
    tensor: Tensor<I, D, K>,
    (group, root): (&Group, usize),
) -> Result<Tensor<I, D, K>, Error> {
    const OPERATION: &str = "broadcast";
    let (device, dtype, shape, primitive) = (tensor.device(), tensor.dtype(), tensor.shape(), tensor.into_primitive());
    if let DType::QFloat(_) = dtype {
        // The bytes of a quantised tensor: the ranks have compared its shape and scheme.
        let mut data = data::<I, K>(OPERATION, primitive)?;
        let request = Request::new(Operation::Broadcast, bonfire_core::DType::U8).root(root).shape(&shape);
        group.operate(request, None, &mut data.bytes)?;
        let dtype = data.dtype;
        return Ok(Tensor::from_data(data, (&device, dtype)));
    }
    if K::device_dtype(&primitive).is_some() {
        return broadcast(Tensor::from_primitive(primitive), root, group);
    }
    // The same operation in the tensor's own memory. That of `broadcast` is from a pool, where the whole parameters of
    // a model of which only parts are kept would stay.
    let spec = TensorSpec::new::<I, K>(OPERATION, dtype, device.clone())?;
    let mut data = data::<I, K>(OPERATION, primitive)?;
    let request = Request::new(Operation::Broadcast, spec.carrier).root(root).shape(&shape);
    group.operate(request, None, &mut data.bytes)?;
    Ok(Tensor::from_data(data, (&device, dtype)))
}
