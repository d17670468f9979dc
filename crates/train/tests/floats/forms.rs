//! The forms of training, with this adapter: replicas by [`Steps::sync`] and by passes, a sharded optimizer, and parts.

use std::cell::RefCell;
use std::sync::Arc;

use bonfire_core::{Error, Group};
use bonfire_train::checkpoint::{Contents, Dtype, OwnPart, Parts, Set, Snapshot};
use bonfire_train::gather::GatherSteps;
use bonfire_train::lane::Tensor;
use bonfire_train::parameters::Parameter;
use bonfire_train::protocol::Header;
use bonfire_train::shards::{Cut, cut};
use bonfire_train::step::{Gradients, Groups, Means, Outcome, Pass, Steps};
use bonfire_train::{DeviceMesh, Sharding};
use bytemuck::{cast_slice, cast_slice_mut, pod_collect_to_vec};

use crate::adapter::{BLOCKS, Floats, Momentum, initial, parameters, passes, tensor, values};

/// The model of a rank: values by position.
pub type Model = Vec<Vec<f32>>;

pub fn header() -> Header {
    Header::new(vec![true; parameters().len()])
}

pub fn steps(groups: Groups, cut: Cut) -> Steps {
    Steps::new(groups, parameters(), Arc::new(Floats(parameters())), cut, false)
}

/// Returns a rank's passes in a step: the samples of each. The ranks have different numbers of passes and of samples,
/// and in some steps none.
pub fn batches(step: usize, rank: usize, ranks: usize) -> Vec<Vec<usize>> {
    let all: Vec<usize> = (0..7 + step).map(|i| 20 * step + i).collect();
    let own = &all[bonfire_core::partition(all.len(), ranks, rank)];
    if step == 3 && rank > 0 {
        return Vec::new();
    }
    own.chunks(2 + rank).map(<[usize]>::to_vec).collect()
}

pub const STEPS: usize = 6;

/// Says after each step whether the training ends. Gets the number of steps, and what answers whether it should stop.
pub type Ends<'a> = &'a dyn Fn(usize, &dyn Fn() -> bool) -> bool;

/// Ends after all steps, and does not ask.
pub fn all(steps: usize, _: &dyn Fn() -> bool) -> bool {
    steps == STEPS
}

/// Trains for so many steps on one rank, without the engine.
pub fn reference(ranks: usize, steps: usize) -> Model {
    let (mut model, momentum) = (initial(), Momentum::default());
    for step in 0..steps {
        let all: Vec<_> = (0..ranks).flat_map(|rank| batches(step, rank, ranks)).collect();
        let total: usize = all.iter().map(Vec::len).sum();
        let mut sums: Vec<Option<Vec<f32>>> = vec![None; model.len()];
        for samples in all {
            let share = samples.len() as f32 / total as f32;
            passes(&samples, &|position, _| model[position].clone(), &mut |position, gradient| {
                let sum = sums[position].get_or_insert_with(|| vec![0.0; gradient.len()]);
                sum.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += share * gradient);
            });
        }
        for (position, gradient) in sums.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                momentum.step(position, &mut model[position], &gradient);
            }
        }
    }
    model
}

pub fn means(outcome: Result<Outcome, Error>) -> Means {
    match outcome.unwrap() {
        Outcome::Gradients(means) => means,
        Outcome::NoSamples => panic!("there are samples"),
    }
}

pub fn update(model: &mut Model, momentum: &Momentum, means: &Means) {
    for (position, gradient) in means.gradients.iter().enumerate() {
        if let Some(gradient) = gradient {
            momentum.step(position, &mut model[position], values(gradient));
        }
    }
}

/// Trains replicas by gradients that are all there.
pub fn by_sync(group: Group, ends: Ends) -> Model {
    let (rank, n) = (group.rank(), group.world_size());
    let steps = steps(Groups::replicas(group).unwrap(), Cut::Rows);
    let (mut model, momentum) = (initial(), Momentum::default());
    for step in 0.. {
        let samples = batches(step, rank, n);
        let weight: usize = samples.iter().map(Vec::len).sum();
        let mut sums: Vec<Option<Tensor>> = vec![None; model.len()];
        for samples in samples {
            let share = samples.len() as f32 / weight as f32;
            passes(&samples, &|position, _| model[position].clone(), &mut |position, gradient| {
                let weighted = tensor(gradient.iter().map(|x| x * share).collect());
                let sum = sums[position].take();
                sums[position] = Some(sum.map_or(weighted.clone(), |sum| steps.tensors().add(sum, weighted)));
            });
        }
        let gradients = sums.into_iter().enumerate().filter_map(|(position, sum)| Some((position, sum?))).collect();
        let gradients = Gradients { gradients, weight: weight as f64, problem: None };
        update(&mut model, &momentum, &means(steps.sync("sync", header(), gradients)));
        if ends(step + 1, &|| steps.should_stop()) {
            break;
        }
    }
    model
}

/// Makes a step of whole models: a pass for each batch, of which the last exchanges.
pub fn step_of(steps: &Steps, model: &Model, mut batches: Vec<Vec<usize>>) -> Result<Outcome, Error> {
    let last = batches.pop();
    let parameter = |position: usize, _| model[position].clone();
    let run = |samples: &[usize], header| {
        let pass = steps.pass(header)?;
        pass.set_weight(samples.len() as f64)?;
        let receiver = pass.receiver();
        passes(samples, &parameter, &mut |position, gradient| receiver.receive(position, tensor(gradient)));
        Box::new(pass).finish(Vec::new(), None)
    };
    for samples in batches {
        run(&samples, None)?;
    }
    Ok(run(&last.unwrap_or_default(), Some(header()))?.expect("the last pass has an outcome"))
}

pub fn by_steps(group: Group, ends: Ends) -> Model {
    let (rank, n) = (group.rank(), group.world_size());
    let steps = steps(Groups::replicas(group).unwrap(), Cut::Rows);
    let (mut model, momentum) = (initial(), Momentum::default());
    for step in 0.. {
        let means = means(step_of(&steps, &model, batches(step, rank, n)));
        update(&mut model, &momentum, &means);
        if ends(step + 1, &|| steps.should_stop()) {
            break;
        }
    }
    // A rank whose data has ended would go on so, until no rank has any.
    assert!(matches!(step_of(&steps, &model, Vec::new()), Ok(Outcome::NoSamples)));
    model
}

/// Trains with a sharded optimizer (ZeRO-1): each rank updates its slices. What asks whether the training should stop
/// are steps of replicas beside, which are never made, as those of a `DataParallel`.
pub fn by_shards(group: Group, sharding: Sharding, ends: Ends) -> Model {
    let (rank, n) = (group.rank(), group.world_size());
    let mesh = sharding.mesh("test", &group).unwrap();
    let replicas = self::steps(Groups::replicas(group).unwrap(), Cut::Rows);
    let steps = steps(Groups::sharded(&mesh, "test").unwrap(), Cut::Slices).beside(&replicas);
    let (mut model, momentum) = (initial(), Momentum::default());
    for step in 0.. {
        let means = means(step_of(&steps, &model, batches(step, rank, n)));
        let update = |position: usize| {
            let (own, gradient) = (steps.layout().range(position), means.gradients[position].as_ref()?);
            momentum.step(position, &mut model[position][own.clone()], values(gradient));
            Some(tensor(model[position][own].to_vec()))
        };
        steps.begin_update("step", 0.1, None).unwrap();
        let updated = steps.update(&means.exists, update).unwrap();
        for (position, whole) in updated.iter().enumerate() {
            if let Some(whole) = whole {
                model[position] = values(whole).to_vec();
            }
        }
        if ends(step + 1, &|| replicas.should_stop()) {
            break;
        }
    }
    model
}

/// A fully sharded training: this rank's parts, by position.
pub struct Sharded {
    pub steps: GatherSteps,
    parts: Model,
    momentum: Momentum,
    /// Whether the backward pass has kept what the forward pass has gathered.
    keeps_values: bool,
}

impl Sharded {
    pub fn new(mesh: impl Into<DeviceMesh>, keep: bool) -> Sharded {
        let groups = Groups::sharded(&mesh.into(), "test").unwrap();
        let steps = GatherSteps::new(groups, parameters(), &BLOCKS, Arc::new(Floats(parameters()))).unwrap();
        if keep {
            steps.keep_gathered();
        }
        let part = |(position, whole): (usize, Vec<f32>)| {
            let mut part = vec![0.0f32; steps.layout().shape(position).iter().product()];
            cut(steps.layout(), position, cast_slice(&whole), 4, cast_slice_mut(&mut part));
            part
        };
        let parts = initial().into_iter().enumerate().map(part).collect();
        Sharded { parts, steps, momentum: Momentum::default(), keeps_values: false }
    }

    fn tensors(&self) -> Vec<Option<Tensor>> {
        self.parts.iter().map(|part| Some(tensor(part.clone()))).collect()
    }

    pub fn step(&mut self, mut batches: Vec<Vec<usize>>) {
        let last = batches.pop();
        let run = |samples: &[usize], last: bool| {
            let pass = self.steps.pass(header(), self.tensors(), last).unwrap();
            pass.set_weight(samples.len() as f64).unwrap();
            let hooks = pass.hooks();
            let (runs, kept) = (RefCell::new(Vec::new()), RefCell::new(vec![None; self.parts.len()]));
            let parameter = |position: usize, again: bool| {
                let value = if again {
                    runs.take().into_iter().for_each(|block| hooks.end_run(block));
                    let kept = kept.borrow()[position].clone();
                    kept.filter(|_| self.keeps_values).or_else(|| hooks.value_again(position))
                } else {
                    hooks.expect(position);
                    let value = hooks.value(position);
                    runs.borrow_mut().extend(value.gathered);
                    kept.borrow_mut()[position] = value.tensor.clone();
                    value.tensor
                };
                values(&value.expect("it is gathered")).to_vec()
            };
            passes(samples, &parameter, &mut |position, gradient| hooks.receive(position, tensor(gradient)));
            Box::new(pass).finish(Vec::new(), None).unwrap()
        };
        batches.iter().for_each(|samples| assert!(run(samples, false).is_none()));
        let means = means(match last {
            Some(samples) => Ok(run(&samples, true).expect("the last pass has an outcome")),
            None => self.steps.skip(header(), self.tensors()),
        });
        update(&mut self.parts, &self.momentum, &means);
    }

    pub fn whole(&self) -> Model {
        let wholes = self.steps.gather(&self.tensors()).unwrap();
        wholes.iter().map(|whole| values(whole.as_ref().unwrap()).to_vec()).collect()
    }

    pub fn snapshot(&self) -> Result<Snapshot, Error> {
        let layout = self.steps.layout().clone();
        let own: Vec<_> = self.parts.iter().cloned().enumerate().collect();
        let collect = move |parts: &mut Parts| {
            own.into_iter().try_for_each(|(position, part)| {
                let parameter = &parameters()[position];
                let own = OwnPart::new(&parameter.shape, layout.shape(position), layout.rank, (1, 0));
                own.add(parts, parameter.path.clone(), Dtype::F32, move |range, sink| sink(cast_slice(&part[range])))
            })
        };
        let contents = Contents { epoch: 0, samples: 0, items: Vec::new() };
        Ok(Snapshot { contents, collect: Box::new(collect) })
    }
}

/// `some_keep_values`: see [`Sharded`]; every other rank.
pub fn by_parts(group: Group, replicas: usize, keep: bool, some_keep_values: bool, ends: Ends) -> Model {
    let (rank, n) = (group.rank(), group.world_size());
    let mesh = DeviceMesh::new(group, [("replicate", replicas), ("shard", n / replicas)]).unwrap();
    let mut training = Sharded::new(mesh, keep);
    training.keeps_values = some_keep_values && rank % 2 == 1;
    for step in 0.. {
        let own = batches(step, rank, n);
        // Where a rank serves a pass, the others need the same blocks in it.
        training.step(if some_keep_values && !own.is_empty() { vec![own.concat()] } else { own });
        if ends(step + 1, &|| training.steps.should_stop()) {
            break;
        }
    }
    training.whole()
}

/// Reads whole parameters.
pub fn load(set: &Set) -> Result<Model, Error> {
    let read = |parameter: &Parameter| {
        let bytes = set.read(&parameter.path, 0..parameter.elements())?;
        Ok(pod_collect_to_vec(&bytes))
    };
    parameters().iter().map(read).collect()
}
