//! Everything that a training carries from step to step.
//!
//! A rank that takes over only a part of it, such as model and optimizer without the scheduler, trains differently from
//! then on, and nothing fails. So it is one value: checkpoints, resuming and [`DataParallel::shrink`] know no parts.
//!
//! [`DataParallel::shrink`]: crate::DataParallel::shrink

use burn::lr_scheduler::LrScheduler;
use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, Optimizer};
use burn::record::Record;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;
use serde::{Deserialize, Serialize};

use super::model::{Parameter, Parameters, rebuild, restore};
use super::record::{load, load_module, record, record_compact, record_module, recordable};
use bonfire_core::Error;
use bonfire_core::internal::hash;
use bonfire_train::checkpoint::SAVING;
use bonfire_train::parameters::{Description, first_difference};

/// Identifies the format and its version.
const FORMAT: &[u8] = b"bonfire training 2\n";

/// Everything that a training carries from step to step.
///
/// It is the same on all ranks after each step. [`Checkpoints`](crate::Checkpoints) save and load it, and
/// [`DataParallel::shrink`](crate::DataParallel::shrink) brings the remaining ranks to the same state. What is not in
/// here, each rank keeps as it is: let nothing that changes during the training stay outside, except what belongs to
/// one rank, such as its metrics.
///
/// ```
/// # use bonfire::{DataParallel, Group, ShardedSampler, TrainingState};
/// # use burn::backend::{Autodiff, Flex};
/// # use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
/// # use burn::nn::LinearConfig;
/// # use burn::optim::AdamConfig;
/// # use burn::tensor::Tensor;
/// # type B = Autodiff<Flex>;
/// # let device = Default::default();
/// # let group = Group::threads(1)?.remove(0);
/// let (model, ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init::<B>(&device))?;
/// let schedule = ExponentialLrSchedulerConfig::new(0.1, 0.99).init().expect("a valid schedule");
/// let mut state = TrainingState::new(model, AdamConfig::new().init(), schedule, ());
/// let sampler = ShardedSampler::new(ddp.group(), 100, 16)?;
/// while state.epoch < 2 {
///     for shard in sampler.epoch(state.epoch)?.after(state.samples) {
///         let input = Tensor::<B, 2>::ones([shard.len(), 2], &device);
///         let gradients = ddp.run(&state.model, [input], |model, input| (model.forward(input).mean(), shard.len()))?;
///         state.step(gradients, 16);
///     }
///     state.next_epoch();
/// }
/// let bytes = state.save()?;
/// # Ok::<(), bonfire::Error>(())
/// ```
pub struct TrainingState<B: AutodiffBackend, M: AutodiffModule<B>, O, S, U = ()> {
    /// The model.
    pub model: M,
    /// The model's optimizer. It stays new if a [`ShardedOptimizer`](crate::ShardedOptimizer) trains the model.
    pub optimizer: O,
    /// The learning rate: a number, or one of burn's schedulers.
    pub scheduler: S,
    /// The running average of the model (EMA), if the training keeps one. `None` at first.
    pub average: Option<M::InnerModule>,
    /// The number of completed epochs.
    pub epoch: usize,
    /// The samples of this epoch that were used, by all ranks together: a position that does not depend on the size of
    /// batches. It may be more than there are, behind a last batch that is smaller.
    pub samples: usize,
    /// All else: numbers, texts, tensors of the backend's own element types, tuples and vectors of these, and structs
    /// with `#[derive(Record)]`. What is of the backend without autodiff is in an
    /// [`InnerRecord`](crate::train::InnerRecord). `()` for nothing.
    pub user: U,
}

impl<B, M, O, S, U> TrainingState<B, M, O, S, U>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
    S: LrScheduler,
    U: Record<B> + Clone,
{
    /// Makes the state at the start of a training.
    pub fn new(model: M, optimizer: O, scheduler: S, user: U) -> Self {
        TrainingState { model, optimizer, scheduler, average: None, epoch: 0, samples: 0, user }
    }

    /// Updates the model with the gradients that a step has returned, at the scheduler's next learning rate. `samples`
    /// is what all ranks together have used of the epoch in it: the size of a batch, of all its passes.
    pub fn step(&mut self, grads: GradientsParams, samples: usize) {
        let rate = self.scheduler.step();
        self.model = self.optimizer.step(rate, self.model.clone(), grads);
        self.samples += samples;
    }

    /// Counts an epoch, and begins the next one with its first batch.
    pub fn next_epoch(&mut self) {
        self.epoch += 1;
        self.samples = 0;
    }

    /// Returns the state as bytes, made of burn's records, for [`DataParallel::resume`](crate::DataParallel::resume).
    /// Since all ranks have the same state, one rank's is enough. That rank holds all of it once more: use
    /// [`Checkpoints`](crate::Checkpoints) unless one file is what you need.
    ///
    /// Write them to a file that is complete or absent: under another name first, then synced to disk and renamed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if burn cannot restore the model exactly: a parameter has another float type than the
    /// backend, or 2^29 elements or more. [`Error::Io`] if burn cannot record the state.
    pub fn save(&self) -> Result<Vec<u8>, Error> {
        let rebuilt = rebuild(self.model.clone()).0;
        let (described, floats) = Parameters::<B>::of(&rebuilt);
        recordable(&*floats)?;
        let model = record_module(rebuilt.valid())?;
        let saved = postcard::to_stdvec(&Saved { parameters: described, model, rest: self.record_rest()? });
        let saved = saved.map_err(|e| Error::io("recording a training", e))?;
        Ok([FORMAT, &hash(saved.iter().copied()).to_le_bytes(), &saved].concat())
    }

    /// Replaces the state by a saved one. After an error it is unchanged.
    pub(super) fn load(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let saved = Saved::parse(bytes)?;
        let (rebuilt, mut identities) = rebuild(self.model.clone());
        let current = Parameters::<B>::of(&rebuilt).0;
        saved.check_model(&current)?;
        let Some(device) = rebuilt.devices().first().cloned() else { return Ok(()) };
        let (model, loaded) = rebuild(M::from_inner(load_module(rebuilt.valid(), saved.model, &device)?));
        identities.set_ids(&loaded.ids());
        let model = restore(model, identities);
        check_loaded(&current, &Parameters::<B>::of(&model).0)?;
        *self = self.with_rest(model, saved.rest)?;
        Ok(())
    }

    /// Returns the record of all but the model.
    pub(super) fn record_rest(&self) -> Result<Rest, Error> {
        let (optimizer, scheduler) = (self.optimizer.to_record(), self.scheduler.to_record::<B>());
        let position = (self.epoch as u64, self.samples as u64);
        let average = self.average.clone().map(|average| record_module(M::from_inner(average).valid()));
        let record = record::<B, _>((optimizer, scheduler, self.user.clone(), position))?;
        Ok(Rest { record, average: average.transpose()? })
    }

    /// Returns the state that consists of `model` and a recorded rest. `self` is not changed.
    pub(super) fn with_rest(&self, model: M, rest: Rest) -> Result<Self, Error> {
        let Some(device) = model.devices().first().cloned() else {
            return Err(Error::argument("loading a training", "the model has no parameters"));
        };
        let (optimizer, scheduler, user, position) = load::<B, RestRecord<B, M, O, S, U>>(rest.record, &device)?;
        let average = rest.average.map(|average| load_module(model.valid(), average, &device));
        Ok(TrainingState {
            average: average.transpose()?,
            model,
            optimizer: self.optimizer.clone().load_record(optimizer),
            scheduler: self.scheduler.clone().load_record::<B>(scheduler),
            epoch: position.0 as usize,
            samples: position.1 as usize,
            user,
        })
    }
}

/// A [`TrainingState`], whatever its types. Nothing else implements it.
pub trait AnyState {
    /// The backend.
    type Backend: AutodiffBackend;
    /// The model.
    type Model: AutodiffModule<Self::Backend>;
    /// The optimizer.
    type Optimizer: Optimizer<Self::Model, Self::Backend>;
    /// The learning rate scheduler.
    type Scheduler: LrScheduler;
    /// All else.
    type User: Record<Self::Backend> + Clone;

    #[doc(hidden)]
    fn state(&self) -> &Of<Self>;

    #[doc(hidden)]
    fn state_mut(&mut self) -> &mut Of<Self>;

    /// Returns what records the optimizer's state of this moment.
    #[doc(hidden)]
    fn optimizer_record(&self) -> LateRecord;

    /// As `optimizer_record`, of the optimizer that has trained the model: it fails if that is another one.
    #[doc(hidden)]
    fn stepped_record(&self) -> LateRecord;
}

/// Makes a record, on any thread.
pub type LateRecord = Box<dyn FnOnce() -> Result<Vec<u8>, Error> + Send>;

/// The type of a state.
pub type Of<T> = TrainingState<
    <T as AnyState>::Backend,
    <T as AnyState>::Model,
    <T as AnyState>::Optimizer,
    <T as AnyState>::Scheduler,
    <T as AnyState>::User,
>;

impl<B, M, O, S, U> AnyState for TrainingState<B, M, O, S, U>
where
    B: AutodiffBackend,
    M: AutodiffModule<B> + 'static,
    O: Optimizer<M, B> + 'static,
    S: LrScheduler,
    U: Record<B> + Clone,
{
    type Backend = B;
    type Model = M;
    type Optimizer = O;
    type Scheduler = S;
    type User = U;

    fn state(&self) -> &Self {
        self
    }

    fn state_mut(&mut self) -> &mut Self {
        self
    }

    fn optimizer_record(&self) -> LateRecord {
        let optimizer = self.optimizer.clone();
        Box::new(move || record_compact::<B, _>(optimizer.to_record()))
    }

    fn stepped_record(&self) -> LateRecord {
        let (optimizer, model, position) = (self.optimizer.clone(), self.model.clone(), (self.epoch, self.samples));
        Box::new(move || {
            let record = record_compact::<B, _>(optimizer.to_record())?;
            if position != (0, 0) && record == NO_STATES && keeps_states(optimizer, model)? {
                let reason = "the optimizer in the state has made no step, though batches were trained; save the pair \
                              of the state and the `ShardedOptimizer` that trains its model";
                return Err(Error::argument(SAVING, reason));
            }
            Ok(record)
        })
    }
}

/// The record of an optimizer that has no states: an empty map.
const NO_STATES: [u8; 1] = [0x80];

/// Whether the optimizer keeps a state for a parameter that it updates.
fn keeps_states<B, M, O>(optimizer: O, model: M) -> Result<bool, Error>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
{
    let tried = tried(optimizer, &model, |_| true)?;
    Ok(tried.is_some_and(|(record, _)| record != NO_STATES))
}

/// The record of an optimizer that was tried, and the parameter that it has updated.
pub(super) type Tried<B> = (Vec<u8>, Parameter<B>);

/// Tries an optimizer on the smallest trained parameter of a kind: returns its record then, and the parameter. `None`
/// if there is none.
pub(super) fn tried<B, M, O>(
    mut optimizer: O,
    model: &M,
    of_kind: impl Fn(&Parameter<B>) -> bool,
) -> Result<Option<Tried<B>>, Error>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
{
    let parameters = Parameters::<B>::of(model).1;
    let elements = |position: &usize| parameters[*position].shape.num_elements();
    let counts = |position: &usize| {
        let parameter = &parameters[*position];
        parameter.trained && elements(position) > 0 && of_kind(parameter)
    };
    let Some(position) = (0..parameters.len()).filter(counts).min_by_key(elements) else { return Ok(None) };
    let Parameter { shape, device, dtype, .. } = &parameters[position];
    let gradient = B::InnerBackend::float_zeros(shape.clone(), device, (*dtype).into());
    optimizer.step(0.0, model.clone(), parameters.gradients([(position, gradient)]));
    Ok(Some((record_compact::<B, _>(optimizer.to_record())?, parameters[position].clone())))
}

/// What [`Rest::record`] contains: optimizer, scheduler, the user's state, epoch and samples.
type RestRecord<B, M, O, S, U> = (<O as Optimizer<M, B>>::Record, <S as LrScheduler>::Record<B>, U, (u64, u64));

/// A recorded [`TrainingState`] without its model.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Rest {
    record: Vec<u8>,
    average: Option<Vec<u8>>,
}

/// A recorded [`TrainingState`].
#[derive(Serialize, Deserialize)]
struct Saved {
    parameters: Vec<Description>,
    model: Vec<u8>,
    rest: Rest,
}

impl Saved {
    /// Reads [`FORMAT`], a hash of what follows, and the contents. burn checks little of what it loads, so the hash is
    /// what detects damaged files.
    fn parse(bytes: &[u8]) -> Result<Saved, Error> {
        let contents = bytes.strip_prefix(FORMAT).and_then(<[u8]>::split_first_chunk);
        let intact =
            contents.filter(|(hashed, contents)| u64::from_le_bytes(**hashed) == hash(contents.iter().copied()));
        match intact.map(|(_, contents)| postcard::take_from_bytes(contents)) {
            Some(Ok((saved, []))) => Ok(saved),
            _ => Err(invalid("these bytes are not what `TrainingState::save` returned, or were damaged")),
        }
    }

    fn check_model(&self, current: &[Description]) -> Result<(), Error> {
        let Some(position) = first_difference(&self.parameters, current) else { return Ok(()) };
        let text = |list: &[Description]| list.get(position).map_or("nothing".into(), ToString::to_string);
        Err(invalid(format!(
            "it was saved for a model that differs first at parameter {position}: {} then, {} now",
            text(&self.parameters),
            text(current)
        )))
    }
}

/// Fails if burn has converted a parameter while loading it.
fn check_loaded(saved: &[Description], loaded: &[Description]) -> Result<(), Error> {
    match first_difference(saved, loaded).and_then(|position| Some((saved.get(position)?, loaded.get(position)?))) {
        Some((saved, loaded)) => Err(invalid(format!("burn has loaded {saved} as {}", loaded.what))),
        None => Ok(()),
    }
}

fn invalid(reason: impl Into<String>) -> Error {
    Error::argument("loading a training", reason)
}
