//! Steps that go wrong: typed errors on all ranks, and no rank that waits for another inside its backward pass.

use std::sync::{Mutex, mpsc};

use bonfire::{Error, TrainingState};

use super::*;

#[test]
fn joining_ranks_whose_layers_communicate_is_a_typed_error() {
    let errors = ranks(2, |group| {
        let (device, rank) = (Default::default(), group.rank());
        let model = SyncBatchNormConfig::new(3).init::<Training>(&group, &device);
        let (model, mut ddp) = DataParallel::new(group, model).unwrap();
        for number in 0..=rank {
            let Ok(step) = ddp.step(&model, 2) else { break };
            let loss =
                attempt(|| step.model().forward(values([2, 3], rank + number)).powf_scalar(2.0).mean().backward());
            match loss.and_then(|grads| step.finish(grads)) {
                Ok(_) => {}
                Err(error) => return error,
            }
        }
        ddp.join(&model).and_then(|_| ddp.join(&model)).map(|_| ()).unwrap_err()
    });
    for error in errors {
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}

/// Runs one step on two ranks and returns their errors.
fn errors(
    step: impl Fn(&mut DataParallel<Training>, &Branches<Training>, usize) -> Result<GradientsParams, Error> + Sync,
) -> Vec<Error> {
    ranks(2, |group| {
        let rank = group.rank();
        let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
        let error = step(&mut ddp, &model, rank).err().unwrap();
        if matches!(error, Error::InvalidArgument { .. }) {
            // The group is usable.
            let good = ddp.step(&model, 1).unwrap();
            let grads = good.model().loss(values([1, 5], 1), false).backward();
            good.finish(grads).unwrap();
        }
        error
    })
}

fn check_errors(errors: &[Error], text: &str) {
    for error in errors {
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn gradients_that_never_arrive_are_an_error_on_all_ranks() {
    // A fork has leaves of its own.
    let forked = errors(|ddp, model, rank| {
        let step = ddp.step(model, 1)?;
        let fork = step.model().clone().fork(&Default::default());
        let used = if rank == 1 { &fork } else { step.model() };
        let grads = used.loss(values([1, 5], 1).require_grad(), false).backward();
        step.finish(grads)
    });
    check_errors(&forked, "rank 1 has samples, and no gradient has arrived");
    let no_backward = errors(|ddp, model, _| ddp.step(model, 1)?.skip());
    check_errors(&no_backward, "rank 0 has samples, and no gradient has arrived");
}

#[test]
fn a_second_backward_pass_is_an_error_on_all_ranks() {
    let errors = errors(|ddp, model, rank| {
        let step = ddp.step(model, 1)?;
        let mut grads = step.model().loss(values([1, 5], 1), false).backward();
        if rank == 1 {
            grads = step.model().loss(values([1, 5], 1), false).backward();
        }
        step.finish(grads)
    });
    check_errors(&errors, "rank 1 has two gradients of `");
}

#[test]
fn a_step_that_is_dropped_fails_on_all_ranks() {
    let errors = errors(|ddp, model, rank| {
        let step = ddp.step(model, 1)?;
        if rank == 1 {
            drop(step);
            return ddp.step(model, 1)?.skip();
        }
        let grads = step.model().loss(values([1, 5], 1), false).backward();
        step.finish(grads)
    });
    check_errors(&errors, "rank 1 has dropped its training step");
}

#[test]
fn different_settings_and_sync_on_one_rank_are_errors_on_all_ranks() {
    let sizes = errors(|ddp, model, rank| {
        ddp.set_bucket_bytes(1000 + rank);
        let step = ddp.step(model, 1)?;
        let grads = step.model().loss(values([1, 5], 1), false).backward();
        let outcome = step.finish(grads);
        ddp.set_bucket_bytes(1000);
        outcome
    });
    check_errors(&sizes, "rank 0's buckets have 1000 bytes and rank 1's 1001 bytes");
    let no_samples = errors(|ddp, model, _| ddp.step(model, 0)?.skip());
    check_errors(&no_samples, "no rank has any samples");
}

#[test]
fn a_backward_pass_ends_although_the_other_rank_has_not_begun_its_step() {
    let (told, heard) = mpsc::channel();
    let heard = Mutex::new(heard);
    ranks(2, |group| {
        let rank = group.rank();
        let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
        // The first step makes the group of the gradients, for which the ranks wait for each other.
        for round in 0..2 {
            if round == 1 && rank == 1 {
                heard.lock().unwrap().recv_timeout(Duration::from_secs(20)).expect("rank 0's backward pass has ended");
                // burn-autodiff takes the locks of all graphs of the process at the end of this.
                values([3], 1).require_grad().sum().backward();
            }
            let step = ddp.step(&model, 1).unwrap();
            let grads = step.model().loss(values([1, 5], 1), false).backward();
            if round == 1 && rank == 0 {
                told.send(()).unwrap();
            }
            step.finish(grads).unwrap();
        }
    });
}

#[test]
fn a_rank_that_is_lost_during_the_backward_pass_is_a_typed_error_and_shrink_continues() {
    for kind in [Kind::Threads, Kind::Tcp] {
        run_ranks(kind, 3, |group| {
            let rank = group.rank();
            let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
            let mut state = TrainingState::new(model, SgdConfig::new().init(), 0.1, ());
            let mut made = 0;
            while made < 6 {
                let step = ddp.step(&state.model, 1);
                let outcome = step.and_then(|step| {
                    let loss = step.model().loss(values([1, 5], made), false);
                    if rank == 1 && made == 3 {
                        return Ok(None);
                    }
                    step.finish(loss.backward()).map(Some)
                });
                match outcome {
                    Ok(Some(grads)) => state.step(grads),
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
                made = state.batch;
            }
        });
    }
}
