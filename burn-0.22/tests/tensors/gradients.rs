//! Gradients through collectives of burn 0.22 alone: what `tests/shared/tensors/gradients.rs` cannot have.

use bonfire::Error;
use bonfire::tensor::autodiff::*;
use bonfire_testing::{Kind, run_ranks};
use burn::tensor::Tensor;

use crate::burn_version::{device, inner_device};
use crate::tensors::gradients::{each_element_type_on, loss, read, tensor, values};

// Not shared: on burn 0.22 checkpointing is a setting of `Device`, and on 0.21 a parameter of the type `Autodiff`.
#[test]
fn checkpointing_gets_the_gradient_of_all_losses_in_each_element_type() {
    each_element_type_on(|| device().gradient_checkpointing());
}

// Not shared: `Autodiff` of burn 0.21 needs a collective between two backward passes of ranks that are threads.
#[test]
fn backward_passes_may_follow_each_other_without_a_collective_between_them() {
    for _ in 0..200 {
        run_ranks(Kind::Threads, 3, |group| {
            let leaf = || tensor(&values(group.rank(), [1, 2, 2]), [1, 2, 2]).require_grad();
            let (one, two) = (leaf(), leaf());
            let losses = [&one, &two].map(|x| loss(all_reduce_sum(x.clone(), &group).unwrap(), group.rank()));
            let [first, second] = losses.map(|loss| loss.backward());
            assert_eq!(read(one.grad(&first).expect("tracked")), read(two.grad(&second).expect("tracked")));
        });
    }
}

// Not shared: on burn 0.21 a tensor without autodiff has another type, `Tensor<Flex, D>`.
#[test]
fn tensors_on_a_device_without_autodiff_are_refused_on_all_ranks() {
    run_ranks(Kind::Threads, 2, |group| {
        let refused = |result: Result<Tensor<2>, Error>| {
            let Err(Error::InvalidArgument { reason, .. }) = result else { panic!("it was not refused") };
            assert!(reason.contains("`tensor::operation`") && reason.contains("`device.autodiff()`"), "{reason}");
        };
        let x = || Tensor::<2>::ones([2, 2], &inner_device());
        refused(all_reduce_sum(x(), &group));
        refused(broadcast(x(), 0, &group));
        refused(all_gather(x(), 0, &group));
        refused(all_gather_v(x(), 0, None, &group));
        refused(reduce_scatter(x(), 0, &group));
        refused(reduce_scatter_v(x(), 0, &[1, 1], &group));
        refused(all_to_all(x(), 0, &group));
        refused(all_to_all_v(x(), 0, &[1, 1], None, &group));
        assert_eq!(group.trace().operations.len(), 0, "nothing was sent");
        assert!(matches!(all_gather(x().autodiff(), 2, &group), Err(Error::InvalidArgument { .. })));
        assert!(matches!(broadcast(x().autodiff(), 2, &group), Err(Error::InvalidArgument { .. })));
    });
}
