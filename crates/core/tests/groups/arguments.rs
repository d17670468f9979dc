//! Invalid arguments are rejected at once on the rank that passed them, and the group stays usable. NaN and infinities
//! are valid elements.

use std::time::Duration;

use bonfire_core::{Builder, Element, Error, Group, ReduceOp};
use bonfire_testing::{Kind, run_ranks, run_ranks_with};
use half::{bf16, f16};

type Act = fn(&Group) -> Result<(), Error>;

/// Calls with an invalid argument, which rank 1 of three makes.
const REFUSED: &[(&str, Act)] = &[
    ("root of reduce", |g| g.reduce(&mut [0f32; 2], ReduceOp::Sum, 3)),
    ("root of reduce_into", |g| g.reduce_into(&[0f32; 2], &mut [], ReduceOp::Sum, usize::MAX)),
    ("root of broadcast", |g| g.broadcast(&mut [0f32; 2], 3)),
    ("root of broadcast_into", |g| g.broadcast_into(None, &mut [0f32; 2], 3)),
    ("receiver", |g| g.send(&[0f32; 2], 3)),
    ("sender", |g| g.recv(&mut [0f32; 2], 3)),
    ("message to oneself", |g| g.send(&[0f32; 2], 1)),
    ("message from oneself", |g| g.recv(&mut [0f32; 2], 1)),
    ("output of all_reduce", |g| g.all_reduce_into(&[0f32; 2], &mut [0f32; 3], ReduceOp::Sum)),
    ("output of reduce", |g| g.reduce_into(&[0f32; 2], &mut [0f32; 1], ReduceOp::Sum, 1)),
    ("input of all_gather", |g| g.all_gather_into(&[0f32; 2], &mut [0f32; 3])),
    ("no input of all_gather", |g| g.all_gather_into(&[], &mut [0f32; 3])),
    ("output of reduce_scatter", |g| g.reduce_scatter_into(&[0f32; 6], &mut [0f32; 1], ReduceOp::Sum)),
    ("length of all_to_all", |g| g.all_to_all(&mut [0f32; 4])),
    ("length of all_to_all_into", |g| g.all_to_all_into(&[0f32; 4], &mut [0f32; 4])),
    ("output of all_to_all", |g| g.all_to_all_into(&[0f32; 6], &mut [0f32; 3])),
    ("root of gather", |g| g.gather(&mut [0f32; 2], 3)),
    ("output of gather", |g| g.gather_into(&[0f32; 2], &mut [0f32; 5], 1)),
    ("root of scatter", |g| g.scatter(&mut [0f32; 2], 3)),
    ("input of scatter", |g| g.scatter_into(&[0f32; 5], &mut [0f32; 2], 1)),
    ("too few sizes", |g| g.all_gather_v_into(&[0f32; 2], &[2, 2], &mut [0f32; 4])),
    ("sizes beyond all memory", |g| g.all_gather_v_into(&[0f32], &[usize::MAX, 1, 1], &mut [0f32; 1])),
    ("input of all_gather_v", |g| g.all_gather_v_into(&[0f32; 2], &[2, 1, 0], &mut [0f32; 3])),
    ("output of all_gather_v", |g| g.all_gather_v_into(&[0f32; 2], &[1, 2, 0], &mut [0f32; 4])),
    ("input of reduce_scatter_v", |g| g.reduce_scatter_v_into(&[0f32; 4], &[1, 2, 0], &mut [0f32; 2], ReduceOp::Sum)),
    ("output of reduce_scatter_v", |g| g.reduce_scatter_v_into(&[0f32; 3], &[1, 2, 0], &mut [0f32; 1], ReduceOp::Sum)),
    ("output of gather_v", |g| g.gather_v_into(&[0f32; 2], &[1, 2, 0], &mut [0f32; 4], 1)),
    ("input of scatter_v", |g| g.scatter_v_into(&[0f32; 2], &[1, 2, 0], &mut [0f32; 2], 1)),
    ("scatter_v without the root's input", |g| g.scatter_v::<f32>(None, 1).map(drop)),
    ("scatter_v with input on another rank", |g| g.scatter_v::<f32>(Some((&[], &[0, 0, 0])), 0).map(drop)),
    ("sizes of scatter_v", |g| g.scatter_v::<f32>(Some((&[0.0], &[0, 0, 0])), 1).map(drop)),
    ("input of all_to_all_v", |g| g.all_to_all_v(&[0f32; 2], &[1, 1, 1]).map(drop)),
    ("sizes of one's own part", |g| g.all_to_all_v_into(&[0f32; 3], &[1, 1, 1], &mut [0f32; 2], &[1, 0, 1])),
    ("root in a batch", |g| g.batch().all_reduce(&mut [0f32; 3], ReduceOp::Sum).broadcast(&mut [0f32], 3).run()),
    ("receiver in a batch", |g| g.batch().all_reduce(&mut [0f32; 3], ReduceOp::Sum).send(&[0f32], 1).run()),
    ("sender in a batch", |g| g.batch().recv(&mut [0f32], 3).run()),
    ("exchange to a rank that does not exist", |g| g.exchange(&[0f32], 3, &mut [0f32], 0)),
    ("exchange from a rank that does not exist", |g| g.exchange(&[0f32], 0, &mut [0f32], 3)),
    ("exchange with oneself on one side only", |g| g.exchange(&[0f32], 1, &mut [0f32], 0)),
    ("lengths of an exchange with oneself", |g| g.exchange(&[0f32], 1, &mut [0f32; 2], 1)),
    ("broadcast without the root's input", |g| g.broadcast_into(None, &mut [0f32; 2], 1)),
    ("broadcast with input on another rank", |g| g.broadcast_into(Some(&[0f32; 2]), &mut [0f32; 2], 0)),
    ("length of the root's input", |g| g.broadcast_into(Some(&[0f32; 3]), &mut [0f32; 2], 1)),
];

#[test]
fn invalid_arguments_are_rejected_and_the_group_stays_usable() {
    for kind in Kind::ALL {
        run_ranks(kind, 3, move |group| {
            for (name, act) in REFUSED {
                // Meanwhile the other ranks wait in the next operation.
                if group.rank() == 1 {
                    let result = act(&group);
                    assert!(matches!(result, Err(Error::InvalidArgument { .. })), "{kind:?}, {name}: {result:?}");
                }
                let mut data = [1i32; 3];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap_or_else(|e| panic!("{kind:?}, after {name}: {e}"));
                assert_eq!(data, [3; 3]);
            }
            assert_eq!(group.failure(), None);
        });
    }
}

#[test]
fn a_group_without_ranks_is_rejected() {
    assert!(matches!(Group::threads(0), Err(Error::InvalidArgument { .. })));
    let empty = Group::builder().rank(0).world_size(0).address("127.0.0.1:29500").connect();
    assert!(matches!(empty, Err(Error::InvalidArgument { .. })));
}

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;
/// The inputs of three ranks, and the results of all reductions by IEEE 754, where `NAN` stands for any NaN.
const COLUMNS: &[([f32; 3], [f32; 5])] = &[
    // Sum, mean, max, min, product.
    ([NAN, 1.0, 2.0], [NAN; 5]),
    ([1.0, NAN, 2.0], [NAN; 5]),
    ([1.0, 2.0, NAN], [NAN; 5]),
    ([NAN, NAN, NAN], [NAN; 5]),
    ([NAN, INF, -INF], [NAN; 5]),
    ([INF, 1.0, 2.0], [INF, INF, INF, 1.0, INF]),
    ([1.0, INF, INF], [INF, INF, INF, 1.0, INF]),
    ([1.0, 2.0, -INF], [-INF, -INF, 2.0, -INF, -INF]),
    ([-INF, 1.0, INF], [NAN, NAN, INF, -INF, -INF]),
    ([INF, 0.0, 1.0], [INF, INF, INF, 0.0, NAN]),
    ([1.0, 2.0, 3.0], [6.0, 2.0, 3.0, 1.0, 6.0]),
];

trait Float: Element {
    fn from(value: f32) -> Self;
    fn to(self) -> f32;
    fn bits(self) -> u64;
}

macro_rules! floats {
    ($($type:ty: $from:expr, $to:expr;)*) => {
        $(impl Float for $type {
            fn from(value: f32) -> Self { $from(value) }
            fn to(self) -> f32 { $to(self) }
            fn bits(self) -> u64 { self.to_bits().into() }
        })*
    };
}

floats! {
    f32: |x| x, |x| x;
    f64: |x| x as f64, |x| x as f32;
    f16: f16::from_f32, f16::to_f32;
    bf16: bf16::from_f32, bf16::to_f32;
}

/// Reduces all columns, repeated `times`, by every reduction, and returns the bits of the results.
fn reduce_all<T: Float>(group: &Group, times: usize) -> Vec<u64> {
    let mut bits = Vec::new();
    for (i, op) in ReduceOp::ALL.iter().copied().enumerate() {
        let mut data: Vec<T> =
            COLUMNS.iter().cycle().take(COLUMNS.len() * times).map(|(ranks, _)| T::from(ranks[group.rank()])).collect();
        group.all_reduce(&mut data, op).unwrap();
        for (got, (ranks, want)) in data.iter().zip(COLUMNS.iter().cycle()) {
            let (got, want) = (got.to(), want[i]);
            assert!(got == want || got.is_nan() && want.is_nan(), "{op} of {ranks:?} in {}: {got}", T::DTYPE);
        }
        bits.extend(data.into_iter().map(T::bits));
    }
    bits
}

fn check_non_finite(kind: Kind, settings: impl Fn(Builder) -> Builder) {
    let results = run_ranks_with(
        kind,
        3,
        |builder| settings(builder.deadline(Duration::from_secs(20))),
        |group| {
            let each = |times| {
                [
                    reduce_all::<f32>(&group, times),
                    reduce_all::<f64>(&group, times),
                    reduce_all::<f16>(&group, times),
                    reduce_all::<bf16>(&group, times),
                ]
                .concat()
            };
            [each(1), each(100)].concat()
        },
    );
    assert!(results.iter().all(|bits| *bits == results[0]), "{kind:?}: the bits differ between ranks");
}

#[test]
fn nan_and_infinities_follow_ieee_754() {
    for kind in Kind::ALL {
        check_non_finite(kind, |builder| builder);
        for algorithm in kind.algorithms() {
            check_non_finite(kind, |builder| builder.algorithms(*algorithm));
        }
    }
}

/// Max and min choose between two zeros or two NaN by the order of ranks, so all ranks keep the same one. (Which
/// payload a sum of several NaN keeps is up to the processor and the compiler: it may differ between ranks.)
#[test]
fn all_ranks_keep_the_same_signed_zero_and_max_and_min_the_same_nan() {
    for kind in Kind::ALL {
        for algorithm in [None].into_iter().chain(kind.algorithms().iter().copied().map(Some)) {
            for n in 2..=4 {
                let results = run_ranks_with(
                    kind,
                    n,
                    |builder| algorithm.map_or(builder.clone(), |algorithm| builder.algorithms(algorithm)),
                    |group| {
                        let rank = group.rank() as u32;
                        let signed_zero = if rank.is_multiple_of(2) { 0.0 } else { -0.0f32 };
                        let mut bits = Vec::new();
                        for op in ReduceOp::ALL.iter().copied() {
                            let extreme = matches!(op, ReduceOp::Max | ReduceOp::Min);
                            let nan = f32::from_bits(0x7fc0_0001 + if extreme { rank } else { 0 });
                            let mut data = [[nan, signed_zero]; 100];
                            group.all_reduce(data.as_flattened_mut(), op).unwrap();
                            bits.extend(data.as_flattened().iter().map(|x| x.to_bits()));
                        }
                        bits
                    },
                );
                assert!(results.iter().all(|bits| *bits == results[0]), "{kind:?}, {algorithm:?}, {n} ranks");
            }
        }
    }
}
