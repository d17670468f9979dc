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

/// A record of the backend without autodiff, within the user's part of a [`TrainingState`](crate::TrainingState), which
/// is a record of the backend that trains: tensors, tuples and vectors of them, or a struct with `#[derive(Record,
/// Clone)]`. The records that burn derives for modules cannot be cloned: take what is in them.
///
/// ```
/// # use bonfire::{DataParallel, Group, TrainingState, train::InnerRecord};
/// # use burn::backend::{Autodiff, Flex};
/// # use burn::module::AutodiffModule;
/// # use burn::nn::LinearConfig;
/// # use burn::optim::AdamConfig;
/// # let group = Group::threads(1)?.remove(0);
/// # let linear = LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&Default::default());
/// let (model, ddp) = DataParallel::new(group, linear)?;
/// let best = InnerRecord(model.valid().weight.val());
/// let mut state = TrainingState::new(model, AdamConfig::new().init(), 1e-3, (f64::INFINITY, best));
/// # let _ = (state.save()?, ddp);
/// # Ok::<(), bonfire::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct InnerRecord<R>(pub R);

impl<B: AutodiffBackend, R: Record<B::InnerBackend>> Record<B> for InnerRecord<R> {
    type Item<S: PrecisionSettings> = R::Item<S>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        self.0.into_item()
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, device: &B::Device) -> Self {
        InnerRecord(R::from_item(item, device))
    }
}

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
