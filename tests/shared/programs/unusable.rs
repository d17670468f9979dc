//! Weights and lengths that are unusable: the same error on all ranks, which can go on.

use bonfire::train::longest;
use bonfire::{Error, Sharding};
use burn::optim::{GradientsParams, SgdConfig};

use super::*;

const WRONG: [f64; 4] = [-1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
const REFUSED: &str = "the weight of a pass of rank 1 is negative or not finite";

/// Fails unless all ranks have got this error.
fn refused(errors: &[Error], expected: &str) {
    assert!(errors.iter().all(|error| *error == errors[0]));
    assert!(matches!(&errors[0], Error::InvalidArgument { .. }), "{}", errors[0]);
    assert!(errors[0].to_string().contains(expected), "{}", errors[0]);
}

#[test]
fn a_weight_that_is_negative_or_not_finite_is_refused_in_each_form() {
    for wrong in WRONG {
        for place in 0..2 {
            let of_ranks = ranks(2, |group| {
                let rank = group.rank();
                let own = batch(&group, 0);
                let weight = |i: usize| if (rank, i) == (1, place) { wrong } else { 1.5 };
                let (net, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
                let sharded: ShardedSgd<Net> =
                    ShardedOptimizer::new(&ddp, SgdConfig::new().init(), Sharding::All).unwrap();
                let (parts, fsdp) = FullyShardedParallel::new(group.clone(), Net::new(1)).unwrap();
                let gradients = || GradientsParams::from_grads(net.loss(&own).backward(), &net);
                let errors = vec![
                    ddp.run(&net, 0..2, |net, i| (net.loss(&own), weight(i))).map(drop).unwrap_err(),
                    sharded.run(&net, 0..2, |net, i| (net.loss(&own), weight(i))).map(drop).unwrap_err(),
                    fsdp.run(&parts, 0..2, |net, i| (net.loss(&own), weight(i))).map(drop).unwrap_err(),
                    ddp.sync(&net, gradients(), weight(place)).map(drop).unwrap_err(),
                ];
                let mean = ddp.mean(&[1.0], weight(place)).unwrap_err();
                // All groups are still usable.
                ddp.run(&net, [1.5], |net, weight| (net.loss(&own), weight)).unwrap();
                sharded.run(&net, [1.5], |net, weight| (net.loss(&own), weight)).map(drop).unwrap();
                fsdp.run(&parts, [1.5], |net, weight| (net.loss(&own), weight)).map(drop).unwrap();
                assert_eq!(fsdp.mean(&[rank as f64], 0.5).unwrap(), [0.5]);
                (errors, mean)
            });
            for form in 0..4 {
                refused(&of_ranks.iter().map(|(errors, _)| errors[form].clone()).collect::<Vec<_>>(), REFUSED);
            }
            let of_means: Vec<_> = of_ranks.iter().map(|(_, mean)| mean.clone()).collect();
            refused(&of_means, "mean: the weight of some rank is negative or not finite");
        }
    }
}

#[test]
fn a_loss_of_several_elements_is_refused_on_all_ranks() {
    let errors = ranks(2, |group| {
        let rank = group.rank();
        let own = batch(&group, 0);
        let (net, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
        let (parts, fsdp) = FullyShardedParallel::new(group, Net::new(1)).unwrap();
        // Rank 1 forgets the mean in its second pass.
        let loss = |net: &Net, pass: usize| match (rank, pass) {
            (1, 1) => (net.forward(inputs(&own)).flatten(0, 1), own.len()),
            _ => (net.loss(&own), own.len()),
        };
        let of_replicas = ddp.run(&net, 0..2, loss).unwrap_err();
        // The group is usable. After full sharding, whose ranks' calls differ then, it is not.
        ddp.run(&net, [0], loss).unwrap();
        let of_parts = fsdp.run(&parts, 0..2, loss).map(drop).unwrap_err();
        [of_replicas, of_parts].map(|error| error.to_string())
    });
    for error in errors.iter().flatten() {
        assert!(error.contains("the loss has 5 elements: return their mean") && error.contains("rank 1"), "{error}");
    }
}

#[test]
fn a_weight_of_0_counts_nothing_and_only_zeros_are_refused() {
    let results =
        ranks(2, |group| {
            let own = batch(&group, 0);
            let (net, ddp) = DataParallel::new(group.clone(), Net::new(1)).unwrap();
            // The mean of nothing is NaN.
            let nothing = |net: &Net| net.loss(&own) * f64::NAN;
            let run =
                |weights: [f64; 2]| {
                    ddp.run(&net, weights, |net, weight| {
                        if weight == 0.0 { (nothing(net), weight) } else { (net.loss(&own), weight) }
                    })
                };
            let of = |grads: &GradientsParams| values(gradient::<2>(grads, net.first.weight.id).unwrap());
            let (all, some) = (run([0.75, 0.75]).unwrap(), run([1.5, 0.0]).unwrap());
            let mean = ddp.mean(&[f64::NAN], 0.0).unwrap_err();
            assert!(of(&all).iter().zip(of(&some)).all(|(all, some)| (all - some).abs() < 1e-12));
            assert!(of(&all).iter().all(|value| value.is_finite() && *value != 0.0));
            [run([0.0, 0.0]).map(drop).unwrap_err(), mean]
        });
    for i in 0..2 {
        refused(&results.iter().map(|errors| errors[i].clone()).collect::<Vec<_>>(), "no rank has any samples");
    }
}

#[test]
fn ranks_agree_on_a_length_and_none_that_is_too_long_is_padded_to() {
    let results = ranks(3, |group| {
        let own = 10 * group.rank();
        assert_eq!(longest(&group, own, 20).unwrap(), 20);
        assert_eq!(longest(&group, 0, 20).unwrap(), 0);
        let error = longest(&group, own, 15).unwrap_err();
        assert_eq!(longest(&group, 5, 15).unwrap(), 5);
        error
    });
    refused(&results, "rank 2 has a sequence of 20, and the longest that is allowed has 15; cut it, or leave it out");
}
