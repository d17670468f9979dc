//! An embedding whose table is freed after its run. Not shared: it looks into `DispatchTensor`, which only burn 0.22
//! has; `tests/ranks/fully_sharded/freed.rs` is that of burn 0.21.

use bonfire::train::embedding;
use bonfire::{FullyShardedParallel, Group, ShardedBlock};
use bonfire_testing::ranks;
use burn::backend::flex::FlexTensor;
use burn::backend::{AutodiffBackend, Dispatch, DispatchKindConversion, DispatchTensor, Flex};
use burn::module::{Module, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::burn_version::device;

const WIDTH: usize = 6;

fn values<const D: usize>(shape: [usize; D], seed: usize, device: &Device) -> Tensor<D> {
    let next = |i: usize| ((i + 1) * (2 * seed + 7919) % 2003) as f32 / 1001.5 - 1.0;
    let values: Vec<f32> = (0..shape.iter().product()).map(next).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

#[derive(Module, Debug)]
struct Words {
    table: ShardedBlock<Embedding>,
    head: ShardedBlock<Linear>,
}

/// Returns whether nothing else holds the table after its run, and the gradient of this rank's part of it.
fn embed(group: Group, as_burn: bool) -> (bool, TensorData) {
    let device = device();
    let mut table = EmbeddingConfig::new(10, WIDTH).init(&device);
    table.weight = Param::from_tensor(values([10, WIDTH], 3, &device));
    let mut head = LinearConfig::new(WIDTH, 2).with_bias(false).init(&device);
    head.weight = Param::from_tensor(values([WIDTH, 2], 5, &device));
    let id = table.weight.id;
    let words = Words { table: ShardedBlock::new(table), head: ShardedBlock::new(head) };
    let (model, fsdp) = FullyShardedParallel::new(group, words).unwrap();
    let step = fsdp.last_pass(&model, 1).unwrap();
    let mut held: Option<FlexTensor> = None;
    let x = step.model().table.run(|table| {
        let whole = Dispatch::inner(table.weight.val().into_dispatch());
        held =
            <DispatchTensor as DispatchKindConversion<Flex>>::try_into_backend(whole).ok().map(|whole| whole.float());
        let words = Tensor::<2, Int>::from_ints([[1, 7, 3], [1, 0, 9]], &device);
        if as_burn { table.forward(words) } else { embedding(table.weight.val(), words) }
    });
    let loss = step.model().head.run(|head| head.forward(x)).powf_scalar(2.0).mean();
    let is_freed = held.expect("it is on Flex").is_unique();
    let mut gradients = step.finish(&mut loss.backward()).unwrap().for_optimizer(&AdamConfig::new().init()).unwrap();
    (is_freed, gradients.remove::<2>(id).expect("it is trained").into_data())
}

#[test]
fn an_embedding_that_keeps_no_table_has_the_gradients_of_burns() {
    let [own, burn] = [false, true].map(|as_burn| ranks(2, |group| embed(group, as_burn)));
    for ((own_freed, own), (burn_freed, burn)) in own.into_iter().zip(burn) {
        assert!(own_freed && !burn_freed, "{own_freed}, {burn_freed}");
        assert_eq!(own, burn);
    }
}
