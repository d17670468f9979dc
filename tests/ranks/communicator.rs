//! The device communicator of burn 0.21 alone: what `tests/shared/tensors` cannot have.

#[path = "../../examples/moe/model.rs"]
#[allow(dead_code, reason = "the example trains, too")]
mod moe;

use std::ops::Range;
use std::time::Instant;

use bonfire::{DeviceCommunicator, Group};
use bonfire_testing::{Kind, run_ranks};
use burn::backend::Flex;

use crate::burn_version::{Inner, Training, values};
use crate::tensors::communicator::{communicator, model};

// Not shared: only `FlexTensor` of burn 0.21 is moved to memory that the ranks share.
/// Prints how long an all-reduce of 4 MiB takes between two ranks in shared memory, without and with prepared buffers.
#[test]
#[ignore = "a measurement"]
fn measure_prepared_buffers() {
    const LEN: usize = 1 << 20;
    let ratios = run_ranks(Kind::Shm, 2, |group| {
        let plain = communicator(&group);
        let mut prepared = communicator(&group);
        let model = model(LEN);
        let moved = prepared.prepare_communication_buffer_for_model(model.clone()).unwrap();
        let time = |communicator: &DeviceCommunicator<Flex>, weights: Inner<1>| {
            group.barrier().unwrap();
            let start = Instant::now();
            for _ in 0..20 {
                communicator.all_reduce(weights.clone()).unwrap();
            }
            start.elapsed().as_secs_f64() / 20.0
        };
        let mut rounds: Vec<_> =
            (0..15).map(|_| (time(&plain, model.0.val()), time(&prepared, moved.0.val()))).collect();
        rounds.sort_by(|a, b| (a.0 / a.1).total_cmp(&(b.0 / b.1)));
        let least = |times: &mut dyn Iterator<Item = f64>| times.fold(f64::MAX, f64::min) * 1e3;
        let (as_is, moved) = (least(&mut rounds.iter().map(|r| r.0)), least(&mut rounds.iter().map(|r| r.1)));
        (as_is, moved, rounds[7].0 / rounds[7].1)
    });
    let (as_is, moved, ratio) = ratios[0];
    println!("4 MiB: {as_is:.3} ms as it is, {moved:.3} ms prepared; median ratio {ratio:.2}");
}

// Not shared: the example is for burn 0.21, with `AutodiffBackend` as a parameter.
const EXPERTS: usize = 8;

struct Pass {
    outputs: Vec<f64>,
    /// The gradients of the input, the router, and this rank's experts.
    gradients: Vec<Vec<f64>>,
}

/// One forward and backward pass with some ranks' tokens.
fn pass(group: &Group, ranks: Range<usize>) -> Pass {
    let communicator = DeviceCommunicator::new(group.clone(), Default::default(), None, "ep").unwrap();
    // Rank 2's two experts are as good as rank 0's for every token. The first of equals is taken: rank 2 gets none.
    let mut router = moe::numbers(5, moe::WIDTH * EXPERTS, 1.0);
    for row in router.chunks_exact_mut(EXPERTS) {
        (row[4], row[5]) = (row[0], row[1]);
    }
    let layer = moe::Experts::<Training>::new(router, EXPERTS, group);
    let [inputs, targets] = moe::tokens::<Training>(ranks);
    let inputs = inputs.require_grad();
    let outputs = layer.forward(inputs.clone(), &communicator).unwrap();
    let loss = (outputs.clone() - targets).powi_scalar(2).sum();
    let gradients = layer.gradients(loss, &inputs, group).unwrap();
    Pass { outputs: values(outputs), gradients: gradients.into_iter().map(values).collect() }
}

fn close(ours: &[f64], expected: &[f64]) {
    assert_eq!(ours.len(), expected.len());
    let difference = ours.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(difference <= 1e-6, "they differ by {difference}");
}

/// Rank 1 has no token of its own, and rank 2's experts get none: of equally good experts the first is taken.
#[test]
fn dispatch_experts_and_combine_on_four_ranks_equal_one_rank_forward_and_backward() {
    let one = run_ranks(Kind::Threads, 1, |group| pass(&group, 0..4)).remove(0);
    let four = run_ranks(Kind::Threads, 4, |group| pass(&group, group.rank()..group.rank() + 1));
    let all = |part: fn(&Pass) -> &Vec<f64>| four.iter().flat_map(part).copied().collect::<Vec<_>>();
    close(&all(|pass| &pass.outputs), &one.outputs);
    close(&all(|pass| &pass.gradients[0]), &one.gradients[0]);
    assert!(four[1].outputs.is_empty(), "rank 1 has no token of its own");
    for (rank, pass) in four.iter().enumerate() {
        close(&pass.gradients[1], &one.gradients[1]);
        for expert in 0..2 {
            close(&pass.gradients[2 + expert], &one.gradients[2 + 2 * rank + expert]);
        }
    }
    assert!(four[2].gradients[2..].iter().flatten().all(|gradient| *gradient == 0.0), "rank 2 gets no token");
    assert!(four[3].gradients[2..].iter().flatten().any(|gradient| *gradient != 0.0));
}
