//! The tensors of a model in a set.

use std::collections::BTreeSet;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Bytes, Int, Tensor, TensorData};

use super::format::{Dtype, width};
use super::own_part::{OwnPart, OwnParts};
use super::parts::{describe, loaded, read, shape, stored};
use super::set::{Set, argument};
use super::{Collect, SAVING};
use crate::tensor::host::Kind;
use bonfire_core::Error;

/// Returns what adds all tensors of a model, under names that begin with `prefix`. Holds the tensors, not copies of
/// their elements. Those with an own part must have its shape.
pub(super) fn collect<B: Backend, M: Module<B>>(prefix: &'static str, model: &M, own: &OwnParts) -> Vec<Collect> {
    struct Collector<'a>(Names, Vec<Collect>, &'a OwnParts);

    impl Collector<'_> {
        fn push<B: Backend, K: Kind<B> + 'static, const D: usize>(&mut self, tensor: Tensor<B, D, K>)
        where
            K::Primitive: Send,
        {
            let name = self.0.name();
            self.1.push(Box::new(move |parts| parts.add_tensor(name, tensor)));
        }
    }

    impl<B: Backend> ModuleVisitor<B> for Collector<'_> {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.0.path.push(name.into());
        }

        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.0.path.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let Some(part) = self.2.get(&param.id).cloned() else { return self.push(param.val()) };
            let (name, tensor) = (self.0.name(), param.val());
            self.1.push(Box::new(move |parts| {
                let dims = tensor.shape();
                if dims.as_slice() != part.shape {
                    let OwnPart { shape: expected, whole, .. } = part;
                    let reason = format!(
                        "`{name}` has the shape {:?}, and this rank's part of {whole:?} has {expected:?}; save the \
                         model that the optimizer has updated, and an average of such models",
                        dims.as_slice()
                    );
                    return Err(Error::argument(SAVING, reason));
                }
                part.add(parts, name, tensor.dtype(), |range, sink| read(tensor, range, sink))
            }));
        }

        fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
            self.push(param.val());
        }

        fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
            self.push(param.val());
        }
    }

    let mut collector = Collector(Names { prefix, path: Vec::new() }, Vec::new(), own);
    model.visit(&mut collector);
    collector.1
}

/// Returns `model` with the tensors of a set, which must be those of the same model. Those with an own part get that.
pub(super) fn load<B: Backend, M: Module<B>>(
    prefix: &'static str,
    model: M,
    set: &Set,
    own: &OwnParts,
) -> Result<M, Error> {
    let names = Names { prefix, path: Vec::new() };
    let mut loader = Loader { names, set, own, used: BTreeSet::new(), failure: None };
    let model = model.map(&mut loader);
    if let Some(error) = loader.failure {
        return Err(error);
    }
    match set.names(prefix).find(|(name, _)| !loader.used.contains(&format!("{prefix}{name}"))) {
        None => Ok(model),
        Some((name, tensor)) => {
            let has = describe(tensor.dtype, &tensor.shape);
            Err(other_model(name, &has, "nothing"))
        }
    }
}

fn other_model(path: &str, saved: &str, own: &str) -> Error {
    argument(format!(
        "it was saved for another model: `{path}` was {saved} then and is {own} now; load it into the model that was \
         saved, or give another folder"
    ))
}

/// The names of parameters: their paths in the model behind a prefix.
struct Names {
    prefix: &'static str,
    path: Vec<String>,
}

impl Names {
    fn name(&self) -> String {
        format!("{}{}", self.prefix, self.path.join("."))
    }
}

/// Replaces values by those of a set. After a failure, parameters keep their values.
struct Loader<'a> {
    names: Names,
    set: &'a Set,
    own: &'a OwnParts,
    used: BTreeSet<String>,
    failure: Option<Error>,
}

impl Loader<'_> {
    /// Returns the saved elements of the parameter at this place.
    fn read(&mut self, id: ParamId, dtype: burn::tensor::DType, dimensions: &[usize]) -> Option<TensorData> {
        if self.failure.is_some() {
            return None;
        }
        let read = self.try_read(id, dtype, dimensions);
        read.map_err(|error| self.failure = Some(error)).ok()
    }

    fn try_read(&mut self, id: ParamId, dtype: burn::tensor::DType, dimensions: &[usize]) -> Result<TensorData, Error> {
        let name = self.names.name();
        let path = name.strip_prefix(self.names.prefix).unwrap_or(&name);
        let part = self.own.get(&id);
        let whole = part.map_or(dimensions, |part| &part.whole);
        let own = stored(dtype).map_or_else(|| format!("{dtype:?}"), |dtype| describe(dtype, whole));
        let Some(tensor) = self.set.tensor(&name) else { return Err(other_model(path, "nothing", &own)) };
        if stored(dtype) != Some(tensor.dtype) || tensor.shape != whole {
            return Err(other_model(path, &describe(tensor.dtype, &tensor.shape), &own));
        }
        let mut bytes = match part {
            Some(part) => part.read(self.set, &name, width(tensor.dtype))?,
            None => self.set.read(&name, 0..tensor.len())?,
        };
        if tensor.dtype == Dtype::BOOL {
            // Only 0 and 1 are valid.
            bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
        }
        let dtype = loaded(tensor.dtype).ok_or_else(|| other_model(path, &own, &own))?;
        self.used.insert(name);
        Ok(TensorData { bytes: Bytes::from_bytes_vec(bytes), shape: shape(dimensions), dtype })
    }
}

impl<B: Backend> ModuleMapper<B> for Loader<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.names.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.names.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, value, mapper) = param.consume();
        let (device, dtype) = (value.device(), value.dtype());
        let data = self.read(id, dtype, value.shape().as_slice());
        let value = data.map_or(value, |data| Tensor::from_data(data, (&device, dtype)));
        Param::from_mapped_value(id, value, mapper)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
        let (id, value, mapper) = param.consume();
        let (device, dtype) = (value.device(), value.dtype());
        let data = self.read(id, dtype, value.shape().as_slice());
        let value = data.map_or(value, |data| Tensor::from_data(data, (&device, dtype)));
        Param::from_mapped_value(id, value, mapper)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<B, D, Bool>>) -> Param<Tensor<B, D, Bool>> {
        let (id, value, mapper) = param.consume();
        let device = value.device();
        let data = self.read(id, value.dtype(), value.shape().as_slice());
        let value = data.map_or(value, |data| Tensor::from_data(data, &device));
        Param::from_mapped_value(id, value, mapper)
    }
}
