//! `SyncBatchNorm` on burn 0.22: what burn's layer computes with the global batch.

use bonfire::tensor::autodiff::attempt;
use bonfire::{DataParallel, Error, SyncBatchNorm, SyncBatchNormConfig};
use bonfire_testing::ranks;
use burn::module::{Module, Param};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor, TensorData};

const CHANNELS: usize = 3;

fn device() -> Device {
    Device::flex().autodiff()
}

/// Of the global batch: rows, channels, and a dimension behind them.
fn batch(rows: std::ops::Range<usize>) -> Tensor<3> {
    let value = |i: usize| ((i + 1) * 7919 % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..12 * CHANNELS * 2).map(value).collect();
    Tensor::<3>::from_data(TensorData::new(values, [12, CHANNELS, 2]), &device()).slice([rows, 0..CHANNELS, 0..2])
}

fn loss(output: Tensor<3>) -> Tensor<1> {
    (output.clone().powf_scalar(3.0) + output).mean()
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

fn assert_near(own: &[f32], expected: &[f32], what: &str) {
    assert_eq!(own.len(), expected.len());
    let worst = own.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-5, "{what}: {own:?} instead of {expected:?}");
}

/// A layer before the one that communicates, which gets its gradient through the statistics.
fn before() -> Linear {
    let mut linear = LinearConfig::new(2, 2).init(&device());
    linear.weight = Param::from_tensor(Tensor::from_floats([[0.7, -0.4], [0.2, 1.1]], &device()));
    linear.bias = Some(Param::from_tensor(Tensor::from_floats([0.3, -0.2], &device())));
    linear
}

#[derive(Module, Debug)]
struct Net {
    before: Linear,
    norm: SyncBatchNorm,
}

/// Gradients of scale and offset and of the layer before, running mean and variance, and the output of inference.
fn of_burn() -> [Vec<f32>; 6] {
    let (norm, before): (BatchNorm, _) = (BatchNormConfig::new(CHANNELS).init(&device()), before());
    let gradients = loss(norm.forward(before.forward(batch(0..12)))).backward();
    let own = [&norm.gamma, &norm.beta].map(|param| floats(param.val().grad(&gradients).expect("it is trained")));
    let valid = norm.valid();
    let output = floats(valid.forward(batch(0..4).inner()));
    let [gamma, beta] = own;
    let of_before = floats(before.weight.val().grad(&gradients).expect("it is trained"));
    [gamma, beta, of_before, floats(valid.running_mean.value()), floats(valid.running_var.value()), output]
}

#[test]
fn shards_of_any_size_are_normalised_as_one_batch() {
    // Where the rows of each rank end.
    for ends in [vec![12], vec![6, 12], vec![2, 5, 12], vec![3, 4, 12]] {
        let own = ranks(ends.len(), |group| {
            let rows = if group.rank() == 0 { 0 } else { ends[group.rank() - 1] }..ends[group.rank()];
            let norm = SyncBatchNormConfig::new(CHANNELS).init(&group, &device());
            let (net, ddp) = DataParallel::new(group, Net { before: before(), norm }).unwrap();
            let weight = rows.len();
            let pass = |net: &Net, x| (loss(net.norm.forward(net.before.forward(x))), weight);
            let mut mean = ddp.run(&net, [batch(rows)], pass).unwrap();
            let of_before = floats(mean.remove::<2>(net.before.weight.id).unwrap());
            let scales = [&net.norm.gamma, &net.norm.beta];
            let [gamma, beta] = scales.map(|param| floats(mean.remove::<1>(param.id).unwrap()));
            let valid = net.norm.valid();
            let output = floats(valid.forward(batch(0..4).inner()));
            [gamma, beta, of_before, floats(valid.running_mean.value()), floats(valid.running_var.value()), output]
        });
        let names = ["scale", "offset", "layer before", "running mean", "running variance", "inference"];
        for (rank, own) in own.iter().enumerate() {
            for ((own, expected), name) in own.iter().zip(of_burn()).zip(names) {
                assert_near(own, &expected, &format!("{ends:?}, rank {rank}, {name}"));
            }
        }
        assert!(own.iter().all(|other| *other == own[0]), "the ranks differ");
    }
}

#[test]
fn passes_of_threads_wait_for_each_other_where_layers_communicate() {
    let norms = ranks(3, |group| {
        let layer = SyncBatchNormConfig::new(CHANNELS).init(&group, &device());
        let (norm, ddp) = DataParallel::new(group.clone(), layer).unwrap();
        let shard = |pass: usize| batch(4 * group.rank() + 2 * pass..4 * group.rank() + 2 * pass + 2);
        let mut norms = Vec::new();
        for _ in 0..20 {
            let mut mean = ddp.run(&norm, [0, 1], |norm, pass| (loss(norm.forward(shard(pass))), 2)).unwrap();
            norms.push(floats(mean.remove::<1>(norm.gamma.id).unwrap()));
        }
        norms
    });
    assert!(norms.iter().flatten().all(|own| *own == norms[0][0]), "{norms:?}");
}

#[test]
fn a_rank_that_does_not_run_the_layer_is_an_error_on_all() {
    let errors = ranks(2, |group| {
        let layer = SyncBatchNormConfig::new(CHANNELS).init(&group, &device());
        let (norm, ddp) = DataParallel::new(group.clone(), layer).unwrap();
        let batches = (group.rank() == 0).then(|| batch(0..4));
        ddp.run(&norm, batches, |norm, x| (loss(norm.forward(x)), 4)).unwrap_err()
    });
    assert!(errors.iter().all(|error| matches!(error, Error::Mismatch { .. })), "{errors:?}");
}

#[test]
fn without_a_group_a_layer_is_for_inference() {
    let norm = SyncBatchNormConfig::new(CHANNELS).init_inference(&device());
    let error = attempt(|| norm.forward(batch(0..4))).unwrap_err();
    assert!(error.to_string().contains("a layer for inference cannot train"), "{error}");
    let output = norm.valid().forward(batch(0..4).inner());
    assert_near(&floats(output), &floats(batch(0..4)), "it has mean 0 and variance 1");
    // A frozen layer uses the running statistics, as burn's does.
    let output = norm.freeze().forward(batch(0..4));
    assert_near(&floats(output), &floats(batch(0..4)), "frozen");
}

#[test]
fn a_step_outside_of_passes_weighs_by_rows_and_a_rank_without_any_takes_part() {
    let own = ranks(3, |group| {
        let layer = SyncBatchNormConfig::new(CHANNELS).init(&group, &device());
        let (norm, ddp) = DataParallel::new(group.clone(), layer).unwrap();
        let rows = [0..8, 8..8, 8..12][group.rank()].clone();
        let weight = rows.len();
        let gradients = loss(norm.forward(batch(rows))).backward();
        let mut mean = ddp.sync(&norm, GradientsParams::from_grads(gradients, &norm), weight).unwrap();
        floats(mean.remove::<1>(norm.gamma.id).unwrap())
    });
    let norm: BatchNorm = BatchNormConfig::new(CHANNELS).init(&device());
    let gradients = loss(norm.forward(batch(0..12))).backward();
    assert_near(&own[0], &floats(norm.gamma.val().grad(&gradients).expect("it is trained")), "scale");
    assert!(own.iter().all(|other| *other == own[0]), "the ranks differ");
}
