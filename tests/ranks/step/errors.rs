//! Steps that go wrong on burn 0.21 alone: second backward passes, and ranks that are lost.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bonfire::{Error, TrainingState};
use bonfire_testing::{Kind, run_ranks};
use burn::backend::Flex;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::optim::SgdConfig;
use burn::tensor::TensorPrimitive;

use crate::burn_version::{DataParallel, Tensor};
use crate::shared::step::errors::{check_errors, errors};
use crate::shared::step::models::{Branches, values};

// Not shared: a backward pass uses up the `AutodiffTensor`s of its hooks in burn 0.22, and a second one panics.
#[test]
fn a_second_backward_pass_is_an_error_on_all_ranks() {
    let errors = errors(|ddp, model, rank| {
        let step = ddp.last_pass(model, 1)?;
        let mut grads = step.model().loss(values([1, 5], 1), false).backward();
        if rank == 1 {
            grads = step.model().loss(values([1, 5], 1), false).backward();
        }
        step.finish(&mut grads)
    });
    check_errors(&errors, "rank 1 has two gradients of `");
}

// Not shared: a backward pass uses up the `AutodiffTensor`s of its hooks in burn 0.22, and a second one panics.
#[test]
fn a_backward_pass_inside_the_closure_is_an_error_on_all_ranks() {
    let errors = errors(|ddp, model, rank| {
        ddp.run(model, [()], |model, ()| {
            if rank == 1 {
                drop(model.loss(values([1, 5], 2), true).backward());
            }
            (model.loss(values([1, 5], 1), false), 1)
        })
    });
    check_errors(&errors, "before the weight of its pass is known");
}

// Not shared: the package for burn 0.22 has no `TrainingState` and no `shrink`.
#[test]
fn a_rank_that_is_lost_during_the_backward_pass_is_a_typed_error_and_shrink_continues() {
    for kind in [Kind::Threads, Kind::Tcp] {
        run_ranks(kind, 3, |group| {
            let rank = group.rank();
            let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
            let mut state = TrainingState::new(model, SgdConfig::new().init(), 0.1, ());
            let mut made = 0;
            while made < 6 {
                let step = ddp.last_pass(&state.model, 1);
                let outcome = step.and_then(|step| {
                    let loss = step.model().loss(values([1, 5], made), false);
                    if rank == 1 && made == 3 {
                        return Ok(None);
                    }
                    step.finish(&mut loss.backward()).map(Some)
                });
                match outcome {
                    Ok(Some(grads)) => state.step(grads, 1),
                    // Leaves the group: its handles are dropped.
                    Ok(None) => return,
                    Err(
                        Error::PeerLost { .. } | Error::Left { .. } | Error::Disconnected { .. } | Error::Broken { .. },
                    ) => {
                        assert_eq!(made, 3, "only then was a rank lost");
                        ddp.shrink(&mut state).unwrap();
                        assert_eq!(ddp.group().world_size(), 2);
                    }
                    Err(error) => panic!("{error}"),
                }
                made = state.samples;
            }
        });
    }
}

/// A backward step that panics.
#[derive(Debug)]
struct Panics;

impl Backward<Flex, 1> for Panics {
    type State = ();

    fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {
        panic!("on purpose");
    }
}

/// Returns the loss, whose backward pass panics before it computes a gradient.
fn panicking(loss: Tensor<1>) -> Tensor<1> {
    let loss = loss.into_primitive().tensor();
    let loss = Panics.prepare::<NoCheckpointing>([loss.node]).compute_bound().stateless(loss.primitive);
    Tensor::from_primitive(TensorPrimitive::Float(loss))
}

// Not shared: `Backward` is for tensors of a backend, which burn 0.22 hides in `Dispatch`.
#[test]
fn a_backward_pass_that_panics_is_a_typed_error_on_the_other_ranks() {
    // The step outlives the panic, which its rank has caught.
    let caught = errors(|ddp, model, rank| {
        let step = ddp.last_pass(model, 1)?;
        let loss = step.model().loss(values([1, 5], 1), false);
        if rank == 1 {
            catch_unwind(AssertUnwindSafe(|| panicking(loss).backward())).map(drop).unwrap_err();
            drop(step);
            return ddp.skip(model);
        }
        step.finish(&mut loss.backward())
    });
    check_errors(&caught, "rank 1 has dropped its training step");

    // The panic ends the step and then the rank.
    for kind in [Kind::Threads, Kind::Tcp] {
        run_ranks(kind, 2, |group| {
            let rank = group.rank();
            let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                let step = ddp.last_pass(&model, 1).unwrap();
                let loss = step.model().loss(values([1, 5], 1), false);
                let loss = if rank == 1 { panicking(loss) } else { loss };
                step.finish(&mut loss.backward())
            }));
            match (rank, outcome) {
                (1, Err(panic)) => assert_eq!(panic.downcast_ref(), Some(&"on purpose")),
                (0, Ok(Err(Error::PeerLost { peer: 1, .. } | Error::Left { .. }))) => {
                    let mut state = TrainingState::new(model, SgdConfig::new().init(), 0.1, ());
                    ddp.shrink(&mut state).unwrap();
                    let step = ddp.last_pass(&state.model, 1).unwrap();
                    let mut grads = step.model().loss(values([1, 5], 1), false).backward();
                    step.finish(&mut grads).unwrap();
                }
                (rank, Ok(outcome)) => panic!("rank {rank}: {:?}", outcome.err()),
                (rank, Err(_)) => panic!("rank {rank} panicked"),
            }
        });
    }
}
