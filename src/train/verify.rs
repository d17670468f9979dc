//! Comparison of the ranks' models and optimizers.

use std::collections::HashMap;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::Optimizer;
use burn::record::{DoublePrecisionSettings, Record, Recorder};
use burn::tensor::backend::AutodiffBackend;
use rmpv::ValueRef;
use rmpv::decode::read_value_ref;
use rmpv::encode::write_value_ref;

use super::data_parallel::DataParallel;
use super::model::Parameter;
use super::record::Records;
use super::states;
use bonfire_core::Error;
use bonfire_core::internal::AgreedOperations;
use bonfire_train::parameters::{Digested, NOTHING, compare, digest};
use bonfire_train::protocol::Problem;

impl<B: AutodiffBackend> DataParallel<B> {
    /// Compares the ranks' trained parameters and the state of their optimizers, bit by bit. All ranks must call it.
    ///
    /// A step compares the parameters from time to time. This compares at any time, after the last
    /// step for instance, and finds other optimizer state before it changes a parameter. It records the whole optimizer
    /// state, with 8 bytes for every element: do not call it in every step.
    ///
    /// Parameters that need no gradient are not compared: running statistics are among them, which differ between
    /// ranks. With a [`ShardedOptimizer`](crate::ShardedOptimizer), whose state differs too, use
    /// [`average_states`](Self::average_states), which compares the trained parameters.
    ///
    /// ```
    /// # use bonfire::{DataParallel, Group};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::AdamConfig;
    /// # let device = Default::default();
    /// # let group = Group::threads(1)?.remove(0);
    /// # let linear = LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&device);
    /// # let (model, ddp) = DataParallel::new(group, linear)?;
    /// # let optimizer = AdamConfig::new().init::<Autodiff<Flex>, Linear<Autodiff<Flex>>>();
    /// ddp.verify(&model, &optimizer)?;
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if anything differs: it names the first parameter that does, in the
    /// model's order, and the ranks. The group remains usable. Otherwise the errors of [`Group::all_reduce`].
    ///
    /// [`Group::all_reduce`]: crate::Group::all_reduce
    #[track_caller]
    pub fn verify<M, O>(&self, model: &M, optimizer: &O) -> Result<(), Error>
    where
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let _call = self.group().enter("DataParallel::verify");
        let (parameters, steps) = (&self.replicas.parameters, &self.replicas.steps);
        let states = state_digests::<B, M, O>(optimizer, parameters).map_err(|error| self.group().abandon(error))?;
        steps.check_saves("verify")?;
        self.compare_parameters("verify", model)?;
        let names = parameters.iter().map(|parameter| format!("the optimizer's state for `{}`", parameter.path));
        let names = names.chain(["the optimizer's state".into()]);
        compare(self.group(), "verify", Digested::named(0, names, &states), steps.count())
    }

    /// Averages the states that differ between the ranks' models, such as the running statistics of batch norm, which
    /// depend on a rank's own samples only. Call it on all ranks before validating or saving.
    ///
    /// States are the float parameters that need no gradient. Each becomes the mean over the ranks, without weights.
    /// One that is bit-identical on all ranks, such as a frozen weight, is not changed. The trained parameters must be
    /// bit-identical. [`SyncBatchNorm`] needs no such call: its statistics are the same on all ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if trained parameters differ: it names the first one and the ranks.
    /// Otherwise the errors of [`Group::all_reduce`](crate::Group::all_reduce), and [`Error::Io`] if a state cannot be
    /// read from its device. The model is lost then: pass a clone if you need it.
    ///
    /// [`SyncBatchNorm`]: crate::SyncBatchNorm
    #[track_caller]
    pub fn average_states<M: AutodiffModule<B>>(&self, model: M) -> Result<M, Error> {
        let _call = self.group().enter("DataParallel::average_states");
        self.compare_parameters("average_states", &model)?;
        states::average(self.group(), model, |_| true)
    }

    /// Checks that the model has the parameters of the start, and that they are bit-identical on all ranks if they are
    /// trained. Otherwise fails on all ranks with the same error.
    #[track_caller]
    pub(super) fn compare_parameters<M: AutodiffModule<B>>(&self, operation: &str, model: &M) -> Result<(), Error> {
        let (parameters, own) = (&self.replicas.parameters, self.replicas.in_model(model));
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

/// Returns the digests of the optimizer's state: for each parameter, and of the state that is for none of them.
fn state_digests<B, M, O>(optimizer: &O, parameters: &[Parameter<B>]) -> Result<Vec<u64>, Error>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
{
    let item = optimizer.to_record().into_item::<DoublePrecisionSettings>();
    let bytes = Recorder::<B>::save_item(&Records::default(), item, ()).map_err(|e| Error::io(RECORDING, e))?;
    let record = read_value_ref(&mut &bytes[..]).map_err(|e| Error::io(RECORDING, e))?;
    let places = parameters.iter().zip(0..).map(|(parameter, place)| (parameter.id.serialize(), place));
    let mut digests = StateDigests { places: places.collect(), digests: vec![NOTHING; parameters.len() + 1] };
    digests.add(&record, "", parameters.len())?;
    Ok(digests.digests)
}

const RECORDING: &str = "recording an optimizer's state";

/// The digests of what a record has for each parameter, and last of all else.
///
/// burn's optimizers record maps from ids to states, and an optimizer of several has several maps in any form. Ids
/// differ between ranks, and so does the order of a map. So each value counts by itself, under the names that lead to
/// it without ids, and for the parameter whose id is among them.
struct StateDigests {
    places: HashMap<String, usize>,
    digests: Vec<u64>,
}

impl StateDigests {
    fn add(&mut self, value: &ValueRef<'_>, path: &str, place: usize) -> Result<(), Error> {
        match value {
            ValueRef::Map(entries) if !entries.is_empty() => entries.iter().try_for_each(|(key, value)| {
                let name = if let ValueRef::String(text) = key { text.as_str() } else { None };
                match name.map(|name| (self.places.get(name), name)) {
                    Some((Some(place), _)) => self.add(value, path, *place),
                    Some((None, name)) if is_id(name) => self.add(value, path, place),
                    _ => self.add(value, &format!("{path}/{key}"), place),
                }
            }),
            ValueRef::Array(items)
                if items.iter().any(|item| matches!(item, ValueRef::Map(_) | ValueRef::Array(_))) =>
            {
                let items = items.iter().enumerate();
                items.into_iter().try_for_each(|(i, item)| self.add(item, &format!("{path}/{i}"), place))
            }
            leaf => {
                let mut bytes = path.as_bytes().to_vec();
                write_value_ref(&mut bytes, leaf).map_err(|e| Error::io(RECORDING, e))?;
                self.digests[place] = self.digests[place].wrapping_add(digest(&bytes));
                Ok(())
            }
        }
    }
}

/// Whether this may be the id of a parameter that the model does not have. burn writes them so.
fn is_id(name: &str) -> bool {
    name.len() == ID && ParamId::try_deserialize(name).is_some()
}

/// The length of an id: eight bytes in base 32.
const ID: usize = 13;
