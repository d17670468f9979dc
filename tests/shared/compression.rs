//! Compressed gradients: the same bits on all ranks, the mean up to what the encoding loses, and no loss that grows.

use bonfire::train::compression::{Bf16, Compression, Int8};
use bonfire::{Checkpoints, Error, Group, TrainingState};
use bonfire_testing::{Kind, ranks, run_ranks};
use burn::module::Param;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, TensorData};

use crate::burn_version::*;

type Vectors = Vec<Param<Tensor<1>>>;

/// Elements of the parameters: less than there are ranks, no multiple of a block, several blocks.
const SIZES: [usize; 4] = [1, 700, 3, 64];

/// Loses nothing, so that all else is exact.
struct Plain;

impl Compression for Plain {
    fn name(&self) -> String {
        "plain".into()
    }

    fn bytes(&self, elements: usize) -> usize {
        4 * elements
    }

    fn compress(&self, values: &[f32], bytes: &mut [u8]) {
        bytes.copy_from_slice(bytemuck::cast_slice(values));
    }

    fn decompress(&self, bytes: &[u8], values: &mut [f32]) {
        values.copy_from_slice(bytemuck::cast_slice(bytes));
    }
}

fn model() -> Vectors {
    let parameter = |size: &usize| Param::from_data(TensorData::new(vec![1.0f32; *size], [*size]), &device());
    SIZES.iter().map(parameter).collect()
}

/// Returns gradients of the parameters at which `value` is not NaN.
fn gradients(model: &Vectors, value: impl Fn(usize, usize) -> f32) -> GradientsParams {
    let mut grads = GradientsParams::new();
    for (position, parameter) in model.iter().enumerate().filter(|(position, _)| !value(*position, 0).is_nan()) {
        let values: Vec<_> = (0..SIZES[position]).map(|i| value(position, i)).collect();
        let data = TensorData::new(values, [SIZES[position]]).convert_dtype(parameter.val().dtype());
        let dtype = data.dtype();
        grads.register(parameter.id, Inner::<1>::from_data(data, (&inner_device(), dtype)));
    }
    grads
}

/// The values of the gradients, by position.
fn values(model: &Vectors, grads: &GradientsParams) -> Vec<Option<Vec<f32>>> {
    let values = |parameter: &Param<Tensor<1>>| {
        let grad = gradient::<1>(grads, parameter.id)?;
        assert_eq!(grad.dtype(), parameter.val().dtype());
        Some(grad.into_data().iter::<f32>().collect())
    };
    model.iter().map(values).collect()
}

/// An integer of at most ten bits.
fn integer(rank: usize, position: usize, i: usize) -> f32 {
    ((rank * 31 + position * 7 + i * 13) % 1009) as f32 - 504.0
}

#[test]
fn an_encoding_that_loses_nothing_gives_the_mean() {
    for kind in [Kind::Threads, Kind::Tcp, Kind::Shm] {
        for (n, uneven) in [(1, false), (2, false), (3, true), (4, false), (5, true)] {
            let results = run_ranks(kind, n, move |group| {
                let rank = group.rank();
                let (model, mut ddp) = DataParallel::new(group, model()).unwrap();
                ddp.set_compression(Plain).unwrap();
                // Parameter 2 has a gradient on rank 0 only, and parameter 3 on none.
                let value = |position, i| match position {
                    3 => f32::NAN,
                    2 if rank > 0 => f32::NAN,
                    _ => integer(rank, position, i),
                };
                let samples = if uneven { rank } else { 8 };
                values(&model, &ddp.sync(&model, gradients(&model, value), samples).unwrap())
            });
            let samples = |rank: usize| if uneven { rank as f64 } else { 8.0 };
            let total: f64 = (0..n).map(samples).sum();
            for result in &results {
                assert_eq!(result, &results[0]);
                assert_eq!(result[3], None);
                for (position, mean) in result.iter().enumerate().take(3) {
                    let contributors = if position == 2 { 1 } else { n };
                    let Some(mean) = mean else {
                        assert!(uneven && position == 2, "{n} ranks: parameter {position} has no mean");
                        continue;
                    };
                    for (i, found) in mean.iter().enumerate() {
                        let weighted = |rank| samples(rank) * f64::from(integer(rank, position, i));
                        let expected = (0..contributors).map(weighted).sum::<f64>() / total;
                        // Exact if the number of ranks is a power of two.
                        let tolerance = if n.is_power_of_two() { 0.0 } else { 1e-3 };
                        let found = f64::from(*found);
                        assert!(
                            (found - expected).abs() <= tolerance,
                            "{n} ranks, {position}, {i}: {found} {expected}"
                        );
                    }
                }
            }
        }
    }
}

/// Sums up the means of 40 steps with the same gradients, and checks that the ranks' are the same.
fn sums(n: usize, compression: impl Compression + Clone, value: fn(usize, usize, usize) -> f32) -> Vec<f64> {
    let results = ranks(n, |group| {
        let rank = group.rank();
        let (model, mut ddp) = DataParallel::new(group, model()).unwrap();
        ddp.set_compression(compression.clone()).unwrap();
        let mut sums = vec![0.0; SIZES.iter().sum()];
        for _ in 0..STEPS {
            let grads = gradients(&model, |position, i| value(rank, position, i));
            let means = values(&model, &ddp.sync(&model, grads, 1).unwrap());
            sums.iter_mut().zip(means.into_iter().flatten().flatten()).for_each(|(sum, mean)| *sum += f64::from(mean));
        }
        sums
    });
    assert!(results.iter().all(|sums| *sums == results[0]));
    results.into_iter().next().unwrap()
}

const STEPS: usize = 40;

/// What is lost in one step comes with the next, so the loss of all steps is that of one.
#[test]
fn what_is_lost_in_a_step_comes_with_the_next_ones() {
    // Neither a multiple of a unit, nor around zero.
    let value = |rank: usize, position: usize, i: usize| 0.3 + integer(rank, position, i) / 3000.0;
    // The largest gradient is 0.47. The sum is wrong by half a unit at most, the ranks' parts of it by three quarters.
    let check = |name: &str, n: usize, sums: Vec<f64>, unit: f64| {
        let elements = SIZES.iter().enumerate().flat_map(|(position, size)| (0..*size).map(move |i| (position, i)));
        for ((position, i), sum) in elements.zip(sums) {
            let mean = (0..n).map(|rank| f64::from(value(rank, position, i))).sum::<f64>() / n as f64;
            let error = (sum - STEPS as f64 * mean).abs();
            assert!(error <= 1.25 * unit, "{name}, {n} ranks, parameter {position}, {i}: {error} of {unit}");
        }
    };
    for n in [2, 3] {
        check("int8", n, sums(n, Int8, value), 0.47 / 127.0);
        check("bf16", n, sums(n, Bf16, value), 0.25 / 128.0);
    }
    // Below a unit of the block's largest: sent once in some steps.
    let small = |_, _, i| if i == 0 { 1.0 } else { 1e-3 };
    let sums = sums(2, Int8, small);
    assert!((sums[2] - STEPS as f64 * 1e-3).abs() <= 1.25 / 127.0, "{}", sums[2]);
}

/// Carries no more than 4, as an encoding of small range does, and whole numbers only.
struct Narrow;

impl Compression for Narrow {
    fn name(&self) -> String {
        "narrow".into()
    }

    fn bytes(&self, elements: usize) -> usize {
        Plain.bytes(elements)
    }

    fn compress(&self, values: &[f32], bytes: &mut [u8]) {
        let cut_off: Vec<f32> = values.iter().map(|value| value.round().clamp(-4.0, 4.0)).collect();
        Plain.compress(&cut_off, bytes);
    }

    fn decompress(&self, bytes: &[u8], values: &mut [f32]) {
        Plain.decompress(bytes, values);
    }
}

/// Returns the means of parameter 1's first element in steps in which its gradients on all ranks are these.
fn means(ddp: &DataParallel, model: &Vectors, of_steps: &[f32]) -> Vec<f32> {
    let mean = |value: &f32| {
        let grads = gradients(model, |position, _| if position == 1 { *value } else { 0.5 });
        values(model, &ddp.sync(model, grads, 1).unwrap())[1].as_ref().unwrap()[0]
    };
    of_steps.iter().map(mean).collect()
}

#[test]
fn what_an_encoding_cuts_off_of_a_spike_does_not_come_back_step_after_step() {
    for n in [2, 3] {
        ranks(n, |group| {
            let (model, mut ddp) = DataParallel::new(group, model()).unwrap();
            ddp.set_compression(Narrow).unwrap();
            let spike = [&[0.0, 0.0, 1e6], &[0.0; 300][..]].concat();
            let found = means(&ddp, &model, &spike);
            // The rest of the spike, 64 times the usual gradient of its bucket, and no more.
            let sum: f32 = found.iter().sum();
            assert!((4.0..=4.0 + 2.0 * 64.0).contains(&sum), "{n} ranks: {sum}");
            assert_eq!(found[found.len() - 100..], [0.0; 100], "{n} ranks");
        });
    }
}

#[test]
fn going_back_forgets_what_was_lost() {
    let folder = tempfile::tempdir().unwrap();
    ranks(2, |group| {
        let mut checkpoints = Checkpoints::new(&group, folder.path()).unwrap();
        let (model, mut ddp) = DataParallel::new(group, model()).unwrap();
        ddp.set_compression(Narrow).unwrap();
        let optimizer: SgdOf<Vectors> = SgdConfig::new().init();
        let mut state = TrainingState::new(model, optimizer, 0.1, ());
        checkpoints.save(&state).unwrap();
        let bytes = state.save().unwrap();
        // Each rank's half is rounded to 0, and then to 1 with what was lost before.
        assert_eq!(means(&ddp, &state.model, &[0.8, 0.8]), [0.0, 2.0]);
        for way in ["a call", "a load", "a resume", "a shrink"] {
            ddp.forget_compression_errors();
            assert_eq!(means(&ddp, &state.model, &[0.8]), [0.0]);
            match way {
                "a call" => ddp.forget_compression_errors(),
                "a load" => assert!(checkpoints.load(&mut state).unwrap()),
                "a resume" => ddp.resume(&mut state, || Ok(bytes.clone())).unwrap(),
                _ => ddp.shrink(&mut state).unwrap(),
            }
            assert_eq!(means(&ddp, &state.model, &[0.8]), [0.0], "after {way}");
        }
    });
}

/// A chain, so that gradients are complete one after the other.
fn loss(model: &Vectors, number: usize) -> Tensor<1> {
    model.iter().fold(Tensor::from_data([0.1 + number as f32 / 50.0], &device()), |x, parameter| {
        (parameter.val() * x.clone()).powf_scalar(2.0).mean() * 0.5 + x * 0.5
    })
}

#[test]
fn overlapped_steps_and_sync_get_the_same_bits() {
    for kind in [Kind::Threads, Kind::Tcp, Kind::Shm] {
        for n in 1..=4 {
            let results = run_ranks(kind, n, |group| [true, false].map(|overlapped| train(&group, overlapped)));
            for [overlapped, sync] in &results {
                assert_eq!(overlapped, sync, "{n} ranks, {kind:?}");
                assert_eq!(overlapped, &results[0][0], "{n} ranks, {kind:?}");
            }
        }
    }
}

fn train(group: &Group, overlapped: bool) -> Vec<TensorData> {
    let rank = group.rank();
    let (mut model, mut ddp) = DataParallel::new(group.clone(), model()).unwrap();
    ddp.set_bucket_bytes(256);
    let mut optimizer = SgdConfig::new().init();
    for number in 0..22 {
        // The first steps fix the buckets.
        if number == 2 {
            ddp.set_compression(Int8).unwrap();
        }
        let samples = 1 + (rank + number) % 3;
        let grads = if overlapped || number < 2 {
            let step = ddp.last_pass(&model, samples).unwrap();
            let mut backward = loss(step.model(), number + rank).backward();
            step.finish(&mut backward).unwrap()
        } else {
            let grads = GradientsParams::from_grads(loss(&model, number + rank).backward(), &model);
            ddp.sync(&model, grads, samples).unwrap()
        };
        model = optimizer.step(0.05, model, grads);
    }
    model.iter().map(|parameter| parameter.val().into_data()).collect()
}

/// Exchanges gradients that are not finite on rank 1, and then good ones.
#[test]
fn gradients_that_are_not_finite_are_an_error_on_all_ranks_and_the_group_stays_usable() {
    for wrong in [f32::NAN, f32::INFINITY] {
        for overlapped in [false, true] {
            let errors = ranks(3, |group| {
                let rank = group.rank();
                let (model, mut ddp) = DataParallel::new(group, model()).unwrap();
                ddp.set_compression(Int8).unwrap();
                let step = |good: bool| {
                    let factor = if rank == 1 && !good { wrong } else { 1.0 };
                    let loss = |model: &Vectors| model[0].val().sum() + model[1].val().sum() * factor;
                    if overlapped {
                        let step = ddp.last_pass(&model, 1)?;
                        let mut backward = loss(step.model()).backward();
                        step.finish(&mut backward)
                    } else {
                        ddp.sync(&model, GradientsParams::from_grads(loss(&model).backward(), &model), 1)
                    }
                };
                step(true).unwrap();
                let error = step(false).err().unwrap();
                let grads = step(true).unwrap();
                let mean = values(&model, &grads);
                assert!(mean[1].iter().flatten().all(|mean| (mean - 1.0).abs() < 1e-6));
                error.to_string()
            });
            for error in errors {
                assert!(error.contains("rank 1's gradient of `1` has elements that are not finite"), "{error}");
                assert!(error.contains("int8"), "{error}");
            }
        }
    }
}

#[test]
fn different_compressions_and_f64_are_refused() {
    let errors = ranks(2, |group| {
        let rank = group.rank();
        let (model, mut ddp) = DataParallel::new(group, model()).unwrap();
        if rank == 1 {
            ddp.set_compression(Bf16).unwrap();
        }
        let sync = ddp.sync(&model, gradients(&model, |_, _| 1.0), 1).err().unwrap();
        let step = ddp.last_pass(&model, 1).unwrap();
        let mut backward = loss(step.model(), 1).backward();
        let step = step.finish(&mut backward).err().unwrap();
        [sync, step]
    });
    for error in errors.into_iter().flatten() {
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("rank 0 and rank 1 compress gradients differently"), "{error}");
    }
    let group = Group::threads(1).unwrap().remove(0);
    let wide = Tensor::<1>::from_data(TensorData::from([1.0f64]), (&device(), DType::F64));
    let (_, mut ddp) = DataParallel::new(group, vec![Param::from_tensor(wide)]).unwrap();
    let error = ddp.set_compression(Int8).unwrap_err().to_string();
    assert!(error.contains("`0` has elements of f64"), "{error}");
}

#[test]
fn a_parameter_of_f64_that_is_unfrozen_later_is_refused() {
    let errors = ranks(2, |group| {
        let wide = Tensor::<1>::from_data(TensorData::from([1.0f64]), (&device(), DType::F64));
        let frozen = Param::from_tensor(wide).set_require_grad(false);
        let (model, mut ddp) = DataParallel::new(group, vec![frozen]).unwrap();
        ddp.set_compression(Int8).unwrap();
        let [frozen] = <[_; 1]>::try_from(model).unwrap();
        let model = vec![frozen.set_require_grad(true)];
        ddp.run(&model, [()], |model, ()| (model[0].val().sum(), 1)).err().unwrap()
    });
    for error in errors {
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains("rank 0 trains `0`, whose elements of f64"), "{error}");
    }
}

#[test]
fn half_precision_parameters_keep_their_type() {
    ranks(2, |group| {
        let rank = group.rank();
        let half = |parameter: Param<Tensor<1>>| {
            Param::from_tensor(Tensor::from_inner(parameter.val().inner().cast(DType::F16)).require_grad())
        };
        let (model, mut ddp) = DataParallel::new(group, model().into_iter().map(half).collect::<Vectors>()).unwrap();
        ddp.set_compression(Plain).unwrap();
        let mean = ddp.sync(&model, gradients(&model, |position, i| integer(rank, position, i)), 1).unwrap();
        for (position, mean) in values(&model, &mean).into_iter().enumerate() {
            for (i, mean) in mean.unwrap().into_iter().enumerate() {
                assert_eq!(mean, (integer(0, position, i) + integer(1, position, i)) / 2.0);
            }
        }
    });
}

/// Goes wrong on rank 1.
struct Faulty {
    rank: usize,
    fault: &'static str,
}

impl Faulty {
    fn fails(&self, fault: &str) -> bool {
        self.rank == 1 && self.fault == fault
    }
}

impl Compression for Faulty {
    fn name(&self) -> String {
        "faulty".into()
    }

    fn bytes(&self, elements: usize) -> usize {
        assert!(!self.fails("bytes"), "on purpose");
        match self.fault {
            "length" if self.rank == 1 => 4 * elements + 8,
            "size" if self.rank == 1 => usize::MAX,
            _ => 4 * elements,
        }
    }

    fn compress(&self, values: &[f32], bytes: &mut [u8]) {
        assert!(!self.fails("compress"), "on purpose");
        Plain.compress(values, &mut bytes[..4 * values.len()]);
    }

    fn decompress(&self, bytes: &[u8], values: &mut [f32]) {
        assert!(!self.fails("decompress"), "on purpose");
        Plain.decompress(&bytes[..4 * values.len()], values);
    }
}

#[test]
fn encodings_that_panic_or_differ_in_length_fail_on_all_ranks() {
    for fault in ["bytes", "compress", "decompress", "length", "size"] {
        for overlapped in [false, true] {
            let errors = ranks(2, |group| {
                let rank = group.rank();
                let (model, mut ddp) = DataParallel::new(group, model()).unwrap();
                ddp.set_compression(Faulty { rank, fault }).unwrap();
                let outcome = if overlapped {
                    let step = ddp.last_pass(&model, 1).unwrap();
                    let mut backward = loss(step.model(), 1).backward();
                    step.finish(&mut backward)
                } else {
                    ddp.sync(&model, gradients(&model, |_, _| 1.0), 1)
                };
                outcome.err().unwrap()
            });
            for (rank, error) in errors.iter().enumerate() {
                let text = error.to_string();
                let found = match fault {
                    "length" => matches!(error, Error::Mismatch { .. }),
                    "size" => text.contains("rank 1's encoding makes 18446744073709551615 bytes"),
                    _ => text.contains("rank 1's encoding has panicked: on purpose"),
                };
                assert!(found, "{fault}, overlapped {overlapped}, rank {rank}: {text}");
            }
        }
    }
}
