//! The contract of vLLM's device communicator: each test's name is a promise.

use std::ops::Range;

use bonfire::{DeviceCommunicator, Error, Group, partition};
use bonfire_testing::{Kind, run_ranks};
use burn::nn::LinearConfig;
use burn::tensor::{Bool, DType, Device, Float, Int, Tensor, TensorData};

/// Runs `f` on each of `n` ranks.
fn on<T: Send + 'static>(n: usize, f: impl Fn(DeviceCommunicator, Group) -> T + Clone + Send + 'static) -> Vec<T> {
    run_ranks(Kind::Threads, n, move |group| f(communicator(&group), group))
}

fn communicator(group: &Group) -> DeviceCommunicator {
    DeviceCommunicator::new(group.clone(), Device::flex(), None, "ep").unwrap()
}

/// A tensor of this shape that counts up from `start`.
fn count<const D: usize>(start: usize, shape: [usize; D]) -> Tensor<D> {
    let start = start as i64;
    let end = start + shape.iter().product::<usize>() as i64;
    Tensor::<1, Int>::arange(start..end, &Device::flex()).float().reshape(shape)
}

#[track_caller]
fn same<const D: usize>(ours: Result<Tensor<D>, Error>, expected: Tensor<D>) {
    assert_eq!(ours.unwrap().into_data(), expected.into_data());
}

#[test]
fn all_gather_defaults_to_the_last_dimension() {
    on(3, |communicator, group| {
        let parts = |rank: usize| count(10 * rank, [2, 3, 1]);
        let all = (0..3).map(parts).collect::<Vec<_>>();
        same(communicator.all_gather(parts(group.rank()), None), Tensor::cat(all.clone(), 2));
        same(communicator.all_gather(parts(group.rank()), Some(-2)), Tensor::cat(all.clone(), 1));
        same(communicator.all_gather(parts(group.rank()), Some(0)), Tensor::cat(all, 0));
    });
}

#[test]
fn all_gather_v_defaults_to_the_first_dimension_and_takes_or_exchanges_sizes() {
    on(3, |communicator, group| {
        let sizes = [2, 0, 1];
        let part = |rank: usize| count(10 * rank, [sizes[rank], 2]);
        let all = Tensor::cat(vec![part(0), part(2)], 0);
        same(communicator.all_gather_v(part(group.rank()), None, Some(&sizes)), all.clone());
        same(communicator.all_gather_v(part(group.rank()), None, None), all);
        let columns = Tensor::cat((0..3).map(|rank| count(rank, [2, rank + 1])).collect(), 1);
        same(communicator.all_gather_v(count(group.rank(), [2, group.rank() + 1]), Some(1), Some(&[1, 2, 3])), columns);
    });
}

#[test]
fn all_gather_v_of_a_list_is_one_operation() {
    let records = on(2, |communicator, group| {
        let rows = 2 - group.rank();
        let none = |rows: usize| Tensor::from_data(TensorData::new(Vec::<f32>::new(), [rows, 0]), &Device::flex());
        let tensors = |rows| vec![count(rows, [rows, 2]), count(7 * rows, [rows, 3]), none(rows)];
        let before = group.trace().operations.len();
        let all = communicator.all_gather_v_list(tensors(rows), None, Some(&[2, 1])).unwrap();
        let operations = group.trace().operations.len() - before;
        for ((ours, first), second) in all.into_iter().zip(tensors(2)).zip(tensors(1)).take(2) {
            assert_eq!(ours.into_data(), Tensor::cat(vec![first, second], 0).into_data());
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
        let all = Tensor::cat((0..3).map(part).collect(), 1);
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
                DeviceCommunicator::new(metadata.clone(), Device::flex(), Some(tensors.clone()), "tp").unwrap();
            communicator.all_gather_v(own, None, None).unwrap();
            [metadata, tensors].map(|group| group.trace().operations.iter().map(|r| r.call.dtype).collect::<Vec<_>>())
        })
    });
    for rank in ranks.collect::<Vec<_>>() {
        assert_eq!(rank.join().unwrap(), [[bonfire::DType::U64], [bonfire::DType::F32]]);
    }
    let [one, two] = [1, 2].map(|n| Group::threads(n).unwrap().remove(0));
    assert!(matches!(
        DeviceCommunicator::new(one, Device::flex(), Some(two), "tp"),
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
        let extra = |rank: usize| Tensor::<2, Int>::full([rows(rank), 1], rank as i32, &Device::flex());
        for sequence_parallel in [false, true] {
            let (all, scores, extras) =
                communicator.dispatch(hidden(own), logits(own), sequence_parallel, vec![extra(own)]).unwrap();
            assert_eq!(all.to_data(), Tensor::cat(vec![hidden(0), hidden(2)], 0).into_data());
            assert_eq!(scores.into_data(), Tensor::cat(vec![logits(0), logits(2)], 0).into_data());
            assert_eq!(extras[0].to_data(), Tensor::cat(vec![extra(0), extra(2)], 0).into_data());
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
    on(2, |communicator, group| {
        let device = Device::flex();
        let own = Tensor::<1, Int>::from_data([1 + group.rank() as i32, 5], &device);
        let all = communicator.all_gather(own.clone(), None).unwrap();
        assert_eq!(all.into_data().iter::<i64>().collect::<Vec<_>>(), [1, 5, 2, 5]);
        let sum = communicator.all_reduce(own.clone()).unwrap();
        assert_eq!(sum.into_data().iter::<i64>().collect::<Vec<_>>(), [3, 10]);
        let flags = communicator.all_gather(own.equal_elem(2), Some(0)).unwrap();
        assert_eq!(flags.into_data().iter::<bool>().collect::<Vec<_>>(), [false, false, true, false]);
        let float = Tensor::<1>::ones([2], (&device, DType::F64));
        assert_eq!(communicator.reduce_scatter(float, None).unwrap().into_data(), TensorData::from([2f64]));
    });
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
        let model = LinearConfig::new(2, 1).init(&Device::flex());
        errors.push(communicator.prepare_communication_buffer_for_model(model).unwrap_err());
        for error in errors {
            assert!(error.to_string().contains("communicator `ep`: it was destroyed"), "{error}");
        }
        assert_eq!(kept.into_data(), (own() * 2).into_data());
        group.barrier().unwrap();
    });
}

#[test]
fn tokens_go_to_several_experts_and_results_return_in_token_order() {
    run_ranks(Kind::Threads, 3, |group| {
        let (communicator, rank) = (communicator(&group), group.rank());
        // Two experts on rank 0, one on each other rank. No token selects rank 1's.
        let experts = Tensor::<2, Int>::from_data([[3, 0], [0, 1], [1, 3]], &Device::flex());
        let routing = communicator.route(experts, 4, false).unwrap();
        assert_eq!(routing.rows(), [&[6usize, 6][..], &[0], &[6]][rank]);
        let tokens = Tensor::<2>::from_data([[0f32], [1.0], [2.0]], &Device::flex()) + 10.0 * rank as f32;
        let arrived = routing.dispatch(tokens).unwrap();
        // In the order of experts, and of ranks for each.
        let expected: &[f32] = match rank {
            0 => &[0.0, 1.0, 10.0, 11.0, 20.0, 21.0, 1.0, 2.0, 11.0, 12.0, 21.0, 22.0],
            1 => &[],
            _ => &[0.0, 2.0, 10.0, 12.0, 20.0, 22.0],
        };
        assert_eq!(arrived.to_data().iter::<f32>().collect::<Vec<_>>(), expected);
        // Each rank's experts add 100 times its number.
        let back = routing.combine(arrived + 100.0 * rank as f32).unwrap() - 10.0 * rank as f32;
        assert_eq!(back.into_data().iter::<f32>().collect::<Vec<_>>(), [200.0, 0.0, 1.0, 1.0, 2.0, 202.0]);
        let wrong = communicator.route(Tensor::from_data([[4]], &Device::flex()), 4, false);
        assert!(wrong.unwrap_err().to_string().contains("no expert 4"));
        assert!(routing.dispatch(Tensor::<2>::ones([2, 1], &Device::flex())).is_err());
    });
}

const WIDTH: usize = 4;
const EXPERTS: usize = 4;

/// Numbers between -1 and 1 that are always the same.
fn matrix(seed: usize, shape: [usize; 2]) -> Tensor<2> {
    let values = (0..shape[0] * shape[1]).map(|i| ((seed * 7919 + i * 104_729) as f64).sin()).collect();
    Tensor::from_data(TensorData::new(values, shape), (&Device::flex().autodiff(), DType::F64))
}

fn list(tensor: Tensor<2>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

/// The outputs of a layer of experts for the tokens of some ranks, the gradients of these tokens, and those of this
/// rank's experts. Each token goes to two experts, and the results are added. Rank 1 has no tokens, and no token
/// selects the last expert.
fn experts(group: &Group, ranks: Range<usize>) -> (Vec<f64>, Vec<f64>, Vec<Vec<f64>>) {
    let communicator = DeviceCommunicator::new(group.clone(), Device::flex(), None, "ep").unwrap();
    let tokens = |rank: usize| [3, 0, 5][rank];
    let (all, before) = ((0..3).map(tokens).sum::<usize>(), (0..ranks.start).map(tokens).sum::<usize>());
    let own = before..before + ranks.map(tokens).sum::<usize>();
    let inputs = matrix(1, [all, WIDTH]).slice([own.clone(), 0..WIDTH]).detach().require_grad();
    let choices = own.clone().flat_map(|token| [token % 3, (token + 1) % 3]).map(|expert| expert as i64).collect();
    let choices = Tensor::from_data(TensorData::new(choices, [own.len(), 2]), &Device::flex());
    let mine = partition(EXPERTS, group.world_size(), group.rank());
    let weights: Vec<_> = mine.map(|expert| matrix(100 + expert, [WIDTH, WIDTH]).require_grad()).collect();

    let routing = communicator.route(choices, EXPERTS, true).unwrap();
    let arrived = routing.dispatch_tracked(inputs.clone()).unwrap();
    let (mut results, mut row) = (Vec::new(), 0);
    for (weights, rows) in weights.iter().zip(routing.rows()).filter(|(_, rows)| **rows > 0) {
        results.push(arrived.clone().narrow(0, row, *rows).matmul(weights.clone()).tanh());
        row += rows;
    }
    let results = if results.is_empty() { arrived } else { Tensor::cat(results, 0) };
    let back = routing.combine_tracked(results).unwrap();
    let outputs = if own.is_empty() { back } else { back.reshape([own.len(), 2, WIDTH]).sum_dim(1).squeeze_dim(1) };
    let gradients = outputs.clone().powi_scalar(2).sum().backward();
    let gradient = |of: &Tensor<2>| of.grad(&gradients).map(list).unwrap_or_default();
    (list(outputs.inner()), gradient(&inputs), weights.iter().map(gradient).collect())
}

#[test]
fn experts_on_three_ranks_equal_one_rank_forward_and_backward() {
    let (outputs, of_inputs, of_weights) = run_ranks(Kind::Threads, 1, |group| experts(&group, 0..3)).remove(0);
    let ranks = run_ranks(Kind::Threads, 3, |group| experts(&group, group.rank()..group.rank() + 1));
    let close = |own: Vec<f64>, expected: &[f64]| {
        assert_eq!(own.len(), expected.len());
        assert!(own.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{own:?} is not {expected:?}");
    };
    assert!(ranks[1].0.is_empty() && of_weights[3].is_empty() && of_weights[2].iter().any(|gradient| *gradient != 0.0));
    close(ranks.iter().flat_map(|rank| rank.0.clone()).collect(), &outputs);
    close(ranks.iter().flat_map(|rank| rank.1.clone()).collect(), &of_inputs);
    for (own, expected) in ranks.into_iter().flat_map(|rank| rank.2).zip(&of_weights) {
        close(own, expected);
    }
}
