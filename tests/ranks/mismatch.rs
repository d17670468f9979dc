//! Mismatches of operations on tensors.

use bonfire::tensor::operation::all_gather;

use crate::burn_version::{Inner, inner_device};
use crate::shared::mismatch::mismatch;

// Not shared: operations on tensors, which the package for burn 0.22 lacks.
#[test]
fn a_mismatch_says_that_only_shapes_differ() {
    let message = mismatch(|group| {
        let shape = if group.rank() == 0 { [2, 3] } else { [3, 2] };
        all_gather(Inner::<2>::ones(shape, &inner_device()), 0, &group).map(drop)
    });
    assert!(message.contains("which differ in the shape of their tensors"), "{message}");
}
