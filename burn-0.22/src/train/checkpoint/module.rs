//! The tensors of a model in a set.

use burn::module::{Module, Param, Parameter};
use burn::tensor::{Bytes, DType, Tensor, TensorData};

use super::{OwnParts, loaded, read, stored};
use crate::train::model::with_values;
use crate::train::walk::{Kind, Map, Place, Visit, visit};
use bonfire_core::Error;
use bonfire_train::checkpoint::{Collect, LOADING, ModelReader, Set};

/// Returns what adds all tensors of a model, under names that begin with `item/`. Holds the tensors, not copies of
/// their elements. Those with an own part must have its shape.
pub(super) fn collect<M: Module>(item: &'static str, model: &M, own: &OwnParts) -> Vec<Collect> {
    visit(model, Collector { item, own, list: Vec::new() }).list
}

struct Collector<'a> {
    item: &'static str,
    own: &'a OwnParts,
    list: Vec<Collect>,
}

impl Visit for Collector<'_> {
    fn parameter<const D: usize, K: Kind>(&mut self, place: &Place, param: &Param<Tensor<D, K>>)
    where
        Tensor<D, K>: Parameter,
    {
        let (name, tensor) = (format!("{}/{}", self.item, place.path()), param.val());
        let part = self.own.get(&param.id).cloned();
        if let DType::QFloat(scheme) = tensor.dtype() {
            self.list.push(Box::new(move |parts| {
                let data = tensor.try_into_data();
                let data = data.map_err(|error| Error::io("reading a tensor to save it", error))?;
                let (bytes, scheme) = (data.as_bytes().len(), format!("{scheme:?}"));
                parts.add_quantised(name, scheme, bytes, move |range, sink| sink(&data.as_bytes()[range]))
            }));
            return;
        }
        self.list.push(Box::new(move |parts| {
            let (dtype, shape) = (stored(&name, tensor.dtype())?, tensor.shape());
            parts.add_parameter(name, dtype, shape.as_slice(), part, move |range, sink| {
                read(tensor.clone(), dtype, range, sink)
            })
        }));
    }
}

/// Returns `model` with the tensors of a set, which must be those of the same model. Those with an own part get that.
pub(super) fn load<M: Module>(item: &str, model: M, set: &Set, own: &OwnParts) -> Result<M, Error> {
    let mut loader = Loader { reader: ModelReader::new(item, set), own, failure: None };
    let model = with_values(model, &mut loader);
    loader.failure.map_or_else(|| loader.reader.finish(), Err)?;
    Ok(model)
}

/// Replaces values by those of a set. After a failure, parameters keep their values.
struct Loader<'a> {
    reader: ModelReader<'a>,
    own: &'a OwnParts,
    failure: Option<Error>,
}

impl Map for Loader<'_> {
    fn parameter<const D: usize, K: Kind>(&mut self, place: &Place, param: Param<Tensor<D, K>>) -> Param<Tensor<D, K>>
    where
        Tensor<D, K>: Parameter,
    {
        if self.failure.is_some() {
            return param;
        }
        let (id, mut value, mapper) = param.consume();
        let path = place.path();
        let data = if let DType::QFloat(scheme) = value.dtype() {
            let own = value.clone().try_into_data().map_err(|error| Error::io(LOADING, error));
            own.and_then(|own| {
                let (own, shape, dtype) = own.into_parts();
                let bytes = self.reader.read_quantised(&path, &format!("{scheme:?}"), own.len())?;
                Ok(TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape, dtype))
            })
        } else {
            stored(&path, value.dtype()).and_then(|dtype| {
                let bytes = self.reader.read(&path, dtype, value.shape().as_slice(), self.own.get(&id))?;
                let dtype = loaded(dtype).unwrap_or(value.dtype());
                Ok(TensorData::from_bytes(Bytes::from_bytes_vec(bytes), value.shape(), dtype))
            })
        };
        match data {
            Ok(data) => value = Tensor::from_data(data, (&value.device(), value.dtype())),
            Err(error) => self.failure = Some(error),
        }
        Param::from_mapped_value(id, value, mapper)
    }
}
