//! The contract of vLLM's device communicator: each test's name is a promise.

use bonfire::{Error, Group};
use bonfire_testing::{Kind, run_ranks};
use burn::module::{Param, ParamId};
use burn::tensor::{Bool, Float, Int, TensorData};

use super::checks::every_kind_of_element;
use crate::burn_version::{Inner, inner_device};
use crate::tensor_version::DeviceCommunicator;

/// Runs `f` on each of `n` ranks.
fn on<T: Send + 'static>(n: usize, f: impl Fn(DeviceCommunicator, Group) -> T + Clone + Send + 'static) -> Vec<T> {
    run_ranks(Kind::Threads, n, move |group| f(communicator(&group), group))
}

pub fn communicator(group: &Group) -> DeviceCommunicator {
    DeviceCommunicator::new(group.clone(), inner_device(), None, "ep").unwrap()
}

/// A tensor of this shape that counts up from `start`.
fn count<const D: usize>(start: usize, shape: [usize; D]) -> Inner<D> {
    let start = start as i64;
    let end = start + shape.iter().product::<usize>() as i64;
    Inner::<1, Int>::arange(start..end, &inner_device()).float().reshape(shape)
}

#[track_caller]
fn same<const D: usize>(ours: Result<Inner<D>, Error>, expected: Inner<D>) {
    assert_eq!(ours.unwrap().into_data(), expected.into_data());
}

#[test]
fn all_gather_defaults_to_the_last_dimension() {
    on(3, |communicator, group| {
        let parts = |rank: usize| count(10 * rank, [2, 3, 1]);
        let all = (0..3).map(parts).collect::<Vec<_>>();
        same(communicator.all_gather(parts(group.rank()), None), Inner::cat(all.clone(), 2));
        same(communicator.all_gather(parts(group.rank()), Some(-2)), Inner::cat(all.clone(), 1));
        same(communicator.all_gather(parts(group.rank()), Some(0)), Inner::cat(all, 0));
    });
}

#[test]
fn all_gather_v_defaults_to_the_first_dimension_and_takes_or_exchanges_sizes() {
    on(3, |communicator, group| {
        let sizes = [2, 0, 1];
        let part = |rank: usize| count(10 * rank, [sizes[rank], 2]);
        let all = Inner::cat(vec![part(0), part(2)], 0);
        same(communicator.all_gather_v(part(group.rank()), None, Some(&sizes)), all.clone());
        same(communicator.all_gather_v(part(group.rank()), None, None), all);
        let columns = Inner::cat((0..3).map(|rank| count(rank, [2, rank + 1])).collect(), 1);
        same(communicator.all_gather_v(count(group.rank(), [2, group.rank() + 1]), Some(1), Some(&[1, 2, 3])), columns);
    });
}

#[test]
fn all_gather_v_of_a_list_is_one_operation() {
    let records = on(2, |communicator, group| {
        let rows = 2 - group.rank();
        let none = |rows: usize| Inner::from_data(TensorData::new(Vec::<f32>::new(), [rows, 0]), &inner_device());
        let tensors = |rows| vec![count(rows, [rows, 2]), count(7 * rows, [rows, 3]), none(rows)];
        let before = group.trace().operations.len();
        let all = communicator.all_gather_v_list(tensors(rows), None, Some(&[2, 1])).unwrap();
        let operations = group.trace().operations.len() - before;
        for ((ours, first), second) in all.into_iter().zip(tensors(2)).zip(tensors(1)).take(2) {
            assert_eq!(ours.into_data(), Inner::cat(vec![first, second], 0).into_data());
        }
        operations
    });
    assert_eq!(records, [1, 1]);
}

#[test]
fn all_reduce_is_out_of_place() {
    on(3, |communicator, group| {
        let own = count(group.rank(), [2, 2]);
        same(communicator.all_reduce(own.clone()), count(0, [2, 2]) * 3 + 3);
        assert_eq!(own.into_data(), count(group.rank(), [2, 2]).into_data());
    });
}

/// The original returns a permuted result for three dimensions and more, also by default.
#[test]
fn reduce_scatter_splits_the_last_dimension_of_three_and_more() {
    on(2, |communicator, group| {
        let (rank, own) = (group.rank(), |rank: usize| count(100 * rank, [2, 3, 4]));
        let sum = own(0) + own(1);
        same(communicator.reduce_scatter(own(rank), None), sum.clone().narrow(2, 2 * rank, 2));
        same(communicator.reduce_scatter(own(rank), Some(2)), sum.clone().narrow(2, 2 * rank, 2));
        same(communicator.reduce_scatter(own(rank), Some(0)), sum.clone().narrow(0, rank, 1));
        let (start, len) = [(0, 1), (1, 2)][rank];
        same(communicator.reduce_scatter_v(own(rank), Some(-2), Some(&[1, 2])), sum.narrow(1, start, len));
        let four = count(rank, [1, 2, 1, 6]);
        let sum = count(0, [1, 2, 1, 6]) * 2 + 1;
        same(communicator.reduce_scatter(four, None), sum.narrow(3, 3 * rank, 3));
    });
}

#[test]
fn gather_returns_none_except_on_the_root() {
    on(3, |communicator, group| {
        let part = |rank: usize| count(10 * rank, [2, 2]);
        let all = Inner::cat((0..3).map(part).collect(), 1);
        match communicator.gather(part(group.rank()), None, None).unwrap() {
            Some(whole) => assert_eq!((whole.into_data(), group.rank()), (all.clone().into_data(), 0)),
            None => assert_ne!(group.rank(), 0),
        }
        let whole = communicator.gather(part(group.rank()), Some(2), Some(-2)).unwrap();
        assert_eq!(whole.is_some(), group.rank() == 2);
    });
}

#[test]
fn send_and_recv_default_to_the_neighbours_in_the_ring() {
    on(3, |communicator, group| {
        let rank = group.rank();
        let sent = |rank: usize| count(rank, [2, 1]);
        // Rank 0 sends first, so the ranks never wait for each other in a cycle, even if a send waits.
        if rank == 0 {
            communicator.send(sent(0), None).unwrap();
        }
        let received = communicator.recv([2, 1], None, None);
        same(received, sent((rank + 2) % 3));
        if rank != 0 {
            communicator.send(sent(rank), None).unwrap();
        }
        match rank {
            0 => communicator.send(sent(0).greater_elem(0), Some(2)).unwrap(),
            2 => {
                let flags = communicator.recv::<2, Bool>([2, 1], None, Some(0)).unwrap();
                assert_eq!(flags.into_data(), TensorData::from([[false], [true]]));
            }
            _ => {}
        }
    });
}

#[test]
fn metadata_and_tensors_travel_on_their_groups() {
    let ranks = Group::threads(2).unwrap().into_iter().zip(Group::threads(2).unwrap());
    let ranks = ranks.map(|(metadata, tensors)| {
        std::thread::spawn(move || {
            let own = count(0, [tensors.rank() + 1, 1]);
            let communicator =
                DeviceCommunicator::new(metadata.clone(), inner_device(), Some(tensors.clone()), "tp").unwrap();
            communicator.all_gather_v(own, None, None).unwrap();
            [metadata, tensors].map(|group| group.trace().operations.iter().map(|r| r.call.dtype).collect::<Vec<_>>())
        })
    });
    for rank in ranks.collect::<Vec<_>>() {
        assert_eq!(rank.join().unwrap(), [[bonfire::DType::U64], [bonfire::DType::F32]]);
    }
    let [one, two] = [1, 2].map(|n| Group::threads(n).unwrap().remove(0));
    assert!(matches!(
        DeviceCommunicator::new(one, inner_device(), Some(two), "tp"),
        Err(Error::InvalidArgument { .. })
    ));
}

#[test]
fn dispatch_and_combine_keep_extra_tensors_and_token_counts() {
    on(3, |communicator, group| {
        let rows = |rank: usize| [2, 0, 3][rank];
        let own = group.rank();
        let hidden = |rank: usize| count(10 * rank, [rows(rank), 4]);
        let logits = |rank: usize| count(100 * rank, [rows(rank), 2]);
        let extra = |rank: usize| Inner::<2, Int>::full([rows(rank), 1], rank as i32, &inner_device());
        for sequence_parallel in [false, true] {
            let (all, scores, extras) =
                communicator.dispatch(hidden(own), logits(own), sequence_parallel, vec![extra(own)]).unwrap();
            assert_eq!(all.to_data(), Inner::cat(vec![hidden(0), hidden(2)], 0).into_data());
            assert_eq!(scores.into_data(), Inner::cat(vec![logits(0), logits(2)], 0).into_data());
            assert_eq!(extras[0].to_data(), Inner::cat(vec![extra(0), extra(2)], 0).into_data());
            let combined = communicator.combine(all * (own as f32 + 1.0), sequence_parallel).unwrap();
            assert_eq!(combined.dims(), [rows(own), 4]);
            if rows(own) > 0 {
                assert_eq!(combined.into_data(), (hidden(own) * 6).into_data());
            }
        }
        let wrong = communicator.combine(count(0, [4, 4]), true);
        assert!(wrong.unwrap_err().to_string().contains("do not add up"));
    });
}

#[test]
fn dispatch_without_sequence_parallelism_uses_the_data_parallel_group() {
    // Four ranks: two of tensor parallelism times two of data parallelism.
    let pairs = [Group::threads(2).unwrap(), Group::threads(2).unwrap()];
    let pairs: Vec<_> = pairs.into_iter().flatten().collect();
    let ranks = Group::threads(4).unwrap().into_iter().zip(pairs).map(|(group, pair)| {
        std::thread::spawn(move || {
            let mut communicator = communicator(&group);
            communicator.set_data_parallel_group(pair).unwrap();
            let rows = |sequence_parallel| {
                let own = count(0, [group.rank() + 1, 1]);
                let (all, ..) =
                    communicator.dispatch::<2, Float>(own.clone(), own, sequence_parallel, Vec::new()).unwrap();
                let rows = all.dims()[0];
                (rows, communicator.combine(all, sequence_parallel).unwrap().dims()[0])
            };
            [rows(false), rows(true)]
        })
    });
    let rows: Vec<_> = ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect();
    assert_eq!(rows, [[(3, 1), (10, 1)], [(3, 2), (10, 2)], [(7, 3), (10, 3)], [(7, 4), (10, 4)]]);
}

#[test]
fn dispatch_and_combine_are_the_identity_in_a_group_of_one() {
    on(1, |communicator, _| {
        let own = count(3, [2, 2]);
        let extra = vec![own.clone().equal_elem(4)];
        let (hidden, logits, extra) = communicator.dispatch(own.clone(), own.clone() * 2, true, extra).unwrap();
        assert_eq!(hidden.clone().into_data(), own.to_data());
        assert_eq!(logits.into_data(), (own.clone() * 2).into_data());
        assert_eq!(extra[0].to_data(), own.clone().equal_elem(4).into_data());
        same(communicator.combine(hidden, true), own.clone());
        same(communicator.all_reduce(own.clone()), own.clone());
        same(communicator.all_gather(own.clone(), None), own.clone());
        same(communicator.reduce_scatter(own.clone(), None), own.clone());
        assert!(communicator.combine(own, false).is_ok(), "there is nothing to undo");
    });
}

#[test]
fn every_kind_and_width_of_element_is_supported() {
    run_ranks(Kind::Threads, 2, |group| every_kind_of_element(&group));
}

#[test]
fn destroy_makes_every_later_call_an_error() {
    on(2, |mut communicator, group| {
        let own = || count(0, [2, 2]);
        let kept = communicator.all_reduce(own()).unwrap();
        communicator.destroy();
        communicator.destroy();
        let mut errors = vec![
            communicator.all_reduce(own()).unwrap_err(),
            communicator.all_gather(own(), None).unwrap_err(),
            communicator.all_gather_v(own(), None, None).unwrap_err(),
            communicator.all_gather_v_list(vec![own()], None, None).unwrap_err(),
            communicator.reduce_scatter(own(), None).unwrap_err(),
            communicator.reduce_scatter_v(own(), None, None).unwrap_err(),
            communicator.gather(own(), None, None).unwrap_err(),
            communicator.send(own(), None).unwrap_err(),
            communicator.recv::<1, Float>([1], None, None).unwrap_err(),
            communicator.dispatch::<2, Float>(own(), own(), true, Vec::new()).unwrap_err(),
            communicator.combine(own(), true).unwrap_err(),
            communicator.route(own().int(), 2, true).unwrap_err(),
            communicator.set_data_parallel_group(group.clone()).unwrap_err(),
        ];
        errors.push(communicator.prepare_communication_buffer_for_model(model(4)).unwrap_err());
        for error in errors {
            assert!(error.to_string().contains("communicator `ep`: it was destroyed"), "{error}");
        }
        assert_eq!(kept.into_data(), (own() * 2).into_data());
        group.barrier().unwrap();
    });
}

/// Parameters that count up from 0.
pub fn model(len: usize) -> (Param<Inner<1>>, Param<Inner<1, Int>>) {
    let places = Inner::<1, Int>::arange(0..len as i64, &inner_device());
    (Param::from_tensor(places.clone().float()), Param::initialized(ParamId::new(), places))
}

#[test]
fn prepared_buffers_give_the_same_results() {
    const LEN: usize = 300_000;
    for kind in [Kind::Threads, Kind::Shm] {
        run_ranks(kind, 2, |group| {
            let mut communicator = communicator(&group);
            let model = communicator.prepare_communication_buffer_for_model(model(LEN)).unwrap();
            let (weights, places) = (model.0.val(), model.1.val());
            assert_eq!(weights.to_data(), count(0, [LEN]).into_data());
            let sum = communicator.all_reduce(weights.clone()).unwrap();
            assert_eq!(sum.to_data(), (count(0, [LEN]) * 2).into_data());
            let again = communicator.all_reduce(sum.clone()).unwrap();
            assert_eq!(again.into_data(), (count(0, [LEN]) * 4).into_data());
            let all = communicator.all_gather(places.clone(), Some(0)).unwrap();
            assert_eq!(all.dims(), [2 * LEN]);
            // Existing tensors outlive the communicator and its groups.
            communicator.destroy();
            drop((communicator, group));
            assert_eq!(sum.into_data(), (weights * 2).into_data());
        });
    }
}
