//! What is refused, and ranks that leave.

use bonfire::train::compression::Int8;

use super::*;
use crate::model_data::gradient_data;

#[test]
fn unsupported_blocks_and_optimizers_are_rejected() {
    ranks(4, |group| {
        let (_, ddp) = DataParallel::new(group.clone(), Odd::new(DType::F32)).unwrap();
        for blocks in [0, 3, 8] {
            let new: Result<ShardedAdam<Odd>, _> =
                ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::Blocks(blocks));
            let error = new.unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            assert!(error.to_string().contains(&format!("4 ranks are not blocks of {blocks}")), "{error}");
        }
        let muon: MuonOf<Odd> = MuonConfig::new().init();
        let muon = ShardedOptimizer::new(&ddp, muon, Sharding::All).unwrap_err();
        assert!(muon.to_string().contains(MUON), "{muon}");
        assert!(muon.to_string().contains("train them with `DataParallel`"), "{muon}");
        let (mut used, model): (AdamOf<Odd>, _) = (AdamConfig::new().init(), Odd::new(DType::F32));
        let grads = gradients(&model, |_, _| Some(1.0));
        used.step(0.1, model, grads);
        let used = ShardedOptimizer::new(&ddp, used, Sharding::All).unwrap_err();
        assert!(used.to_string().contains("has state of whole parameters already"), "{used}");
        // None of these calls has sent anything on some ranks only.
        group.barrier().unwrap();
    });
}

/// A sharded optimizer does not compress, so a setting of it would be ignored.
#[test]
fn compression_and_a_sharded_optimizer_exclude_each_other() {
    ranks(2, |group| {
        let (model, mut ddp) = DataParallel::new(group, Odd::new(DType::F32)).unwrap();
        let sharded = |ddp: &DataParallel| -> Result<ShardedAdam<Odd>, Error> {
            ShardedOptimizer::new(ddp, AdamConfig::new().init(), Sharding::All)
        };
        ddp.set_compression(Int8).unwrap();
        let error = sharded(&ddp).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("call `unset_compression` before"), "{error}");
        // Afterwards gradients have all their bits.
        let odd = || gradients(&model, |_, i| Some(1.0 + i as f64 / 1024.0));
        let found = |ddp: &DataParallel| gradient_data(&model, &ddp.sync(&model, odd(), 1).unwrap());
        let own = gradient_data(&model, &odd());
        assert_ne!(found(&ddp), own);
        ddp.unset_compression().unwrap();
        assert_eq!(found(&ddp), own);
        let optimizer = sharded(&ddp).unwrap();
        let error = ddp.set_compression(Int8).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("a `ShardedOptimizer` trains the model"), "{error}");
        drop(optimizer);
        ddp.set_compression(Int8).unwrap();
    });
}

#[test]
fn an_invalid_step_is_rejected_on_all_ranks_and_changes_nothing() {
    ranks(4, |group| {
        let (rank, device) = (group.rank(), inner_device());
        let (mut model, ddp) = DataParallel::new(group.clone(), Odd::new(DType::F32)).unwrap();
        let mut optimizer: ShardedSgd<Odd> =
            ShardedOptimizer::new(&ddp, SgdConfig::new().init(), Sharding::Blocks(2)).unwrap();
        let before = bits(&model);
        let mut refused = |model: &mut Odd, grads, samples, expected: &str| {
            let before = bits(model);
            let error = optimizer.advance(0.1, model, grads, samples).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
            assert_eq!(bits(model), before);
        };
        refused(&mut model, GradientsParams::new(), 0, "no rank has any samples");
        let mut grads = GradientsParams::new();
        if rank == 2 {
            grads.register(model.few.id, Inner::<1>::ones([4], &device));
        }
        refused(&mut model, grads, 1, "rank 2's gradient of `few`");
        let mut grads = GradientsParams::new();
        if rank == 1 {
            grads.register(ParamId::new(), Inner::<1>::ones([5], &device));
        }
        refused(&mut model, grads, 1, "rank 1 has gradients of parameters");
        let mut other = model.clone();
        if rank == 3 {
            other.cube = whole(&[2, 3, 12], DType::F32);
        }
        refused(&mut other, GradientsParams::new(), 1, "rank 3's model does not have `cube`");
        // The groups are still usable.
        for max in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let parts = optimizer.sync(&model, gradients(&model, |_, _| Some(1.0)), 1).unwrap();
            let error = parts.clip_norm(max).err().unwrap();
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        }
        // A pass that the `DataParallel` keeps.
        let pass = ddp.pass(&model, 1).unwrap();
        pass.finish_trained(GradientsParams::new()).unwrap();
        let error = optimizer.sync(&model, gradients(&model, |_, _| Some(1.0)), 1).err().unwrap();
        assert!(error.to_string().contains("rank 0 has passes of this step with another"), "{error}");
        assert!(ddp.skip(&model).is_err(), "the pass had no gradients");
        // Parts of one rank that are not those of this optimizer.
        let whole: ShardedSgd<Odd> = ShardedOptimizer::new(&ddp, SgdConfig::new().init(), Sharding::None).unwrap();
        let others = whole.sync(&model, gradients(&model, |_, _| Some(1.0)), 1).unwrap();
        let own = optimizer.sync(&model, gradients(&model, |_, _| Some(1.0)), 1).unwrap();
        let error = optimizer.step(0.1, &mut model, if rank == 1 { others } else { own }).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("rank 1 has parts of another model or another sharding"), "{error}");
        let parts = optimizer.sync(&model, gradients(&model, |_, _| Some(1.0)), 1).unwrap();
        let sgd: SgdOf<Odd> = SgdConfig::new().init();
        let error = parts.for_optimizer(&sgd).err().unwrap();
        assert!(error.to_string().contains("parts for a sharded optimizer"), "{error}");
        assert_eq!(bits(&model), before);
        let grads = gradients(&model, |_, _| Some(1.0));
        optimizer.advance(0.5, &mut model, grads, 1).unwrap();
        assert_ne!(bits(&model), before);
    });
}

#[test]
fn a_rank_that_leaves_is_an_error_on_all_others() {
    for leaver in 0..4 {
        let results = ranks(4, |group| {
            let rank = group.rank();
            let (mut model, ddp) = DataParallel::new(group, Odd::new(DType::F32)).unwrap();
            let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::Blocks(2)).unwrap();
            let grads = gradients(&model, |_, _| Some(1.0));
            optimizer.advance(0.5, &mut model, grads, 1).unwrap();
            if rank == leaver {
                return None;
            }
            let before = bits(&model);
            let error = optimizer.advance(0.5, &mut model, GradientsParams::new(), 1).unwrap_err();
            assert_eq!(bits(&model), before);
            Some(error)
        });
        let errors: Vec<_> = results.into_iter().flatten().collect();
        assert_eq!(errors.len(), 3);
        assert!(errors.iter().all(|error| matches!(error, Error::Left { rank, .. } if *rank == leaver)), "{errors:?}");
    }
}

#[test]
fn a_model_keeps_its_ids() {
    ranks(2, |group| {
        let (mut model, ddp) = DataParallel::new(group, Odd::new(DType::F32)).unwrap();
        let ids: HashSet<_> = list_param_ids(&model).into_iter().collect();
        let mut optimizer = ShardedOptimizer::new(&ddp, AdamConfig::new().init(), Sharding::All).unwrap();
        let grads = gradients(&model, |_, _| Some(1.0));
        optimizer.advance(0.5, &mut model, grads, 1).unwrap();
        assert_eq!(list_param_ids(&model).into_iter().collect::<HashSet<_>>(), ids);
    });
}
