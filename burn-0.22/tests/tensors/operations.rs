//! Operations on tensors of burn 0.22 alone: what `tests/shared/tensors/operations.rs` cannot have.

use bonfire::Error;
use bonfire::tensor::operation::{recv, scatter};
use bonfire_testing::{Kind, run_ranks};
use burn::tensor::{BoolStore, DType, Float, Int};

use crate::burn_version::inner_device;

#[test]
fn tensors_that_a_device_or_the_group_lacks_are_typed_errors_before_anything_is_sent() {
    run_ranks(Kind::Threads, 2, |group| {
        let (rank, device) = (group.rank(), inner_device());
        let refused = |result: Result<(), Error>, words: &str| match result {
            Err(Error::InvalidArgument { reason, .. }) if reason.contains(words) => {}
            other => panic!("{other:?} does not mention '{words}'"),
        };
        let received = recv::<1, Float>([2], 1 - rank, (&device, DType::I32), &group);
        refused(received.map(drop), "cannot be sent as float tensors");
        let received = recv::<1, Int>([2], 1 - rank, (&device, DType::F32), &group);
        refused(received.map(drop), "cannot be sent as int tensors");
        // What the root has counts there, so that it alone would know.
        let scattered = scatter::<1, Float>(None, 1 - rank, 0, (&device, DType::Bool(BoolStore::Native)), &group);
        refused(scattered.map(drop), "Bool");
        assert!(!device.supports_dtype(DType::Flex32));
        refused(
            recv::<1, Float>([2], 1 - rank, (&device, DType::Flex32), &group).map(drop),
            "has no tensors of Flex32",
        );
        assert_eq!(group.trace().operations.len(), 0, "nothing was sent");
    });
}
