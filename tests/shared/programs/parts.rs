//! Programs in which ranks have parts.

use bonfire::Sharding;
use burn::optim::{AdamConfig, SgdConfig};

use super::*;

#[test]
fn a_layer_is_unfrozen_later_with_a_sharded_optimizer() {
    equals_one_rank(|group| {
        let mut net = Net::new(1);
        net.first = trains(net.first, false);
        let (mut model, ddp) = DataParallel::new(group.clone(), net).unwrap();
        let mut optimizer: ShardedAdam<Net> =
            ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All).unwrap();
        for step in 0..STEPS {
            if step == 20 {
                model.first = trains(model.first, true);
            }
            let own = batch(&group, step);
            let parts = optimizer.run(&model, own.chunks(3), |net, own| (net.loss(own), own.len())).unwrap();
            optimizer.step(0.01, &mut model, parts.clip_norm(0.1).unwrap()).unwrap();
        }
        weights(&model)
    });
}

#[test]
fn a_layer_is_unfrozen_later_with_full_sharding() {
    equals_one_rank(|group| {
        let mut net = Net::new(1);
        net.first = trains(net.first, false);
        let (mut model, fsdp) = FullyShardedParallel::new(group.clone(), net).unwrap();
        let mut optimizer: AdamOf<Net> = AdamConfig::new().init();
        for step in 0..STEPS {
            if step == 20 {
                model.first = trains(model.first, true);
            }
            let own = batch(&group, step);
            let parts = fsdp.run(&model, own.chunks(3), |net, own| (net.loss(own), own.len())).unwrap();
            let parts = parts.clip_norm(0.1).unwrap().for_optimizer(&optimizer).unwrap();
            model = optimizer.step(0.01, model, parts);
        }
        weights(&fsdp.gather(&model).unwrap())
    });
}

#[test]
fn a_policy_and_its_value_train_in_parts_with_one_backward_pass() {
    equals_one_rank(|group| {
        let (mut policy, acting) = FullyShardedParallel::new(group.clone(), Net::new(1)).unwrap();
        let (mut value, judging) = FullyShardedParallel::new(group.clone(), Net::new(5)).unwrap();
        let mut of_policy: AdamOf<Net> = AdamConfig::new().init();
        let mut of_value: SgdOf<Net> = SgdConfig::new().init();
        for step in 0..STEPS {
            let own = batch(&group, step);
            let acts = acting.last_pass(&policy, own.len()).unwrap();
            let judges = judging.last_pass(&value, own.len()).unwrap();
            let judged = judges.model().forward(inputs(&own));
            let advantage = (targets(&own) - judged.clone()).detach();
            let acted = (acts.model().forward(inputs(&own)).tanh() * advantage).mean();
            let error = (judged - targets(&own)).powf_scalar(2.0).mean();
            let mut grads = (error - acted).backward();
            let grads = (acts.finish(&mut grads).unwrap(), judges.finish(&mut grads).unwrap());
            policy = of_policy.step(0.01, policy, grads.0.for_optimizer(&of_policy).unwrap());
            value = of_value.step(0.1, value, grads.1.for_optimizer(&of_value).unwrap());
        }
        [weights(&acting.gather(&policy).unwrap()), weights(&judging.gather(&value).unwrap())].concat()
    });
}
