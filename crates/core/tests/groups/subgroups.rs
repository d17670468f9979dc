//! Subgroups: what ferrotorch's SubBackend does, and what it lacks.

use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use bonfire_core::{Error, Group, ReduceOp};
use bonfire_testing::transport::Channels;
use bonfire_testing::{DEADLINE, Kind, errors, run_ranks, run_ranks_with};

/// Runs `f` on the groups of every kind.
fn everywhere(n: usize, f: impl Fn(Group) + Clone + Send + 'static) {
    for kind in Kind::ALL {
        run_ranks(kind, n, f.clone());
    }
}

fn refusal(result: Result<Group, Error>) -> String {
    match result {
        Err(Error::InvalidArgument { reason, .. }) => reason,
        other => panic!("{other:?} is no refusal"),
    }
}

/// Checks that all ranks of the group take part, and no other rank: each contributes a bit of its own.
fn sums(group: &Group) {
    let mut bits = vec![1i64 << group.rank(); 300];
    group.all_reduce(&mut bits, ReduceOp::Sum).unwrap();
    assert_eq!(bits, vec![(1i64 << group.world_size()) - 1; 300]);
}

#[test]
fn members_are_checked_for_emptiness_then_range_then_the_caller() {
    everywhere(3, |group| {
        let rank = group.rank();
        assert!(refusal(group.subgroup(&[])).contains("no members"));
        assert!(refusal(group.subgroup(&[3])).contains("member 3"));
        assert!(refusal(group.subgroup(&[(rank + 1) % 3, usize::MAX])).contains("member 18446744073709551615"));
        assert!(refusal(group.subgroup(&[(rank + 1) % 3, (rank + 2) % 3])).contains("is not a member"));
        // The group is still usable.
        sums(&group.subgroup(&[0, 1, 2]).unwrap());
        assert_eq!(group.failure(), None);
    });
}

#[test]
fn members_are_sorted_and_deduplicated() {
    everywhere(4, |group| {
        if group.rank() == 2 {
            return;
        }
        let named = [[3, 0, 1, 3], [1, 1, 0, 3], [0; 4], [0, 3, 1, 0]];
        let part = group.subgroup(&named[group.rank()]).unwrap();
        assert_eq!(part.members(), [0, 1, 3]);
        assert_eq!(part.rank(), [0, 1, 9, 2][group.rank()]);
        assert_eq!(part.world_size(), 3);
        sums(&part);
    });
}

#[test]
fn ranks_are_mapped_both_ways_and_the_parent_is_known() {
    everywhere(4, |group| {
        assert!(group.parent().is_none());
        assert_eq!((group.members(), group.to_local(3), group.to_local(4)), (vec![0, 1, 2, 3], Some(3), None));
        assert_eq!(group.to_global(2), Ok(2));
        if group.rank() % 2 == 0 {
            return;
        }
        let odd = group.subgroup(&[1, 3]).unwrap();
        assert_eq!([0, 1].map(|local| odd.to_global(local)), [Ok(1), Ok(3)]);
        assert_eq!([0, 1, 2, 3, 4].map(|global| odd.to_local(global)), [None, Some(0), None, Some(1), None]);
        assert_eq!(odd.to_global(odd.rank()), Ok(group.rank()));
        assert!(matches!(odd.to_global(2), Err(Error::InvalidArgument { .. })));
        assert_eq!(odd.parent().map(Group::rank), Some(group.rank()));
        assert_eq!(odd.parent().map(Group::world_size), Some(4));
    });
}

#[test]
fn operations_take_local_ranks() {
    everywhere(3, |group| {
        if group.rank() == 0 {
            return;
        }
        let pair = group.subgroup(&[1, 2]).unwrap();
        let mut data = [group.rank() as u8];
        pair.broadcast(&mut data, 1).unwrap();
        assert_eq!(data, [2]);
        match pair.rank() {
            0 => pair.send(&[7u8], 1).unwrap(),
            _ => pair.recv(&mut data, 0).unwrap(),
        }
        assert_eq!(data, [[2], [7]][pair.rank()]);
        // Ranks of the parent are no ranks of this group, and no rank sends to itself.
        assert!(matches!(pair.send(&data, 2), Err(Error::InvalidArgument { .. })));
        assert!(matches!(pair.recv(&mut data, 2), Err(Error::InvalidArgument { .. })));
        assert!(matches!(pair.send(&data, pair.rank()), Err(Error::InvalidArgument { .. })));
        assert_eq!(pair.all_gather_v(&[pair.rank() as u32]).unwrap().0, [0, 1]);
    });
}

#[test]
fn subgroups_can_be_nested() {
    everywhere(5, |group| {
        if group.rank() == 1 {
            return;
        }
        let four = group.subgroup(&[0, 2, 3, 4]).unwrap();
        sums(&four);
        if four.rank() == 0 {
            return;
        }
        let three = four.subgroup(&[1, 2, 3]).unwrap();
        sums(&three);
        assert_eq!(three.members(), [1, 2, 3]);
        assert_eq!(three.to_global(0).and_then(|rank| four.to_global(rank)), Ok(2));
        let one = three.subgroup(&[three.rank()]).unwrap();
        one.barrier().unwrap();
        sums(&one);
        assert_eq!(one.parent().and_then(Group::parent).map(Group::world_size), Some(4));
    });
}

#[test]
fn a_barrier_involves_members_only() {
    everywhere(3, |group| {
        if group.rank() < 2 {
            let pair = group.subgroup(&[0, 1]).unwrap();
            pair.barrier().unwrap();
            pair.start_barrier().unwrap().wait().unwrap();
        }
        // Rank 2 waits here meanwhile.
        group.barrier().unwrap();
    });
}

#[test]
fn a_receive_times_out_without_affecting_the_parent() {
    for kind in Kind::ALL {
        let results = run_ranks(kind, 3, |group| {
            let pair = (group.rank() > 0).then(|| group.subgroup(&[1, 2]).unwrap());
            let late = pair.as_ref().filter(|pair| pair.rank() == 1).map(|pair| {
                let result = pair.with_deadline(Duration::from_millis(100)).recv(&mut [0u8], 0);
                assert_eq!(pair.failure(), result.clone().err());
                result
            });
            // The parent is not affected.
            group.barrier().unwrap();
            late
        });
        let missing = match &results[2] {
            Some(Err(Error::Timeout { missing, .. })) => missing.clone(),
            other => panic!("{kind:?}: {other:?} is no timeout"),
        };
        assert_eq!(missing, [0], "{kind:?}: by its rank in the subgroup");
    }
}

#[test]
fn members_that_disagree_on_the_members_get_an_error() {
    for kind in Kind::ALL {
        for named in [[&[0, 1, 2][..], &[0, 1, 2], &[0, 2, 3]], [&[0, 1, 2], &[0, 1], &[0, 1, 2]]] {
            let results = run_ranks(kind, 4, move |group| match named.get(group.rank()) {
                Some(members) if members.contains(&group.rank()) => group.subgroup(members).map(|_| ()),
                // This rank creates no subgroup, and still gets the error.
                _ => group.barrier(),
            });
            let first = errors(results);
            assert!(first.iter().all(|error| *error == first[0]), "{kind:?}: {first:?}");
            match &first[0] {
                Error::MemberMismatch { rank, members, peer, theirs } => {
                    assert_eq!((&members[..], &theirs[..]), (named[*rank], named[*peer]), "{kind:?}");
                    assert_ne!(members, theirs);
                }
                other => panic!("{kind:?}: {other}"),
            }
        }
    }
}

#[test]
fn a_missing_member_is_named() {
    for kind in Kind::ALL {
        let results = run_ranks_with(
            kind,
            3,
            |builder| builder.deadline(Duration::from_millis(500)),
            |group| match group.rank() {
                2 => {
                    let failed = || group.failure().is_some();
                    while !failed() && group.with_deadline(DEADLINE).recv(&mut [0u8], 0).is_ok() {}
                    None
                }
                _ => Some(group.subgroup(&[0, 1, 2]).map(|_| ())),
            },
        );
        let errors = errors(results.into_iter().flatten().collect());
        assert!(errors.iter().any(|e| e.to_string().contains("rank 2")), "{kind:?}: {errors:?}");
    }
}

#[test]
fn split_groups_ranks_by_color_in_the_order_of_their_keys() {
    everywhere(5, |group| {
        let rank = group.rank();
        let color = [Some(7), None, Some(7), Some(u64::MAX), Some(7)][rank];
        let part = group.split(color, [3, 0, -1, 0, 3][rank]).unwrap();
        let Some(part) = part else {
            assert_eq!(rank, 1);
            return group.barrier().unwrap();
        };
        assert_eq!(part.members(), if rank == 3 { vec![3] } else { vec![2, 0, 4] });
        assert_eq!(part.to_global(part.rank()), Ok(rank));
        assert_eq!(part.to_local(rank), Some(part.rank()));
        let (all, _) = part.all_gather_v(&[rank as u8]).unwrap();
        assert_eq!(all, if rank == 3 { vec![3] } else { vec![2, 0, 4] });
        group.barrier().unwrap();
    });
}

#[test]
fn by_host_groups_the_ranks_of_each_host() {
    run_ranks(Kind::Threads, 3, |group| sums(&group.by_host().unwrap()));
    run_ranks(Kind::Hosts(&[0, 1, 1, 0, 2]), 5, |group| {
        let host = group.by_host().unwrap();
        assert_eq!(host.members(), [&[0, 3][..], &[1, 2], &[1, 2], &[0, 3], &[4]][group.rank()]);
        sums(&host);
        // Across hosts: the first rank of each host, and so on.
        let across = group.split(Some(host.rank() as u64), 0).unwrap().unwrap();
        assert_eq!(across.members(), [&[0, 1, 4][..], &[0, 1, 4], &[2, 3], &[2, 3], &[0, 1, 4]][group.rank()]);
        sums(&across);
    });
}

#[test]
fn custom_transports_have_no_subgroups() {
    let groups: Vec<_> = Channels::group(2).into_iter().map(|end| Group::on(Arc::new(end))).collect();
    for group in &groups {
        assert!(refusal(group.subgroup(&[0, 1])).contains("custom transport"));
        assert!(refusal(group.by_host()).contains("custom transport"));
        assert!(matches!(group.split(Some(0), 0), Err(Error::InvalidArgument { .. })));
    }
}

#[test]
fn a_failure_of_a_subgroup_does_not_affect_its_parent() {
    for kind in Kind::ALL {
        run_ranks(kind, 3, move |group| {
            let all = group.subgroup(&[0, 1, 2]).unwrap();
            let outcome = match all.rank() {
                0 => all.all_reduce(&mut [0u8; 3], ReduceOp::Sum),
                _ => all.all_reduce(&mut [0u8; 4], ReduceOp::Sum),
            };
            assert!(matches!(outcome, Err(Error::Mismatch { .. })), "{kind:?}: {outcome:?}");
            sums(&group);
            // The shrunk subgroup works, and has no parent.
            let again = all.shrink().unwrap();
            sums(&again);
            assert!(again.parent().is_none());
            // Ranks drop their handles of the parent one by one. It lives as long as the subgroup.
            let last = group.subgroup(&[0, 1, 2]).unwrap();
            drop(group);
            sums(&last);
            sums(last.parent().unwrap());
        });
    }
}

/// Threads of the same rank use clones of handles: one thread for each group, all at once.
#[test]
fn concurrent_operations_of_parent_and_subgroups_do_not_interfere() {
    let rounds = 10_000 / Kind::ALL.len();
    for kind in Kind::ALL {
        run_ranks(kind, 4, move |group| {
            let pair = group.split(Some(group.rank() as u64 / 2), 0).unwrap().unwrap();
            let across = group.split(Some(group.rank() as u64 % 2), 0).unwrap().unwrap();
            let three = (group.rank() > 0).then(|| group.subgroup(&[1, 2, 3]).unwrap());
            let groups: Vec<Group> = [Some(group), Some(pair), Some(across), three].into_iter().flatten().collect();
            let begin = Arc::new(Barrier::new(groups.len()));
            let spawn = |(index, group): (usize, Group)| {
                let begin = begin.clone();
                thread::spawn(move || {
                    let ranks = group.members();
                    begin.wait();
                    for round in 0..rounds {
                        // A different value in each group and round, and lengths that select different algorithms.
                        let len = [3, 70, 1500, 9000][round % 4];
                        let value = |rank: usize| (round * 64 + index * 16 + rank + 1) as u64;
                        let mut data = vec![value(ranks[group.rank()]); len];
                        group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                        assert_eq!(data, vec![ranks.iter().map(|rank| value(*rank)).sum::<u64>(); len]);
                    }
                })
            };
            let threads: Vec<_> = groups.into_iter().enumerate().map(spawn).collect();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}
