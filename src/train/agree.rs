//! Makes the ranks' models equal: checks that all have the same parameters, and broadcasts the values of one rank.

use std::any::Any;
use std::fmt;

use burn::module::{AutodiffModule, ModuleMapper, ModuleVisitor, Param, ParamId, Parameter as Value};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{Bool, Int, Shape, Tensor, TensorMetadata, TensorPrimitive};
use serde::{Deserialize, Serialize};

use super::bucket::Item;
use crate::tensor::host::{Kind, TensorSpec, data, float};
use crate::tensor::operation::broadcast;
use bonfire_core::internal::{AgreedOperations, ByteOperations, Request, process_number};
use bonfire_core::{DType, Element, Error, Group, Operation};

/// The description of a parameter that must be the same on all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ParameterDescription {
    pub path: String,
    /// Kind, element type, shape and whether it needs a gradient, as text.
    pub what: String,
}

impl fmt::Display for ParameterDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`: {}", self.path, self.what)
    }
}

/// Returns the first position where two lists of parameters differ. One past the end of the shorter list stands for a
/// parameter that it lacks.
pub(crate) fn first_difference(one: &[ParameterDescription], other: &[ParameterDescription]) -> Option<usize> {
    (0..one.len().max(other.len())).find(|&i| one.get(i) != other.get(i))
}

/// A float parameter. Its gradients can be synchronised.
#[derive(Clone)]
pub(crate) struct Parameter<B: AutodiffBackend> {
    pub id: ParamId,
    pub path: String,
    pub shape: Shape,
    pub dtype: burn::tensor::DType,
    pub element: DType,
    pub device: B::Device,
    /// Whether it needs a gradient.
    pub trained: bool,
}

impl<B: AutodiffBackend> Parameter<B> {
    /// Returns the bucket item for its gradient, where this is the parameter at `position`.
    pub fn item(&self, position: usize) -> Item {
        Item { position, dtype: self.element, bytes: self.shape.num_elements() * self.element.size() }
    }

    /// Returns burn's name of the element type in which gradients are reduced: the parameter's own, or f32.
    pub fn dtype_of(&self, carrier: DType) -> burn::tensor::DType {
        if carrier == self.element { self.dtype } else { burn::tensor::DType::F32 }
    }

    /// Returns a gradient in the element type in which it is reduced.
    pub fn widen(&self, gradient: FloatTensor<B::InnerBackend>, carrier: DType) -> FloatTensor<B::InnerBackend> {
        match carrier == self.element {
            true => gradient,
            false => B::InnerBackend::float_cast(gradient, self.dtype_of(carrier).into()),
        }
    }

    /// Adds a gradient to `results`, in the parameter's element type.
    pub fn register(&self, mut gradient: FloatTensor<B::InnerBackend>, results: &mut GradientsParams) {
        if float(gradient.dtype()) != Some(self.element) {
            gradient = B::InnerBackend::float_cast(gradient, self.dtype.into());
        }
        let gradient = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(gradient));
        results.register(self.id, gradient);
    }
}

/// Rebuilds the model with running states and leaves of its own. Clones of a model share them, so threads that train
/// clones would lock each other out of burn's backward pass. The rebuilt model lacks the mappings for loading and
/// saving, which are returned beside it; [`broadcast_parameters`] and [`restore`] put them back.
pub(crate) fn rebuild<B: AutodiffBackend, M: AutodiffModule<B>>(model: M) -> (M, Identities) {
    let (mut identities, mut leaves) = (Identities(Vec::new()), Identities(Vec::new()));
    model.visit(&mut identities);
    let rebuilt = M::from_inner(model.valid());
    // Only leaves show whether they need a gradient: what a mapping has made of one is none.
    rebuilt.visit(&mut leaves);
    identities.0.iter_mut().zip(leaves.0).for_each(|(identity, leaf)| identity.trained = leaf.trained);
    (rebuilt, identities)
}

/// Returns the model with the ids, the need for gradients and the mappings of these identities.
pub(crate) fn restore<B: AutodiffBackend, M: AutodiffModule<B>>(model: M, identities: Identities) -> M {
    model.map(&mut ParameterLoader { source: None, identities: identities.0.into_iter(), failure: None })
}

/// Returns the descriptions of all parameters, and the float parameters, both in visiting order.
pub(crate) fn parameters<B: AutodiffBackend, M: AutodiffModule<B>>(
    model: &M,
) -> (Vec<ParameterDescription>, Vec<Parameter<B>>) {
    let mut collector = ParameterCollector { path: Vec::new(), described: Vec::new(), parameters: Vec::new() };
    model.visit(&mut collector);
    (collector.described, collector.parameters)
}

/// Checks that all ranks have rank 0's parameters. Otherwise fails on all ranks with the same error.
#[track_caller]
pub(crate) fn check_same_model(group: &Group, operation: &str, own: &[ParameterDescription]) -> Result<(), Error> {
    let first: Vec<ParameterDescription> = broadcast_value(group, &own, 0)?;
    let differs = first_difference(own, &first);
    let positions = all_gather_values(group, [differs.map_or(u64::MAX, |i| i as u64)])?;
    let Some(([position], rank)) = positions.into_iter().zip(0..).filter(|([i], _)| *i < u64::MAX).min() else {
        return Ok(());
    };
    let position = position as usize;
    let other: Option<ParameterDescription> = broadcast_value(group, &own.get(position), rank)?;
    let text = |parameter: Option<&ParameterDescription>| {
        parameter.map_or("nothing, its model ends before".into(), ToString::to_string)
    };
    let (first, other) = (text(first.get(position)), text(other.as_ref()));
    let reason = format!(
        "the ranks' models differ first at parameter {position}: rank 0 has {first}; rank {rank} has {other}; build \
         the same model on all ranks"
    );
    Err(Error::argument(operation, reason))
}

/// Returns the model with `root`'s values in all parameters, and with these identities.
pub(crate) fn broadcast_parameters<B: AutodiffBackend, M: AutodiffModule<B>>(
    group: &Group,
    model: M,
    identities: Identities,
    root: usize,
) -> Result<M, Error> {
    let identities = identities.0.into_iter();
    let mut load = ParameterLoader { source: Some((group, root)), identities, failure: None };
    let model = model.map(&mut load);
    match load.failure {
        // The others may be waiting for a value of this rank.
        Some(error) => Err(group.abandon(error)),
        None => Ok(model),
    }
}

/// Makes a group of the same ranks, for communication that takes place beside that of `group`. All ranks must call it.
#[track_caller]
pub(crate) fn lane(group: &Group) -> Result<Group, Error> {
    let ranks: Vec<usize> = (0..group.world_size()).collect();
    if ranks.len() == 1 { Ok(group.clone()) } else { group.subgroup(&ranks) }
}

/// Returns whether no two ranks are threads of one process. All ranks must call it.
#[track_caller]
pub(crate) fn ranks_are_processes(group: &Group) -> Result<bool, Error> {
    let own = process_number().map_err(|error| group.abandon(error))?;
    let mut numbers = all_gather_values(group, [own])?;
    numbers.sort_unstable();
    numbers.dedup();
    Ok(numbers.len() == group.world_size())
}

/// All-gathers `N` values from each rank. Returns them by rank.
#[track_caller]
pub(crate) fn all_gather_values<T: Element, const N: usize>(group: &Group, own: [T; N]) -> Result<Vec<[T; N]>, Error> {
    let mut all = vec![own; group.world_size()];
    group.all_gather(all.as_flattened_mut())?;
    Ok(all)
}

/// Returns `own` if all ranks succeeded. Otherwise all ranks return the error of the lowest rank that failed, and the
/// group stays usable.
pub(crate) fn all_or_none<T>(group: &Group, own: Result<T, Error>) -> Result<T, Error> {
    let failed = all_gather_values(group, [u8::from(own.is_err())])?;
    let Some(rank) = failed.iter().position(|failed| *failed == [1]) else { return own };
    let told: Option<Error> = broadcast_value(group, &own.as_ref().err(), rank)?;
    match own {
        // With its source, which only this rank has.
        Err(error) if group.rank() == rank => Err(error),
        _ => Err(told.unwrap_or_else(|| Error::broken("training", format!("rank {rank} failed without an error")))),
    }
}

/// Broadcasts `root`'s value: returns its `own` on all ranks. The others' `own` is ignored.
#[track_caller]
pub(crate) fn broadcast_value<T: Serialize, R: for<'de> Deserialize<'de>>(
    group: &Group,
    own: &T,
    root: usize,
) -> Result<R, Error> {
    let broken = |e| Error::io("comparing the ranks' models", e);
    let mut bytes = if group.rank() == root { postcard::to_stdvec(own).map_err(broken)? } else { Vec::new() };
    let mut len = [bytes.len() as u64];
    group.broadcast(&mut len, root)?;
    bytes.resize(len[0] as usize, 0);
    group.broadcast(&mut bytes, root)?;
    postcard::from_bytes(&bytes).map_err(broken)
}

struct ParameterCollector<B: AutodiffBackend> {
    path: Vec<String>,
    described: Vec<ParameterDescription>,
    parameters: Vec<Parameter<B>>,
}

impl<B: AutodiffBackend> ParameterCollector<B> {
    fn describe(&mut self, kind: &str, dtype: burn::tensor::DType, shape: &Shape) -> String {
        let path = self.path.join(".");
        let dtype = format!("{dtype:?}").to_lowercase();
        let what = format!("{kind} {dtype} {:?}", shape.as_slice());
        self.described.push(ParameterDescription { path: path.clone(), what });
        path
    }
}

impl<B: AutodiffBackend> ModuleVisitor<B> for ParameterCollector<B> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let tensor = param.val();
        let trained = tensor.is_require_grad();
        let kind = if trained { "trained float" } else { "untrained float" };
        let (dtype, shape) = (tensor.dtype(), tensor.shape());
        let path = self.describe(kind, dtype, &shape);
        if let Some(element) = float(dtype) {
            let device = tensor.device();
            self.parameters.push(Parameter { id: param.id, path, shape, dtype, element, device, trained });
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.describe("int", param.val().dtype(), &param.val().shape());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.describe("bool", param.val().dtype(), &param.val().shape());
    }
}

/// What parameters are besides their values, in visiting order.
pub(crate) struct Identities(Vec<Identity>);

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

    fn push<T: Value + 'static>(&mut self, param: &Param<T>, trained: bool) {
        let (id, _, mapper) = param.clone().consume();
        self.0.push(Identity { id, trained, mapper: Box::new(mapper) });
    }
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Identities {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.push(param, param.is_require_grad());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.push(param, false);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.push(param, false);
    }
}

/// Replaces every parameter's identity and, if there is a source, its value by that of this rank of the group.
struct ParameterLoader<'a> {
    source: Option<(&'a Group, usize)>,
    identities: std::vec::IntoIter<Identity>,
    failure: Option<Error>,
}

impl ParameterLoader<'_> {
    /// Replaces one value. `renew` gets it, whether it needs a gradient, and the source; after a failure no source. It
    /// returns the new value, and a failure, after which the model is of no use.
    fn load<T: Value + 'static>(
        &mut self,
        param: Param<T>,
        renew: impl FnOnce(T, bool, Option<(&Group, usize)>) -> (T, Option<Error>),
    ) -> Param<T> {
        let (mut id, value, mut mapper) = param.consume();
        let mut trained = value.is_require_grad();
        if let Some(identity) = self.identities.next() {
            (id, trained) = (identity.id, identity.trained);
            mapper = identity.mapper.downcast().map_or(mapper, |mapper| *mapper);
        }
        let source = self.source.filter(|_| self.failure.is_none());
        let (value, failure) = renew(value, trained, source);
        self.failure = self.failure.take().or(failure);
        Param::from_mapped_value(id, value, mapper)
    }
}

/// Returns the source's value of a tensor, or an empty tensor and why it was not received.
fn received<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    source: Option<(&Group, usize)>,
) -> (Tensor<B, D, K>, Option<Error>) {
    let Some(source) = source else { return (tensor, None) };
    let options = (tensor.device(), tensor.dtype());
    match try_receive(tensor, source) {
        Ok(received) => (received, None),
        Err(error) => (Tensor::empty([0; D], (&options.0, options.1)), Some(error)),
    }
}

fn try_receive<B: Backend, const D: usize, K: Kind<B>>(
    tensor: Tensor<B, D, K>,
    (group, root): (&Group, usize),
) -> Result<Tensor<B, D, K>, Error> {
    const OPERATION: &str = "broadcast";
    let (device, dtype, shape, primitive) = (tensor.device(), tensor.dtype(), tensor.shape(), tensor.into_primitive());
    if K::device_dtype(&primitive).is_some() {
        return broadcast(Tensor::from_primitive(primitive), root, group);
    }
    // The same operation in the tensor's own memory. That of `broadcast` is from a pool, where the whole parameters of
    // a model of which only parts are kept would stay.
    let spec = TensorSpec::new::<B, K>(OPERATION, dtype, device.clone())?;
    let mut data = data::<B, K>(OPERATION, primitive)?;
    let request = Request::new(Operation::Broadcast, spec.carrier).root(root).shape(&shape);
    group.operate(request, None, &mut data.bytes)?;
    Ok(Tensor::from_data(data, (&device, dtype)))
}

impl<B: AutodiffBackend> ModuleMapper<B> for ParameterLoader<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        self.load(param, |value, trained, source| {
            let (value, failure) = received(value.inner(), source);
            // A leaf of this model's own.
            (Tensor::from_inner(value).set_require_grad(trained), failure)
        })
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
        self.load(param, |value, _, source| received(value, source))
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<B, D, Bool>>) -> Param<Tensor<B, D, Bool>> {
        self.load(param, |value, _, source| received(value, source))
    }
}
