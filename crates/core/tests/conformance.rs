//! The conformance matrix: transport x world size x algorithm x operation x reduction x element type x length x in or
//! out of place. Every result is compared with exact arithmetic.

use bonfire_conformance::{
    check, check_all_types, check_batch, check_group, check_sizes, check_variable_sizes, lengths,
};
use bonfire_core::{Algorithm, Error, Group, Selection, TransportKind};
use bonfire_testing::{DEADLINE, Kind, free_address, run_ranks, run_ranks_with};
use half::{bf16, f16};

/// All types and lengths with the group's default algorithms, and large lengths, whose messages have several chunks.
fn matrix_of(kind: Kind, worlds: std::ops::RangeInclusive<usize>) {
    for n in worlds {
        run_ranks(kind, n, |group| check_group(&group));
    }
}

/// Every algorithm at every length, on one type of each kind of accumulator.
fn algorithms(kind: Kind, worlds: impl IntoIterator<Item = usize>) {
    for n in worlds {
        for algorithm in Algorithm::ALL.iter().copied() {
            run_ranks_with(
                kind,
                n,
                |builder| builder.algorithms(algorithm),
                move |group| {
                    for len in lengths(n).into_iter().chain([140_001]) {
                        check::<f32>(&group, len);
                        check::<bf16>(&group, len);
                        check::<i32>(&group, len);
                        check_sizes::<f32>(&group, len);
                    }
                },
            );
        }
    }
}

#[test]
fn threads_1_to_9() {
    matrix_of(Kind::Threads, 1..=9);
}

#[test]
fn tcp_1_to_5() {
    matrix_of(Kind::Tcp, 1..=5);
}

#[test]
fn tcp_6_to_9() {
    matrix_of(Kind::Tcp, 6..=9);
}

#[test]
fn shm_2_to_5() {
    matrix_of(Kind::Shm, 2..=5);
}

#[test]
fn shm_6_to_9() {
    matrix_of(Kind::Shm, 6..=9);
}

/// Lengths around the largest that is sent at once, and lengths of so many chunks that every buffer is used several
/// times. Operations of all sizes follow each other.
#[test]
fn shm_in_many_chunks() {
    for n in [2, 3, 5] {
        run_ranks(Kind::Shm, n, |group| {
            for len in [4096, 4097, 5461, 5462, 8191, 8192, 8193, 65_537, 1_000_003, 3000, 400_000] {
                check::<f32>(&group, len);
                check_variable_sizes::<f32>(&group, len);
            }
            check::<f64>(&group, 300_001);
            check::<i8>(&group, 1_500_001);
            check::<i32>(&group, 250_001);
            check::<bf16>(&group, 600_001);
        });
    }
}

#[test]
fn hosts_of_equal_size() {
    matrix_of(Kind::Hosts(&[0, 0, 1, 1]), 4..=4);
    matrix_of(Kind::Hosts(&[0, 0, 1, 1, 2, 2]), 6..=6);
}

#[test]
fn hosts_of_different_size() {
    matrix_of(Kind::Hosts(&[0, 0, 0, 1]), 4..=4);
    matrix_of(Kind::Hosts(&[0, 0, 1, 1, 1, 2, 2]), 7..=7);
}

#[test]
fn hosts_with_noncontiguous_ranks() {
    matrix_of(Kind::Hosts(&[0, 1]), 3..=5);
    matrix_of(Kind::Hosts(&[0, 1, 1, 2, 0, 1]), 6..=6);
}

/// Operations of many kinds and types in one batch, with messages in an order that would make ranks wait for each other
/// one by one.
#[test]
fn batches() {
    for kind in Kind::ALL {
        for n in [1, 2, 5] {
            run_ranks(kind, n, move |group| {
                for len in [0, 3, 1000] {
                    check_batch(&group, len);
                }
            });
        }
    }
}

/// A subgroup supports every operation of a group.
#[test]
fn subgroups() {
    for kind in Kind::ALL {
        run_ranks(kind, 5, |group| {
            if group.rank() != 1 {
                let part = group.subgroup(&[0, 2, 3, 4]).unwrap();
                check_all_types(&part, &[0, 3, 5, 1000]);
                check::<f32>(&part, 100_003);
                check::<f32>(&part.subgroup(&[part.rank()]).unwrap(), 7);
            }
            group.barrier().unwrap();
        });
    }
}

/// Several chunks: one crosses between hosts while the hosts work on the next.
#[test]
fn hosts_in_many_chunks() {
    for hosts in [&[0, 0, 1, 1][..], &[0, 1, 0]] {
        run_ranks(Kind::Hosts(hosts), hosts.len(), |group| {
            for len in [2_097_152, 2_097_153, 3000, 4_500_001] {
                check::<f32>(&group, len);
            }
            check::<bf16>(&group, 4_400_001);
            check::<i32>(&group, 2_200_001);
        });
    }
}

#[test]
fn algorithms_on_threads_1_to_6() {
    algorithms(Kind::Threads, 1..=6);
}

#[test]
fn algorithms_on_threads_7_to_8() {
    algorithms(Kind::Threads, 7..=8);
}

#[test]
fn algorithms_on_threads_9() {
    algorithms(Kind::Threads, 9..=9);
}

#[test]
fn algorithms_on_tcp_2_to_5() {
    algorithms(Kind::Tcp, 2..=5);
}

#[test]
fn algorithms_on_tcp_6_and_9() {
    algorithms(Kind::Tcp, [6, 9]);
}

/// Operations that the engine runs alternate with operations that run as plans, in both orders.
#[test]
fn engine_and_plans_alternate() {
    for kind in [Kind::Threads, Kind::Shm] {
        for table in ["native:0-39;ring:40-99999;native:100000-", "all_reduce=halving:0-99999;native:100000-"] {
            let table: Selection = table.parse().unwrap();
            for n in [2, 3, 5] {
                run_ranks_with(
                    kind,
                    n,
                    |builder| builder.algorithms(table.clone()),
                    move |group| {
                        for len in [0, 1, 9, 10, 11, 1000, 24_999, 25_000, 70_001, 7] {
                            check::<f32>(&group, len);
                            check::<f16>(&group, len);
                            check_variable_sizes::<f16>(&group, len);
                        }
                    },
                );
            }
        }
    }
}

/// Messages below and above the size from which they are split over connections, also where ranks are configured with
/// different numbers of connections.
#[test]
fn tcp_over_several_connections() {
    for connections in [[2, 2, 2], [8, 8, 8], [1, 4, 3]] {
        let address = free_address();
        let builder = |rank: usize| {
            let builder = Group::builder().rank(rank).world_size(3).address(&address).deadline(DEADLINE);
            builder.transport(TransportKind::Tcp).tcp_connections(connections[rank])
        };
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let builder = builder(rank);
                std::thread::spawn(move || {
                    let group = builder.connect().unwrap();
                    for len in [0, 7, 131_071 / 4, 131_072 / 4, 3 * 131_072 / 4 + 1, 300_007] {
                        check::<f32>(&group, len);
                        check::<i8>(&group, len);
                    }
                })
            })
            .collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    }
    for connections in [0, 9] {
        let builder = Group::builder().rank(1).world_size(2).address(free_address()).tcp_connections(connections);
        assert!(matches!(builder.connect(), Err(Error::InvalidArgument { .. })));
    }
}
