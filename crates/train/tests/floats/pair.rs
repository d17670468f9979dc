//! Two ranks on processors of two architectures, over TCP: one is this program, the other a program of these tests for
//! another architecture. What they compute is compared with two ranks of this program.

use std::env;

use bonfire_core::{Error, Group, ReduceOp};
use bonfire_testing::free_address;
use bonfire_testing::oracle::{Sample, all_reduced, input};
use bonfire_testing::process::{Process, is_child, report};
use bonfire_train::Sharding;
use bytemuck::cast_slice;
use half::{bf16, f16};

use crate::forms::{Model, STEPS, all, by_parts, by_shards, by_steps, by_sync, reference};

const TEST: &str = "pair::two_architectures_compute_what_one_does";
/// The command line of the other program, with an emulator if it needs one.
const OTHER: &str = "BONFIRE_OTHER_PROGRAM";
/// What a rank does.
const TASK: &str = "TASK";

/// Trains in each form. Returns the models, whose numbers as text are exact.
fn train(group: &Group) -> Result<String, Error> {
    let models = [
        by_sync(group.clone(), &all),
        by_steps(group.clone(), &all),
        by_shards(group.clone(), Sharding::All, &all),
        by_parts(group.clone(), 1, false, false, &all),
        by_parts(group.clone(), 1, true, false, &all),
    ];
    Ok(serde_json::to_string(&models).expect("numbers"))
}

/// Numbers of up to so many bits, of all magnitudes: their sums are rounded in floats.
fn rough<T: Sample>(rank: usize, len: usize, bits: u32) -> Vec<T> {
    let mut state = rank as u64 + 1;
    let mut next = || {
        // As in the core's tests of kernels: L'Ecuyer, "Tables of linear congruential generators", 1999.
        state = state.wrapping_mul(2_862_933_555_777_941_757).wrapping_add(3_037_000_493);
        state >> 8
    };
    let number = |_| {
        let (wide, shift) = (i128::from(next()) << 56 | i128::from(next()), next() as u32 % bits);
        T::of((wide >> (112 - bits + shift)) * if next() & 1 == 0 { 1 } else { -1 })
    };
    (0..len).map(number).collect()
}

/// Reduces `T` in each way, by each algorithm that its sizes choose. Returns a checksum for each result.
fn reduce_all<T: Sample>(group: &Group, bits: u32, sums: &mut Vec<String>) -> Result<(), Error> {
    let (rank, ranks) = (group.rank(), group.world_size());
    for (op, len) in ReduceOp::ALL.iter().flat_map(|op| [1, 7, 1023, 60_001].map(|len| (*op, len))) {
        let mut data: Vec<T> = input(rank, len);
        group.all_reduce(&mut data, op)?;
        let expected: Vec<T> = all_reduced(op, ranks, 0..len);
        assert!(cast_slice::<T, u8>(&data) == cast_slice::<T, u8>(&expected), "{op} of {len} {}", T::DTYPE);
        let mut data: Vec<T> = rough(rank, len, bits);
        group.all_reduce(&mut data, op)?;
        sums.push(format!("{op} of {len} {}: {:08x}", T::DTYPE, crc32fast::hash(cast_slice(&data))));
    }
    Ok(())
}

/// Operations on all kinds of numbers. Integers wrap, and no sum is a NaN: processors give it different signs.
fn reduce(group: &Group) -> Result<String, Error> {
    let mut sums = Vec::new();
    reduce_all::<f32>(group, 60, &mut sums)?;
    reduce_all::<f64>(group, 110, &mut sums)?;
    reduce_all::<f16>(group, 15, &mut sums)?;
    reduce_all::<bf16>(group, 60, &mut sums)?;
    reduce_all::<i8>(group, 30, &mut sums)?;
    reduce_all::<i32>(group, 60, &mut sums)?;
    reduce_all::<i64>(group, 110, &mut sums)?;
    reduce_all::<u16>(group, 60, &mut sums)?;
    Ok(sums.join("\n"))
}

/// Sums that are no numbers: these must be bit-identical on both ranks, but not in both groups. Returns their bytes.
fn no_numbers(group: &Group) -> Result<String, Error> {
    fn sum<T: Sample>(group: &Group, values: [T; 4]) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        for len in [3, 5001, 60_001] {
            // Infinities of both signs, a NaN on either rank, and zeros of both signs.
            let turn = if group.rank() == 0 { [0, 2, 3, 3] } else { [1, 3, 2, 1] };
            let mut data: Vec<T> = (0..len).map(|i| values[turn[i % 4]]).collect();
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            bytes.extend_from_slice(cast_slice(&data));
        }
        Ok(bytes)
    }
    let mut bytes = sum(group, [f32::INFINITY, f32::NEG_INFINITY, -f32::NAN, -0.0])?;
    bytes.extend(sum(group, [f16::INFINITY, f16::NEG_INFINITY, -f16::NAN, f16::NEG_ZERO])?);
    bytes.extend(sum(group, [bf16::INFINITY, bf16::NEG_INFINITY, -bf16::NAN, bf16::NEG_ZERO])?);
    Ok(format!("{:08x}", crc32fast::hash(&bytes)))
}

fn task(group: &Group) -> Result<String, Error> {
    let done = String::new;
    match (&*env::var(TASK).expect("set by the parent"), group.rank()) {
        ("train", _) => train(group),
        ("reduce", _) => reduce(group),
        ("no numbers", _) => no_numbers(group),
        ("lengths", rank) => group.all_reduce(&mut vec![0f32; 8 + rank], ReduceOp::Sum).map(|()| done()),
        (_, 0) => group.broadcast(&mut [0f32; 8], 0).map(|()| done()),
        _ => group.all_reduce(&mut [0f32; 8], ReduceOp::Sum).map(|()| done()),
    }
}

/// Runs a task on two ranks, which are these programs and are told these world sizes.
fn run(programs: [&[String]; 2], task: &str, world_sizes: [usize; 2]) -> [Result<String, Error>; 2] {
    let address = free_address();
    let start = |rank: usize| {
        let variables = [
            ("BONFIRE_RANK", rank.to_string()),
            ("BONFIRE_WORLD_SIZE", world_sizes[rank].to_string()),
            ("BONFIRE_ADDRESS", address.clone()),
            ("BONFIRE_TRANSPORT", "tcp".into()),
            ("BONFIRE_DEADLINE", "60".into()),
            (TASK, task.into()),
        ];
        Process::start_program(programs[rank], TEST, &variables)
    };
    let mut ranks = [0, 1].map(start);
    let outcomes = [0, 1].map(|rank: usize| ranks[rank].outcome());
    assert!(ranks.iter_mut().all(|rank| rank.end().success()), "{task}");
    outcomes
}

#[test]
#[ignore = "needs a program for another architecture: scripts/systems pair"]
fn two_architectures_compute_what_one_does() {
    if is_child() {
        return report(&Group::from_env().and_then(|group| task(&group)));
    }
    let own = [env::current_exe().expect("the test's own binary").to_str().expect("a path in UTF-8").to_owned()];
    let other = env::var(OTHER).unwrap_or_else(|_| panic!("{OTHER} is not set"));
    let other: Vec<String> = other.split_whitespace().map(str::to_owned).collect();
    let both: [[&[String]; 2]; 2] = [[&own, &other], [&other, &own]];

    for name in ["train", "reduce"] {
        let expected = run([&own, &own], name, [2, 2]).map(Result::unwrap);
        assert!(expected[0] == expected[1], "{name}: {expected:?}");
        for programs in both {
            for (rank, outcome) in run(programs, name, [2, 2]).into_iter().enumerate() {
                let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
                assert_eq!(lines(&outcome.unwrap()), lines(&expected[0]), "{name}: rank {rank} of {programs:?}");
            }
        }
        if name == "train" {
            let models: Vec<Model> = serde_json::from_str(&expected[0]).unwrap();
            let reference = reference(2, STEPS).concat();
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5;
            assert!(models.iter().all(|model| model.concat().iter().zip(&reference).all(close)), "{models:?}");
        }
    }
    for programs in both {
        let [one, two] = run(programs, "no numbers", [2, 2]).map(Result::unwrap);
        assert_eq!(one, two, "{programs:?}");
        for name in ["lengths", "operations"] {
            let [one, two] = run(programs, name, [2, 2]).map(Result::unwrap_err);
            assert!(matches!(&one, Error::Mismatch { calls, .. } if calls.len() == 2), "{name}: {one}");
            assert_eq!(one, two, "{name}");
        }
        for error in run(programs, "nothing", [2, 3]).map(Result::unwrap_err) {
            let Error::Rendezvous { reason, .. } = &error else { panic!("{error:?} is not a failed rendezvous") };
            assert!(reason.contains("a world size of 3, rank 0 with 2"), "{error}");
        }
    }
}
