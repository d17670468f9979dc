//! A model in training, in each form.

use std::path::Path;

use bonfire::train::checkpoint::Named;
use bonfire::{Checkpoints, Error, Group, Sharding, TrainingState};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::DType;

use super::*;
use crate::checkpoint_version::{Adam, TrainingOf};

pub const RATE: f64 = 0.01;

/// How the ranks hold models, and exchange their gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// In passes.
    Replicas,
    /// After the backward pass.
    Synced,
    Slices,
    Parts,
}

/// Those in passes.
pub const FORMS: [Form; 3] = [Form::Replicas, Form::Slices, Form::Parts];

pub const ALL_FORMS: [Form; 4] = [Form::Replicas, Form::Synced, Form::Slices, Form::Parts];

impl Form {
    /// Returns the batches of a rank's samples: some at a time, or all of them where there are no passes.
    pub fn batches<T>(self, own: &[T]) -> std::slice::Chunks<'_, T> {
        own.chunks(if self == Form::Synced { own.len().max(1) } else { 3 })
    }
}

/// A model in training with its state, and what trains it.
pub struct Trained<M: Model> {
    pub state: TrainingOf<Adam, M, ()>,
    by: By<M>,
}

enum By<M: Model> {
    Replicas(DataParallel),
    Synced(DataParallel),
    Slices(ShardedAdam<M>),
    Parts(FullyShardedParallel),
}

impl<M: Model + 'static> Trained<M> {
    pub fn new(group: &Group, form: Form, dtype: DType, model: M) -> Self {
        let model = map_floats(model, |data, _| data.convert_dtype(dtype));
        let adam = || AdamConfig::new().init();
        let (model, by) = match form {
            Form::Parts => {
                let (model, fsdp) = FullyShardedParallel::new(group.clone(), model).unwrap();
                (model, By::Parts(fsdp))
            }
            _ => {
                let (model, ddp) = DataParallel::new(group.clone(), model).unwrap();
                let by = match form {
                    Form::Slices => By::Slices(ShardedOptimizer::new(&ddp, adam(), Sharding::All).unwrap()),
                    Form::Synced => By::Synced(ddp),
                    _ => By::Replicas(ddp),
                };
                (model, by)
            }
        };
        Trained { state: TrainingState::new(model, adam(), RATE, ()), by }
    }

    /// Makes a step of this model alone. Its loss is a mean over samples.
    pub fn step(&mut self, own: Vec<usize>, loss: impl Fn(&M, &[usize]) -> Tensor<1>) {
        self.run(own.chunks(3), |model, own| (loss(model, own), own.len()));
    }

    /// Makes a step of this model alone. `loss` also returns what it is a mean over.
    pub fn run<T>(&mut self, batches: impl IntoIterator<Item = T>, loss: impl Fn(&M, T) -> (Tensor<1>, usize)) {
        let Trained { state, by } = self;
        match by {
            By::Replicas(ddp) => {
                let grads = ddp.run(&state.model, batches, loss).unwrap();
                state.step(grads, BATCH);
            }
            By::Synced(ddp) => {
                // Of one batch at most: of several, burn 0.21 might lose gradients.
                let (grads, weight) = match batches.into_iter().next() {
                    Some(batch) => {
                        let (loss, weight) = loss(&state.model, batch);
                        (GradientsParams::from_grads(loss.backward(), &state.model), weight)
                    }
                    None => (GradientsParams::new(), 0),
                };
                let grads = ddp.sync(&state.model, grads, weight).unwrap();
                state.step(grads, BATCH);
            }
            By::Slices(optimizer) => {
                let parts = optimizer.run(&state.model, batches, loss).unwrap();
                optimizer.step(RATE, &mut state.model, parts).unwrap();
                state.samples += BATCH;
            }
            By::Parts(fsdp) => {
                let parts = fsdp.run(&state.model, batches, loss).unwrap();
                state.step(parts.for_optimizer(&state.optimizer).unwrap(), BATCH);
            }
        }
    }

    /// The whole of a model that this rank has as it has the one in training.
    pub fn whole_of(&self, model: &M) -> M {
        match &self.by {
            By::Parts(fsdp) => fsdp.gather(model).unwrap(),
            _ => model.clone(),
        }
    }

    pub fn whole(&self) -> M {
        self.whole_of(&self.state.model)
    }
}

/// Makes a step of two models with one backward pass.
pub fn step_both<A: Model + 'static, B: Model + 'static>(
    (a, b): (&mut Trained<A>, &mut Trained<B>),
    samples: usize,
    loss: impl Fn(&A, &B) -> Tensor<1>,
) {
    // The parallel of each form has the same methods of other types.
    macro_rules! both {
        ($by_a:expr, $by_b:expr) => {{
            let (p, q) = ($by_a.last_pass(&a.state.model, samples), $by_b.last_pass(&b.state.model, samples));
            let (p, q) = (p.unwrap(), q.unwrap());
            let mut grads = loss(p.model(), q.model()).backward();
            (p.finish(&mut grads).unwrap(), q.finish(&mut grads).unwrap())
        }};
    }
    match (&mut a.by, &mut b.by) {
        (By::Replicas(by_a), By::Replicas(by_b)) => {
            let (of_a, of_b) = both!(by_a, by_b);
            a.state.step(of_a, BATCH);
            b.state.step(of_b, BATCH);
        }
        (By::Slices(by_a), By::Slices(by_b)) => {
            let (of_a, of_b) = both!(by_a, by_b);
            by_a.step(RATE, &mut a.state.model, of_a).unwrap();
            by_b.step(RATE, &mut b.state.model, of_b).unwrap();
            a.state.samples += BATCH;
            b.state.samples += BATCH;
        }
        (By::Parts(by_a), By::Parts(by_b)) => {
            let (of_a, of_b) = both!(by_a, by_b);
            a.state.step(of_a.for_optimizer(&a.state.optimizer).unwrap(), BATCH);
            b.state.step(of_b.for_optimizer(&b.state.optimizer).unwrap(), BATCH);
        }
        _ => panic!("models of one form"),
    }
}

/// The checkpoints of two models, if there are any.
pub struct Saved(Option<Checkpoints>);

impl Saved {
    pub fn open(group: &Group, folder: Option<&Path>) -> Saved {
        Saved(folder.map(|folder| Checkpoints::new(group, folder).unwrap()))
    }

    /// Goes on from the newest set.
    pub fn load<A: Model + 'static, B: Model + 'static>(&mut self, a: &mut Trained<A>, b: &mut Trained<B>) {
        let Some(checkpoints) = &mut self.0 else { return };
        let (x, y) = (&mut a.state, &mut b.state);
        match (&mut a.by, &mut b.by) {
            (By::Slices(p), By::Slices(q)) => checkpoints.load((Named("a", (x, p)), Named("b", (y, q)))),
            (By::Parts(p), By::Parts(q)) => checkpoints.load((Named("a", (x, &*p)), Named("b", (y, &*q)))),
            _ => checkpoints.load((Named("a", x), Named("b", y))),
        }
        .unwrap();
    }

    /// Compares the ranks, and saves a set.
    pub fn save<A: Model + 'static, B: Model + 'static>(
        &mut self,
        a: &Trained<A>,
        b: &Trained<B>,
    ) -> Result<(), Error> {
        let Some(checkpoints) = &mut self.0 else { return Ok(()) };
        let (x, y) = (&a.state, &b.state);
        match (&a.by, &b.by) {
            (By::Slices(p), By::Slices(q)) => {
                checkpoints.verify((Named("a", (x, p)), Named("b", (y, q))))?;
                checkpoints.save((Named("a", (x, p)), Named("b", (y, q))))
            }
            (By::Parts(p), By::Parts(q)) => {
                checkpoints.verify((Named("a", (x, p)), Named("b", (y, q))))?;
                checkpoints.save((Named("a", (x, p)), Named("b", (y, q))))
            }
            _ => {
                checkpoints.verify((Named("a", x), Named("b", y)))?;
                checkpoints.save((Named("a", x), Named("b", y)))
            }
        }
    }
}
