//! Comparing models and optimizers over the ranks, and averaging what differs between them.

use burn::backend::ops::FloatTensorOps;
use burn::backend::{AutodiffBackend, Dispatch, DispatchTensor, TensorMetadata};
use burn::module::{Module, ParamId};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Tensor, TensorData};

use super::data_parallel::DataParallel;
use super::model::Parameters;
use super::walk::{FloatParameter, map_floats, visit_floats};
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group};
use bonfire_train::agree::{different, mean_over_ranks};
use bonfire_train::parameters::{Digested, NOTHING, compare, digest};
use bonfire_train::protocol::Problem;

impl DataParallel {
    /// Checks that the ranks have the same model and the same state of the optimizer, bit by bit. All ranks must call
    /// this. Parameters that need no gradient are not compared: running statistics differ between ranks.
    ///
    /// Steps compare the models now and then. Call this after the last step, since no comparison follows it, and where
    /// a difference must be found at once.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if anything differs: it names the first parameter that does, in the
    /// model's order, and the ranks. The group remains usable. Otherwise the errors of [`Group::all_reduce`].
    #[track_caller]
    pub fn verify<M: Module>(&self, model: &M, optimizer: &ModuleOptimizer) -> Result<(), Error> {
        let _call = self.group().enter("DataParallel::verify");
        let parameters = &self.replicas.parameters;
        let states = state_digests(optimizer, parameters).map_err(|error| self.group().abandon(error))?;
        self.replicas.steps.check_saves("verify")?;
        self.compare_parameters("verify", model)?;
        let names = parameters.iter().map(|parameter| format!("the optimizer's state for `{}`", parameter.path));
        let names = names.chain(["the optimizer's state".into()]);
        compare(self.group(), "verify", Digested::named(0, names, &states), self.replicas.steps.count())
    }

    /// Averages the states that differ between the ranks' models, such as the running statistics of batch norm, which
    /// depend on a rank's own samples only. Call it on all ranks before validating or saving.
    ///
    /// States are the float parameters that need no gradient. Each becomes the mean over the ranks, without weights.
    /// One that is bit-identical on all ranks, such as a frozen weight, is not changed. The trained parameters must be
    /// bit-identical. [`SyncBatchNorm`](crate::SyncBatchNorm) needs no such call: its statistics are the same on all
    /// ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if trained parameters differ: it names the first one and the ranks.
    /// Otherwise the errors of [`Group::all_reduce`], and [`Error::Io`] if a state cannot be read from its device. The
    /// model is lost then: pass a clone if you need it.
    #[track_caller]
    pub fn average_states<M: Module>(&self, model: M) -> Result<M, Error> {
        let _call = self.group().enter("DataParallel::average_states");
        self.compare_parameters("average_states", &model)?;
        average(self.group(), model, |_| true)
    }

    /// Checks that the model has the parameters of the start, and that they are bit-identical on all ranks if they are
    /// trained. Otherwise fails on all ranks with the same error.
    #[track_caller]
    fn compare_parameters<M: Module>(&self, operation: &str, model: &M) -> Result<(), Error> {
        let parameters = &self.replicas.parameters;
        let own = self.replicas.in_model(model);
        self.replicas.unused.end();
        let digests = own.digests().map_err(|error| self.group().abandon(error))?;
        let names = parameters.iter().map(|parameter| format!("`{}`", parameter.path));
        compare(self.group(), operation, Digested::named(0, names, &digests), self.replicas.steps.count())?;
        match own.header(parameters, true).problem {
            Some(Problem::Changed(position)) => {
                let path = &parameters[position].path;
                let reason =
                    format!("the model does not have `{path}` as it was at the start; pass the one in training");
                Err(Error::argument(operation, reason))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the digests of the optimizer's state: for each parameter, and of the state that is for none of them. burn's
/// records name fields by the ids of parameters, which differ between ranks.
fn state_digests(optimizer: &ModuleOptimizer, parameters: &Parameters) -> Result<Vec<u64>, Error> {
    const OPERATION: &str = "recording an optimizer's state";
    let failed = |error| Error::io(OPERATION, error);
    let bytes = optimizer.into_bytes().map_err(|error| Error::io(OPERATION, error))?;
    let reader = burn_pack::Reader::from_bytes(bytes).map_err(failed)?;
    let mut digests = vec![NOTHING; parameters.len() + 1];
    let mut add = |name: &str, contents: &[u8]| {
        let (id, field) = name.split_once('.').unwrap_or(("", name));
        let place = id.parse::<u64>().ok().and_then(|id| parameters.position(id.into()));
        let digest = digest(&[field.as_bytes(), contents].concat());
        let all = &mut digests[place.unwrap_or(parameters.len())];
        *all = all.wrapping_add(digest);
    };
    reader.scalars().iter().for_each(|(name, value)| add(name, format!("{value:?}").as_bytes()));
    for tensor in reader.into_tensors().map_err(failed)? {
        let (name, _, _, _, bytes) = tensor.into_parts().map_err(failed)?;
        add(&name, &bytes);
    }
    Ok(digests)
}

/// Replaces every float parameter that needs no gradient and differs between ranks by the mean over all ranks.
/// `is_whole` tells whether the ranks have the whole parameter: each may have a part.
#[track_caller]
pub(super) fn average<M: Module>(group: &Group, model: M, is_whole: impl Fn(ParamId) -> bool) -> Result<M, Error> {
    // A running state's last update is pending until the next one. `valid` writes it to the value, in `model` too.
    drop(model.valid());
    let is_state = |parameter: &FloatParameter| !parameter.trained && is_whole(parameter.id);
    let data = |value: DispatchTensor| {
        let data = Tensor::<1>::from_dispatch(Dispatch::inner(value)).try_into_data();
        data.map_err(|error| group.abandon(Error::io("reading a state", error)))
    };
    // By state, in visiting order. Most are frozen weights, which are the same on all ranks.
    let mut digests = Vec::new();
    visit_floats(&model, |parameter| {
        if is_state(&parameter) {
            digests.push(data(parameter.value).map(|data| digest(data.as_bytes())));
        }
    });
    let digests = digests.into_iter().collect::<Result<Vec<_>, _>>()?;
    let mut differs = different(group, &digests)?.into_iter();
    let mut failure = None;
    let model = map_floats(model, |parameter| {
        if !is_state(&parameter) || !differs.next()? || failure.is_some() {
            return None;
        }
        let (dtype, device) = (parameter.value.dtype(), Dispatch::inner(parameter.value.clone()).device());
        let shape = parameter.value.shape();
        // f64 represents all float types exactly, so the mean is exact up to rounding.
        let mean = data(parameter.value).and_then(|data| mean_over_ranks(group, data.iter().collect()));
        match mean {
            Ok(mean) => {
                let data = TensorData::new(mean, shape).convert_dtype(dtype);
                Some(Dispatch::float_from_data(data, &device))
            }
            Err(error) => {
                failure = Some(error);
                None
            }
        }
    });
    failure.map_or(Ok(model), Err)
}
