//! Everything that a training carries, on all ranks: after lost ranks, and from a checkpoint.

use std::cell::Cell;
use std::io;

use bonfire::{Error, Group, ShardedSampler, TrainingState};
use bonfire_testing::{fuzz::fuzz, ranks};
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::module::Param;
use burn::nn::{BatchNormConfig, LinearConfig, LinearLayout};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{TensorData, Tolerance};

use super::checkpoints::state::{Contents, User, contents};
use crate::burn_version::*;
use crate::checkpoint_version::*;

models! {
    /// A layer whose weight is mapped when it is saved, with running statistics and a frozen parameter.
    struct Net {
        norm: BatchNorm,
        linear: Linear,
        frozen: Param<Tensor<1>>,
    }
}

impl Net {
    fn new(outputs: usize) -> Self {
        let device = device();
        Net {
            norm: BatchNormConfig::new(3).init(&device),
            linear: LinearConfig::new(3, outputs).with_layout(LinearLayout::Col).init(&device),
            frozen: Param::from_data([0.3f32, -0.2], &device).set_require_grad(false),
        }
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        self.linear.forward(self.norm.forward(input)) * self.frozen.val().slice(0..1).unsqueeze()
    }
}

type State = ScheduledTraining<Net, User>;

/// The state at the start of a training. Parameters and ids differ between ranks before `DataParallel::new`, and ids
/// afterwards, too.
fn start(group: Group) -> (State, DataParallel) {
    let (model, ddp) = DataParallel::new(group, Net::new(2)).unwrap();
    let schedule = ExponentialLrSchedulerConfig::new(0.1, 0.8).init().unwrap();
    (State::new(model, AdamConfig::new().init(), schedule, (7, Vec::new())), ddp)
}

/// The mean gradients of a step on a rank's own samples.
fn gradients(state: &State, ddp: &mut DataParallel, samples: &[usize]) -> Result<GradientsParams, Error> {
    let rows: Vec<f32> = samples.iter().flat_map(|i| [*i as f32, (i % 7) as f32, (i * i % 5) as f32]).collect();
    let input = Tensor::<2>::from_data(TensorData::new(rows, [samples.len(), 3]), &device());
    let loss = state.model.forward(input).powi_scalar(2).mean();
    ddp.sync(&state.model, GradientsParams::from_grads(loss.backward(), &state.model), samples.len())
}

/// Applies gradients, and changes the user's state.
fn apply(state: &mut State, grads: GradientsParams) {
    state.step(grads, 1);
    state.user.0 += 3;
    state.user.1.push(1.0 / state.user.0 as f64);
}

/// A step after which all ranks are the same, with an average of the model.
fn step(state: &mut State, ddp: &mut DataParallel, samples: &[usize]) -> Result<(), Error> {
    let grads = gradients(state, ddp, samples)?;
    apply(state, grads);
    // The statistics of burn's batch norm are each rank's own.
    state.model = ddp.average_states(state.model.clone())?;
    if state.samples % 2 == 1 {
        state.average = Some(state.model.valid());
    }
    Ok(())
}

/// The samples of a rank in a step.
fn samples(rank: usize, step: usize) -> [usize; 3] {
    [rank + step, 3 * rank + 2 * step, 11 * rank + step]
}

fn all_equal(results: &[Contents]) {
    for (rank, result) in results.iter().enumerate() {
        assert_eq!(result, &results[0], "rank {rank} differs from the first one");
    }
}

#[test]
fn ranks_that_are_a_step_behind_take_over_everything() {
    // Rank 1 is lost, and leaves in the fourth step. Ranks 2 and 4 are a step ahead of ranks 0 and 3.
    let results = ranks(5, |group| {
        let rank = group.rank();
        let (mut state, mut ddp) = start(group);
        for i in 0..3 {
            step(&mut state, &mut ddp, &samples(rank, i)).unwrap();
        }
        let grads = gradients(&state, &mut ddp, &samples(rank, 3)).unwrap();
        if rank == 1 {
            return Vec::new();
        }
        // The state of a rank whose last `sync` failed when that of another rank had succeeded.
        if rank % 2 == 0 && rank > 0 {
            apply(&mut state, grads);
        }
        let own = contents(&state);
        let id = state.model.linear.weight.id;
        ddp.shrink(&mut state).unwrap();
        assert_eq!(state.model.linear.weight.id == id, rank == 2 || !TAKES_IDS);
        let mut seen = vec![contents(&state)];
        if rank == 2 {
            assert_eq!(seen[0], own);
        }
        for i in 4..7 {
            step(&mut state, &mut ddp, &samples(rank, i)).unwrap();
            seen.push(contents(&state));
        }
        seen
    });
    let remaining: Vec<_> = results.into_iter().filter(|seen| !seen.is_empty()).collect();
    assert_eq!(remaining.len(), 4);
    for at in 0..4 {
        all_equal(&remaining.iter().map(|seen| seen[at].clone()).collect::<Vec<_>>());
    }
    // Seven steps at rates that fall by a fifth.
    let expected = (0..6).fold(0.1 / 0.8 * 0.8, |rate, _| rate * 0.8);
    assert_eq!((remaining[0][3].rate, remaining[0][3].position), (f64::to_bits(expected), (0, 7)));
    assert_eq!(remaining[0][3].user.0, 7 + 7 * 3);
}

#[test]
fn ranks_that_had_ended_the_epoch_are_ahead() {
    let results = ranks(3, |group| {
        let rank = group.rank();
        let (mut state, mut ddp) = start(group);
        step(&mut state, &mut ddp, &samples(rank, 0)).unwrap();
        if rank == 2 {
            state.next_epoch();
            state.user.0 = 100;
        }
        ddp.shrink(&mut state).unwrap();
        contents(&state)
    });
    assert_eq!((results[0].position, results[0].user.0), ((1, 0), 100));
    all_equal(&results);
}

#[test]
fn remaining_ranks_train_the_same_model_as_without_a_loss() {
    const BATCHES: usize = 12;
    const BATCH: usize = 16;
    let train = |group: Group, dies: Option<usize>| {
        let (device, identity) = (device(), group.rank());
        let mut model: Linear = LinearConfig::new(3, 2).with_bias(false).init(&device);
        model.weight = Param::from_data(TensorData::new(vec![0.1f32, 0.2, -0.3, 0.4, -0.5, 0.6], [3, 2]), &device);
        let (model, mut ddp) = DataParallel::new(group, model).unwrap();
        let mut state = TrainingState::new(model, AdamConfig::new().init(), 0.01, ());
        while state.samples < BATCHES * BATCH {
            if state.samples == 5 * BATCH && dies == Some(identity) {
                return None;
            }
            let sampler = ShardedSampler::new(ddp.group(), BATCHES * BATCH, BATCH).unwrap();
            let grads = sampler.epoch(0).and_then(|epoch| {
                let shard = epoch.after(state.samples).next().unwrap();
                let rows: Vec<f32> = shard.iter().flat_map(|i| [*i as f32, (i % 7) as f32, 1.0]).collect();
                let input = Tensor::<2>::from_data(TensorData::new(rows, [shard.len(), 3]), &device);
                let loss = state.model.forward(input).powi_scalar(2).mean();
                ddp.sync(&state.model, GradientsParams::from_grads(loss.backward(), &state.model), shard.len())
            });
            match grads {
                Ok(grads) => state.step(grads, BATCH),
                Err(Error::Left { .. }) => ddp.shrink(&mut state).unwrap(),
                Err(error) => panic!("{error}"),
            }
        }
        Some(state.model.weight.to_data())
    };
    let reference = ranks(1, |group| train(group, None)).remove(0).unwrap();
    for dies in 0..3 {
        let remaining: Vec<_> = ranks(3, |group| train(group, Some(dies))).into_iter().flatten().collect();
        assert_eq!((remaining.len(), &remaining[0]), (2, &remaining[1]));
        remaining[0].assert_approx_eq::<f32>(&reference, Tolerance::absolute(1e-4));
    }
}

/// Bytes of a state after `steps` steps on one rank.
fn saved(steps: usize) -> Vec<u8> {
    let bytes = ranks(1, |group| {
        let (mut state, mut ddp) = start(group);
        for i in 0..steps {
            step(&mut state, &mut ddp, &samples(0, i)).unwrap();
        }
        state.save().unwrap()
    });
    bytes.concat()
}

#[test]
fn a_resumed_training_equals_the_uninterrupted_one_bit_for_bit() {
    let file = Cell::new(Vec::new());
    let mut whole = Vec::new();
    for (first, last) in [(0, 8), (0, 5), (5, 8)] {
        let bytes = file.take();
        let mut results = ranks(3, |group| {
            let rank = group.rank();
            let (mut state, mut ddp) = start(group);
            if first == 0 {
                // Every training starts with the same weights.
                let weights = TensorData::new((1..7u8).map(|i| 1.0 / f32::from(i)).collect::<Vec<_>>(), [3, 2]);
                let weight = Tensor::from_data(weights, &device()).require_grad();
                let linear = &mut state.model.linear;
                let bias = Tensor::zeros([2], &device()).require_grad();
                linear.weight = Param::initialized(linear.weight.id, weight);
                linear.bias = linear.bias.as_ref().map(|own| Param::initialized(own.id, bias));
            } else {
                ddp.resume(&mut state, || Ok(bytes.clone())).unwrap();
                assert_eq!(state.samples, first);
            }
            for i in first..last {
                step(&mut state, &mut ddp, &samples(rank, i)).unwrap();
            }
            (contents(&state), state.save().unwrap())
        });
        file.set(results.remove(0).1);
        let mut contents: Vec<_> = results.into_iter().map(|(contents, _)| contents).collect();
        all_equal(&contents);
        whole.push(contents.remove(0));
    }
    assert_eq!(whole[0], whole[2]);
    assert_ne!(whole[0], whole[1]);
}

#[test]
fn only_rank_0s_file_counts_when_resuming() {
    let (new, stale) = (saved(6), saved(2));
    let results = ranks(3, |group| {
        let rank = group.rank();
        let (mut state, mut ddp) = start(group);
        // Rank 1 has a checkpoint of another run, rank 2 has none.
        let read = || match rank {
            0 => Ok(new.clone()),
            1 => Ok(stale.clone()),
            _ => Err(io::Error::new(io::ErrorKind::NotFound, "no such file")),
        };
        ddp.resume(&mut state, read).unwrap();
        let resumed = contents(&state);
        step(&mut state, &mut ddp, &samples(rank, 6)).unwrap();
        (resumed, contents(&state))
    });
    let (resumed, trained): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    assert_eq!(resumed[0].position, (0, 6));
    all_equal(&resumed);
    all_equal(&trained);
}

#[test]
fn all_ranks_report_what_rank_0_cannot_resume_from() {
    let good = saved(2);
    let mut damaged = good.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 1;
    let other_model = ranks(1, |group| {
        let (model, _) = DataParallel::new(group, Net::new(5)).unwrap();
        let schedule = ExponentialLrSchedulerConfig::new(0.1, 0.8).init().unwrap();
        let adam = AdamConfig::new().init();
        State::new(model, adam, schedule, (0, Vec::new())).save().unwrap()
    });
    let cases: [(io::Result<&[u8]>, &str); 4] = [
        (Err(io::ErrorKind::PermissionDenied.into()), "reading a saved training: permission denied"),
        (Ok(&damaged), "these bytes are not what `TrainingState::save` returned, or were damaged"),
        (Ok(&good[..good.len() - 1]), "these bytes are not what"),
        (Ok(&other_model[0]), OTHER_MODEL_IN_MEMORY),
    ];
    ranks(2, |group| {
        let (mut state, mut ddp) = start(group);
        let before = contents(&state);
        for (read, expected) in &cases {
            let read = || match read {
                Ok(bytes) => Ok(bytes.to_vec()),
                Err(error) => Err(error.kind().into()),
            };
            let error = ddp.resume(&mut state, read).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(contents(&state), before);
        }
        // The group is still usable.
        ddp.resume(&mut state, || Ok(good.clone())).unwrap();
        assert_eq!(state.samples, 2);
    });
}

#[test]
fn state_of_another_kind_is_an_error_on_all_ranks() {
    let bytes = saved(2);
    ranks(2, |group| {
        let (model, mut ddp) = DataParallel::new(group, Net::new(2)).unwrap();
        // A number in place of a schedule and of the user's state.
        let mut state = TrainingState::new(model, AdamConfig::new().init(), 0.1, 5u64);
        let error = ddp.resume(&mut state, || Ok(bytes.clone())).unwrap_err().to_string();
        assert!(error.starts_with(OTHER_SCHEDULER_IN_MEMORY), "{error}");
    });
}

#[test]
fn fuzz_saved_states() {
    let group = Group::threads(1).unwrap().remove(0);
    let (state, ddp) = start(group);
    let (state, ddp) = (std::cell::RefCell::new(state), std::cell::RefCell::new(ddp));
    fuzz("training-state", [saved(0), saved(1)], |bytes| {
        let result = ddp.borrow_mut().resume(&mut *state.borrow_mut(), || Ok(bytes.to_vec()));
        assert!(matches!(result, Ok(()) | Err(Error::InvalidArgument { .. })), "{result:?}");
        result.is_ok()
    });
}
