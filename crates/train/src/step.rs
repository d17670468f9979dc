//! Training steps of a model that is whole on every rank: data parallelism, and sharded optimizers (ZeRO-1).
//!
//! A step has any number of passes. A pass hands over its gradients in any order, each as soon as it is complete
//! ([`Receiver::receive`]). Those of the last pass leave in full buckets while the backward pass computes the next
//! ones; those of the passes before wait on the rank and leave with them. [`Steps::sync`] gets all gradients at once.
//!
//! # The invariant
//! Every gradient that exists for a parameter at the end of a step is exchanged exactly once, or the step is an error
//! on all ranks. A gradient that comes when its bucket may have left is exchanged in a bucket of its own at the end.

pub mod averages;
mod clipping;
mod exchange;
mod finite;
mod gather;
pub mod iteration;
mod last;
pub mod layers;
mod model;
mod pass;
mod state;
mod stop;
mod sums;
mod sync;
mod unused;
mod updates;
mod weight;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};

use bytemuck::cast_slice_mut;

pub(crate) use self::exchange::{Channel, Exchange};
pub(crate) use self::finite::Finite;
pub(crate) use self::gather::gather;
pub(crate) use self::model::Model;
pub use self::pass::{Pass, Receiver, StepPass};
use self::state::{Settings, State};
pub(crate) use self::stop::Stopping;
pub(crate) use self::sums::Sums;
pub use self::sync::Gradients;
pub use self::unused::Unused;
pub use self::weight::{PassWeight, check_loss};
pub(crate) use self::weight::{counted, usable};
use crate::agree::all_gather_values;
use crate::compression::{CompressedLane, Compression, Compressor};
use crate::lane::{Tensor, Tensors, lane};
use crate::mesh::DeviceMesh;
use crate::parameters::{Parameter, comparison_is_due};
use crate::protocol::Refusal;
use crate::shards::{Cut, Layout};
use bonfire_core::internal::{AgreedOperations, ByteOperations, Request, lock};
use bonfire_core::{DType, Error, Group, Operation, ReduceOp};

/// The groups of a training.
#[derive(Clone, Debug)]
pub struct Groups {
    /// All ranks that train the model.
    pub main: Group,
    /// Those among them that have different parts of this rank's replica.
    pub shards: Group,
    /// Those that have the same part.
    pub replicas: Group,
}

/// What a step ends with on all ranks.
pub enum Outcome {
    /// The mean gradients.
    Gradients(Means),
    /// No rank has samples.
    NoSamples,
}

/// The mean gradients of a step, by position.
pub struct Means {
    /// The mean, or this rank's part of it. `None` where no rank has a gradient, and where this rank has no part.
    pub gradients: Vec<Option<Tensor>>,
    /// Whether any rank has a gradient.
    pub exists: Vec<bool>,
}

/// What the messages of a step end with: the same on all ranks.
pub(crate) type Decided<T> = Result<T, Refusal>;

/// What is kept from step to step. Clones share it.
#[derive(Clone)]
pub struct Steps {
    shared: Arc<Shared>,
}

struct Shared {
    groups: Groups,
    model: Arc<Model>,
    /// Whether the gradients of all ranks are on collective devices. The ranks have agreed on it.
    on_devices: bool,
    state: Mutex<State>,
}

impl Steps {
    /// Prepares the training of these parameters, which are the same on all ranks. Does not communicate.
    pub fn new(
        groups: Groups,
        parameters: impl Into<Arc<[Parameter]>>,
        tensors: Arc<dyn Tensors>,
        cut: Cut,
        on_devices: bool,
    ) -> Steps {
        let parameters = parameters.into();
        let layout = Layout::new(&parameters, cut, groups.shards.world_size(), groups.shards.rank());
        let model = Arc::new(Model { tensors, layout: Arc::new(layout), parameters });
        let state = Mutex::new(State::new(model.clone()));
        Steps { shared: Arc::new(Shared { groups, model, on_devices, state }) }
    }

    /// Makes these steps those of the same model as others: a pass that is kept by one must not be missed by another,
    /// what leaves out a step of one leaves out that of another, and [`should_stop`](Self::should_stop) answers for the
    /// steps of both.
    pub fn beside(self, others: &Steps) -> Steps {
        let (keeper, skips, stopping) = {
            let others = others.state();
            (others.keeper.clone(), others.settings.skips.clone(), others.stopping.clone())
        };
        let mut state = self.state();
        (state.keeper, state.settings.skips, state.stopping) = (keeper, skips, stopping);
        drop(state);
        self
    }

    /// Returns steps with the same settings over other groups, after a loss of ranks.
    pub fn over(&self, groups: Groups, cut: Cut) -> Steps {
        let mut settings = self.state().settings.clone();
        settings.compressor = settings.compressor.map(|compressor| compressor.anew(groups.main.rank()));
        let steps = Steps::new(groups, self.parameters().clone(), self.tensors().clone(), cut, self.is_on_devices());
        steps.state().settings = settings;
        steps
    }

    /// Returns the groups.
    pub fn groups(&self) -> &Groups {
        &self.shared.groups
    }

    /// Returns the parameters.
    pub fn parameters(&self) -> &Arc<[Parameter]> {
        &self.shared.model.parameters
    }

    /// Returns the parts that the ranks have of gradients.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.shared.model.layout
    }

    /// Returns the adapter.
    pub fn tensors(&self) -> &Arc<dyn Tensors> {
        &self.shared.model.tensors
    }

    /// Whether the gradients of all ranks are on collective devices.
    pub fn is_on_devices(&self) -> bool {
        self.shared.on_devices
    }

    /// Returns the number of steps so far.
    pub fn count(&self) -> u64 {
        self.state().steps
    }

    /// Whether any rank had been asked to stop before it ended its passes of the last step, or of one before. All ranks
    /// get the same answer after the same step. From the first call on, the signal that asks this process waits for the
    /// end of a step.
    pub fn should_stop(&self) -> bool {
        self.stopping().answer()
    }

    fn stopping(&self) -> Arc<Stopping> {
        self.state().stopping.clone()
    }

    /// Says more about an error which shows that the ranks' calls differ: one may have left out a step. A mismatch says
    /// where all ranks are in the training. If a rank has left, the log of each of the others says where that one was.
    /// `in_step` says that the error is that of a step.
    pub fn counted<T>(&self, result: Result<T, Error>, in_step: bool) -> Result<T, Error> {
        const REMEDY: &str = "a rank without samples for a step calls `skip`, or `run` without batches";
        result.map_err(|mut error| {
            if let Error::Mismatch { note, .. } = &mut error {
                note.push_str(if note.is_empty() { "" } else { "; " });
                note.push_str(REMEDY);
            } else if let Error::Left { .. } = &error {
                let (rank, steps) = (self.groups().main.rank(), self.count());
                let place = match in_step {
                    true => format!("was in training step {}", steps + 1),
                    false => format!("had made {steps} training steps"),
                };
                log::warn!(
                    "rank {rank} {place}; if the rank that left was elsewhere, it has left out a step: {REMEDY}"
                );
            }
            error
        })
    }

    /// Fails on all ranks if some have begun to save a checkpoint and others have not called it. All ranks call it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] then. Otherwise those of [`Group::all_gather`].
    #[track_caller]
    pub fn check_saves(&self, operation: &str) -> Result<(), Error> {
        let main = &self.groups().main;
        let saves = all_gather_values(main, [main.saves()])?.concat();
        let differ = saves.iter().any(|of_rank| *of_rank != saves[0]);
        if differ { Err(Refusal::Saves(saves).error(operation, &[])) } else { Ok(()) }
    }

    /// Counts steps anew, after all ranks have taken over a state. The next two steps compare the models.
    pub fn restart(&self) {
        let mut state = self.state();
        state.steps = 0;
        state.forget();
    }

    /// Forgets the passes of a step that will not be made. All ranks call it.
    pub fn forget_passes(&self) {
        self.state().forget_passes();
    }

    /// Sets the most bytes in a bucket, instead of measuring.
    pub fn set_bucket_bytes(&self, bytes: usize) {
        self.state().settings.bucket_bytes = Some(bytes.max(1));
    }

    /// Leaves out steps in which a gradient of any rank is not finite. All ranks call it.
    pub fn skip_non_finite(&self) {
        // Relaxed: the same thread begins the steps.
        self.state().settings.skips.store(true, Ordering::Relaxed);
    }

    /// Makes gradients travel compressed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the model has trained parameters of f64, which f32 cannot carry. [`Error::Broken`]
    /// if the encoding panics.
    pub fn set_compression(&self, compression: impl Compression, trained: &[bool]) -> Result<(), Error> {
        let wide = self.state().wide(trained);
        if let Some(wide) = wide {
            let path = &self.parameters()[wide].path;
            let reason = format!("`{path}` has elements of f64; train it in f32 or without compression");
            return Err(Error::argument("set_compression", reason));
        }
        self.set_compressor(Some(Compressor::new(Arc::new(compression), self.groups().main.rank())?))
    }

    /// Makes gradients travel as they are.
    ///
    /// # Errors
    /// Those of making a lane.
    pub fn unset_compression(&self) -> Result<(), Error> {
        self.set_compressor(None)
    }

    /// Whether gradients travel compressed.
    pub fn is_compressed(&self) -> bool {
        self.state().settings.compressor.is_some()
    }

    /// Whether other steps are [`beside`](Self::beside) these.
    pub fn has_others(&self) -> bool {
        Arc::strong_count(&self.state().keeper) > 1
    }

    fn set_compressor(&self, compressor: Option<Compressor>) -> Result<(), Error> {
        let mut state = self.state();
        state.settings.compressor = compressor;
        let State { settings, blocking, overlapped, .. } = &mut *state;
        for channel in [blocking, overlapped].into_iter().flatten() {
            let groups = [channel.shards.group().clone(), channel.replicas.group().clone()];
            *channel = self.channel(groups, settings)?;
        }
        Ok(())
    }

    /// Forgets what compression has lost and would add to the next gradients. All ranks call it.
    pub fn forget_compression_errors(&self) {
        self.state().forget_compression_errors();
    }

    /// Whether the ranks compare the parameters that are trained in the next step.
    pub fn comparison_is_due(&self, trained: &[bool]) -> bool {
        let bytes = self.parameters().iter().zip(trained).filter(|(_, trained)| **trained).map(|(p, _)| p.bytes());
        comparison_is_due(self.count(), bytes.sum(), self.is_on_devices())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
    }

    /// Makes the lanes of gradients over groups for shards and for replicas.
    fn channel(&self, [shards, replicas]: [Group; 2], settings: &Settings) -> Result<Channel, Error> {
        let tensors = self.tensors();
        let shards = lane(tensors, &shards)?;
        let replicas = match settings.compressor.clone() {
            None => lane(tensors, &replicas)?,
            Some(compressor) => Box::new(CompressedLane::new(replicas, tensors.clone(), compressor)),
        };
        Ok(Channel { shards, replicas, compressor: settings.compressor.clone() })
    }

    /// Takes the lanes over the groups themselves.
    fn take_blocking(&self, state: &mut State) -> Result<Channel, Error> {
        let Groups { shards, replicas, .. } = self.groups().clone();
        state.blocking.take().map_or_else(|| self.channel([shards, replicas], &state.settings), Ok)
    }

    /// Ends a step on this rank.
    fn ended(&self, ended: Result<Decided<Outcome>, Error>, operation: &str) -> Result<Outcome, Error> {
        let ended = self.counted(ended, true);
        let (mut state, parameters) = (self.state(), self.parameters());
        if let Ok(Err(refusal)) = &ended
            && refusal.leaves_out(self.groups().main.rank(), state.steps + 1, parameters)
        {
            state.forget();
            return Ok(Outcome::left_out(parameters.len()));
        }
        let ended = ended.and_then(|decided| decided.map_err(|refusal| refusal.error(operation, parameters)));
        match &ended {
            Ok(outcome) => state.steps += u64::from(matches!(outcome, Outcome::Gradients(_))),
            // Its result is not used.
            Err(_) => state.forget(),
        }
        set_progress(&self.groups().main, state.steps, ended.as_ref().err());
        ended
    }
}

/// Says how many steps a rank has made, for the errors of ranks that are elsewhere. `failed` is why the last one has
/// failed.
pub(crate) fn set_progress(main: &Group, steps: u64, failed: Option<&Error>) {
    let plural = if steps == 1 { "" } else { "s" };
    let failed = failed.map_or(String::new(), |error| format!(" and one that has failed ({error})"));
    main.set_progress(format!("after {steps} training step{plural}{failed}"));
}

impl Outcome {
    /// That of a step which is left out: no rank has a gradient.
    pub(crate) fn left_out(parameters: usize) -> Outcome {
        Outcome::of((0..parameters).map(|_| None).collect(), vec![false; parameters])
    }

    /// Leaves out what no rank had: it was reduced as zeros.
    pub(crate) fn of(mut gradients: Vec<Option<Tensor>>, exists: Vec<bool>) -> Outcome {
        let missing = gradients.iter_mut().zip(&exists).filter(|(_, exists)| !**exists);
        missing.for_each(|(gradient, _)| *gradient = None);
        Outcome::Gradients(Means { gradients, exists })
    }
}

impl Groups {
    /// Says how the ranks hold what is sharded, for a checkpoint.
    pub fn sharding(&self, parts: &str) -> String {
        let (ranks, replicas) = (self.shards.world_size(), self.replicas.world_size());
        let of = if replicas > 1 { format!(", {replicas} of each") } else { String::new() };
        format!("{parts} on {ranks} ranks{of}")
    }

    /// Returns how many ranks have the same part, and which of them this one is.
    pub fn replica(&self) -> (usize, usize) {
        (self.replicas.world_size(), self.replicas.rank())
    }

    /// Replicas of the whole model on the ranks of a group.
    ///
    /// # Errors
    /// Those of [`Group::threads`].
    pub fn replicas(main: Group) -> Result<Groups, Error> {
        Ok(Groups { shards: Group::threads(1)?.remove(0), replicas: main.clone(), main })
    }

    /// The groups of a mesh with the dimensions `shard` and `replicate`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it has others.
    pub fn sharded(mesh: &DeviceMesh, operation: &str) -> Result<Groups, Error> {
        let [shards, replicas] = mesh.shards_and_replicas(operation)?;
        Ok(Groups { main: mesh.whole().clone(), shards, replicas })
    }

    /// Fails all groups, so that no rank waits for this one. Returns the first cause.
    pub fn abandon(&self, error: Error) -> Error {
        [&self.shards, &self.replicas, &self.main].into_iter().fold(error, |error, group| group.abandon(error))
    }

    /// Averages values over all ranks, each with a weight. The values of ranks whose weight is 0 are ignored.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if no rank has samples, or if a rank's weight is negative or not finite.
    /// Otherwise those of [`Group::all_reduce`].
    #[track_caller]
    pub fn mean<const N: usize>(&self, values: &[f64; N], weight: f64) -> Result<[f64; N], Error> {
        let weight = usable(weight).unwrap_or(f64::NAN);
        let weighted = values.iter().map(|value| if weight == 0.0 { 0.0 } else { value * weight });
        let mut sums: Vec<f64> = weighted.chain([weight]).collect();
        let request = Request::new(Operation::AllReduce, DType::F64).reduction(ReduceOp::Sum).part_of("mean");
        self.main.operate(request, None, cast_slice_mut(&mut sums))?;
        if !sums[N].is_finite() {
            let reason = "the weight of some rank is negative or not finite; give a number of samples, tokens or the \
                          like, or a sum of weights";
            return Err(Error::argument("mean", reason));
        }
        if sums[N] == 0.0 {
            return Err(Refusal::NoSamples.error("mean", &[]));
        }
        Ok(std::array::from_fn(|i| sums[i] / sums[N]))
    }

    /// Adds numbers of all ranks that have different parts. Ranks that have the same part use those of one of them, so
    /// that all ranks get the same bits: devices may add the same elements in different orders.
    ///
    /// # Errors
    /// Those of [`Group::all_gather`], after which all groups have failed: a rank may wait for others in either.
    #[track_caller]
    pub fn add_over_shards(&self, mut own: Vec<f64>) -> Result<Vec<f64>, Error> {
        self.replicas.broadcast(&mut own, 0).map_err(|error| self.abandon(error))?;
        let mut all = own.repeat(self.shards.world_size());
        self.shards.all_gather_into(&own, &mut all).map_err(|error| self.abandon(error))?;
        let sum = |i: usize| all.iter().skip(i).step_by(own.len()).sum();
        Ok((0..own.len()).map(sum).collect())
    }
}
