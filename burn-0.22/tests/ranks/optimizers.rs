//! Optimizers of burn 0.22: several groups of parameters, and the size of a sharded state.

use bonfire::{DataParallel, ShardedOptimizer, Sharding};
use bonfire_testing::ranks;
use burn::grad_clipping::GradientClipping;
use burn::module::ParamGroup;
use burn::nn::LinearConfig;
use burn::optim::{AdamConfig, SgdConfig};
use burn::tensor::{DType, Tensor};

use crate::burn_version::device;
use crate::shared::sharded::check_all_forms;

#[test]
fn groups_of_parameters_have_optimizers_of_their_own() {
    check_all_forms(DType::F64, || {
        let of_matrix = ParamGroup::from_predicate("matrix");
        AdamConfig::new().init().with_group(of_matrix, SgdConfig::new().build(), Some(GradientClipping::Value(0.1)))
    });
}

#[test]
fn the_state_of_a_block_is_that_of_one_optimizer() {
    // Two moments in f32, for a matrix of 3 x 5 and a vector of 5.
    let whole = 2 * 4 * (3 * 5 + 5);
    for (n, sharding, blocks) in [(1, Sharding::All, 1), (3, Sharding::All, 1), (4, Sharding::Blocks(2), 2)] {
        let bytes = ranks(n, |group| {
            let (mut net, ddp) = DataParallel::new(group, LinearConfig::new(3, 5).init(&device())).unwrap();
            let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), sharding).unwrap();
            assert_eq!(optimizer.state_bytes().unwrap(), 0);
            let input = Tensor::<2>::ones([2, 3], &device());
            let parts = optimizer.run(&net, [input], |net, input| (net.forward(input).mean(), 2)).unwrap();
            optimizer.step(0.1, &mut net, parts).unwrap();
            optimizer.state_bytes().unwrap()
        });
        assert_eq!(bytes.iter().sum::<usize>(), blocks * whole, "{bytes:?}");
        assert!(bytes.iter().all(|own| *own <= whole * blocks / n + 4 * 2 * 4), "{bytes:?}");
    }
}
