//! The model: a decoder-only transformer over bytes.

use bonfire::ShardedBlock;
use bonfire::train::embedding;
use burn::module::Module;
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderLayer};
use burn::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};

use crate::data::CONTEXT;

const BYTES: usize = 256;
const WIDTH: usize = 96;
const HEADS: usize = 4;
const BLOCKS: usize = 2;

/// Embeddings of bytes and positions, blocks of attention and feed-forward layers, and scores of the next byte. Without
/// dropout, so that the result does not depend on the number of ranks. With full sharding each block is gathered for
/// its passes; all else is gathered once in a step.
#[derive(Module, Debug)]
pub struct LanguageModel {
    bytes: Embedding,
    positions: Embedding,
    blocks: Vec<ShardedBlock<TransformerEncoderLayer>>,
    norm: LayerNorm,
    output: Linear,
}

impl LanguageModel {
    /// Creates a model with random weights.
    pub fn new(device: &Device) -> Self {
        let block =
            TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, HEADS, BLOCKS).with_dropout(0.0).with_norm_first(true);
        LanguageModel {
            bytes: EmbeddingConfig::new(BYTES, WIDTH).init(device),
            positions: EmbeddingConfig::new(CONTEXT, WIDTH).init(device),
            blocks: (0..BLOCKS).map(|_| ShardedBlock::new(TransformerEncoderLayer::new(&block, device))).collect(),
            norm: LayerNormConfig::new(WIDTH).init(device),
            output: LinearConfig::new(WIDTH, BYTES).init(device),
        }
    }

    /// Scores of the next byte, `[n, len, 256]`, after each byte of sequences `[n, len]` of at most [`CONTEXT`] bytes.
    pub fn forward(&self, input: Tensor<2, Int>) -> Tensor<3> {
        let ([n, len], device) = (input.dims(), input.device());
        let positions = Tensor::<1, Int>::arange(0..len as i64, &device).reshape([1, len]).expand([n, len]);
        let mut x = embedding(self.bytes.weight.val(), input) + embedding(self.positions.weight.val(), positions);
        for block in &self.blocks {
            x = block.run(|block| block.forward(x, None, Some(generate_autoregressive_mask(n, len, &device))));
        }
        self.output.forward(self.norm.forward(x))
    }

    /// The mean loss per byte, in nats, if `targets` follow the bytes of `input`.
    pub fn loss(&self, input: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let scores = self.forward(input);
        let [n, len, classes] = scores.dims();
        let criterion = CrossEntropyLossConfig::new().init(&scores.device());
        criterion.forward(scores.reshape([n * len, classes]), targets.reshape([n * len]))
    }
}
