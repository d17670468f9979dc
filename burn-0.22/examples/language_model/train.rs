//! The training loop.

use std::io::{self, Write};
use std::time::Instant;

use bonfire::train::seeded;
use bonfire::{Checkpoints, Group, ShardedSampler, partition};
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::module::Module;
use burn::optim::AdamConfig;
use burn::tensor::activation::softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::command::{Args, Failure};
use crate::data::{CONTEXT, Text, bytes, sequences};
use crate::form::{Form, State};
use crate::model::LanguageModel;
use crate::writing::{peak_memory, report, write_text};

/// Trains on `device` as one rank of `group`. `alone` says whether all ranks are threads of this process.
pub fn run(group: &Group, args: &Args, text: &Text, device: &Device, alone: bool) -> Result<(), Failure> {
    let model = seeded(group, args.seed, device, || LanguageModel::new(device))?;
    let (model, mut form) = Form::new(group, args.shard, args.mesh, model)?;
    let schedule = ExponentialLrSchedulerConfig::new(3e-3, 0.998).init()?;
    let mut state = State::new(model, AdamConfig::new().init(), schedule, (args.batch.into(), args.seed));
    resume(group, args, &mut state, &mut form)?;
    let mut checkpoints = args.save.as_ref().map(|folder| Checkpoints::new(group, folder)).transpose()?;
    let batch_size = args.batch as usize;
    let sampler = ShardedSampler::new(group, sequences(&text.train), batch_size)?.seed(args.seed).drop_last();
    let (batches, start) = (sampler.batches(), Instant::now());
    let first = state.epoch * batches + state.samples / batch_size;
    let mut shards = sampler.epoch(state.epoch)?.after(state.samples);
    let mut stop = false;
    for step in first..args.steps {
        if shards.len() == 0 {
            state.next_epoch();
            shards = sampler.epoch(state.epoch)?;
        }
        let shard = shards.next().ok_or("the text is too short")?;
        let loss = form.step(&mut state, tensors(&text.train, &shard, device), shard.len(), batch_size)?;
        stop = checkpoints.is_some() && form.should_stop();
        let last = stop || step + 1 == args.steps;
        let is_due = |every: usize| last || (step + 1).is_multiple_of(every);
        if let Some(checkpoints) = checkpoints.as_mut().filter(|_| is_due(args.save_every as usize)) {
            form.save_in_background(&state, checkpoints)?;
        }
        if group.rank() == 0 && is_due((args.steps / 10).max(1)) {
            let trained = (step + 1 - first) * batch_size * CONTEXT;
            let rate = trained as f64 / start.elapsed().as_secs_f64();
            writeln!(io::stdout(), "step {}/{}: loss {loss:.4}, {rate:.0} tokens/s", step + 1, args.steps)?;
        }
        if stop {
            break;
        }
    }
    if let Some(checkpoints) = &mut checkpoints {
        checkpoints.wait()?;
    }
    if stop {
        if group.rank() == 0 {
            writeln!(io::stdout(), "stopped, and saved: go on with --resume")?;
        }
        return Ok(());
    }
    let (model, device) = (form.whole(&state)?.valid(), device.clone().inner());
    let loss_per_byte = test(group, &form, &model, &text.test, batch_size)?;
    let mut peaks = vec![peak_memory(); group.world_size()];
    group.all_gather(&mut peaks)?;
    if group.rank() == 0 {
        if args.sample > 0 {
            let written = write_text(args.sample, args.seed, |text| chances(&model, text, &device));
            writeln!(io::stdout(), "{}", String::from_utf8_lossy(&written))?;
        }
        report(&peaks, alone, loss_per_byte)?;
    }
    Ok(())
}

/// Goes on from the newest checkpoint.
fn resume(group: &Group, args: &Args, state: &mut State, form: &mut Form) -> Result<(), Failure> {
    let Some(folder) = &args.resume else { return Ok(()) };
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
fn test(group: &Group, form: &Form, model: &LanguageModel, text: &[u8], batch: usize) -> Result<f64, Failure> {
    let share: Vec<usize> = partition(sequences(text), group.world_size(), group.rank()).collect();
    let device = model.devices().first().cloned().unwrap_or_default();
    let mut total = 0.0;
    for chosen in share.chunks(batch) {
        let [input, targets] = tensors(text, chosen, &device);
        total += f64::from(model.loss(input, targets).into_scalar::<f32>()) * chosen.len() as f64;
    }
    Ok(form.mean(total / share.len().max(1) as f64, share.len())?)
}

/// Returns the chances of each byte after some text.
fn chances(model: &LanguageModel, text: Vec<i64>, device: &Device) -> Vec<f64> {
    let len = text.len();
    let scores = model.forward(Tensor::<2, Int>::from_data(TensorData::new(text, [1, len]), device));
    let last = scores.slice([0..1, len - 1..len]).flatten::<1>(0, 2);
    softmax(last / 0.8, 0).into_data().iter::<f64>().collect()
}

/// Returns the chosen sequences and, for each of their bytes, the next one: `[n, CONTEXT]` both.
fn tensors(text: &[u8], chosen: &[usize], device: &Device) -> [Tensor<2, Int>; 2] {
    let tensor = |offset: usize| {
        Tensor::from_data(TensorData::new(bytes(text, chosen, offset), [chosen.len(), CONTEXT]), device)
    };
    [tensor(0), tensor(1)]
}
