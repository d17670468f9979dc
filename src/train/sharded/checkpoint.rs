//! The state of a sharded optimizer, saved and loaded by any number of ranks.

use std::ops::Range;

use burn::module::AutodiffModule;
use burn::optim::SimpleOptimizer;
use burn::record::Recorder;
use burn::tensor::Element;
use burn::tensor::backend::{AutodiffBackend, BackendTypes};
use serde::{Deserialize, Serialize};

use super::ShardedOptimizer;
use super::state::{Piece, Records, elements, join};
use crate::train::agree::{Described, Parameter, first_difference};
use bonfire_core::Error;

/// Says what the bytes are, and of which version.
const FORMAT: &str = "bonfire sharded optimizer 1";

/// What one rank saves.
#[derive(Serialize, Deserialize)]
struct Part {
    format: String,
    steps: u64,
    /// One for each parameter, in the order of the model.
    slices: Vec<Slice>,
}

/// The state of a part of a parameter.
#[derive(Serialize, Deserialize)]
struct Slice {
    parameter: Described,
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
    /// This rank's part of the state, for [`load`](Self::load). The ranks of one block together have all of it: with
    /// [`Sharding::Blocks`](super::Sharding::Blocks)`(m)` these are ranks 0 to `m - 1`, or as many from a multiple of
    /// `m` on.
    ///
    /// # Errors
    /// [`Error::Io`] where the state cannot be recorded.
    pub fn save(&self) -> Result<Vec<u8>, Error> {
        let slices = self.own().into_iter().zip(&self.shards.parameters).zip(&self.states);
        let slices = slices.map(|((own, parameter), state)| {
            let record = state.as_ref().map(|state| self.record(state)).transpose()?;
            Ok(Slice { parameter: describe(parameter), start: own.start, end: own.end, record })
        });
        let part = Part { format: FORMAT.into(), steps: self.steps, slices: slices.collect::<Result<_, Error>>()? };
        postcard::to_stdvec(&part).map_err(|e| Error::io("saving an optimizer", e))
    }

    /// Goes on from parts that were [saved](Self::save), in any order: with as many ranks and the same sharding, a
    /// rank's own is enough; with others, give the parts of all ranks of a block. It talks to nobody, so it is for the
    /// caller to see that all ranks load parts of the same step.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where something is no saved part, the parts are of different steps or of a model with
    /// other parameters, or what this rank needs is in none of them; the optimizer stays as it was. Burn's records come
    /// back in the backend's own float type, so parameters of another one are refused too.
    pub fn load<P: AsRef<[u8]>>(&mut self, parts: &[P]) -> Result<(), Error> {
        let parts = parts.iter().map(|part| match postcard::take_from_bytes::<Part>(part.as_ref()) {
            Ok((part, [])) if part.format == FORMAT => Ok(part),
            _ => Err(refused("these bytes are not what `ShardedOptimizer::save` gave")),
        });
        let parts = parts.collect::<Result<Vec<_>, Error>>()?;
        let Some(first) = parts.first() else { return Err(refused("give at least one part")) };
        let steps = first.steps;
        if let Some(other) = parts.iter().find(|part| part.steps != steps) {
            return Err(refused(format!("one part is of step {steps}, another one of step {}", other.steps)));
        }
        for part in &parts {
            self.check_model(part)?;
        }
        let mut states = Vec::with_capacity(self.states.len());
        for (position, own) in self.own().into_iter().enumerate() {
            let slices: Vec<_> = parts.iter().map(|part| &part.slices[position]).collect();
            states.push(self.load_slice(&self.shards.parameters[position], own, &slices)?);
        }
        (self.states, self.steps) = (states, steps);
        Ok(())
    }

    /// How many bytes this rank's state takes: the tensors in it, with elements of the parameter's type. All of it is
    /// recorded for that, so do not ask in every step.
    ///
    /// # Errors
    /// [`Error::Io`] where the state cannot be recorded.
    pub fn state_bytes(&self) -> Result<usize, Error> {
        let mut bytes = 0;
        for ((own, parameter), state) in self.own().into_iter().zip(&self.shards.parameters).zip(&self.states) {
            if let Some(state) = state {
                let count = elements(&self.record(state)?, own.len());
                bytes +=
                    count.map_err(|e| Error::broken("counting an optimizer's state", e))? * parameter.element.size();
            }
        }
        Ok(bytes)
    }

    /// Where this rank's slice of each parameter is.
    fn own(&self) -> Vec<Range<usize>> {
        let mut own = vec![0..0; self.shards.parameters.len()];
        for place in self.shards.layout.iter().flat_map(|shared| &shared.places) {
            own[place.position] = place.slice();
        }
        own
    }

    fn record(&self, state: &O::State<1>) -> Result<Vec<u8>, Error> {
        let record = Recorder::<B::InnerBackend>::record(&Records::default(), state.clone(), ());
        record.map_err(|e| Error::io("recording an optimizer's state", e))
    }

    fn check_model(&self, part: &Part) -> Result<(), Error> {
        let here: Vec<_> = self.shards.parameters.iter().map(describe).collect();
        let saved: Vec<_> = part.slices.iter().map(|slice| slice.parameter.clone()).collect();
        let Some(position) = first_difference(&saved, &here) else { return Ok(()) };
        let show = |list: &[Described]| list.get(position).map_or("nothing".into(), ToString::to_string);
        Err(refused(format!(
            "it was saved for a model that differs first at parameter {position}: {} then, {} now",
            show(&saved),
            show(&here)
        )))
    }

    /// The state for this rank's slice of a parameter, from what others had.
    fn load_slice(
        &self,
        parameter: &Parameter<B>,
        own: Range<usize>,
        slices: &[&Slice],
    ) -> Result<Option<O::State<1>>, Error> {
        let wrong = |reason: &str| refused(format!("the state of `{}`: {reason}", parameter.path));
        let (mut pieces, mut without) = (Vec::new(), 0);
        let mut next = own.start;
        while next < own.end {
            let furthest = slices.iter().filter(|slice| slice.start <= next).max_by_key(|slice| slice.end);
            let Some(slice) = furthest.filter(|slice| slice.end > next) else {
                let (next, end) = (next, own.end);
                return Err(wrong(&format!(
                    "elements {next} to {end} are needed here and {next} is in no part; give the parts of all ranks \
                     of a block"
                )));
            };
            let end = slice.end.min(own.end);
            match &slice.record {
                Some(record) => {
                    let range = next - slice.start..end - slice.start;
                    pieces.push(Piece { record, len: slice.end - slice.start, range });
                }
                None => without += 1,
            }
            next = end;
        }
        if pieces.is_empty() {
            return Ok(None);
        }
        if without > 0 {
            return Err(wrong("some parts have one, and others have none"));
        }
        if parameter.dtype != <B::InnerBackend as BackendTypes>::FloatElem::dtype() {
            return Err(wrong(&format!(
                "the parameter is {}, and burn's records come back in the backend's own float type",
                describe(parameter).what
            )));
        }
        let record = join(&pieces).map_err(wrong)?;
        let state = Recorder::<B::InnerBackend>::load(&Records::default(), record, &parameter.device);
        state.map(Some).map_err(|e| wrong(&e.to_string()))
    }
}

/// A parameter as it is compared with what was saved: element type and shape.
fn describe<B: AutodiffBackend>(parameter: &Parameter<B>) -> Described {
    let what = format!("{:?} {:?}", parameter.dtype, parameter.shape.as_slice()).to_lowercase();
    Described { path: parameter.path.clone(), what }
}

fn refused(reason: impl Into<String>) -> Error {
    Error::argument("loading an optimizer", reason)
}

// burn's feature `distributed` takes autodiff from the backends on the host.
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
