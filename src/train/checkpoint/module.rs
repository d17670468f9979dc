//! The tensors of a model in a set.

use std::collections::BTreeSet;

use burn::module::{Module, Param, Parameter};
use burn::tensor::backend::Backend;
use burn::tensor::{Bytes, Shape, Tensor, TensorData};

use super::{OwnParts, loaded, read, stored};
use crate::tensor::host::Kind;
use crate::train::walk::{Map, Place, Visit, map, visit};
use bonfire_core::Error;
use bonfire_train::checkpoint::{Collect, Dtype, SAVING, Set, argument, describe, width};

/// Returns what adds all tensors of a model, under names that begin with `prefix`. Holds the tensors, not copies of
/// their elements. Those with an own part must have its shape.
pub(super) fn collect<B: Backend, M: Module<B>>(prefix: &'static str, model: &M, own: &OwnParts) -> Vec<Collect> {
    visit(model, Collector { prefix, own, list: Vec::new() }).list
}

struct Collector<'a> {
    prefix: &'static str,
    own: &'a OwnParts,
    list: Vec<Collect>,
}

impl<B: Backend> Visit<B> for Collector<'_> {
    fn parameter<const D: usize, K: Kind<B> + 'static>(&mut self, place: &Place, param: &Param<Tensor<B, D, K>>)
    where
        Tensor<B, D, K>: Parameter,
    {
        let (name, tensor) = (format!("{}{}", self.prefix, place.path()), param.val());
        let part = self.own.get(&param.id).cloned();
        self.list.push(Box::new(move |parts| {
            let (dtype, dims) = (stored(&name, tensor.dtype())?, tensor.shape());
            let Some(part) = part else {
                return parts.add_replicated(name, dtype, dims.as_slice(), move |range, sink| {
                    read(tensor.clone(), range, sink)
                });
            };
            if dims.as_slice() != part.shape {
                let reason = format!(
                    "`{name}` has the shape {:?}, and this rank's part of {:?} has {:?}; save the model that the \
                     optimizer has updated, and an average of such models",
                    dims.as_slice(),
                    part.whole,
                    part.shape
                );
                return Err(Error::argument(SAVING, reason));
            }
            part.add(parts, name, dtype, |range, sink| read(tensor, range, sink))
        }));
    }
}

/// Returns `model` with the tensors of a set, which must be those of the same model. Those with an own part get that.
pub(super) fn load<B: Backend, M: Module<B>>(
    prefix: &'static str,
    model: M,
    set: &Set,
    own: &OwnParts,
) -> Result<M, Error> {
    let mut loader = Loader { prefix, set, own, used: BTreeSet::new(), failure: None };
    let model = map(model, &mut loader);
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

/// Replaces values by those of a set. After a failure, parameters keep their values.
struct Loader<'a> {
    prefix: &'static str,
    set: &'a Set,
    own: &'a OwnParts,
    used: BTreeSet<String>,
    failure: Option<Error>,
}

impl<B: Backend> Map<B> for Loader<'_> {
    fn parameter<const D: usize, K: Kind<B> + 'static>(
        &mut self,
        place: &Place,
        param: Param<Tensor<B, D, K>>,
    ) -> Param<Tensor<B, D, K>>
    where
        Tensor<B, D, K>: Parameter,
    {
        if self.failure.is_some() {
            return param;
        }
        let (id, mut value, mapper) = param.consume();
        match self.read(&place.path(), id, &value) {
            Ok(data) => value = Tensor::from_data(data, (&value.device(), value.dtype())),
            Err(error) => self.failure = Some(error),
        }
        Param::from_mapped_value(id, value, mapper)
    }
}

impl Loader<'_> {
    /// Returns the saved elements of a parameter.
    fn read<B: Backend, K: Kind<B>, const D: usize>(
        &mut self,
        path: &str,
        id: burn::module::ParamId,
        value: &Tensor<B, D, K>,
    ) -> Result<TensorData, Error> {
        let (name, dims, dtype) = (format!("{}{path}", self.prefix), value.shape(), stored(path, value.dtype())?);
        let part = self.own.get(&id);
        let whole = part.map_or(dims.as_slice(), |part| &part.whole);
        let own = describe(dtype, whole);
        let Some(tensor) = self.set.tensor(&name) else { return Err(other_model(path, "nothing", &own)) };
        if dtype != tensor.dtype || tensor.shape != whole {
            return Err(other_model(path, &describe(tensor.dtype, &tensor.shape), &own));
        }
        let mut bytes = match part {
            Some(part) => part.read(self.set, &name, width(tensor.dtype))?,
            None => self.set.read(&name, 0..tensor.elements())?,
        };
        if tensor.dtype == Dtype::BOOL {
            // Only 0 and 1 are valid.
            bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
        }
        let dtype = loaded(tensor.dtype).ok_or_else(|| other_model(path, &own, &own))?;
        self.used.insert(name);
        Ok(TensorData { bytes: Bytes::from_bytes_vec(bytes), shape: Shape::clone(&dims), dtype })
    }
}
