//! Last batches that are too small to give each rank a sample.

use super::*;

models! {
    /// A linear layer and a normalisation, which needs all ranks.
    struct Normed {
        linear: Linear,
        norm: SyncBatchNorm,
    }
}

/// The samples of the tests with few of them, and the size of their batches: the last batch has one sample.
const FEW: (usize, usize) = (61, 60);

/// Trains for an epoch. A rank does not run the model on an empty shard.
fn train_few(group: Group, tail: fn(ShardedSampler) -> ShardedSampler) -> Result<Vec<f64>, Error> {
    let device = device();
    let mut linear: Linear = LinearConfig::new(3, 2).with_bias(false).init(&device);
    linear.weight = Param::from_tensor(pattern::<2>(&[3, 2], 1));
    let norm = in_f64(SyncBatchNormConfig::new(2).init(&device));
    let (mut model, ddp) = DataParallel::new(group, Normed { linear, norm })?;
    let mut optimizer = SgdConfig::new().init();
    let samples = pattern::<2>(&[FEW.0, 3], 2);
    for shard in tail(ShardedSampler::new(ddp.group(), FEW.0, FEW.1)?).epoch(0).unwrap() {
        let mut grads = GradientsParams::new();
        if !shard.is_empty() {
            let rows =
                Tensor::from_data(TensorData::from(&shard.iter().map(|i| *i as i64).collect::<Vec<_>>()[..]), &device);
            let batch = samples.clone().select(0, rows);
            let gradients =
                attempt(|| model.norm.forward(model.linear.forward(batch)).powf_scalar(3.0).mean().backward())?;
            grads = GradientsParams::from_grads(gradients, &model);
        }
        let grads = ddp.sync(&model, grads, shard.len())?;
        model = optimizer.step(0.1, model, grads);
    }
    Ok(values(model.linear.weight.val()))
}

#[test]
fn a_padded_or_dropped_tail_leaves_no_rank_without_samples() {
    for tail in [ShardedSampler::pad, ShardedSampler::drop_last] {
        let train = move |group| train_few(group, tail).expect("no empty shard");
        let one = on_ranks(1, train).remove(0);
        for many in on_ranks(2, train) {
            assert_close(&many, &one, 1e-12);
        }
    }
}

#[test]
fn a_kept_tail_that_one_rank_skips_is_an_error_on_all() {
    for outcome in on_ranks(2, |group| train_few(group, |sampler| sampler)) {
        assert!(matches!(outcome, Err(Error::Mismatch { .. })), "{outcome:?}");
    }
}
