//! Over which ranks the layers of a model normalise.

use bonfire::TrainingState;

use super::*;

/// A layer whose running mean is that of its last batch.
fn layer() -> SyncBatchNorm {
    SyncBatchNormConfig::new(1).with_momentum(1.0).init(&device())
}

/// Returns the mean over the ranks of a layer to which each rank gives its number.
fn mean_of_ranks(layer: &SyncBatchNorm, rank: usize) -> f64 {
    layer.forward(Tensor::<2>::full([2, 1], rank as f64, (&device(), DType::F32)));
    values(layer.running_mean.value_sync())[0]
}

#[test]
fn a_model_normalises_over_the_ranks_that_train_it_also_after_one_is_lost() {
    let means = on_ranks(3, |group| {
        let rank = group.rank();
        let (model, mut ddp) = DataParallel::new(group, layer()).unwrap();
        let model = ddp.average_states(model).unwrap();
        let before = mean_of_ranks(&model, rank);
        if rank == 2 {
            return vec![before];
        }
        let mut state = TrainingState::new(model, SgdConfig::new().init(), 0.1, ());
        ddp.shrink(&mut state).unwrap();
        vec![before, mean_of_ranks(&state.model, rank)]
    });
    assert_eq!(means, [vec![1.0, 0.5], vec![1.0, 0.5], vec![1.0]]);
}

#[test]
fn a_layer_keeps_the_ranks_that_the_program_has_given_it() {
    let means = on_ranks(4, |group| {
        let rank = group.rank();
        let pair = group.subgroup(&[rank / 2 * 2, rank / 2 * 2 + 1]).unwrap();
        let (model, ddp) = DataParallel::new(group, layer().over(&pair)).unwrap();
        let model = ddp.average_states(model).unwrap();
        mean_of_ranks(&model, rank)
    });
    assert_eq!(means, [0.5, 0.5, 2.5, 2.5]);
}
