//! Values that serde encodes, and work that is done once for each host.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use bonfire_core::{Error, Group};
use bonfire_testing::{Kind, ranks, run_ranks};
use serde::{Deserialize, Serialize, Serializer};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Settings {
    name: String,
    rates: BTreeMap<u32, f64>,
    folder: Option<String>,
}

impl Settings {
    fn of(rank: usize) -> Settings {
        let rates = (0..rank as u32).map(|i| (i, 1.0 / f64::from(i + 1))).collect();
        Settings { name: format!("rank {rank}"), rates, folder: (rank == 1).then(|| "data".into()) }
    }
}

#[test]
fn values_arrive_as_they_are_between_threads_and_over_each_transport() {
    for kind in Kind::ALL {
        for n in 1..=3 {
            run_ranks(kind, n, move |group| {
                let (rank, all) = (group.rank(), (0..n).map(Settings::of).collect::<Vec<_>>());
                assert_eq!(group.all_gather_value(&Settings::of(rank)).unwrap(), all);
                for root in 0..n {
                    let own = (rank == root).then(|| Settings::of(rank));
                    assert_eq!(group.broadcast_value(own, root).unwrap(), all[root]);
                    let gathered = group.gather_value(&Settings::of(rank), root).unwrap();
                    assert_eq!(gathered, (rank == root).then(|| all.clone()));
                }
            });
        }
    }
}

/// A value that rank 1 cannot encode.
#[derive(Clone, Deserialize)]
struct Fails(usize);

impl Serialize for Fails {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            1 => Err(serde::ser::Error::custom("on purpose")),
            rank => rank.serialize(serializer),
        }
    }
}

#[test]
fn what_one_rank_cannot_send_or_read_is_an_error_on_all_ranks_and_none_waits() {
    type Call = fn(&Group) -> Result<(), Error>;
    fn bytes(group: &Group) -> Vec<u8> {
        vec![7; if group.rank() == 1 { (16 << 20) + 1 } else { 1 }]
    }
    fn on_1<T>(group: &Group, value: impl FnOnce() -> T) -> Option<T> {
        (group.rank() == 1).then(value)
    }
    let cases: [(Call, &str); 10] = [
        (|group| group.all_gather_value(&Fails(group.rank())).map(drop), "encoding the value of rank 1"),
        (|group| group.gather_value(&Fails(group.rank()), 2).map(drop), "encoding the value of rank 1"),
        (|group| group.broadcast_value(on_1(group, || Fails(1)), 1).map(drop), "encoding the value of rank 1"),
        (|group| group.all_gather_value(&bytes(group)).map(drop), "the value of rank 1 takes 1677"),
        (|group| group.gather_value(&bytes(group), 0).map(drop), "the value of rank 1 takes 1677"),
        (|group| group.broadcast_value(on_1(group, || bytes(group)), 1).map(drop), "the value of rank 1 takes 1677"),
        (|group| group.broadcast_value(None::<u8>, 1).map(drop), "rank 1 of root 1: the root passes a value"),
        (|group| group.broadcast_value(Some(1u8), 1).map(drop), "rank 0 of root 1: the root passes a value"),
        (
            |group| match group.rank() {
                1 => group.all_gather_value(&String::from("text")).map(drop),
                _ => group.all_gather_value(&5u8).map(drop),
            },
            "rank 0 cannot decode the value of rank 1; pass values of the same type",
        ),
        (
            |group| match group.rank() {
                2 => group.broadcast_value(None::<(u8, u8)>, 1).map(drop),
                _ => group.broadcast_value(on_1(group, || 5u8), 1).map(drop),
            },
            "rank 2 cannot decode the value of rank 1; pass values of the same type",
        ),
    ];
    for (call, expected) in cases {
        let errors = ranks(3, |group| {
            let error = call(&group).unwrap_err();
            // The group is as good as before.
            assert_eq!(group.all_gather_value(&group.rank()).unwrap(), [0, 1, 2]);
            error
        });
        assert!(errors[0].to_string().contains(expected), "{}", errors[0]);
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    }
    let group = Group::threads(1).unwrap().remove(0);
    assert!(matches!(group.broadcast_value(Some(1), 1), Err(Error::InvalidArgument { .. })));
    assert!(matches!(group.gather_value(&1, 1), Err(Error::InvalidArgument { .. })));
}

#[test]
fn one_rank_of_each_host_prepares_before_any_rank_goes_on() {
    for (kind, n, first) in [
        (Kind::Threads, 3, vec![0]),
        (Kind::Tcp, 2, vec![0]),
        (Kind::Hosts(&[0, 1]), 4, vec![0, 1]),
        (Kind::Hosts(&[0, 0, 1, 2]), 4, vec![0, 2, 3]),
    ] {
        let prepared = Arc::new(Mutex::new(Vec::new()));
        let shared = prepared.clone();
        let expected = first.clone();
        run_ranks(kind, n, move |group| {
            let prepare = || {
                shared.lock().unwrap().push(group.rank());
                Ok::<(), Error>(())
            };
            group.first_on_host(prepare).unwrap();
            assert_eq!(shared.lock().unwrap().len(), expected.len());
            let error = group.first_on_host(|| Err(format!("the disk of {} is full", group.rank()))).unwrap_err();
            assert!(error.to_string().contains("rank 0 failed for its host: the disk of 0 is full"), "{error}");
            group.barrier().unwrap();
        });
        let mut ranks = prepared.lock().unwrap().clone();
        ranks.sort_unstable();
        assert_eq!(ranks, first, "{kind:?}");
    }
}
