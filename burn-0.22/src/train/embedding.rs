//! Embeddings that keep no table for the backward pass.

use burn::tensor::{Int, Tensor};

/// Returns the rows of an embedding's table that the indices name, as burn's `Embedding::forward` does. burn's keeps
/// the table until the backward pass, this does not: use it for an embedding in a
/// [`ShardedBlock`](crate::ShardedBlock), whose table is then freed after its run and not gathered again.
///
/// # Shapes
/// - `table`: `[embeddings, width]`
/// - `indices`: `[batch, length]`
/// - output: `[batch, length, width]`
///
/// ```
/// use bonfire::ShardedBlock;
/// use bonfire::train::embedding;
/// use burn::nn::{Embedding, EmbeddingConfig};
/// use burn::tensor::{Device, Int, Tensor};
///
/// let device = Device::flex();
/// let tokens: ShardedBlock<Embedding> = ShardedBlock::new(EmbeddingConfig::new(10, 4).init(&device));
/// let words = Tensor::<2, Int>::from_ints([[1, 7, 3]], &device);
/// let vectors = tokens.run(|tokens| embedding(tokens.weight.val(), words));
/// assert_eq!(vectors.dims(), [1, 3, 4]);
/// ```
pub fn embedding(table: Tensor<2>, indices: Tensor<2, Int>) -> Tensor<3> {
    let ([batch, length], [_, width]) = (indices.dims(), table.dims());
    table.select(0, indices.reshape([batch * length])).reshape([batch, length, width])
}
