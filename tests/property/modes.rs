//! Programs on the ranks of a group, in every mode.

use std::slice;

use bonfire::{DeviceMesh, Error, Group, Sharding};
use burn::optim::{GradientsParams, MuonConfig};

use crate::burn_version::*;
use crate::model::{self, Net};
use crate::model_data::add;
use crate::program::{Fault, Feature, Mode, Program, STEPS};
use crate::reference::{NORM, Optimizers, RATE, adam, sgd};

/// A model in training.
struct Training {
    net: Net,
    form: Form,
}

enum Form {
    /// Gradients leave during the backward pass.
    Step(DataParallel, Optimizers),
    /// The program adds up gradients, and exchanges them afterwards.
    Sync(DataParallel, Optimizers),
    Zero1(ShardedSgd<Net>, ShardedAdam<Net>),
    Full(FullyShardedParallel, Optimizers),
}

/// A pass in progress.
enum Open {
    Early(Pass<Net>),
    Last(LastPass<Net>),
    LastOfParts(LastPass<Net, Parts>),
    /// Its gradients are taken from the model in training.
    Plain(Net),
}

/// The mean gradients of a step.
enum Mean {
    Whole(GradientsParams),
    Parts(Parts),
}

impl Open {
    fn net(&self) -> &Net {
        match self {
            Open::Early(pass) => pass.model(),
            Open::Last(pass) => pass.model(),
            Open::LastOfParts(pass) => pass.model(),
            Open::Plain(net) => net,
        }
    }

    fn skip(self) -> Result<Mean, Error> {
        match self {
            Open::Last(pass) => pass.skip().map(Mean::Whole),
            Open::LastOfParts(pass) => pass.skip().map(Mean::Parts),
            Open::Early(_) | Open::Plain(_) => unreachable!("the others end with the step"),
        }
    }
}

impl Training {
    fn new(program: &Program, mode: Mode, number: usize, group: &Group) -> Result<Training, Error> {
        let net = model::net(program, number, true);
        let (n, muon) = (group.world_size(), program.fault == Some(Fault::Muon));
        if let Mode::Zero2 | Mode::Zero3 | Mode::Hybrid = mode {
            let shard = if n % 2 == 0 { n / 2 } else { 1 };
            let mesh = match mode {
                Mode::Hybrid => DeviceMesh::new(group.clone(), [("replicate", n / shard), ("shard", shard)])?,
                _ => group.clone().into(),
            };
            let (net, fsdp) = FullyShardedParallel::new(mesh, net)?;
            let fsdp = if mode == Mode::Zero2 { fsdp.keep_gathered() } else { fsdp };
            if muon {
                let parts = fsdp.run(&net, [()], |net, ()| (net.scale.val().powf_scalar(2.0).mean(), 1))?;
                let muon: MuonOf<Net> = MuonConfig::new().init();
                parts.for_optimizer(&muon)?;
            }
            return Ok(Training { net, form: Form::Full(fsdp, Optimizers::new(program)) });
        }
        let (net, ddp) = DataParallel::new(group.clone(), net)?;
        let optimizers = Optimizers::new(program);
        let form = match mode {
            Mode::Step => Form::Step(ddp, optimizers),
            Mode::Sync => Form::Sync(ddp, optimizers),
            _ => {
                if muon {
                    let muon: MuonOf<Net> = MuonConfig::new().init();
                    ShardedOptimizer::new(&ddp, muon, Sharding::All)?;
                }
                let sgd = ShardedOptimizer::new(&ddp, sgd(program), Sharding::All)?;
                let adam = ShardedOptimizer::new(&ddp, adam(program), Sharding::All)?;
                Form::Zero1(sgd, adam)
            }
        };
        Ok(Training { net, form })
    }

    fn open(&self, weight: usize, is_last: bool) -> Result<Open, Error> {
        Ok(match (&self.form, is_last) {
            (Form::Step(ddp, _), false) => Open::Early(ddp.pass(&self.net, weight)?),
            (Form::Step(ddp, _), true) => Open::Last(ddp.last_pass(&self.net, weight)?),
            (Form::Zero1(sgd, _), false) => Open::Early(sgd.pass(&self.net, weight)?),
            (Form::Zero1(sgd, _), true) => Open::LastOfParts(sgd.last_pass(&self.net, weight)?),
            (Form::Full(fsdp, _), false) => Open::Early(fsdp.pass(&self.net, weight)?),
            (Form::Full(fsdp, _), true) => Open::LastOfParts(fsdp.last_pass(&self.net, weight)?),
            (Form::Sync(..), _) => Open::Plain(self.net.clone()),
        })
    }

    /// Ends a pass of this weight. `sum` has the gradients that the program adds up itself.
    fn close(
        &self,
        open: Open,
        gradients: &mut Gradients,
        sum: &mut GradientsParams,
        weight: f64,
    ) -> Result<Option<Mean>, Error> {
        Ok(match open {
            Open::Early(pass) => {
                pass.finish(gradients)?;
                None
            }
            Open::Last(pass) => Some(Mean::Whole(pass.finish(gradients)?)),
            Open::LastOfParts(pass) => Some(Mean::Parts(pass.finish(gradients)?)),
            Open::Plain(_) => {
                add(&self.net, &GradientsParams::from_module(gradients, &self.net), sum, weight);
                None
            }
        })
    }

    /// Ends the step of a rank without another pass.
    fn end(&self, program: &Program, step: usize, rank: usize, sum: GradientsParams) -> Result<Mean, Error> {
        let weight: usize = program.passes[step][rank].iter().map(|(_, weight)| weight).sum();
        Ok(match &self.form {
            Form::Step(ddp, _) => Mean::Whole(ddp.skip(&self.net)?),
            Form::Zero1(sgd, _) => Mean::Parts(sgd.skip(&self.net)?),
            Form::Full(fsdp, _) => Mean::Parts(fsdp.skip(&self.net)?),
            Form::Sync(ddp, _) => {
                let mut sum = sum;
                if program.fault == Some(Fault::OtherShape) && step == 2 && rank == 0 {
                    sum.register(self.net.scale.id, Inner::<1>::ones([3], &inner_device()));
                }
                Mean::Whole(ddp.sync(&self.net, sum, weight)?)
            }
        })
    }

    fn update(&mut self, program: &Program, mean: Mean) -> Result<(), Error> {
        match (&mut self.form, mean) {
            (Form::Step(_, optimizers) | Form::Sync(_, optimizers), Mean::Whole(gradients)) => {
                self.net = optimizers.step(program, self.net.clone(), gradients);
            }
            (Form::Zero1(sgd, adam), Mean::Parts(parts)) => {
                let (of_sgd, of_adam) = shared(program, &self.net, parts)?;
                sgd.step(RATE, &mut self.net, of_sgd)?;
                adam.step(RATE, &mut self.net, of_adam)?;
            }
            (Form::Full(_, Optimizers { sgd, adam }), Mean::Parts(parts)) => {
                let (of_sgd, of_adam) = shared(program, &self.net, parts)?;
                let (of_sgd, of_adam) = (of_sgd.for_optimizer(sgd)?, of_adam.for_optimizer(adam)?);
                self.net = sgd.step(RATE, self.net.clone(), of_sgd);
                self.net = adam.step(RATE, self.net.clone(), of_adam);
            }
            _ => unreachable!("a form has one kind of mean"),
        }
        Ok(())
    }

    /// Makes a step whose passes [`DataParallel::run`] and its like run.
    fn run(&self, program: &Program, step: usize, rank: usize) -> Result<Mean, Error> {
        let passes = program.passes[step][rank].iter().enumerate();
        let batches =
            passes.map(|(pass, (samples, weight))| (model::batch(program, (step, rank, pass), *samples), *weight));
        let fails = program.fault == Some(Fault::Closure) && step == 2 && rank == program.ranks - 1;
        let loss = |net: &Net, (batch, weight): ((Tensor<2>, bool), usize)| {
            let outputs = net.forward(program, vec![batch]).remove(0);
            let loss = model::loss(program, outputs, &self.net);
            if fails { Err("on purpose".into()) } else { Ok((loss, weight)) }
        };
        Ok(match &self.form {
            Form::Step(ddp, _) => Mean::Whole(ddp.try_run(&self.net, batches, loss)?),
            Form::Zero1(sgd, _) => Mean::Parts(sgd.try_run(&self.net, batches, loss)?),
            Form::Full(fsdp, _) => Mean::Parts(fsdp.try_run(&self.net, batches, loss)?),
            Form::Sync(..) => by_hand(program, slice::from_ref(self), step, rank)?.remove(0),
        })
    }
}

/// Shares parts between the optimizers of a model: those of `Sgd`, and those of `Adam`.
fn shared(program: &Program, net: &Net, parts: Parts) -> Result<(Parts, Parts), Error> {
    let parts = if program.has(Feature::ClipNorm) { parts.clip_norm(NORM)? } else { parts };
    let matrices = model::matrices(net);
    Ok(parts.split(|id| if program.has(Feature::TwoOptimizers) { matrices.contains(&id) } else { !program.adam }))
}

/// Makes a step of models whose passes the program runs: their losses are one, through all models in turn.
fn by_hand(program: &Program, trainings: &[Training], step: usize, rank: usize) -> Result<Vec<Mean>, Error> {
    let passes = &program.passes[step][rank];
    let total: usize = passes.iter().map(|(_, weight)| weight).sum();
    let mut sums: Vec<_> = trainings.iter().map(|_| GradientsParams::new()).collect();
    let mut means: Vec<Option<Mean>> = trainings.iter().map(|_| None).collect();
    let mut views = Vec::new();
    for (pass, (samples, weight)) in passes.iter().enumerate() {
        let is_last = pass + 1 == passes.len();
        let mut open = Vec::new();
        for training in trainings {
            open.push(training.open(*weight, is_last)?);
        }
        let (batch, optional) = model::batch(program, (step, rank, pass), *samples);
        let forward = || {
            let x =
                open.iter().fold(batch.clone(), |x, open| open.net().forward(program, vec![(x, optional)]).remove(0));
            model::loss(program, x, &trainings[trainings.len() - 1].net)
        };
        // Layers that communicate panic with an error, which it returns.
        let mut loss = attempt(forward)?;
        if program.fault == Some(Fault::SecondBackward) && step == 2 && rank == 0 && is_last {
            attempt(|| loss.backward())?;
            loss = attempt(forward)?;
        }
        views.push((loss, open, *weight as f64 / total as f64));
        // With full sharding one pass is open at a time; others keep the early ones open.
        let waits = program.has(Feature::TwoViews) && !is_last && !matches!(trainings[0].form, Form::Full(..));
        // The last pass begins when the early ones have ended.
        let next_is_last = pass + 2 == passes.len();
        if waits && !next_is_last {
            continue;
        }
        for (loss, open, share) in views.drain(..) {
            let mut gradients = attempt(|| loss.backward())?;
            for (number, open) in open.into_iter().enumerate() {
                let mean = trainings[number].close(open, &mut gradients, &mut sums[number], share)?;
                means[number] = means[number].take().or(mean);
            }
        }
    }
    if passes.is_empty() && trainings.len() > 1 && matches!(trainings[0].form, Form::Step(..) | Form::Zero1(..)) {
        // In the order of the other ranks.
        let open: Vec<_> = trainings.iter().map(|training| training.open(0, true)).collect::<Result<_, _>>()?;
        return open.into_iter().map(Open::skip).collect();
    }
    let ended = trainings.iter().zip(means).zip(sums);
    ended.map(|((training, mean), sum)| mean.map_or_else(|| training.end(program, step, rank, sum), Ok)).collect()
}

/// Returns the parameters of all models after the last step.
pub fn train(program: &Program, mode: Mode, group: &Group) -> Result<Vec<f64>, Error> {
    let rank = group.rank();
    let trainings = (0..program.models()).map(|number| Training::new(program, mode, number, group));
    let mut trainings = trainings.collect::<Result<Vec<_>, _>>()?;
    for step in 0..STEPS {
        for training in &mut trainings {
            training.net = training.net.clone().freeze(model::is_frozen(program, step, rank));
        }
        let means = match program.has(Feature::TwoInABackward) {
            true => by_hand(program, &trainings, step, rank)?,
            false => {
                let by_hand = |training: &Training| -> Result<Mean, Error> {
                    Ok(by_hand(program, slice::from_ref(training), step, rank)?.remove(0))
                };
                let run = |training: &Training| training.run(program, step, rank);
                let manual = program.has(Feature::Manual);
                trainings
                    .iter()
                    .map(|training| if manual { by_hand(training) } else { run(training) })
                    .collect::<Result<_, _>>()?
            }
        };
        for (training, mean) in trainings.iter_mut().zip(means) {
            training.update(program, mean)?;
        }
    }
    let whole = |training: &Training| match &training.form {
        Form::Full(fsdp, _) => fsdp.gather(&training.net),
        _ => Ok(training.net.clone()),
    };
    let nets = trainings.iter().map(whole).collect::<Result<Vec<_>, _>>()?;
    Ok(nets.iter().flat_map(model::floats).collect())
}
