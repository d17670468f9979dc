//! A [`TrainingState`] in a set.

use std::collections::BTreeMap;

use burn::lr_scheduler::LrSchedulerRecord;
use burn::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn::store::RecordError;
use burn_pack::Reader;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::optimizer::Check;
use super::{Load, OwnParts, Save, module, optimizer};
use crate::train::model::{Parameter, Parameters};
use crate::train::training_state::TrainingState;
use bonfire_core::Error;
use bonfire_train::checkpoint::{Contents, Item, Kind, LOADING, Parts, SAVING, Set, Snapshot, argument};

/// The names of what a set has.
const MODEL: &str = "model";
const AVERAGE: &str = "average";
const OPTIMIZER: &str = "optimizer";
const SCHEDULER: &str = "scheduler";
const USER: &str = "user";

/// The form of the user's record: burn 0.21's, so the package for it reads what has no tensors.
const MESSAGE_PACK: &str = "MessagePack";

/// What burn puts before the names of the numbers of a scheduler's first group.
const FIRST_GROUP: &str = "0.";

/// What a rank has of a training: which parts of the model, of the optimizer's state, and how the ranks hold them.
#[derive(Default)]
pub(in crate::train) struct OwnState {
    pub model: OwnParts,
    pub optimizer: OwnParts,
    pub sharding: Option<String>,
}

impl<M: Module + 'static, U: Serialize + DeserializeOwned + Clone> Save for &TrainingState<M, U> {
    fn snapshot(self) -> Result<Snapshot, Error> {
        self.snapshot_of(&self.optimizer, OwnState::default(), self.check_stepped())
    }
}

impl<M: Module + 'static, U: Serialize + DeserializeOwned + Clone> Load for &mut TrainingState<M, U> {
    type Loaded = TrainingState<M, U>;

    fn read(&self, set: &Set) -> Result<Self::Loaded, Error> {
        self.read_of(set, &self.optimizer, &OwnState::default())
    }

    fn replace(self, loaded: Self::Loaded) {
        *self = loaded;
    }

    fn check_savable(&self) -> Result<(), Error> {
        self.check_optimizer()
    }
}

impl<M: Module + 'static, U: Serialize + DeserializeOwned + Clone> TrainingState<M, U> {
    /// Returns what is to be saved of a training with this optimizer, of which this rank has these parts.
    pub(in crate::train) fn snapshot_of(
        &self,
        optimizer: &ModuleOptimizer,
        own: OwnState,
        check: Check,
    ) -> Result<Snapshot, Error> {
        let sharded = |item: Item, is_sharded| Item { sharding: own.sharding.clone().filter(|_| is_sharded), ..item };
        let is_cut = !own.model.is_empty();
        let item = |name, kind| sharded(Item::new(name, kind).of(std::any::type_name::<M>()), is_cut);
        let mut items = vec![item(MODEL, Kind::Model)];
        // A running state's last update is pending until `valid`.
        let mut collect = module::collect(MODEL, &self.model.valid(), &own.model);
        if let Some(average) = &self.average {
            items.push(item(AVERAGE, Kind::Average));
            collect.extend(module::collect(AVERAGE, average, &own.model));
        }
        let (scheduler, user) = (Item::new(SCHEDULER, Kind::Scheduler), user_item::<U>());
        let (fields, _) = scheduler_fields(&self.scheduler).map_err(|error| Error::io(SAVING, error))?;
        for (field, scalar) in fields {
            collect.push(Box::new(move |parts| {
                parts.add_scalar(format!("{SCHEDULER}/{field}"), optimizer::from_burn(scalar))
            }));
        }
        if user.record.is_some() {
            let record = rmp_serde::to_vec_named(&self.user).map_err(|error| Error::io(SAVING, error))?;
            collect.push(Box::new(|parts| parts.add_value(USER.into(), record)));
        }
        items.extend([sharded(Item::new(OPTIMIZER, Kind::Optimizer), true), scheduler, user]);
        let parameters = Parameters::of(&self.model).1;
        collect.push(optimizer::collect(OPTIMIZER, optimizer.clone(), parameters, own.optimizer, check));
        let collect = Box::new(|parts: &mut Parts| collect.into_iter().try_for_each(|collect| collect(parts)));
        let contents = Contents { epoch: self.epoch as u64, samples: self.samples as u64, items };
        Ok(Snapshot { contents, collect })
    }

    /// Reads a training with an optimizer like this one, of which this rank has these parts. Returns the optimizer in
    /// the state.
    pub(in crate::train) fn read_of(
        &self,
        set: &Set,
        optimizer: &ModuleOptimizer,
        own: &OwnState,
    ) -> Result<Self, Error> {
        let Some(contents) = set.contents() else {
            let reason = "it has Bonfire's first format, which the package for burn 0.21 reads; load it there and save \
                          it again";
            return Err(argument(reason));
        };
        set.check_unnamed()?;
        let item = Item::new(OPTIMIZER, Kind::Optimizer);
        set.check(&item)?;
        let parameters = Parameters::of(&self.model).1;
        let optimizer = optimizer::load(&item, optimizer, set, &parameters, &own.optimizer)?;
        let model = module::load(MODEL, self.model.clone(), set, &own.model)?;
        let prefix = format!("{AVERAGE}/");
        let average = set.names(&prefix).next().map(|_| module::load(AVERAGE, model.valid(), set, &own.model));
        let average = average.transpose()?.map(|average| average.valid());
        let (epoch, samples) = (contents.epoch as usize, contents.samples as usize);
        let (scheduler, user) = (self.read_scheduler(set)?, self.read_user(set)?);
        Ok(TrainingState { model, optimizer, scheduler, average, epoch, samples, user })
    }

    fn read_scheduler(&self, set: &Set) -> Result<ModuleLrScheduler, Error> {
        let item = Item::new(SCHEDULER, Kind::Scheduler);
        set.check(&item)?;
        let (own, has_groups) = scheduler_fields(&self.scheduler).map_err(|error| Error::io(LOADING, error))?;
        let fields: Vec<_> = own.into_keys().collect();
        set.check_fields(&item, &fields)?;
        let mut record = LrSchedulerRecord::new();
        for field in fields {
            let lacks = || argument(format!("`{SCHEDULER}/{field}` is no number"));
            let scalar = set.scalar(&format!("{SCHEDULER}/{field}"))?.ok_or_else(lacks)?;
            record = record.with_scalar(&field, optimizer::to_burn(scalar));
        }
        let record = if has_groups { record } else { LrSchedulerRecord::new().with_record("0", record) };
        Ok(self.scheduler.clone().load_record(record))
    }

    fn read_user(&self, set: &Set) -> Result<U, Error> {
        let item = user_item::<U>();
        set.check(&item)?;
        if item.record.is_none() {
            return Ok(self.user.clone());
        }
        let record = set.value(USER)?.ok_or_else(|| argument(format!("it has no record of {item}")))?;
        rmp_serde::from_slice(&record)
            .map_err(|error| argument(format!("{item} cannot be read: {error}; load it into what was saved")))
    }

    /// Fails if the state that the optimizer will have could not be saved.
    pub(in crate::train) fn check_optimizer(&self) -> Result<(), Error> {
        let parameters = Parameters::of(&self.model).1;
        let fails = |parameter: &Parameter| optimizer::check_type(SAVING, parameter, true).is_err();
        let Some(parameter) = smallest(&parameters, fails) else { return Ok(()) };
        let mut tried = self.optimizer.clone();
        tried.step(0.0, self.model.clone(), parameter.zero_gradient());
        optimizer::check_type(SAVING, parameter, optimizer::has_fields(&tried)?)
    }

    /// Returns what fails if the optimizer in the state has no states, though it would after the batches that were
    /// trained.
    pub(in crate::train) fn check_stepped(&self) -> Check {
        let (mut tried, model, position) = (self.optimizer.clone(), self.model.clone(), (self.epoch, self.samples));
        Box::new(move |is_new| {
            let parameters = Parameters::of(&model).1;
            let Some(parameter) = smallest(&parameters, |_| true).filter(|_| is_new && position != (0, 0)) else {
                return Ok(());
            };
            tried.step(0.0, model, parameter.zero_gradient());
            if !optimizer::has_states(&tried)? {
                return Ok(());
            }
            let reason = "the optimizer in the state has made no step, though batches were trained; save the pair of \
                          the state and the `ShardedOptimizer` that trains its model";
            Err(Error::argument(SAVING, reason))
        })
    }
}

/// Returns the smallest trained parameter of a kind.
fn smallest(parameters: &[Parameter], of_kind: impl Fn(&Parameter) -> bool) -> Option<&Parameter> {
    let elements = |parameter: &&Parameter| parameter.shape.num_elements();
    let trained = parameters.iter().filter(|parameter| parameter.trained && elements(parameter) > 0);
    trained.filter(|parameter| of_kind(parameter)).min_by_key(elements)
}

fn user_item<U>() -> Item {
    let item = Item::new(USER, Kind::User).of(std::any::type_name::<U>());
    if std::any::type_name::<U>() == "()" { item } else { item.record(MESSAGE_PACK) }
}

/// Returns the numbers of a scheduler, and whether it has groups of parameters. Without groups their names have no
/// prefix: the package for burn 0.21 knows none.
fn scheduler_fields(scheduler: &ModuleLrScheduler) -> Result<(BTreeMap<String, burn_pack::Scalar>, bool), RecordError> {
    let reader = Reader::from_bytes(scheduler.to_record().into_bytes()?)?;
    let has_groups = !reader.scalars().keys().all(|name| name.starts_with(FIRST_GROUP));
    let fields = reader.scalars().iter().map(|(name, scalar)| {
        let stripped = name.strip_prefix(FIRST_GROUP).filter(|_| !has_groups);
        (stripped.unwrap_or(name).to_owned(), *scalar)
    });
    Ok((fields.collect(), has_groups))
}
