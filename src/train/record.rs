//! Records of burn as bytes.

use burn::module::Module;
use burn::record::{DoublePrecisionSettings, NamedMpkBytesRecorder, PrecisionSettings, Record, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend, BackendTypes};
use burn::tensor::{DType, Element};

use super::model::Parameter;
use bonfire_core::Error;

/// Records floats as f64 and integers as i64, so all narrower types are restored exactly.
pub(super) type Records = NamedMpkBytesRecorder<DoublePrecisionSettings>;

/// Bytes per element in records.
const WIDTH: usize = 8;

/// Returns a record as bytes. What it contains must be [`recordable`].
pub(super) fn record<B: Backend, R: Record<B>>(record: R) -> Result<Vec<u8>, Error> {
    let bytes = Recorder::<B>::record(&Records::default(), record, ());
    bytes.map_err(|e| Error::io("recording a training", e))
}

/// Returns the record in these bytes.
pub(super) fn load<B: Backend, R: Record<B>>(bytes: Vec<u8>, device: &B::Device) -> Result<R, Error> {
    let record = Recorder::<B>::load(&Records::default(), bytes, device);
    record.map_err(|e| Error::io("loading a recorded training", e))
}

/// Returns a record as bytes, without burn's metadata, and with floats in f64 only if the backend's are. What it
/// contains must be [`recordable`].
pub(super) fn record_compact<B: Backend, R: Record<B>>(record: R) -> Result<Vec<u8>, Error> {
    let bytes = match <B as BackendTypes>::FloatElem::dtype() {
        DType::F64 => Recorder::<B>::save_item(&Records::default(), record.into_item::<DoublePrecisionSettings>(), ()),
        _ => Recorder::<B>::save_item(&CompactRecords::default(), record.into_item::<CompactSettings>(), ()),
    };
    bytes.map_err(|e| Error::io("recording a training", e))
}

/// Returns the record that [`record_compact`] has recorded.
pub(super) fn load_compact<B: Backend, R: Record<B>>(mut bytes: Vec<u8>, device: &B::Device) -> Result<R, Error> {
    let record = match <B as BackendTypes>::FloatElem::dtype() {
        DType::F64 => Recorder::<B>::load_item(&Records::default(), &mut bytes)
            .map(|item| R::from_item::<DoublePrecisionSettings>(item, device)),
        _ => Recorder::<B>::load_item(&CompactRecords::default(), &mut bytes)
            .map(|item| R::from_item::<CompactSettings>(item, device)),
    };
    record.map_err(|e| Error::io("loading a recorded training", e))
}

/// Records floats as f32, so that all narrower types are restored exactly, and integers as i64.
type CompactRecords = NamedMpkBytesRecorder<CompactSettings>;

#[derive(Clone, Debug, Default)]
struct CompactSettings;

impl PrecisionSettings for CompactSettings {
    type FloatElem = f32;
    type IntElem = i64;
}

/// Returns the record of a module as it is in memory. It must have no mappings, as what `valid` returns: burn's records
/// are mapped, and burn cannot load them into a module that trains, because what a mapping makes is no leaf.
pub(super) fn record_module<B: Backend, M: Module<B>>(module: M) -> Result<Vec<u8>, Error> {
    record(module.into_record())
}

/// Returns `module` with what [`record_module`] has recorded. It must have no mappings either.
pub(super) fn load_module<B: Backend, M: Module<B>>(module: M, bytes: Vec<u8>, device: &B::Device) -> Result<M, Error> {
    Ok(module.load_record(load(bytes, device)?))
}

/// Fails unless these parameters, and an optimizer's state for them, come back from a record as they were: burn loads
/// records in the backend's own float type, and the format has 32 bits for a tensor's length.
pub(super) fn recordable<'a, B: AutodiffBackend>(
    parameters: impl IntoIterator<Item = &'a Parameter<B>>,
) -> Result<(), Error> {
    let own = <B as BackendTypes>::FloatElem::dtype();
    for Parameter { path, dtype, shape, .. } in parameters {
        let reason = if *dtype != own {
            format!(
                "`{path}` is {dtype:?}, and burn loads records in the backend's own float type, {own:?}; use a \
                     backend whose float type is that of the parameters"
            )
        } else if u32::try_from(shape.num_elements() * WIDTH).is_err() {
            format!("`{path}` has {} elements, too many for a record; split it", shape.num_elements())
        } else {
            continue;
        };
        return Err(Error::argument("recording a training", reason));
    }
    Ok(())
}
