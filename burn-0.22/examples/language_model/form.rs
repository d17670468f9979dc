//! How a training is spread over the ranks.

use bonfire::{
    Checkpoints, DataParallel, DeviceMesh, Error, FullyShardedParallel, Group, ShardedOptimizer, Sharding,
    TrainingState,
};
use burn::optim::AdamConfig;
use burn::tensor::{Int, Tensor};

use crate::command::Shard;
use crate::model::LanguageModel;

/// What a rank carries from step to step. The user's state are the settings: batch and seed.
pub type State = TrainingState<LanguageModel, (u64, u64)>;

/// What trains a model on the ranks of a group.
pub enum Form {
    /// Each rank has the whole model.
    Replicas(DataParallel),
    /// As above. The optimizer in the state has no state then.
    Optimizer(DataParallel, Box<ShardedOptimizer>),
    /// The model in the state has this rank's parts.
    Parts(FullyShardedParallel),
}

impl Form {
    /// Returns the model to train, too. A mesh is a number of replicas and a number of ranks that shard each.
    pub fn new(
        group: &Group,
        shard: Shard,
        mesh: Option<[usize; 2]>,
        model: LanguageModel,
    ) -> Result<(LanguageModel, Self), Error> {
        if let Shard::Full | Shard::Grads = shard {
            let mesh = match mesh {
                Some([replicas, ranks]) => DeviceMesh::new(group.clone(), [("replicate", replicas), ("shard", ranks)])?,
                None => group.clone().into(),
            };
            let (model, parallel) = FullyShardedParallel::new(mesh, model)?;
            let parallel = if shard == Shard::Grads { parallel.keep_gathered() } else { parallel };
            return Ok((model, Form::Parts(parallel)));
        }
        let (model, mut ddp) = DataParallel::new(group.clone(), model)?;
        // A resumed run has the same buckets, and so the same bits.
        ddp.set_bucket_bytes(1 << 20);
        let form = match shard {
            Shard::Optimizer => {
                let optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All)?;
                Form::Optimizer(ddp, Box::new(optimizer))
            }
            _ => Form::Replicas(ddp),
        };
        Ok((model, form))
    }

    /// Trains on this rank's sequences of a batch, of which all ranks together have `all`. Returns the mean loss over
    /// all ranks.
    pub fn step(
        &mut self,
        state: &mut State,
        batch: [Tensor<2, Int>; 2],
        samples: usize,
        all: usize,
    ) -> Result<f64, Error> {
        let mut loss = None;
        let run = |model: &LanguageModel, [input, targets]: [Tensor<2, Int>; 2]| {
            let own = model.loss(input, targets);
            loss = Some(own.clone().inner());
            (own, samples)
        };
        match self {
            Form::Replicas(ddp) => {
                let gradients = ddp.run(&state.model, [batch], run)?;
                state.step(gradients, all);
            }
            Form::Optimizer(_, optimizer) => {
                let parts = optimizer.run(&state.model, [batch], run)?;
                optimizer.step(state.scheduler.step(), &mut state.model, parts)?;
                state.samples += all;
            }
            Form::Parts(parallel) => {
                let parts = parallel.run(&state.model, [batch], run)?;
                state.step(parts.for_optimizer(&state.optimizer)?, all);
            }
        }
        self.mean(loss.map_or(0.0, |loss| loss.into_scalar::<f32>().into()), samples)
    }

    /// Returns the mean over all ranks.
    pub fn mean(&self, value: f64, samples: usize) -> Result<f64, Error> {
        let [mean] = match self {
            Form::Replicas(ddp) | Form::Optimizer(ddp, _) => ddp.mean(&[value], samples)?,
            Form::Parts(parallel) => parallel.mean(&[value], samples)?,
        };
        Ok(mean)
    }

    /// Whether all ranks should save and end.
    pub fn should_stop(&self) -> bool {
        match self {
            Form::Replicas(ddp) | Form::Optimizer(ddp, _) => ddp.should_stop(),
            Form::Parts(parallel) => parallel.should_stop(),
        }
    }

    /// Returns the whole model.
    pub fn whole(&self, state: &State) -> Result<LanguageModel, Error> {
        match self {
            Form::Parts(parallel) => parallel.gather(&state.model),
            _ => Ok(state.model.clone()),
        }
    }

    pub fn save_in_background(&self, state: &State, checkpoints: &mut Checkpoints) -> Result<(), Error> {
        match self {
            Form::Replicas(_) => checkpoints.save_in_background(state),
            Form::Optimizer(_, optimizer) => checkpoints.save_in_background((state, &**optimizer)),
            Form::Parts(parallel) => checkpoints.save_in_background((state, parallel)),
        }
    }

    /// Loads the newest checkpoint, which a training of any form has saved. Returns false if there is none.
    pub fn load(&mut self, state: &mut State, checkpoints: &mut Checkpoints) -> Result<bool, Error> {
        match self {
            Form::Replicas(_) => checkpoints.load(state),
            Form::Optimizer(_, optimizer) => checkpoints.load((state, &mut **optimizer)),
            Form::Parts(parallel) => checkpoints.load((state, &*parallel)),
        }
    }
}
