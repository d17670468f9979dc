//! Sharded optimizers on burn 0.21 alone: what `tests/shared/sharded.rs` cannot have.

mod checkpoints;

use bonfire::Sharding;
use bonfire_testing::ranks;
use burn::optim::AdamConfig;
use burn::tensor::DType;

use crate::burn_version::{Advance, DataParallel, ShardedOptimizer};
use crate::shared::sharded::{Odd, gradients};

/// Elements of the parameters of `Odd` that are trained.
const ELEMENTS: usize = 1 + 3 + 35 + 257 * 257 + 66;

// Not shared: `ShardedOptimizer` on burn 0.22 has no `state_bytes`.
#[test]
fn state_shrinks_by_the_number_of_ranks_in_a_block() {
    let state = |n, sharding| {
        ranks(n, |group| {
            let (mut model, ddp) = DataParallel::new(group, Odd::new(DType::F32)).unwrap();
            let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), sharding).unwrap();
            assert_eq!(optimizer.state_bytes().unwrap(), 0);
            let grads = gradients(&model, |_, _| Some(1.0));
            optimizer.advance(0.1, &mut model, grads, 1).unwrap();
            optimizer.state_bytes().unwrap()
        })
    };
    // Two moments in f32.
    let whole = 2 * 4 * ELEMENTS;
    assert_eq!(state(2, Sharding::None), [whole; 2]);
    for (n, sharding, parts, most) in [
        (4, Sharding::All, 4, 0.3),
        (4, Sharding::Blocks(2), 2, 0.55),
        (6, Sharding::Blocks(3), 3, 0.34),
        (3, Sharding::All, 3, 0.34),
    ] {
        let bytes = state(n, sharding);
        for block in bytes.chunks(parts) {
            assert_eq!(block.iter().sum::<usize>(), whole, "{n} ranks, {sharding:?}");
        }
        let largest = *bytes.iter().max().unwrap();
        assert!(largest as f64 <= most * whole as f64, "{n} ranks, {sharding:?}: {largest} bytes of {whole}");
        // Balanced to one element of each moment and bucket.
        assert!(largest - bytes.iter().min().unwrap() <= 2 * 4 * 2, "{n} ranks, {sharding:?}: {bytes:?}");
    }
}
