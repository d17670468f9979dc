//! Steps that go wrong: typed errors on all ranks, and no rank that waits for another inside its backward pass.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, mpsc};

use bonfire::{Error, SyncBatchNormConfig};

use super::models::BUCKET;
use super::*;

#[test]
fn joining_ranks_whose_layers_communicate_is_a_typed_error() {
    let errors = ranks(2, |group| {
        let rank = group.rank();
        let model = SyncBatchNormConfig::new(3).init(&device());
        let (model, ddp) = DataParallel::new(group, model).unwrap();
        for number in 0..=rank {
            let Ok(step) = ddp.last_pass(&model, 2) else { break };
            let loss =
                attempt(|| step.model().forward(values([2, 3], rank + number)).powf_scalar(2.0).mean().backward());
            match loss.and_then(|mut grads| step.finish(&mut grads)) {
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
pub fn errors(
    step: impl Fn(&mut DataParallel, &Branches, usize) -> Result<GradientsParams, Error> + Sync,
) -> Vec<Error> {
    ranks(2, |group| {
        let rank = group.rank();
        let (model, mut ddp) = DataParallel::new(group, Branches::new()).unwrap();
        let error = step(&mut ddp, &model, rank).err().unwrap();
        if matches!(error, Error::InvalidArgument { .. }) {
            // The group is usable.
            let good = ddp.last_pass(&model, 1).unwrap();
            let mut grads = good.model().loss(values([1, 5], 1), false).backward();
            good.finish(&mut grads).unwrap();
        }
        error
    })
}

pub fn check_errors(errors: &[Error], text: &str) {
    for error in errors {
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn a_panic_that_the_program_catches_is_named_on_all_ranks() {
    let errors = errors(|ddp, model, rank| {
        let backward = |step: &LastPass<Branches>| step.model().loss(values([1, 5], 1), false).backward();
        if rank == 1 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                let step = ddp.last_pass(model, 1).unwrap();
                let _grads = backward(&step);
                panic!("the program's own");
            }));
            assert!(caught.is_err());
        }
        let step = ddp.last_pass(model, 1)?;
        let mut grads = backward(&step);
        step.finish(&mut grads)
    });
    check_errors(&errors, "rank 1 has panicked in a training step before `finish`, and its program goes on");
}

/// A rank that leaves out a step with `continue` makes the next one with the others, which are a step ahead.
#[test]
fn a_mismatch_says_where_in_the_training_each_rank_is() {
    let lines = Mutex::new([0; 2]);
    let errors = ranks(2, |group| {
        let rank = group.rank();
        let at = |line| lines.lock().unwrap()[rank] = line;
        let (model, ddp) = DataParallel::new(group, Branches::new()).unwrap();
        let run = |batch| {
            at(line!() + 1);
            ddp.run(&model, [batch], |model, batch| (model.loss(values([1, 5], batch), false), 1)).err()
        };
        let error = (0..6).filter(|batch| (rank, *batch) != (1, 2)).find_map(run);
        error.unwrap_or_else(|| {
            at(line!() + 1);
            ddp.mean(&[1.0], 1).unwrap_err()
        })
    });
    let [run, mean] = lines.into_inner().unwrap().map(|line| format!("{}:{line}", file!()));
    for error in errors {
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        let error = error.to_string();
        for expected in [
            format!("DataParallel::run at {run}, after 5 training steps"),
            format!("DataParallel::mean at {mean}, after 5 training steps"),
            "a rank without samples for a step calls `skip`".into(),
        ] {
            assert!(error.contains(&expected), "{expected}: {error}");
        }
    }
}

#[test]
fn gradients_that_never_arrive_are_an_error_on_all_ranks() {
    // A fork has leaves of its own.
    let forked = errors(|ddp, model, rank| {
        let step = ddp.last_pass(model, 1)?;
        let fork = step.model().clone().fork(&device());
        let used = if rank == 1 { &fork } else { step.model() };
        let mut grads = used.loss(values([1, 5], 1).require_grad(), false).backward();
        step.finish(&mut grads)
    });
    check_errors(&forked, "rank 1 has samples, and no gradient has arrived");
    let no_backward = errors(|ddp, model, _| {
        let pass = ddp.last_pass(model, 1)?;
        pass.finish(&mut values([1], 1).require_grad().backward())
    });
    check_errors(&no_backward, "rank 0 has samples, and no gradient has arrived");
}

#[test]
fn a_step_that_is_dropped_fails_on_all_ranks() {
    let errors = errors(|ddp, model, rank| {
        let step = ddp.last_pass(model, 1)?;
        if rank == 1 {
            drop(step);
            return ddp.skip(model);
        }
        let mut grads = step.model().loss(values([1, 5], 1), false).backward();
        step.finish(&mut grads)
    });
    check_errors(&errors, "rank 1 has dropped its training step");
}

#[test]
fn different_settings_and_sync_on_one_rank_are_errors_on_all_ranks() {
    let sizes = errors(|ddp, model, rank| {
        ddp.set_bucket_bytes(1000 + rank);
        let step = ddp.last_pass(model, 1)?;
        let mut grads = step.model().loss(values([1, 5], 1), false).backward();
        let outcome = step.finish(&mut grads);
        ddp.set_bucket_bytes(1000);
        outcome
    });
    check_errors(&sizes, "rank 0's buckets have 1000 bytes and rank 1's 1001 bytes");
    let later = errors(|ddp, model, rank| {
        let step =
            |ddp: &DataParallel| ddp.run(model, [1], |model, batch| (model.loss(values([1, 5], batch), false), 1));
        step(ddp)?;
        ddp.set_bucket_bytes(1000 + rank);
        let outcome = step(ddp);
        ddp.set_bucket_bytes(1000);
        outcome
    });
    check_errors(&later, "rank 0's buckets have 1000 bytes and rank 1's 1001 bytes");
    let no_samples = errors(|ddp, model, _| ddp.skip(model));
    check_errors(&no_samples, "no rank has any samples");
}

#[test]
fn a_backward_pass_ends_although_the_other_rank_has_not_begun_its_step() {
    let (told, heard) = mpsc::channel();
    let heard = Mutex::new(heard);
    ranks(2, |group| {
        let rank = group.rank();
        let (model, ddp) = DataParallel::new(group, Branches::new()).unwrap();
        // The first step makes the group of the gradients, for which the ranks wait for each other.
        for round in 0..2 {
            if round == 1 && rank == 1 {
                heard.lock().unwrap().recv_timeout(Duration::from_secs(20)).expect("rank 0's backward pass has ended");
                // burn-autodiff takes the locks of all graphs of the process at the end of this.
                values([3], 1).require_grad().sum().backward();
            }
            let step = ddp.last_pass(&model, 1).unwrap();
            let mut grads = step.model().loss(values([1, 5], 1), false).backward();
            if round == 1 && rank == 0 {
                told.send(()).unwrap();
            }
            step.finish(&mut grads).unwrap();
        }
    });
}

#[test]
fn nan_and_infinity_reach_all_ranks_alike() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    // The gradient of a weight is the input of its row.
    let inputs = [[inf, 1.0, inf, 1.0], [2.0, nan, -inf, 2.0], [3.0, 3.0, 3.0, 3.0]];
    for kind in KINDS {
        // Equal weights, and others.
        for samples in [[2, 2, 2], [1, 2, 5]] {
            let results = run_ranks(kind, 3, move |group| {
                let rank = group.rank();
                let model: Linear = LinearConfig::new(4, 2).with_bias(false).init(&device());
                let (model, mut ddp) = DataParallel::new(group, model).unwrap();
                ddp.set_bucket_bytes(BUCKET);
                let input = Tensor::<2>::from_data([inputs[rank]], &device());
                let loss = |model: &Linear| model.forward(input.clone());
                // The ranks compare their parameters, which stay as they are.
                let mut bits = Vec::new();
                for overlapped in [true, true, false] {
                    let grads = if overlapped {
                        let step = ddp.last_pass(&model, samples[rank]).unwrap();
                        let mut grads = loss(step.model()).sum().backward();
                        step.finish(&mut grads).unwrap()
                    } else {
                        let grads = GradientsParams::from_grads(loss(&model).sum().backward(), &model);
                        ddp.sync(&model, grads, samples[rank]).unwrap()
                    };
                    let weight = gradient::<2>(&grads, model.weight.id).unwrap().into_data();
                    bits.push(weight.iter::<f32>().map(f32::to_bits).collect::<Vec<_>>());
                }
                bits
            });
            let of_rank_0 = &results[0][0];
            assert!(results.iter().flatten().all(|bits| bits == of_rank_0), "{kind:?}: {results:?}");
            let values: Vec<_> = of_rank_0.iter().copied().map(f32::from_bits).collect();
            assert_eq!(values[..2], [inf; 2]);
            assert!(values[2..6].iter().all(|value| value.is_nan()), "{values:?}");
            let mean = if samples == [2; 3] { 2.0 } else { 2.5 };
            assert!(values[6..].iter().all(|value| (value - mean).abs() < 1e-6), "{values:?}");
        }
    }
}

#[test]
fn a_model_without_parameters_is_an_error_on_all_ranks() {
    for error in ranks(2, |group| {
        let (model, ddp) = DataParallel::new(group.clone(), Vec::<Linear>::new()).unwrap();
        let step = ddp.last_pass(&model, 1).unwrap();
        assert!(step.model().is_empty());
        let error = step.finish(&mut values([3], 1).require_grad().sum().backward()).unwrap_err();
        group.barrier().unwrap();
        error
    }) {
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        check_errors(&[error], "the model has no parameters to train");
    }
}

#[test]
fn a_rank_that_takes_no_step_is_named_at_the_deadline() {
    // In the first step the ranks make the group of the gradients.
    for steps in [0, 2] {
        let (told, heard) = mpsc::channel();
        let heard = Mutex::new(heard);
        let groups = Group::builder().deadline(Duration::from_secs(5)).threads(2).unwrap();
        thread::scope(|scope| {
            for group in groups {
                let (told, heard) = (told.clone(), &heard);
                scope.spawn(move || {
                    let rank = group.rank();
                    let (model, ddp) = DataParallel::new(group, Branches::new()).unwrap();
                    let step = || {
                        let step = ddp.last_pass(&model, 1)?;
                        let mut grads = step.model().loss(values([1, 5], 1), false).backward();
                        step.finish(&mut grads)
                    };
                    (0..steps).for_each(|_| drop(step().unwrap()));
                    if rank == 1 {
                        heard.lock().unwrap().recv_timeout(Duration::from_secs(60)).expect("rank 0 has failed");
                    }
                    let error = step().unwrap_err();
                    println!("rank {rank} after {steps} steps: {error}");
                    assert!(matches!(&error, Error::Timeout { rank: 0, missing, .. } if missing == &[1]), "{error}");
                    if rank == 0 {
                        told.send(()).unwrap();
                    }
                });
            }
        });
    }
}

#[test]
fn a_step_that_is_refused_after_others_leaves_the_group_usable() {
    ranks(2, |group| {
        let rank = group.rank();
        let (model, ddp) = DataParallel::new(group, Branches::new()).unwrap();
        let step = |model: &Branches| {
            ddp.run(model, [()], |model, ()| (model.loss(values([1, 5], 1), false), 1)).map(|gradients| gradients.len())
        };
        // The ranks then know the order of gradients.
        (0..3).for_each(|_| assert_eq!(step(&model).unwrap(), 4));
        let frozen =
            if rank == 0 { Branches { never: model.never.clone().no_grad(), ..model.clone() } } else { model.clone() };
        let error = step(&frozen).unwrap_err().to_string();
        assert!(error.contains("freeze and unfreeze parameters on all ranks alike"), "{error}");
        (0..3).for_each(|_| assert_eq!(step(&model).unwrap(), 4));
    });
}

#[test]
fn a_pass_that_is_dropped_before_all_ranks_join_is_an_error_on_all_ranks() {
    let errors = errors(|ddp, model, rank| {
        if rank == 0 {
            let pass = ddp.pass(model, 4)?;
            drop(pass.model().loss(values([1, 5], 1), false).backward());
        }
        ddp.join(model).map(|gradients| gradients.expect("a step"))
    });
    check_errors(&errors, "rank 0 has dropped a pass of this step");
}

#[test]
fn a_pass_of_weight_0_counts_nothing_also_through_layers_that_communicate() {
    let results = ranks(2, |group| {
        let rank = group.rank();
        let model = SyncBatchNormConfig::new(3).init(&device());
        let (model, ddp) = DataParallel::new(group, model).unwrap();
        let gradients = ddp.run(&model, [()], |model, ()| {
            let loss = model.forward(values([2, 3], 1)).powf_scalar(3.0).mean();
            // As a mean over no tokens.
            if rank == 1 { (loss * f32::NAN, 0) } else { (loss, 2) }
        });
        bits(&SgdConfig::new().init().step(1.0, model, gradients.unwrap()))
    });
    assert!(results.iter().all(|bits| bits.0.iter().all(|data| data.iter::<f32>().all(f32::is_finite))), "{results:?}");
}
