//! The parameters of a model, and a model that is the same on all ranks.

use std::collections::HashMap;
use std::mem::replace;
use std::ops::Deref;
use std::sync::Arc;
use std::vec::IntoIter;

use burn::backend::ops::FloatTensorOps;
use burn::backend::{AutodiffBackend, Dispatch, DispatchTensor, TensorMetadata};
use burn::module::{Module, Param, ParamId, Parameter as Value};
use burn::optim::GradientsParams;
use burn::tensor::{GradientCheckpointingStrategy, Shape, Tensor, TensorData};

use super::adapter::opened;
use super::walk::{Kind, Map, Place, Visit, map, visit, visit_floats};
use crate::tensor::host::{TensorSpec, float};
use bonfire_core::internal::{AgreedOperations, ByteOperations, Request};
use bonfire_core::{DType, Error, Group, Operation};
use bonfire_train::parameters::{self, Description, NOTHING, digest, warn_of_unclear};
use bonfire_train::protocol::{Header, Problem};
use bonfire_train::step::Means;

/// A parameter of floats. Its gradients can be exchanged.
#[derive(Clone, Debug)]
pub(super) struct Parameter {
    pub id: ParamId,
    pub path: String,
    pub shape: Shape,
    /// How tensors are made for it.
    pub spec: TensorSpec,
    /// Whether it needed a gradient at the start.
    pub trained: bool,
    /// The block that contains it: see [`ShardedBlock`](super::ShardedBlock).
    pub block: usize,
    gradient: GradientOf,
}

impl Parameter {
    /// Returns a gradient of zeros for it.
    pub fn zero_gradient(&self) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        let zeros = Dispatch::float_zeros(self.shape.clone(), &self.spec.device, self.spec.dtype.into());
        (self.gradient.put)(&mut gradients, self.id, zeros);
        gradients
    }
}

/// Access to the gradients of parameters with one number of dimensions, which is a part of their type.
#[derive(Clone, Copy, Debug)]
struct GradientOf {
    get: fn(&GradientsParams, ParamId) -> Option<DispatchTensor>,
    take: fn(&mut GradientsParams, ParamId) -> Option<DispatchTensor>,
    put: fn(&mut GradientsParams, ParamId, DispatchTensor),
}

impl GradientOf {
    fn rank<const D: usize>() -> GradientOf {
        GradientOf {
            get: |gradients, id| gradients.get::<D>(id).map(Tensor::into_dispatch),
            take: |gradients, id| gradients.remove::<D>(id).map(Tensor::into_dispatch),
            put: |gradients, id, tensor| gradients.register(id, Tensor::<D>::from_dispatch(tensor)),
        }
    }
}

/// Tensors of parameters, with their positions.
type Placed = Vec<(usize, DispatchTensor)>;

/// The parameters of a model by position, which is the same on all ranks; their ids are not. Of several with one id the
/// first counts, as in burn's optimizers.
#[derive(Clone, Debug)]
pub(super) struct Parameters {
    list: Arc<[Parameter]>,
    positions: Arc<HashMap<ParamId, usize>>,
}

impl Deref for Parameters {
    type Target = [Parameter];

    fn deref(&self) -> &[Parameter] {
        &self.list
    }
}

impl FromIterator<Parameter> for Parameters {
    fn from_iter<I: IntoIterator<Item = Parameter>>(parameters: I) -> Self {
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

impl Parameters {
    /// Returns the descriptions of all parameters of a model, of every kind, and those of floats.
    pub fn of<M: Module>(model: &M) -> (Vec<Description>, Parameters) {
        let Collector { described, floats, .. } = describe(model);
        (described, floats.into_iter().collect())
    }

    /// As [`of`](Self::of), with descriptions that tell the blocks.
    pub fn in_blocks<M: Module>(model: &M) -> (Vec<Description>, Parameters) {
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
            dtype: parameter.spec.carrier,
        });
        described.collect()
    }

    /// Returns their whole shapes, and how tensors are made for them.
    pub fn tensors(&self) -> impl Iterator<Item = (Shape, TensorSpec)> {
        self.iter().map(|parameter| (parameter.shape.clone(), parameter.spec.clone()))
    }

    /// Whether the parameters needed gradients at the start, by position.
    pub fn trained(&self) -> Vec<bool> {
        self.iter().map(|parameter| parameter.trained).collect()
    }

    /// Returns a rank's tensors of these parameters in a model. `shape` returns that of the one at a position.
    pub fn in_model<'s, M: Module>(&self, model: &M, shape: impl Fn(usize) -> &'s [usize]) -> InModel {
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
            if !replace(&mut seen[position], true) {
                let fits = parameter.value.shape().as_slice() == shape(position)
                    && parameter.value.dtype() == self[position].spec.dtype;
                found.values[position] = fits.then_some(parameter.value);
            }
        });
        found
    }

    /// Takes the gradients of these parameters, with their positions. Returns whether there were others.
    pub fn take(&self, mut gradients: GradientsParams) -> (Placed, bool) {
        let taken = self.iter().enumerate();
        let taken = taken.filter_map(|(position, parameter)| {
            Some((position, (parameter.gradient.take)(&mut gradients, parameter.id)?))
        });
        let taken = taken.collect();
        (taken, !gradients.is_empty())
    }

    /// Returns the gradient of the parameter at a position.
    pub fn gradient(&self, gradients: &GradientsParams, position: usize) -> Option<DispatchTensor> {
        let parameter = &self[position];
        (parameter.gradient.get)(gradients, parameter.id)
    }

    /// Changes the gradients of these parameters.
    pub fn map_gradients(&self, gradients: &mut GradientsParams, f: impl Fn(DispatchTensor) -> DispatchTensor) {
        for parameter in self.iter() {
            if let Some(gradient) = (parameter.gradient.take)(gradients, parameter.id) {
                (parameter.gradient.put)(gradients, parameter.id, f(gradient));
            }
        }
    }

    /// Returns mean gradients as burn's optimizers take them.
    pub fn means(&self, means: Means) -> GradientsParams {
        let mut by_id = GradientsParams::new();
        for (parameter, gradient) in self.iter().zip(means.gradients) {
            if let Some(gradient) = gradient {
                (parameter.gradient.put)(&mut by_id, parameter.id, opened(gradient));
            }
        }
        by_id
    }
}

/// A rank's tensors of parameters in a model.
pub(super) struct InModel {
    /// By position. `None` where the model lacks the parameter, or has it with another shape or element type.
    pub values: Vec<Option<DispatchTensor>>,
    /// By position, whether it needs a gradient.
    pub trained: Vec<bool>,
    /// Parameters that need a gradient, and that the model did not have at the start.
    pub unknown: Vec<DispatchTensor>,
    /// A parameter that needs a gradient, and that the model has twice.
    pub twice: Option<usize>,
}

impl InModel {
    /// Returns the header of a step with this model. If parameters are sharded, it may have one twice, and needs those
    /// that are frozen.
    pub fn header(&self, parameters: &Parameters, sharded: bool) -> Header {
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
        let digest = |(value, trained): (&Option<DispatchTensor>, &bool)| match value {
            Some(value) if *trained => {
                let value = Tensor::<1>::from_dispatch(Dispatch::inner(value.clone()));
                let data = value.try_into_data().map_err(|error| Error::io("reading a parameter", error))?;
                Ok(digest(data.as_bytes()))
            }
            _ => Ok(NOTHING),
        };
        self.values.iter().zip(&self.trained).map(digest).collect()
    }
}

/// Fails if a parameter is on a device without autodiff.
pub(super) fn check_autodiff<M: Module>(operation: &str, model: &M) -> Result<(), Error> {
    if !model.devices().iter().all(|device| device.is_autodiff()) {
        let reason = "the model is on a device without autodiff, where nothing is trained; make it on \
                      `device.autodiff()`";
        return Err(Error::argument(operation, reason));
    }
    Ok(())
}

/// Whether the tensors of a program's model say that they are trained.
pub(super) struct Needs(Vec<(ParamId, Option<bool>)>);

impl Needs {
    /// Reads a model as the program has made it, before its values get leaves of their own.
    pub fn of<M: Module>(model: &M) -> Needs {
        let mut needs = Vec::new();
        visit_floats(model, |parameter| {
            let is_result = !parameter.trained && Dispatch::is_tracked(&parameter.value);
            needs.push((parameter.id, (!is_result).then_some(parameter.trained)));
        });
        Needs(needs)
    }

    /// Names in the log those that say something else than what the ranks do with these parameters.
    pub fn warn(&self, group: &Group, operation: &str, parameters: &Parameters) {
        let unclear = self.0.iter().filter_map(|(id, needs)| {
            let parameter = &parameters[parameters.position(*id)?];
            (*needs != Some(parameter.trained)).then_some((parameter.path.as_str(), parameter.trained))
        });
        warn_of_unclear(group, operation, unclear);
    }
}

/// Fails if the model has a parameter that needs a gradient twice, under one id: burn's optimizers update only one.
pub(super) fn check_untied<M: Module>(operation: &str, model: &M) -> Result<(), Error> {
    let floats = describe(model).floats;
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

fn describe<M: Module>(model: &M) -> Collector {
    visit(model, Collector { described: Vec::new(), blocks: Vec::new(), floats: Vec::new() })
}

/// Describes parameters, in visiting order.
struct Collector {
    described: Vec<Description>,
    blocks: Vec<usize>,
    floats: Vec<Parameter>,
}

impl Visit for Collector {
    fn parameter<const D: usize, K: Kind>(&mut self, place: &Place, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Value,
    {
        let (path, value, block) = (place.path(), param.val(), place.blocks.block());
        let trained = Value::is_require_grad(&value);
        let (dtype, shape) = (value.dtype(), value.shape());
        let mut kind = K::NAME.to_owned();
        if let Some(carrier) = float(dtype) {
            kind.insert_str(0, if trained { "trained " } else { "untrained " });
            let spec = TensorSpec { device: value.device().inner().as_dispatch().clone(), dtype, carrier };
            let (path, shape, gradient) = (path.clone(), shape.clone(), GradientOf::rank::<D>());
            self.floats.push(Parameter { id: param.id, path, shape, spec, trained, block, gradient });
        }
        let dtype = format!("{dtype:?}").to_lowercase();
        self.described.push(Description { path, what: format!("{kind} {dtype} {:?}", shape.as_slice()) });
        self.blocks.push(block);
    }
}

/// Returns the model with `root`'s values in all parameters, and with running states and leaves of its own. Clones of a
/// model share them, so threads that train clones would lock each other out of burn's backward pass.
pub(super) fn broadcast_parameters<M: Module>(group: &Group, model: M, root: usize) -> Result<M, Error> {
    let mut receive = Receive { source: (group, root), failure: None };
    let model = with_values(model, &mut receive);
    match receive.failure {
        // The others may be waiting for a value of this rank.
        Some(error) => Err(group.abandon(error)),
        None => Ok(model),
    }
}

/// Returns the model with values that `values` gives it without autodiff, and with running states and leaves of its
/// own.
pub(super) fn with_values<M: Module>(model: M, values: &mut impl Map) -> M {
    let strategies = visit(&model, Strategies(Vec::new()));
    map(map(model.valid(), values).train(), &mut Checkpointed(strategies.0.into_iter()))
}

/// The checkpointing strategies of parameters, in visiting order. `train` sets burn's default.
struct Strategies(Vec<Option<GradientCheckpointingStrategy>>);

impl Visit for Strategies {
    fn parameter<const D: usize, K: Kind>(&mut self, _: &Place, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Value,
    {
        self.0.push(param.val().gradient_checkpointing_strategy());
    }
}

struct Checkpointed(IntoIter<Option<GradientCheckpointingStrategy>>);

impl Map for Checkpointed {
    fn parameter<const D: usize, K: Kind>(&mut self, _: &Place, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Value,
    {
        match self.0.next().flatten() {
            Some(strategy) => param.map(|value| value.with_gradient_checkpointing_strategy(strategy)),
            None => param,
        }
    }
}

/// Replaces values by those of a rank of the group. After a failure the model is of no use.
struct Receive<'a> {
    source: (&'a Group, usize),
    failure: Option<Error>,
}

impl Map for Receive<'_> {
    fn parameter<const D: usize, K: Kind>(&mut self, _: &Place, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Value,
    {
        if self.failure.is_some() {
            return param;
        }
        let (id, value, mapper) = param.consume();
        let old = value.clone();
        let value = receive(value, self.source).unwrap_or_else(|error| {
            self.failure = Some(error);
            old
        });
        Param::from_mapped_value(id, value, mapper)
    }
}

fn receive<const D: usize, K: Kind>(
    tensor: Tensor<D, K>,
    (group, root): (&Group, usize),
) -> Result<Tensor<D, K>, Error> {
    const OPERATION: &str = "broadcast";
    let (device, dtype) = (tensor.device(), tensor.dtype());
    let data = tensor.try_into_data().map_err(|error| Error::io(OPERATION, error))?;
    // All ranks have the same shape and element type, so bytes are enough.
    let (mut bytes, shape, read) = data.into_parts();
    let request = Request::new(Operation::Broadcast, DType::U8).root(root);
    group.operate(request, None, &mut bytes)?;
    Ok(Tensor::from_data(TensorData::from_bytes(bytes, shape, read), (&device, dtype)))
}
