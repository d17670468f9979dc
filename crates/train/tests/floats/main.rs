//! Distributed training without a tensor library: the engine trains vectors, in every form, as one rank would.

mod adapter;
mod forms;
#[cfg(unix)]
mod pair;
#[cfg(target_os = "linux")]
mod stop;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use bonfire_core::{DType, Error, Group};
use bonfire_testing::{Kind, ranks, run_ranks};
use bonfire_train::checkpoint::{Checkpoints, Which};
use bonfire_train::gather::GatherSteps;
use bonfire_train::lane::{Elements, Memory, Read, Tensor, Tensors};
use bonfire_train::parameters::Parameter;
use bonfire_train::protocol::Header;
use bonfire_train::shards::Cut;
use bonfire_train::step::{Gradients, Groups, Pass, Steps};
use bonfire_train::{DeviceMesh, Sharding};

use self::adapter::{Floats, Momentum, SPOILED, initial, parameters, tensor};
use self::forms::{
    Model, STEPS, Sharded, all, batches, by_parts, by_shards, by_steps, by_sync, load, means, reference, step_of,
    steps, update,
};

fn check(name: &str, train: impl Fn(Group) -> Model + Clone + Send + 'static) {
    for n in 1..=4 {
        let expected = reference(n, STEPS);
        // On other systems than Unix all ranks are threads.
        let kinds: &[Kind] = if cfg!(unix) { &[Kind::Threads, Kind::Tcp] } else { &[Kind::Threads] };
        for kind in kinds {
            let models = run_ranks(*kind, n, train.clone());
            for (rank, model) in models.iter().enumerate() {
                let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5;
                let equal = model.iter().flatten().zip(expected.iter().flatten()).all(close);
                assert!(equal, "{name}, {n} ranks, {kind:?}, rank {rank}: {model:?}, not {expected:?}");
                assert!(*model == models[0], "{name}, {n} ranks, {kind:?}: rank {rank} differs from rank 0");
            }
        }
    }
}

#[test]
fn replicas_train_as_one_rank() {
    assert_ne!(reference(1, STEPS), initial());
    check("sync", |group| by_sync(group, &all));
    check("step", |group| by_steps(group, &all));
}

#[test]
fn a_sharded_optimizer_trains_as_one_rank() {
    for sharding in [Sharding::All, Sharding::None] {
        check("ZeRO-1", move |group| by_shards(group, sharding, &all));
    }
    check("ZeRO-1 in blocks", |group| {
        let ranks = if group.world_size() % 2 == 0 { 2 } else { 1 };
        by_shards(group, Sharding::Blocks(ranks), &all)
    });
}

#[test]
fn parts_train_as_one_rank() {
    check("ZeRO-3", |group| by_parts(group, 1, false, false, &all));
    check("ZeRO-3 where some backward passes need no values", |group| by_parts(group, 1, false, true, &all));
    check("ZeRO-2", |group| by_parts(group, 1, true, false, &all));
    check("hybrid", |group| {
        let replicas = if group.world_size() % 2 == 0 { 2 } else { 1 };
        by_parts(group, replicas, false, false, &all)
    });
}

#[test]
fn parts_of_three_ranks_are_loaded_as_wholes_by_two() {
    let folder = tempfile::tempdir().unwrap();
    let path: &Path = folder.path();
    let saved = ranks(3, |group| {
        let mut training = Sharded::new(group.clone(), false);
        training.step(batches(0, group.rank(), 3));
        Checkpoints::new(&group, path).unwrap().save(training.snapshot(), None).unwrap();
        training.whole()
    });
    let loaded =
        ranks(2, |group| Checkpoints::read_only(&group, path).unwrap().load(Which::Newest, load).unwrap().unwrap());
    assert!(loaded.iter().all(|loaded| *loaded == saved[0]));
    assert_ne!(saved[0], initial());
}

#[test]
fn a_step_with_a_gradient_that_is_not_finite_is_left_out_on_all_ranks() {
    // In the second step the last rank has a bad sample, in the first of its two passes.
    let spoiled = |rank: usize| if rank == 2 { vec![vec![SPOILED], vec![7]] } else { vec![vec![5]] };
    let steps_of = |rank: usize, bad: bool| {
        [batches(0, rank, 3)].into_iter().chain(bad.then(|| spoiled(rank))).chain([batches(1, rank, 3)])
    };
    let whole = |group: Group, bad: bool| {
        let (rank, steps) = (group.rank(), steps(Groups::replicas(group).unwrap(), Cut::Rows));
        steps.skip_non_finite();
        let (mut model, momentum) = (initial(), Momentum::default());
        for batches in steps_of(rank, bad) {
            let means = means(step_of(&steps, &model, batches));
            update(&mut model, &momentum, &means);
        }
        model
    };
    let parts = |group: Group, bad: bool| {
        let (rank, mut training) = (group.rank(), Sharded::new(group, false));
        training.steps.skip_non_finite();
        steps_of(rank, bad).for_each(|batches| training.step(batches));
        training.whole()
    };
    for train in [&whole as &(dyn Fn(Group, bool) -> Model + Sync), &parts] {
        assert_eq!(ranks(3, |group| train(group, true)), ranks(3, |group| train(group, false)));
    }
}

/// Syncs the gradient of one parameter over blocks of two ranks, twice. Returns both errors. All ranks still hold their
/// groups then, yet none waits.
fn failing(group: Group, parameter: Parameter, readable: bool, failed: &Barrier) -> [Error; 2] {
    let elements = parameter.elements();
    let parameters: Arc<[Parameter]> = [parameter].into();
    let groups = Groups::sharded(&Sharding::Blocks(2).mesh("test", &group).unwrap(), "test").unwrap();
    let tensors = Arc::new(Readable(Floats(parameters.clone()), readable.into()));
    let steps = Steps::new(groups, parameters, tensors, Cut::Slices, false);
    let sync = || {
        let gradients = vec![(0, tensor(vec![1.0; elements]))];
        steps.sync("sync", Header::new(vec![true]), Gradients { gradients, weight: 1.0, problem: None }).err().unwrap()
    };
    let errors = [sync(), sync()];
    failed.wait();
    errors
}

/// An adapter whose tensors may not be readable.
struct Readable(Floats, AtomicBool);

impl Tensors for Readable {
    fn fits(&self, position: usize, tensor: &Tensor) -> bool {
        self.0.fits(position, tensor)
    }

    fn cast(&self, position: usize, tensor: Tensor, dtype: DType) -> Tensor {
        self.0.cast(position, tensor, dtype)
    }

    fn scale(&self, tensor: Tensor, dtype: DType, factor: f64) -> Tensor {
        self.0.scale(tensor, dtype, factor)
    }

    fn add(&self, one: Tensor, other: Tensor) -> Tensor {
        self.0.add(one, other)
    }

    fn sum(&self, tensor: Tensor, dtype: DType) -> Tensor {
        self.0.sum(tensor, dtype)
    }

    fn read(&self, tensor: Tensor) -> Box<dyn Read> {
        if self.1.load(Ordering::Relaxed) { self.0.read(tensor) } else { Box::new(Unreadable) }
    }

    fn memory(&self, dtype: DType, elements: usize) -> Result<Box<dyn Memory>, Error> {
        self.0.memory(dtype, elements)
    }

    fn tensor(&self, position: usize, shape: &[usize], dtype: DType, memory: Box<dyn Memory>) -> Tensor {
        self.0.tensor(position, shape, dtype, memory)
    }
}

struct Unreadable;

impl Read for Unreadable {
    fn is_ready(&mut self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<Elements, Error> {
        Err(Error::broken("reading", "on purpose"))
    }
}

#[test]
fn a_step_that_fails_midway_on_one_rank_leaves_no_rank_waiting() {
    let run = |elements: fn(usize) -> usize, readable: fn(usize) -> bool, expected: fn(&Error) -> bool| {
        let failed = &Barrier::new(4);
        thread::scope(|scope| {
            for group in Group::threads(4).unwrap() {
                scope.spawn(move || {
                    let (rank, shape) = (group.rank(), vec![elements(group.rank())]);
                    let parameter = Parameter { shape, ..parameters()[1].clone() };
                    let [first, second] = failing(group, parameter, readable(rank), failed);
                    assert!(expected(&first), "{first}");
                    assert_eq!(second, first);
                });
            }
        });
    };
    // Rank 0's block disagrees about the parameter. The other block does not, but needs this block.
    run(|rank| if rank == 0 { 70 } else { 6 }, |_| true, |error| matches!(error, Error::Mismatch { .. }));
    // Rank 3 fails when the others have exchanged the header, and are in the subgroups.
    run(|_| 6, |rank| rank != 3, |error| matches!(error, Error::Broken { .. }));
}

/// A tensor library may end a backward pass with a wait for those of other threads, as burn-autodiff does.
#[test]
fn a_rank_that_fails_in_its_backward_pass_leaves_no_rank_waiting_in_theirs() {
    let ended = Barrier::new(2);
    ranks(2, |group| {
        let rank = group.rank();
        let parameters: Arc<[Parameter]> = [parameters()[1].clone()].into();
        let tensors = Arc::new(Readable(Floats(parameters.clone()), true.into()));
        let groups = Groups::sharded(&DeviceMesh::from(group), "test").unwrap();
        let steps = GatherSteps::new(groups, parameters, &[1], tensors.clone()).unwrap();
        let part = tensor(vec![1.0; steps.layout().shape(0)[0]]);
        let pass = steps.pass(Header::new(vec![true]), vec![Some(part)], true).unwrap();
        pass.set_weight(1.0).unwrap();
        let hooks = pass.hooks();
        hooks.expect(0);
        hooks.end_run(hooks.value(0).gathered.expect("a block"));
        // Rank 1 cannot take part in the gather that rank 0 waits for.
        tensors.1.store(rank == 0, Ordering::Relaxed);
        assert!(hooks.value_again(0).is_none());
        ended.wait();
        let error = Box::new(pass).finish(Vec::new(), None).err().unwrap();
        assert!(matches!(error, Error::Broken { .. }), "{error}");
    });
}
