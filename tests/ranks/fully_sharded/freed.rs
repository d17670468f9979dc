//! What a block has gathered is freed after its run, and what burn keeps of it.
//!
//! Not shared: burn 0.22 hides the `FlexTensor` of a tensor in `Dispatch`.

use bonfire::train::embedding;
use bonfire::{FullyShardedParallel, ShardedBlock};
use bonfire_testing::ranks;
use burn::backend::Autodiff;
use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn::backend::flex::FlexTensor;
use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

const WIDTH: usize = 8;

#[derive(Module, Debug)]
struct Kinds<B: Backend> {
    table: ShardedBlock<Embedding<B>>,
    linear: ShardedBlock<Linear<B>>,
    attention: ShardedBlock<MultiHeadAttention<B>>,
    convolution: ShardedBlock<Conv2d<B>>,
    norm: ShardedBlock<LayerNorm<B>>,
    other: ShardedBlock<Linear<B>>,
}

/// Returns whether nothing else holds the value of each weight: those of the layers in their order, and of a weight
/// that is transposed.
fn freed<C: CheckpointStrategy>(embed_as_burn: bool) -> Vec<bool> {
    ranks(2, |group| {
        let device = Default::default();
        let model = Kinds::<Autodiff<Flex, C>> {
            table: ShardedBlock::new(EmbeddingConfig::new(10, WIDTH).init(&device)),
            linear: ShardedBlock::new(LinearConfig::new(WIDTH, WIDTH).init(&device)),
            attention: ShardedBlock::new(MultiHeadAttentionConfig::new(WIDTH, 2).init(&device)),
            convolution: ShardedBlock::new(Conv2dConfig::new([1, 1], [1, 1]).init(&device)),
            norm: ShardedBlock::new(LayerNormConfig::new(WIDTH).init(&device)),
            other: ShardedBlock::new(LinearConfig::new(WIDTH, WIDTH).init(&device)),
        };
        let (model, fsdp) = FullyShardedParallel::new(group, model).unwrap();
        let step = fsdp.last_pass(&model, 1).unwrap();
        let model = step.model();
        let mut held: Vec<FlexTensor> = Vec::new();
        let mut hold = |weight: Tensor<Autodiff<Flex, C>, 2>| held.push(weight.into_primitive().tensor().primitive);
        let words = Tensor::<Autodiff<Flex, C>, 2, Int>::from_ints([[1, 7, 3]], &device);
        let x = model.table.run(|table| {
            hold(table.weight.val());
            if embed_as_burn { table.forward(words) } else { embedding(table.weight.val(), words) }
        });
        let x = model.linear.run(|linear| {
            hold(linear.weight.val());
            linear.forward(x)
        });
        let x = model.attention.run(|attention| {
            hold(attention.query.weight.val());
            hold(attention.output.weight.val());
            attention.forward(MhaInput::self_attn(x)).context
        });
        let [batch, length, width] = x.dims();
        let x = model.convolution.run(|convolution| {
            hold(convolution.weight.val().reshape([1, 1]));
            convolution.forward(x.reshape([batch, 1, length, width]))
        });
        let x = model.norm.run(|norm| norm.forward(x.reshape([batch * length, width])));
        let x = model.other.run(|other| {
            hold(other.weight.val());
            x.matmul(other.weight.val().transpose())
        });
        // The convolution's was reshaped to be held here, which makes a tensor of its own where it is kept.
        let freed = held.iter().map(FlexTensor::is_unique).collect();
        let mut grads = x.powf_scalar(2.0).mean().backward();
        assert!(held.iter().all(FlexTensor::is_unique), "after the backward pass");
        drop(step.finish(&mut grads).unwrap());
        freed
    })
    .remove(0)
}

#[test]
fn the_parameters_of_a_block_are_freed_after_its_run() {
    // All but a weight that is transposed.
    assert_eq!(
        freed::<burn::backend::autodiff::checkpoint::strategy::NoCheckpointing>(false),
        [true, true, true, true, true, false]
    );
    assert_eq!(freed::<BalancedCheckpointing>(false), [true; 6]);
    // burn's embedding keeps its table in any case.
    assert_eq!(freed::<BalancedCheckpointing>(true), [false, true, true, true, true, true]);
}
