//! Mismatches are described by the functions that the user called.

use bonfire::tensor::operation::all_gather;
use bonfire::{Error, Group};
use bonfire_testing::ranks;
use burn::nn::LinearConfig;
use burn::optim::GradientsParams;

use crate::burn_version::*;

/// Returns the message of a mismatch, which is the same on both ranks.
fn mismatch(call: impl Fn(Group) -> Result<(), Error> + Sync) -> String {
    let results = ranks(2, call);
    assert!(matches!(&results[0], Err(Error::Mismatch { .. })) && results[0] == results[1], "{results:?}");
    results[0].as_ref().unwrap_err().to_string()
}

#[test]
fn a_mismatch_names_the_functions_that_were_called() {
    let message = mismatch(|group| {
        let model: Linear = LinearConfig::new(2, 1).init(&device());
        let (model, ddp) = DataParallel::new(group, model)?;
        if ddp.group().rank() == 0 {
            let loss = model.forward(Tensor::<2>::ones([3, 2], &device())).mean();
            ddp.sync(&model, GradientsParams::from_grads(loss.backward(), &model), 3).map(drop)
        } else {
            ddp.mean(&[0.5], 3).map(drop)
        }
    });
    let calls = "rank 0 called sync's all_gather(u64 x 38), rank 1 called mean's all_reduce(f64 x 2, sum);";
    assert!(message.contains(calls), "{message}");
}

#[test]
fn a_mismatch_says_that_only_shapes_differ() {
    let message = mismatch(|group| {
        let shape = if group.rank() == 0 { [2, 3] } else { [3, 2] };
        all_gather(Inner::<2>::ones(shape, &inner_device()), 0, &group).map(drop)
    });
    assert!(message.contains("which differ in the shape of their tensors"), "{message}");
}
