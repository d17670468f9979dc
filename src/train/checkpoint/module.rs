//! The tensors of a model in a set.

use burn::module::{Module, Param, Parameter};
use burn::tensor::backend::Backend;
use burn::tensor::{Bytes, DType, Tensor, TensorData};

use super::{OwnParts, loaded, read, stored};
use crate::tensor::host::{Kind, data};
use crate::train::walk::{Map, Place, Visit, map, visit};
use bonfire_core::Error;
use bonfire_train::checkpoint::{Collect, LOADING, ModelReader, Set};

/// Returns what adds all tensors of a model, under names that begin with `item/`. Holds the tensors, not copies of
/// their elements. Those with an own part must have its shape.
pub(super) fn collect<B: Backend, M: Module<B>>(item: &'static str, model: &M, own: &OwnParts) -> Vec<Collect> {
    visit(model, Collector { item, own, list: Vec::new() }).list
}

struct Collector<'a> {
    item: &'static str,
    own: &'a OwnParts,
    list: Vec<Collect>,
}

impl<B: Backend> Visit<B> for Collector<'_> {
    fn parameter<const D: usize, K: Kind<B> + 'static>(&mut self, place: &Place, param: &Param<Tensor<B, D, K>>)
    where
        Tensor<B, D, K>: Parameter,
    {
        let (name, tensor) = (format!("{}/{}", self.item, place.path()), param.val());
        let part = self.own.get(&param.id).cloned();
        if let DType::QFloat(scheme) = tensor.dtype() {
            self.list.push(Box::new(move |parts| {
                let data = data::<B, K>("reading a tensor to save it", tensor.into_primitive())?;
                let (bytes, scheme) = (data.bytes, format!("{scheme:?}"));
                parts.add_quantised(name, scheme, bytes.len(), move |range, sink| sink(&bytes[range]))
            }));
            return;
        }
        self.list.push(Box::new(move |parts| {
            let (dtype, shape) = (stored(&name, tensor.dtype())?, tensor.shape());
            parts.add_parameter(name, dtype, shape.as_slice(), part, move |range, sink| {
                read(tensor.clone(), range, sink)
            })
        }));
    }
}

/// Returns `model` with the tensors of a set, which must be those of the same model. Those with an own part get that.
pub(super) fn load<B: Backend, M: Module<B>>(item: &str, model: M, set: &Set, own: &OwnParts) -> Result<M, Error> {
    let mut loader = Loader { reader: ModelReader::new(item, set), own, failure: None };
    let model = map(model, &mut loader);
    loader.failure.map_or_else(|| loader.reader.finish(), Err)?;
    Ok(model)
}

/// Replaces values by those of a set. After a failure, parameters keep their values.
struct Loader<'a> {
    reader: ModelReader<'a>,
    own: &'a OwnParts,
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
        let path = place.path();
        let data = if let DType::QFloat(scheme) = value.dtype() {
            data::<B, K>(LOADING, value.clone().into_primitive()).and_then(|own| {
                let bytes = self.reader.read_quantised(&path, &format!("{scheme:?}"), own.bytes.len())?;
                Ok(TensorData { bytes: Bytes::from_bytes_vec(bytes), ..own })
            })
        } else {
            stored(&path, value.dtype()).and_then(|dtype| {
                let bytes = self.reader.read(&path, dtype, value.shape().as_slice(), self.own.get(&id))?;
                let dtype = loaded(dtype).unwrap_or(value.dtype());
                Ok(TensorData { bytes: Bytes::from_bytes_vec(bytes), shape: value.shape(), dtype })
            })
        };
        match data {
            Ok(data) => value = Tensor::from_data(data, (&value.device(), value.dtype())),
            Err(error) => self.failure = Some(error),
        }
        Param::from_mapped_value(id, value, mapper)
    }
}
