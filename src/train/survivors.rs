//! Training that goes on without ranks that were lost.

use burn::module::AutodiffModule;
use burn::optim::Optimizer;
use burn::record::{BinBytesRecorder, DoublePrecisionSettings, Recorder};
use burn::tensor::backend::AutodiffBackend;

use super::agree::{broadcast_value, tell_all};
use super::data_parallel::{DataParallel, trained};
use bonfire_core::Error;

/// Floats are recorded as f64 and integers as i64, so all narrower types come back as they were.
type Records = BinBytesRecorder<DoublePrecisionSettings>;

/// A model and its optimizer, recorded.
type Recorded = (Vec<u8>, Vec<u8>);

impl<B: AutodiffBackend> DataParallel<B> {
    /// Goes on without ranks that were lost: makes the group of those that are left ([`Group::shrink`](crate::Group::shrink)),
    /// and gives all of them the same model and optimizer. Ranks may have failed in the same call of [`sync`](Self::sync)
    /// or in two that follow each other, so some may be one step ahead. The others then take over the model, the optimizer
    /// and the ids of parameters of the lowest of those. States that ranks keep for themselves are
    /// averaged ([`average_states`](Self::average_states)). Ranks that are lost meanwhile are left behind too.
    ///
    /// Call it on every rank that is left, with the model and the optimizer to which the gradients of each `sync` were
    /// applied before anything else was done. [`steps`](Self::steps) says where in the data all of them are then. What
    /// else holds the old group must be made again: samplers, and layers such as
    /// [`SyncBatchNorm`](crate::SyncBatchNorm), by loading the model's record into a model for the new group.
    ///
    /// ```
    /// # use bonfire::{DataParallel, Error, Group, ShardedSampler};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::{Linear, LinearConfig};
    /// # use burn::optim::{GradientsParams, Optimizer, SgdConfig};
    /// # use burn::tensor::Tensor;
    /// # type B = Autodiff<Flex>;
    /// # let device = Default::default();
    /// # let group = Group::threads(1)?.remove(0);
    /// let (mut model, mut ddp) = DataParallel::new(group, LinearConfig::new(2, 1).init::<B>(&device))?;
    /// let mut optimizer = SgdConfig::new().init();
    /// 'training: loop {
    ///     // Batches are the same for any number of ranks, so those that were trained on can be passed over.
    ///     let sampler = ShardedSampler::new(ddp.group(), 100, 16)?;
    ///     for shard in sampler.epoch(0).skip(ddp.steps() as usize) {
    ///         let loss = model.forward(Tensor::<B, 2>::ones([shard.len(), 2], &device)).mean();
    ///         let grads = GradientsParams::from_grads(loss.backward(), &model);
    ///         match ddp.sync(grads, shard.len()) {
    ///             Ok(grads) => model = optimizer.step(0.1, model, grads),
    ///             Err(Error::PeerLost { .. }) => {
    ///                 ddp.shrink(&mut model, &mut optimizer)?;
    ///                 continue 'training;
    ///             }
    ///             Err(error) => return Err(error),
    ///         }
    ///     }
    ///     break;
    /// }
    /// # assert_eq!(ddp.steps(), 7);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Group::shrink`](crate::Group::shrink); [`Error::Io`] on all ranks where a model cannot be recorded, on one
    /// where it cannot be loaded; else the errors of [`Group::all_reduce`](crate::Group::all_reduce). Model and optimizer stay
    /// as they were then, or are a step further.
    pub fn shrink<M, O>(&mut self, model: &mut M, optimizer: &mut O) -> Result<(), Error>
    where
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        loop {
            self.group = self.group.shrink()?;
            // It is of the old group's segment.
            self.memory.clear();
            let whole = self.catch_up(model, optimizer).and_then(|()| {
                // A pass that failed may have moved some ranks' running states and not others'.
                *model = self.average_states(model.clone())?;
                Ok(())
            });
            match whole {
                Err(Error::PeerLost { .. } | Error::Left { .. }) => {}
                result => return result,
            }
        }
    }

    /// Brings ranks that are a step behind to where the others are.
    fn catch_up<M, O>(&mut self, model: &mut M, optimizer: &mut O) -> Result<(), Error>
    where
        M: AutodiffModule<B>,
        O: Optimizer<M, B>,
    {
        let steps = tell_all(&self.group, [self.steps])?;
        let [most] = steps.iter().copied().max().unwrap_or([self.steps]);
        let leader = steps.iter().position(|steps| *steps == [most]).unwrap_or(0);
        if steps.iter().all(|steps| *steps == [most]) {
            return Ok(());
        }
        let failed = |e: &dyn std::fmt::Display| Error::broken("handing over the model", e);
        let own: Result<Recorded, String> = if self.group.rank() == leader {
            record::<B, M, O>(model, optimizer).map_err(|e| e.to_string())
        } else {
            Ok(Default::default())
        };
        let theirs: Result<Recorded, String> = broadcast_value(&self.group, &own, leader)?;
        let (theirs, its_optimizer) = theirs.map_err(|e| failed(&e))?;
        if self.steps == most {
            return Ok(());
        }
        let Some(device) = model.devices().first().cloned() else { return Ok(()) };
        let theirs = Recorder::<B>::load(&Records::default(), theirs, &device).map_err(|e| failed(&e))?;
        let its_optimizer = Recorder::<B>::load(&Records::default(), its_optimizer, &device).map_err(|e| failed(&e))?;
        *model = model.clone().load_record(theirs);
        *optimizer = optimizer.clone().load_record(its_optimizer);
        self.parameters = trained(model).1;
        self.steps = most;
        Ok(())
    }
}

fn record<B, M, O>(model: &M, optimizer: &O) -> Result<Recorded, burn::record::RecorderError>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
    O: Optimizer<M, B>,
{
    let model = Recorder::<B>::record(&Records::default(), model.clone().into_record(), ())?;
    Ok((model, Recorder::<B>::record(&Records::default(), optimizer.to_record(), ())?))
}

// burn's feature `distributed` takes autodiff from the backends on the host.
#[cfg(all(test, not(feature = "ddp")))]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::module::Param;
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{AdamConfig, GradientsParams};
    use burn::tensor::{Tensor, TensorData, Tolerance};

    use super::*;
    use crate::ShardedSampler;
    use bonfire_core::Group;

    type Training = Autodiff<Flex>;

    /// A step on a part of a batch of `size`, the same for any number of ranks.
    fn step<O: Optimizer<Linear<Training>, Training>>(
        ddp: &mut DataParallel<Training>,
        model: &mut Linear<Training>,
        optimizer: &mut O,
        shard: &[usize],
    ) -> Result<(), Error> {
        let device = Default::default();
        let rows: Vec<f32> = shard.iter().flat_map(|i| [*i as f32, (i % 7) as f32, 1.0]).collect();
        let input = Tensor::<Training, 2>::from_data(TensorData::new(rows, [shard.len(), 3]), &device);
        let loss = model.forward(input).powf_scalar(2.0).mean();
        let grads = GradientsParams::from_grads(loss.backward(), model);
        let grads = ddp.sync(grads, shard.len())?;
        *model = optimizer.step(0.01, model.clone(), grads);
        Ok(())
    }

    fn values(model: &Linear<Training>) -> (TensorData, TensorData) {
        (model.weight.to_data(), model.bias.as_ref().expect("a bias").to_data())
    }

    fn on_ranks<T: Send + 'static>(n: usize, rank: impl Fn(Group) -> T + Clone + Send + 'static) -> Vec<T> {
        let threads = Group::threads(n).unwrap().into_iter().map(|group| {
            let rank = rank.clone();
            std::thread::spawn(move || rank(group))
        });
        threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    #[test]
    fn who_is_a_step_behind_takes_over_model_optimizer_and_ids() {
        let results = on_ranks(3, |group| {
            let (device, rank) = (Default::default(), group.rank());
            let (mut model, mut ddp) =
                DataParallel::new(group.clone(), LinearConfig::new(3, 2).init::<Training>(&device)).unwrap();
            let mut optimizer = AdamConfig::new().init();
            for i in 0..3 {
                step(&mut ddp, &mut model, &mut optimizer, &[rank + i, rank + 2 * i]).unwrap();
            }
            // What a rank is left with whose last exchange failed when the others' was through.
            let behind = (model.clone(), optimizer.clone());
            step(&mut ddp, &mut model, &mut optimizer, &[rank + 5]).unwrap();
            let ahead = values(&model);
            if rank != 1 {
                (model, optimizer) = behind;
                ddp.steps -= 1;
            }
            let id = model.weight.id;
            ddp.shrink(&mut model, &mut optimizer).unwrap();
            assert_eq!((values(&model), ddp.steps()), (ahead, 4));
            assert_eq!(model.weight.id == id, rank == 1);
            // The optimizer's moments are the same, too.
            step(&mut ddp, &mut model, &mut optimizer, &[rank + 7]).unwrap();
            values(&model)
        });
        assert!(results.iter().all(|result| *result == results[0]));
    }

    #[test]
    fn survivors_train_on_as_if_nobody_had_been_lost() {
        const BATCHES: u64 = 12;
        let train = |group: Group, dies: Option<usize>| {
            let (device, identity) = (Default::default(), group.rank());
            let mut model = LinearConfig::new(3, 2).with_bias(false).init::<Training>(&device);
            model.weight = Param::from_data(TensorData::new(vec![0.1f32, 0.2, -0.3, 0.4, -0.5, 0.6], [3, 2]), &device);
            let (mut model, mut ddp) = DataParallel::new(group, model).unwrap();
            let mut optimizer = AdamConfig::new().init();
            while ddp.steps() < BATCHES {
                if ddp.steps() == 5 && dies == Some(identity) {
                    return None;
                }
                let sampler = ShardedSampler::new(ddp.group(), 16 * BATCHES as usize, 16).unwrap();
                let shard = sampler.epoch(0).nth(ddp.steps() as usize).unwrap();
                match step(&mut ddp, &mut model, &mut optimizer, &shard) {
                    Err(Error::Left { .. }) => ddp.shrink(&mut model, &mut optimizer).unwrap(),
                    result => result.unwrap(),
                }
            }
            Some(model.weight.to_data())
        };
        let whole = on_ranks(1, move |group| train(group, None)).remove(0).unwrap();
        for dies in 0..3 {
            let results = on_ranks(3, move |group| train(group, Some(dies)));
            let survivors: Vec<_> = results.into_iter().flatten().collect();
            assert_eq!((survivors.len(), &survivors[0]), (2, &survivors[1]));
            survivors[0].assert_approx_eq::<f32>(&whole, Tolerance::absolute(1e-4));
        }
    }
}
