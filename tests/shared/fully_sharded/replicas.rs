//! Ranks that have the same parts and train them differently: an error on all ranks, and never a mixed model.

use bonfire::{Checkpoints, DeviceMesh, Error, Group, TrainingState};
use bonfire_testing::ranks;
use burn::nn::LinearConfig;
use burn::optim::SgdConfig;

use super::Deep;
use crate::burn_version::*;

/// A training on two replicas of two parts each, in which ranks 1 and 3 have the second part.
fn hybrid(group: Group) -> (Linear, FullyShardedParallel) {
    let mesh = DeviceMesh::new(group, [("replicate", 2), ("shard", 2)]).unwrap();
    FullyShardedParallel::new(mesh, LinearConfig::new(3, 4).init(&device())).unwrap()
}

/// Makes a step. Rank 3's learning rate is another one.
fn drift(fsdp: &FullyShardedParallel, model: Linear) -> Result<Linear, Error> {
    let mut optimizer: SgdOf<Linear> = SgdConfig::new().init();
    let input = Tensor::<2>::ones([2, 3], &device());
    let parts = fsdp.run(&model, [input], |model, input| (model.forward(input).powf_scalar(2.0).mean(), 2))?;
    let rate = if fsdp.group().rank() == 3 { 0.2 } else { 0.1 };
    let parts = parts.for_optimizer(&optimizer)?;
    Ok(optimizer.step(rate, model, parts))
}

fn refused(error: Error, expected: &str) {
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn replicas_that_differ_are_found_by_the_next_step_by_gather_and_by_a_save() {
    let folder = tempfile::tempdir().unwrap();
    ranks(4, |group| {
        let (model, fsdp) = hybrid(group.clone());
        let model = drift(&fsdp, model).unwrap();
        let differs = "`weight` of rank 3 differs from rank 1's";
        refused(fsdp.gather(&model).unwrap_err(), differs);
        let state = TrainingState::new(model, SgdConfig::new().init(), 0.1, ());
        let mut checkpoints = Checkpoints::new(&group, folder.path()).unwrap();
        // Smaller tensors come first there.
        refused(checkpoints.save((&state, &fsdp)).unwrap_err(), "of rank 3 differs from rank 1's");
        refused(drift(&fsdp, state.model.clone()).unwrap_err(), differs);
        // The groups remain usable.
        group.barrier().unwrap();
        refused(fsdp.gather(&state.model).unwrap_err(), differs);
    });
    let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().starts_with("set-")));
}

#[test]
fn equal_replicas_train_in_any_number_of_passes() {
    ranks(4, |group| {
        let rank = group.rank();
        let mesh = DeviceMesh::new(group, [("replicate", 2), ("shard", 2)]).unwrap();
        let (mut model, fsdp) = FullyShardedParallel::new(mesh, Deep::new(2)).unwrap();
        let mut optimizer: SgdOf<Deep> = SgdConfig::new().init();
        for step in 0..70 {
            // Some ranks make no pass, and take part in those of the others.
            let passes = 0..(rank + step) % 3;
            let parts = fsdp.run(&model, passes, |model, pass| (model.loss(4 * pass + rank), 1)).unwrap();
            model = optimizer.step(1e-3, model, parts.for_optimizer(&optimizer).unwrap());
        }
        fsdp.gather(&model).unwrap();
    });
}
