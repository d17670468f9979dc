//! Steps and meshes that go wrong: typed errors on all ranks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use bonfire::{DeviceMesh, Error, Group, ShardedBlock};
use bonfire_testing::process::{Process, is_child, report};
use bonfire_testing::{Kind, ranks, run_ranks, run_ranks_with};
use burn::module::Param;
use burn::nn::LinearConfig;
use burn::optim::SgdConfig;
use burn::tensor::DType;

use super::models::{Language, values};
use super::{Deep, WIDTH};
use crate::burn_version::*;

fn text(error: Error) -> String {
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    error.to_string()
}

#[test]
fn a_mesh_has_subgroups_row_by_row() {
    ranks(6, |group| {
        let rank = group.rank();
        let mesh = DeviceMesh::new(group, [("a", 3), ("b", 1), ("c", 2)]).unwrap();
        let members = |name: &str| {
            let group = mesh.group(name).unwrap();
            let mut all = vec![0; group.world_size()];
            group.all_gather_into(&[rank as u64], &mut all).unwrap();
            (group.rank(), all)
        };
        let row = rank as u64 / 2 * 2;
        assert_eq!(members("c"), (rank % 2, vec![row, row + 1]));
        let column = rank as u64 % 2;
        assert_eq!(members("a"), (rank / 2, vec![column, column + 2, column + 4]));
        assert_eq!(members("b"), (0, vec![rank as u64]));
        assert!(text(mesh.group("d").err().unwrap()).contains("this mesh has `a`, `b`, `c`"));
    });
}

#[test]
fn a_mesh_that_does_not_fit_is_an_error_on_all_ranks() {
    let refused = |dimensions: fn(usize) -> Vec<(&'static str, usize)>, expected: &str| {
        for error in ranks(4, |group| {
            let error = DeviceMesh::new(group.clone(), dimensions(group.rank())).unwrap_err();
            group.barrier().unwrap();
            text(error)
        }) {
            assert!(error.contains(expected), "{error}");
        }
    };
    refused(
        |_| vec![("shard", 3), ("replicate", 2)],
        "3 x 2 is 6, and there are 4 ranks; give sizes that multiply to 4",
    );
    refused(|_| vec![("shard", 0), ("replicate", 4)], "0 x 4 is 0");
    refused(|_| vec![("shard", 2), ("shard", 2)], "two dimensions have the name `shard`");
    refused(|_| vec![], "it has no dimensions");
    refused(|rank| if rank == 2 { vec![("shard", 5)] } else { vec![("shard", 4)] }, "5 is 5, and there are 4 ranks");
    refused(
        |rank| if rank == 2 { vec![("replicate", 2), ("shard", 2)] } else { vec![("shard", 4)] },
        "rank 0's mesh is shard 4 and rank 2's replicate 2 x shard 2",
    );
    for error in ranks(2, |group| {
        let mesh = DeviceMesh::new(group, [("tensor", 2)]).unwrap();
        text(FullyShardedParallel::new(mesh, Deep::new(1)).err().unwrap())
    }) {
        assert!(error.contains("the mesh has the dimension `tensor`"), "{error}");
    }
}

models! {
    struct Marked {
        layers: Vec<ShardedBlock<Vec<Linear>>>,
    }
}

#[test]
fn blocks_that_are_marked_differently_are_an_error_on_all_ranks() {
    let linear = || LinearConfig::new(2, 2).init(&device());
    for error in ranks(3, |group| {
        let layers = match group.rank() {
            2 => vec![ShardedBlock::new(vec![linear(), linear()]), ShardedBlock::new(vec![])],
            _ => vec![ShardedBlock::new(vec![linear()]), ShardedBlock::new(vec![linear()])],
        };
        // The same number of parameters.
        let error = FullyShardedParallel::new(group.clone(), Marked { layers }).err().unwrap();
        group.barrier().unwrap();
        text(error)
    }) {
        assert!(error.contains("the ranks' models differ first at parameter 2"), "{error}");
        assert!(error.contains("in block 2; rank 2 has"), "{error}");
    }
    for error in ranks(2, |group| {
        let dtype = if group.rank() == 1 { DType::F64 } else { DType::F32 };
        text(FullyShardedParallel::new(group, Language::new(dtype)).err().unwrap())
    }) {
        assert!(error.contains("trained float f32 [11, 6] in block 1; rank 1 has"), "{error}");
    }
}

/// Runs a good step, one step that goes wrong, and, if the groups are still usable, another good one. Returns the
/// errors.
pub fn errors(
    n: usize,
    wrong: impl Fn(&FullyShardedParallel, &Deep, usize) -> Result<Parts, Error> + Sync,
) -> Vec<Error> {
    ranks(n, |group| {
        let rank = group.rank();
        let (model, fsdp) = FullyShardedParallel::new(group, Deep::new(4)).unwrap();
        let good = || {
            let step = fsdp.last_pass(&model, 1).unwrap();
            let mut grads = step.model().loss(1).backward();
            let parts = step.finish(&mut grads).unwrap();
            let sgd: SgdOf<Deep> = SgdConfig::new().init();
            parts.for_optimizer(&sgd).unwrap()
        };
        good();
        let error = wrong(&fsdp, &model, rank).err().unwrap();
        match error {
            Error::InvalidArgument { .. } => assert_eq!(good().len(), 9),
            _ => assert!(fsdp.last_pass(&model, 1).is_err()),
        }
        error
    })
}

pub fn check(errors: Vec<Error>, expected: &str) {
    for error in errors {
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn a_part_that_is_used_as_the_whole_is_an_error_on_all_ranks() {
    let by_hand = |model: &Deep| -> Tensor<1> { model.scale.val().sum() };
    check(
        errors(2, |fsdp, model, rank| {
            let step = fsdp.last_pass(model, 1)?;
            let loss = step.model().loss(1);
            let loss = if rank == 1 { loss + by_hand(model) } else { loss };
            step.finish(&mut loss.backward())
        }),
        "rank 1 has used its part of `scale` as if it were the whole parameter",
    );
}

#[test]
fn a_missing_backward_pass_is_an_error_on_all_ranks() {
    check(
        errors(2, |fsdp, model, rank| {
            let mut other = values([1], 1, DType::F32).require_grad().backward();
            let step = fsdp.last_pass(model, 1)?;
            let loss = step.model().loss(1);
            if rank == 1 { step.finish(&mut other) } else { step.finish(&mut loss.backward()) }
        }),
        "rank 1 has samples, and no gradient has arrived",
    );
}

#[test]
fn steps_on_which_the_ranks_do_not_agree_are_errors_on_all_ranks() {
    check(
        errors(2, |fsdp, model, _| {
            let step = fsdp.last_pass(model, 0)?;
            let mut grads = step.model().loss(1).backward();
            step.finish(&mut grads)
        }),
        "no rank has any samples",
    );
    check(
        errors(2, |fsdp, model, rank| {
            let mut other = model.clone();
            if rank == 1 {
                other.layers.truncate(3);
            }
            let step = fsdp.last_pass(&other, 1)?;
            let mut grads = step.model().loss(1).backward();
            step.finish(&mut grads)
        }),
        "rank 1's model does not have `layers.3.weight` as it was at the start",
    );
    check(
        errors(2, |fsdp, model, rank| {
            fsdp.run(model, [1], |model, seed| (model.loss(seed), 1))?.clip_norm(1.0 + rank as f64)
        }),
        "rank 0 clips to 1 and rank 1 to 2",
    );
}

#[test]
fn different_blocks_are_a_mismatch_on_all_ranks() {
    for skipped in 0..4 {
        let errors = errors(3, |fsdp, model, rank| {
            let step = fsdp.last_pass(model, 1)?;
            let x = values([3, WIDTH], 1, DType::F32) * step.model().scale.val().unsqueeze();
            let used = step.model().layers.iter().enumerate().filter(|(i, _)| rank != 1 || *i != skipped);
            let x = used.fold(x, |x, (_, layer)| layer.run(|layer| layer.forward(x).tanh()));
            step.finish(&mut x.sum().backward())
        });
        for error in &errors {
            assert!(matches!(error, Error::Mismatch { .. }), "{error}");
            assert!(error.to_string().contains("block "), "{error}");
            // Those that the ranks have called where they differ first: blocks are gathered ahead.
            let named = |block: usize| error.to_string().contains(&format!("block {block} is `layers.{}`", block - 1));
            assert!((1..=4).any(named), "{skipped}: {error}");
            let remedy = "run each block on all ranks, or remove the mark `ShardedBlock` of one that some";
            assert!(error.to_string().contains(remedy), "{error}");
        }
    }
}

#[test]
fn a_step_that_is_dropped_fails_on_all_ranks() {
    check(
        errors(2, |fsdp, model, rank| {
            let step = fsdp.last_pass(model, 1)?;
            if rank == 1 {
                drop(step);
                return fsdp.skip(model);
            }
            let mut grads = step.model().loss(1).backward();
            step.finish(&mut grads)
        }),
        "rank 1 has dropped its training step",
    );
}

#[test]
fn a_clone_of_the_steps_model_is_not_a_number_afterwards() {
    ranks(2, |group| {
        let (model, fsdp) = FullyShardedParallel::new(group, Deep::new(2)).unwrap();
        let step = fsdp.last_pass(&model, 1).unwrap();
        let (unused, mut grads) = (step.model().clone(), step.model().loss(1).backward());
        drop(step.finish(&mut grads).unwrap());
        assert!(unused.loss(1).into_data().iter::<f32>().all(f32::is_nan));
    });
}

#[test]
fn a_rank_that_is_lost_in_the_middle_of_a_step_is_named_on_all_others() {
    for kind in [Kind::Threads, Kind::Tcp, Kind::Shm] {
        is_lost_in_the_middle(kind, |_| panic!("on purpose"));
    }
}

/// Runs steps of three ranks. In the third one, rank 1 panics in `panics`, which gets the fourth layer's input, or in
/// the backward pass of what that returns.
pub fn is_lost_in_the_middle(kind: Kind, panics: fn(Tensor<2>) -> Tensor<2>) {
    let results = run_ranks(kind, 3, move |group| {
        let rank = group.rank();
        let steps = || {
            let (model, fsdp) = FullyShardedParallel::new(group, Deep::new(6)).unwrap();
            for number in 0..3 {
                let step = fsdp.last_pass(&model, 1).unwrap();
                let mut x = values([3, WIDTH], 1, DType::F32) * step.model().scale.val().unsqueeze();
                for (i, layer) in step.model().layers.iter().enumerate() {
                    if rank == 1 && number == 2 && i == 3 {
                        x = panics(x);
                    }
                    x = layer.run(|layer| layer.forward(x).tanh());
                }
                if let Err(error) = step.finish(&mut x.sum().backward()) {
                    assert_eq!(number, 2, "{error}");
                    return error;
                }
            }
            panic!("no rank was lost");
        };
        catch_unwind(AssertUnwindSafe(steps)).ok()
    });
    assert!(results[1].is_none());
    for (rank, error) in results.into_iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let lost = match error.expect("no panic") {
            Error::PeerLost { peer, .. } => peer,
            Error::Left { rank, .. } => rank,
            error => panic!("{kind:?}, rank {rank}: {error}"),
        };
        assert_eq!(lost, 1);
    }
}

#[test]
fn another_backward_pass_between_the_passes_ends_by_the_deadline() {
    let settings = |builder: bonfire::Builder| builder.deadline(Duration::from_secs(3));
    let (told, heard) = mpsc::channel();
    let heard = Arc::new(Mutex::new(heard));
    let results = run_ranks_with(Kind::Threads, 2, settings, move |group| {
        let rank = group.rank();
        let (model, fsdp) = FullyShardedParallel::new(group, Deep::new(8)).unwrap();
        let step = fsdp.last_pass(&model, 1).unwrap();
        let loss = step.model().loss(1);
        if rank == 1 {
            heard.lock().unwrap().recv().unwrap();
            // burn-autodiff takes the locks of all graphs of the process at the end of this.
            values([3], 1, DType::F32).require_grad().sum().backward();
        } else {
            told.send(()).unwrap();
        }
        step.finish(&mut loss.backward()).map(drop)
    });
    // Rank 1 may have been quick enough.
    for error in results.into_iter().filter_map(Result::err) {
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
    }
}

#[test]
fn a_rank_whose_backward_pass_has_ended_keeps_no_rank_waiting() {
    // Each rank's backward pass ends at another time, and is followed by another one, while others are in theirs.
    ranks(4, |group| {
        let (model, fsdp) = FullyShardedParallel::new(group, Deep::new(8)).unwrap();
        for number in 0..30 {
            let step = fsdp.last_pass(&model, 1).unwrap();
            let mut grads = step.model().loss(number).backward();
            values([3], 1, DType::F32).require_grad().sum().backward();
            drop(step.finish(&mut grads).unwrap());
            values([3], 1, DType::F32).require_grad().sum().backward();
        }
    });
}

#[test]
fn a_model_without_parameters_to_train_is_an_error() {
    for error in ranks(2, |group| {
        let frozen = Param::from_tensor(Tensor::<1>::ones([3], &device())).set_require_grad(false);
        let (model, fsdp) = FullyShardedParallel::new(group, vec![frozen]).unwrap();
        let step = fsdp.last_pass(&model, 1).unwrap();
        let loss = step.model()[0].val().sum() * values([1], 1, DType::F32).require_grad();
        text(step.finish(&mut loss.backward()).err().unwrap())
    }) {
        assert!(error.contains("the model has no parameters to train"), "{error}");
    }
}

#[test]
fn unused_group_is_left() {
    // Dropping everything without a step ends the progress threads and leaves the groups.
    ranks(2, |group: Group| drop(FullyShardedParallel::new(group, Deep::new(1)).unwrap()));
}

/// Returns the norms of the gradients of some steps. In each, one rank has no gradient of a bias that it has used.
fn norms_without_a_bias() -> Result<String, Error> {
    let group = Group::from_env()?;
    let rank = group.rank();
    let (model, fsdp) = FullyShardedParallel::new(group, Deep::new(9))?;
    let norm = |number: usize| {
        let parts = fsdp.run(&model, [()], |model, ()| {
            let (last, layers) = model.layers.split_last().expect("nine layers");
            let x = values([3, WIDTH], 1, DType::F32) * model.scale.val().unsqueeze();
            let x = layers.iter().fold(x, |x, layer| layer.run(|layer| layer.forward(x).tanh()));
            let [without, with] = last.run(|last| {
                let (without, bias) = (x.matmul(last.weight.val()), last.bias.as_ref().map(Param::val));
                [without.clone(), without + bias.expect("a bias").unsqueeze()]
            });
            // Not the same rank each time.
            (if number % 2 == rank { without } else { with }.powf_scalar(2.0).mean(), 1)
        });
        parts?.norm().map(|norm| format!("{norm:.6}"))
    };
    Ok((0..4).map(norm).collect::<Result<Vec<_>, _>>()?.join(" "))
}

/// A rank sends the bucket of a block of which it lacks a gradient at the end of its pass, while the other waits for
/// that bucket before it gathers further blocks. Only ranks that are processes wait so.
#[test]
fn a_parameter_whose_use_one_rank_drops_delays_no_rank_forever() {
    if is_child() {
        return report(&norms_without_a_bias());
    }
    let name = "shared::fully_sharded::errors::a_parameter_whose_use_one_rank_drops_delays_no_rank_forever";
    for process in Process::start_ranks(name, 2, "shm", "5") {
        let norms = process.outcome().expect("no rank waits until its deadline");
        let norms: Vec<_> = norms.split(' ').collect();
        assert!(norms.len() == 4 && norms.iter().all(|norm| *norm == norms[0]), "{norms:?}");
    }
}

#[test]
fn a_refused_pass_leaves_the_groups_usable_also_if_a_rank_runs_none() {
    ranks(2, |group| {
        let rank = group.rank();
        let (model, fsdp) = FullyShardedParallel::new(group, Deep::new(3)).unwrap();
        let run = |model: &Deep| fsdp.run(model, [()], |model, ()| (model.loss(1), 1)).map(drop);
        run(&model).unwrap();
        let other = Deep { scale: model.scale.clone().set_require_grad(false), ..model.clone() };
        let refused = if rank == 0 { run(&other) } else { fsdp.skip(&model).map(drop) };
        assert!(text(refused.unwrap_err()).contains("freeze and unfreeze"));
        run(&model).unwrap();
        if rank == 0 { run(&model) } else { fsdp.skip(&model).map(drop) }.unwrap();
    });
}

#[test]
fn a_block_whose_values_one_rank_alone_needs_again_is_gathered_by_all() {
    ranks(2, |group| {
        let rank = group.rank();
        let (model, fsdp) = FullyShardedParallel::new(group, Deep::new(4)).unwrap();
        for _ in 0..4 {
            let parts = fsdp.run(&model, [()], |model, ()| {
                let (x, scale) = (values([3, WIDTH], 1, DType::F32), model.scale.val());
                // The gradient of the first layer's input, and with it the weight, is needed on rank 0 only.
                let x = if rank == 0 { x * scale.unsqueeze() } else { x };
                let x = model.layers.iter().fold(x, |x, layer| layer.run(|layer| layer.forward(x).tanh()));
                (x.powf_scalar(2.0).mean(), 1)
            });
            parts.unwrap().norm().unwrap();
        }
    });
}
