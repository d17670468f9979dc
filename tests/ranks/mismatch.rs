//! Mismatches are described by the functions that the user called.

use bonfire::tensor::operation::all_gather;
use bonfire::{DataParallel, Error, Group};
use bonfire_testing::ranks;
use burn::backend::{Autodiff, Flex};
use burn::nn::LinearConfig;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

/// Returns the message of the mismatch, which is the same on both ranks.
fn mismatch(call: impl Fn(Group) -> Result<(), Error> + Sync) -> String {
    let results = ranks(2, call);
    assert!(matches!(&results[0], Err(Error::Mismatch { .. })) && results[0] == results[1], "{results:?}");
    results[0].as_ref().unwrap_err().to_string()
}

#[test]
fn a_mismatch_names_the_functions_that_were_called() {
    let message = mismatch(|group| {
        let (model, ddp) =
            DataParallel::new(group, LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&Default::default()))?;
        if ddp.group().rank() == 0 {
            let loss = model.forward(Tensor::<_, 2>::ones([3, 2], &Default::default())).mean();
            ddp.sync(&model, GradientsParams::from_grads(loss.backward(), &model), 3).map(drop)
        } else {
            ddp.mean(&[0.5], 3).map(drop)
        }
    });
    let calls = "rank 0 called sync's all_gather(u64 x 30), rank 1 called mean's all_reduce(f64 x 2, sum);";
    assert!(message.contains(calls), "{message}");
}

#[test]
fn a_mismatch_says_that_only_shapes_differ() {
    let message = mismatch(|group| {
        let shape = if group.rank() == 0 { [2, 3] } else { [3, 2] };
        all_gather(Tensor::<Flex, 2>::ones(shape, &Default::default()), 0, &group).map(drop)
    });
    assert!(message.contains("which differ in the shape of their tensors"), "{message}");
}
