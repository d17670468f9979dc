//! A rank that is lost in its backward pass, on burn 0.21 alone.

use bonfire_testing::Kind;
use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::tensor::{DType, TensorPrimitive};

use crate::burn_version::Tensor;
use crate::shared::fully_sharded::WIDTH;
use crate::shared::fully_sharded::errors::{check, errors, is_lost_in_the_middle};
use crate::shared::fully_sharded::models::values;

/// A backward step that panics.
#[derive(Debug)]
struct Panics;

impl Backward<Flex, 1> for Panics {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {
        panic!("on purpose");
    }
}

fn panicking(x: Tensor<2>) -> Tensor<2> {
    let x = x.into_primitive().tensor();
    let x = Panics.prepare::<NoCheckpointing>([x.node]).compute_bound().stateless(x.primitive);
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

// Not shared: `Backward` is for tensors of a backend, which burn 0.22 hides in `Dispatch`.
#[test]
fn a_rank_that_is_lost_in_its_backward_pass_is_named_on_all_others() {
    for kind in [Kind::Threads, Kind::Tcp, Kind::Shm] {
        is_lost_in_the_middle(kind, panicking);
    }
}

// Not shared: a backward pass uses up the `AutodiffTensor`s of its hooks in burn 0.22, and a second one panics.
#[test]
fn a_second_backward_pass_is_an_error_on_all_ranks() {
    check(
        errors(2, |fsdp, model, _| {
            let step = fsdp.last_pass(model, 1)?;
            step.model().loss(1).backward();
            let mut grads = step.model().loss(2).backward();
            step.finish(&mut grads)
        }),
        "rank 0 has two gradients of `",
    );
    check(
        errors(2, |fsdp, model, _| {
            let step = fsdp.last_pass(model, 1)?;
            let x = || values([3, WIDTH], 1, DType::F32);
            step.model().layers[0].run(|layer| layer.forward(x())).sum().backward();
            let mut grads = step.model().layers[1].run(|layer| layer.forward(x())).sum().backward();
            step.finish(&mut grads)
        }),
        "rank 0 has two gradients of `layers.1.",
    );
}
