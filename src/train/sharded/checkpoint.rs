//! Saving and loading the state of a sharded optimizer, on any number of ranks.

use std::ops::Range;

use burn::module::AutodiffModule;
use burn::optim::SimpleOptimizer;
use burn::record::Recorder;
use burn::tensor::Element;
use burn::tensor::backend::{AutodiffBackend, BackendTypes};
use serde::{Deserialize, Serialize};

use super::ShardedOptimizer;
use super::state::{RecordedSlice, elements, join};
use crate::train::agree::{Parameter, ParameterDescription, first_difference};
use crate::train::record::Records;
use bonfire_core::Error;

/// Identifies the format and its version.
const FORMAT: &str = "bonfire sharded optimizer 1";

/// The saved state of one rank.
#[derive(Serialize, Deserialize)]
struct SavedPart {
    format: String,
    steps: u64,
    /// One slice for each parameter, in the order of the model.
    slices: Vec<SavedSlice>,
}

/// The saved state of elements `start..end` of a parameter, and burn's record of it, if there was any state.
#[derive(Serialize, Deserialize)]
struct SavedSlice {
    parameter: ParameterDescription,
    start: usize,
    end: usize,
    record: Option<Vec<u8>>,
}

impl<O, M, B> ShardedOptimizer<O, M, B>
where
    O: SimpleOptimizer<B::InnerBackend> + 'static,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    /// Returns this rank's part of the state as bytes, for [`load`](Self::load). Does not communicate. The ranks of one
    /// block together have all of the state: with [`Sharding::Blocks`](super::Sharding::Blocks)`(m)` these are ranks 0
    /// to `m - 1`, or any `m` ranks from a multiple of `m` on.
    ///
    /// # Errors
    /// [`Error::Io`] if the state cannot be recorded.
    pub fn save(&self) -> Result<Vec<u8>, Error> {
        let slices = self.own_slices().into_iter().zip(&self.shards.parameters).zip(&self.states);
        let slices = slices.map(|((own, parameter), state)| {
            let record = state.as_ref().map(|state| self.record(state)).transpose()?;
            Ok(SavedSlice { parameter: describe(parameter), start: own.start, end: own.end, record })
        });
        let part =
            SavedPart { format: FORMAT.into(), steps: self.steps, slices: slices.collect::<Result<_, Error>>()? };
        postcard::to_stdvec(&part).map_err(|e| Error::io("saving an optimizer", e))
    }

    /// Replaces this rank's state by that of [saved](Self::save) parts, in any order.
    ///
    /// With the same world size and sharding, a rank needs only its own part. Otherwise pass the parts of all ranks of
    /// a block. This is a local operation: the caller must ensure that all ranks load parts of the same step.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if bytes are not a saved part, if the parts are of different steps or of a model with
    /// other parameters, or if elements that this rank needs are in none of them; the optimizer is not changed. burn
    /// loads records in the backend's own float type, so parameters of another type are refused too.
    pub fn load<P: AsRef<[u8]>>(&mut self, parts: &[P]) -> Result<(), Error> {
        let parts = parts.iter().map(|part| match postcard::take_from_bytes::<SavedPart>(part.as_ref()) {
            Ok((part, [])) if part.format == FORMAT => Ok(part),
            _ => Err(invalid("these bytes are not what `ShardedOptimizer::save` returned")),
        });
        let parts = parts.collect::<Result<Vec<_>, Error>>()?;
        let Some(first) = parts.first() else { return Err(invalid("give at least one part")) };
        let steps = first.steps;
        if let Some(other) = parts.iter().find(|part| part.steps != steps) {
            return Err(invalid(format!("one part is of step {steps}, another one of step {}", other.steps)));
        }
        for part in &parts {
            self.check_model(part)?;
        }
        let mut states = Vec::with_capacity(self.states.len());
        for (position, own) in self.own_slices().into_iter().enumerate() {
            let slices: Vec<_> = parts.iter().map(|part| &part.slices[position]).collect();
            states.push(self.load_slice(&self.shards.parameters[position], own, &slices)?);
        }
        (self.states, self.steps) = (states, steps);
        Ok(())
    }

    /// Returns the size of this rank's state in bytes: of its tensors, with elements of the parameters' types. It
    /// records the whole state to count them, so do not call it in every step.
    ///
    /// # Errors
    /// [`Error::Io`] if the state cannot be recorded, [`Error::Broken`] if it is not element-wise.
    pub fn state_bytes(&self) -> Result<usize, Error> {
        let mut bytes = 0;
        for ((own, parameter), state) in self.own_slices().into_iter().zip(&self.shards.parameters).zip(&self.states) {
            if let Some(state) = state {
                let count = elements(&self.record(state)?, own.len());
                bytes +=
                    count.map_err(|e| Error::broken("counting an optimizer's state", e))? * parameter.element.size();
            }
        }
        Ok(bytes)
    }

    /// Returns this rank's slice of each parameter, by position.
    fn own_slices(&self) -> Vec<Range<usize>> {
        let mut own = vec![0..0; self.shards.parameters.len()];
        for span in self.shards.layout.iter().flat_map(|layout| &layout.spans) {
            own[span.position] = span.slice();
        }
        own
    }

    fn record(&self, state: &O::State<1>) -> Result<Vec<u8>, Error> {
        let record = Recorder::<B::InnerBackend>::record(&Records::default(), state.clone(), ());
        record.map_err(|e| Error::io("recording an optimizer's state", e))
    }

    fn check_model(&self, part: &SavedPart) -> Result<(), Error> {
        let current: Vec<_> = self.shards.parameters.iter().map(describe).collect();
        let saved: Vec<_> = part.slices.iter().map(|slice| slice.parameter.clone()).collect();
        let Some(position) = first_difference(&saved, &current) else { return Ok(()) };
        let text = |list: &[ParameterDescription]| list.get(position).map_or("nothing".into(), ToString::to_string);
        Err(invalid(format!(
            "it was saved for a model that differs first at parameter {position}: {} then, {} now",
            text(&saved),
            text(&current)
        )))
    }

    /// Assembles the state for this rank's slice of a parameter from saved slices.
    fn load_slice(
        &self,
        parameter: &Parameter<B>,
        own: Range<usize>,
        slices: &[&SavedSlice],
    ) -> Result<Option<O::State<1>>, Error> {
        let invalid_state = |reason: &str| invalid(format!("the state of `{}`: {reason}", parameter.path));
        let (mut recorded, mut missing) = (Vec::new(), 0);
        let mut next = own.start;
        while next < own.end {
            let furthest = slices.iter().filter(|slice| slice.start <= next).max_by_key(|slice| slice.end);
            let Some(slice) = furthest.filter(|slice| slice.end > next) else {
                let (next, end) = (next, own.end);
                return Err(invalid_state(&format!(
                    "elements {next} to {end} are needed here and {next} is in no part; give the parts of all ranks \
                     of a block"
                )));
            };
            let end = slice.end.min(own.end);
            match &slice.record {
                Some(record) => {
                    let range = next - slice.start..end - slice.start;
                    recorded.push(RecordedSlice { record, len: slice.end - slice.start, range });
                }
                None => missing += 1,
            }
            next = end;
        }
        if recorded.is_empty() {
            return Ok(None);
        }
        if missing > 0 {
            return Err(invalid_state("some parts have one, and others have none"));
        }
        if parameter.dtype != <B::InnerBackend as BackendTypes>::FloatElem::dtype() {
            return Err(invalid_state(&format!(
                "the parameter is {}, and burn loads records in the backend's own float type",
                describe(parameter).what
            )));
        }
        let record = join(&recorded).map_err(invalid_state)?;
        let state = Recorder::<B::InnerBackend>::load(&Records::default(), record, &parameter.device);
        state.map(Some).map_err(|e| invalid_state(&e.to_string()))
    }
}

/// Describes a parameter for the comparison with saved parameters: element type and shape.
fn describe<B: AutodiffBackend>(parameter: &Parameter<B>) -> ParameterDescription {
    let what = format!("{:?} {:?}", parameter.dtype, parameter.shape.as_slice()).to_lowercase();
    ParameterDescription { path: parameter.path.clone(), what }
}

fn invalid(reason: impl Into<String>) -> Error {
    Error::argument("loading an optimizer", reason)
}

// burn's feature `distributed` removes the `AutodiffBackend` impl from host backends.
#[cfg(all(test, not(feature = "ddp")))]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{Adam, AdamConfig, GradientsParams};
    use burn::tensor::Tensor;

    use super::*;
    use crate::train::{DataParallel, Sharding};
    use bonfire_core::{Error, Group};

    type B = Autodiff<Flex>;

    #[test]
    fn fuzz_parts() {
        let group = Group::threads(1).unwrap().remove(0);
        let (mut model, ddp) =
            DataParallel::new(group, LinearConfig::new(2, 1).init::<B>(&Default::default())).unwrap();
        let new = || -> ShardedOptimizer<Adam, Linear<B>, B> {
            ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All).unwrap()
        };
        let mut optimizer = new();
        let without = optimizer.save().unwrap();
        let mut grads = GradientsParams::new();
        grads.register(model.weight.id, Tensor::<Flex, 2>::ones([2, 1], &Default::default()));
        optimizer.step(0.1, &mut model, grads, 1).unwrap();
        let with = optimizer.save().unwrap();
        let mut target = new();
        target.load(&[&with]).unwrap();
        assert_eq!(target.save().unwrap(), with);
        let target = std::cell::RefCell::new(target);
        bonfire_testing::fuzz::fuzz("sharded-part", [without, with.clone()], |bytes| {
            let result = target.borrow_mut().load(&[bytes, &with]);
            assert!(matches!(result, Ok(()) | Err(Error::InvalidArgument { .. })), "{result:?}");
            result.is_ok()
        });
    }
}
