//! Data parallelism over some dimensions of a mesh: along the others, ranks have parameters of their own.

use bonfire::{DeviceMesh, Error};
use bonfire_testing::ranks;
use burn::module::Param;
use burn::optim::GradientsParams;

use crate::burn_version::*;

fn model(value: usize) -> Param<Tensor<1>> {
    Param::from_tensor(Tensor::full([3], value as f32, &device()))
}

/// Distributes models over a mesh of these dimensions, with the rank as value. Then each rank's gradient is its rank.
/// Returns each rank's value afterwards, and its mean gradient.
fn values_and_means(dimensions: &[(&str, usize)]) -> Vec<[f32; 2]> {
    let world_size = dimensions.iter().map(|(_, size)| size).product();
    ranks(world_size, |group| {
        let rank = group.rank();
        let mesh = DeviceMesh::new(group, dimensions.iter().copied()).unwrap();
        let (model, ddp) = DataParallel::new(mesh, model(rank)).unwrap();
        let mut grads = GradientsParams::new();
        grads.register(model.id, Inner::<1>::full([3], rank as f32, &inner_device()));
        let mean = gradient::<1>(&ddp.sync(&model, grads, 1).unwrap(), model.id).unwrap();
        [model.val().inner(), mean].map(|tensor| tensor.into_data().iter::<f32>().next().unwrap())
    })
}

#[test]
fn ranks_that_differ_in_another_dimension_have_parameters_of_their_own() {
    // Ranks 0 and 2, 1 and 3.
    let columns = [[0.0, 1.0], [1.0, 2.0], [0.0, 1.0], [1.0, 2.0]];
    assert_eq!(values_and_means(&[("replicate", 2), ("tensor", 2)]), columns);
    // Ranks 0, 1, 4 and 5; 2, 3, 6 and 7.
    let [first, second] = [[0.0, 2.5], [2.0, 4.5]];
    let blocks = [first, first, second, second, first, first, second, second];
    assert_eq!(values_and_means(&[("replicate", 2), ("tensor", 2), ("shard", 2)]), blocks);
    assert_eq!(values_and_means(&[("replicate", 1), ("tensor", 2)]), [[0.0, 0.0], [1.0, 1.0]]);
    // A mesh for sharding is one of replicas too.
    assert_eq!(values_and_means(&[("replicate", 2), ("shard", 2)]), [[0.0, 1.5]; 4]);
}

#[test]
fn a_mesh_without_replicas_is_an_error() {
    let errors = ranks(2, |group| {
        let mesh = DeviceMesh::new(group, [("tensor", 2)]).unwrap();
        DataParallel::new(mesh, model(0)).unwrap_err()
    });
    let reason = "the mesh has only `tensor`; name the dimension to replicate over `replicate`";
    assert_eq!(errors, [(); 2].map(|()| Error::argument("data parallel", reason)));
}
