//! The training loop.

use std::io::{self, Write};
use std::path::Path;
use std::time::Instant;

use bonfire::train::seeded;
use bonfire::{Checkpoints, Group, ShardedSampler, partition};
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::module::AutodiffModule;
use burn::optim::AdamConfig;
use burn::tensor::activation::softmax;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{ElementConversion, Int, Tensor, TensorData};

use crate::command::{Failure, Shard};
use crate::data::{CONTEXT, Text, bytes, sequences};
use crate::form::{Form, State};
use crate::model::LanguageModel;
use crate::writing::{peak_memory, report, write_text};

/// Settings that a resumed run must have in common with the saved run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    pub batch: usize,
    pub seed: u64,
}

/// A training job, the same on all ranks.
pub struct TrainingJob<'a> {
    pub text: Text,
    pub settings: Settings,
    pub steps: usize,
    pub shard: Shard,
    /// The number of replicas, and of ranks that shard each.
    pub mesh: Option<[usize; 2]>,
    pub save: Option<&'a Path>,
    /// Steps between two checkpoints.
    pub save_every: usize,
    pub resume: Option<&'a Path>,
    /// The number of bytes to write after the training.
    pub sample: usize,
    /// Whether rank 0 prints.
    pub report: bool,
    /// Whether all ranks are threads of this process.
    pub alone: bool,
}

/// The results of a training.
#[derive(Default)]
pub struct Outcome {
    /// The mean loss of every step of this run.
    pub losses: Vec<f64>,
    /// The loss per byte of the part of the text that was not trained on.
    pub loss_per_byte: f64,
}

impl TrainingJob<'_> {
    /// Trains on `device` as one rank of `group`. Returns the whole trained model, too.
    pub fn run<B: AutodiffBackend>(
        &self,
        group: Group,
        device: &B::Device,
    ) -> Result<(Outcome, LanguageModel<B::InnerBackend>), Failure> {
        let model = seeded(&group, self.settings.seed, device, || LanguageModel::<B>::new(device))?;
        let (model, mut form) = Form::new(&group, self.shard, self.mesh, model)?;
        let schedule = ExponentialLrSchedulerConfig::new(3e-3, 0.998).init()?;
        let settings = (self.settings.batch as u64, self.settings.seed);
        let mut state = State::new(model, AdamConfig::new().init(), schedule, settings);
        self.resume(&group, &mut state, &mut form)?;
        let mut outcome = Outcome::default();
        let mut checkpoints = self.save.map(|folder| Checkpoints::new(&group, folder)).transpose()?;
        let sampler = ShardedSampler::new(&group, sequences(&self.text.train), self.settings.batch)?;
        let sampler = sampler.seed(self.settings.seed).drop_last();
        let (batches, start) = (sampler.batches(), Instant::now());
        let batch = self.settings.batch;
        let first = state.epoch * batches + state.samples / batch;
        let mut shards = sampler.epoch(state.epoch)?.after(state.samples);
        let mut stop = false;
        for step in first..self.steps {
            if shards.len() == 0 {
                state.next_epoch();
                shards = sampler.epoch(state.epoch)?;
            }
            let shard = shards.next().ok_or("the text is too short")?;
            let loss = form.step(&mut state, tensors(&self.text.train, &shard, device), shard.len(), batch)?;
            outcome.losses.push(loss);
            stop = checkpoints.is_some() && form.should_stop();
            let last = stop || step + 1 == self.steps;
            if let Some(checkpoints) =
                checkpoints.as_mut().filter(|_| last || (step + 1).is_multiple_of(self.save_every))
            {
                form.save_in_background(&state, checkpoints)?;
            }
            if self.report && group.rank() == 0 && (last || (step + 1).is_multiple_of((self.steps / 10).max(1))) {
                let trained = (step + 1 - first) * batch * CONTEXT;
                let rate = trained as f64 / start.elapsed().as_secs_f64();
                writeln!(io::stdout(), "step {}/{}: loss {loss:.4}, {rate:.0} tokens/s", step + 1, self.steps)?;
            }
            if stop {
                break;
            }
        }
        if let Some(checkpoints) = &mut checkpoints {
            checkpoints.wait()?;
        }
        let model = form.whole(&state)?.valid();
        if stop {
            if self.report && group.rank() == 0 {
                writeln!(io::stdout(), "stopped, and saved: go on with --resume")?;
            }
            return Ok((outcome, model));
        }
        outcome.loss_per_byte = self.test(&group, &form, &model, device)?;
        self.report(&group, &model, &outcome, device)?;
        Ok((outcome, model))
    }

    /// Goes on from the newest checkpoint.
    fn resume<B: AutodiffBackend>(
        &self,
        group: &Group,
        state: &mut State<B>,
        form: &mut Form<B>,
    ) -> Result<(), Failure> {
        let Some(folder) = self.resume else { return Ok(()) };
        let own = state.user;
        if !form.load(state, &mut Checkpoints::read_only(group, folder)?)? {
            return Err(format!("there is no checkpoint in {}", folder.display()).into());
        }
        let (batch, seed) = state.user;
        if state.user != own {
            let folder = folder.display();
            return Err(format!("{folder} was made with --batch {batch} --seed {seed}: give the same").into());
        }
        Ok(())
    }

    /// Returns the loss per byte of the text that was not trained on. Each rank evaluates its share.
    fn test<B: AutodiffBackend>(
        &self,
        group: &Group,
        form: &Form<B>,
        model: &LanguageModel<B::InnerBackend>,
        device: &B::Device,
    ) -> Result<f64, Failure> {
        let text = &self.text.test;
        let share: Vec<usize> = partition(sequences(text), group.world_size(), group.rank()).collect();
        let mut total = 0.0;
        for chosen in share.chunks(self.settings.batch) {
            let [input, targets] = tensors(text, chosen, device);
            let loss: f64 = model.loss(input, targets).into_scalar().elem();
            total += loss * chosen.len() as f64;
        }
        Ok(form.mean(total / share.len().max(1) as f64, share.len())?)
    }

    /// Prints the sample, the peak memory of each rank, and the loss.
    fn report<B: Backend>(
        &self,
        group: &Group,
        model: &LanguageModel<B>,
        outcome: &Outcome,
        device: &B::Device,
    ) -> Result<(), Failure> {
        let mut peaks = vec![peak_memory(); group.world_size()];
        group.all_gather(&mut peaks)?;
        if !self.report || group.rank() != 0 {
            return Ok(());
        }
        if self.sample > 0 {
            let text = write_text(self.sample, self.settings.seed, |text| chances(model, text, device));
            writeln!(io::stdout(), "{}", String::from_utf8_lossy(&text))?;
        }
        report(&peaks, self.alone, outcome.loss_per_byte)?;
        Ok(())
    }
}

/// Returns the chances of each byte after some text.
fn chances<B: Backend>(model: &LanguageModel<B>, text: Vec<i64>, device: &B::Device) -> Vec<f64> {
    let len = text.len();
    let scores = model.forward(Tensor::<B, 2, Int>::from_data(TensorData::new(text, [1, len]), device));
    let last = scores.slice([0..1, len - 1..len]).flatten::<1>(0, 2);
    softmax(last / 0.8, 0).into_data().iter::<f64>().collect()
}

/// Returns the chosen sequences and, for each of their bytes, the next one: `[n, CONTEXT]` both.
fn tensors<B: Backend>(text: &[u8], chosen: &[usize], device: &B::Device) -> [Tensor<B, 2, Int>; 2] {
    let tensor = |offset: usize| {
        Tensor::from_data(TensorData::new(bytes(text, chosen, offset), [chosen.len(), CONTEXT]), device)
    };
    [tensor(0), tensor(1)]
}
