//! The training loop.

use std::fs;
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

use crate::Failure;
use crate::data::{Text, sequences, tensors};
use crate::form::{Form, Shard, State};
use crate::model::{CONTEXT, LanguageModel};

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
        let first = state.epoch * batches + state.batch;
        for step in first..self.steps {
            if state.batch == batches {
                state.next_epoch();
            }
            // An epoch is shuffled in a millisecond.
            let shard = sampler.epoch(state.epoch).nth(state.batch).ok_or("the text is too short")?;
            let loss = form.step(&mut state, tensors(&self.text.train, &shard, device), shard.len())?;
            outcome.losses.push(loss);
            let last = step + 1 == self.steps;
            if let Some(checkpoints) =
                checkpoints.as_mut().filter(|_| last || (step + 1).is_multiple_of(self.save_every))
            {
                form.save_in_background(&state, checkpoints)?;
            }
            if self.report && group.rank() == 0 && (last || (step + 1).is_multiple_of((self.steps / 10).max(1))) {
                let bytes = (step + 1 - first) * self.settings.batch * CONTEXT;
                let rate = bytes as f64 / start.elapsed().as_secs_f64();
                writeln!(io::stdout(), "step {}/{}: loss {loss:.4}, {rate:.0} tokens/s", step + 1, self.steps)?;
            }
        }
        if let Some(checkpoints) = &mut checkpoints {
            checkpoints.wait()?;
        }
        let model = form.whole(&state)?.valid();
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
        if !form.load(state, &mut Checkpoints::new(group, folder)?)? {
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
        let mut out = io::stdout();
        if self.sample > 0 {
            writeln!(out, "{}", String::from_utf8_lossy(&sample(model, self.sample, self.settings.seed, device)))?;
        }
        match self.alone {
            true => writeln!(out, "peak memory of the process with all ranks: {} MiB", peaks[0] >> 20)?,
            false => {
                for (rank, peak) in peaks.iter().enumerate() {
                    writeln!(out, "peak memory of rank {rank}: {} MiB", peak >> 20)?;
                }
            }
        }
        writeln!(out, "loss per byte: {:.4}", outcome.loss_per_byte)?;
        Ok(())
    }
}

/// Writes `len` bytes that the model finds likely.
fn sample<B: Backend>(model: &LanguageModel<B>, len: usize, seed: u64, device: &B::Device) -> Vec<u8> {
    let (mut text, mut random) = (b"\n".to_vec(), seed);
    for _ in 0..len {
        let input: Vec<i64> = text.iter().skip(text.len().saturating_sub(CONTEXT)).map(|b| i64::from(*b)).collect();
        let context = input.len();
        let scores = model.forward(Tensor::<B, 2, Int>::from_data(TensorData::new(input, [1, context]), device));
        let last = scores.slice([0..1, context - 1..context]).flatten::<1>(0, 2);
        let chances: Vec<f64> = softmax(last / 0.8, 0).into_data().iter::<f64>().collect();
        let mut left = uniform(&mut random);
        let byte = chances.iter().position(|chance| {
            left -= chance;
            left < 0.0
        });
        text.push(byte.unwrap_or(0) as u8);
    }
    text.split_off(1)
}

/// Returns a number from 0 to 1 (Steele, Lea and Flood's SplitMix64).
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9), (27, 0x94d0_49bb_1331_11eb)] {
        mixed = (mixed ^ mixed >> shift).wrapping_mul(factor);
    }
    ((mixed ^ mixed >> 31) >> 11) as f64 / (1u64 << 53) as f64
}

/// Returns the most memory that this process had, in bytes, or 0 where the system does not tell.
fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next()?.parse().ok());
    peak.map_or(0, |kib: u64| kib << 10)
}
