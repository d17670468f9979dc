//! Training steps on burn's own backend on wgpu, whose devices have no collectives: gradients are read back from the
//! device while the backward pass goes on.

#[path = "../../common/step.rs"]
mod models;
#[path = "../../common/trainings.rs"]
mod trainings;

use burn::backend::Autodiff;
use burn::backend::wgpu::{CubeBackend, WgpuRuntime};
use burn_fusion::Fusion;
use trainings::{check_ways, replicas_and_parts};

type Plain = Autodiff<CubeBackend<WgpuRuntime, f32, i32, u32>>;
type Fused = Autodiff<Fusion<CubeBackend<WgpuRuntime, f32, i32, u32>>>;

#[test]
fn overlapped_steps_equal_sync() {
    check_ways(models::language::<Plain>, (2, 10), |_| Default::default());
    check_ways(models::convolutional::<Plain>, (2, 10), |_| Default::default());
}

#[test]
fn overlapped_steps_equal_sync_with_fusion() {
    check_ways(models::language::<Fused>, (2, 10), |_| Default::default());
    check_ways(models::convolutional::<Fused>, (2, 10), |_| Default::default());
}

#[test]
fn full_sharding_equals_replicas() {
    check_ways(replicas_and_parts::<Plain>, (2, 5), |_| Default::default());
    check_ways(replicas_and_parts::<Fused>, (2, 5), |_| Default::default());
}
