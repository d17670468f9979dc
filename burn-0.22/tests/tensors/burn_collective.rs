//! The functions of burn-collective. There is one session in a process, so each test holds the lock. Deadlines come
//! from the environment: tests that need a short one run in a child process.

use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, spawn};

use bonfire::burn_collective::*;
use burn::tensor::{DType, Device, Tensor, TensorData};

fn fresh() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    let guard = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    reset_collective();
    guard
}

fn config(devices: usize) -> CollectiveConfig {
    CollectiveConfig::default().with_num_devices(devices)
}

/// Runs `body` as each of `n` registered peers, with ids 10, 11 and so on.
fn peers<T: Send + 'static>(n: u32, body: impl Fn(u32) -> T + Clone + Send + 'static) -> Vec<T> {
    let peer = |rank| {
        let body = body.clone();
        spawn(move || {
            register(id(rank), Device::flex(), config(n as usize)).unwrap();
            body(rank)
        })
    };
    join((0..n).map(peer).collect())
}

fn join<T>(threads: Vec<JoinHandle<T>>) -> Vec<T> {
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn id(rank: u32) -> PeerId {
    PeerId::from(10 + rank)
}

fn floats(values: &[f32]) -> Tensor<1> {
    Tensor::from_floats(values, &Device::flex())
}

fn tensor<const D: usize>(data: TensorData) -> Tensor<D> {
    let dtype = data.dtype();
    Tensor::from_data(data, (&Device::flex(), dtype))
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

fn sum(rank: u32, input: &[f32]) -> Result<Vec<f64>, CollectiveError> {
    all_reduce(id(rank), floats(input), ReduceOperation::Sum).map(values)
}

/// Whether the session still works for these ranks.
fn assert_sound(rank: u32, ranks: u32) {
    assert_eq!(sum(rank, &[1.0, 2.0]).unwrap(), [ranks as f64, 2.0 * ranks as f64]);
}

/// Checks that all peers, the one that differs included, get the same error and stay usable.
fn all_get(expected: CollectiveError, wrong: impl Fn(u32) -> Result<(), CollectiveError> + Clone + Send + 'static) {
    let errors = peers(3, move |rank| {
        let error = wrong(rank).unwrap_err();
        assert_sound(rank, 3);
        error
    });
    assert_eq!(errors, vec![expected; 3]);
    reset_collective();
}

#[test]
fn reduces_with_every_operation_size_and_strategy() {
    let _guard = fresh();
    let strategies = [AllReduceStrategy::Centralized, AllReduceStrategy::Tree(2), AllReduceStrategy::Ring];
    for (n, len, strategy) in [(1, 3), (2, 1), (3, 3), (4, 3), (4, 5), (5, 6), (5, 11), (3, 0), (2, 40_000)]
        .into_iter()
        .flat_map(|(n, len)| strategies.map(|strategy| (n, len, strategy)))
    {
        reset_collective();
        let peer = move |rank: u32| {
            let config = config(n as usize).with_local_all_reduce_strategy(strategy);
            register(id(rank), Device::flex(), config).unwrap();
            let reduce = |op: &ReduceOperation| {
                let input: Vec<f32> = (0..len).map(|i| ((i + rank as usize) % 5) as f32 + 1.0).collect();
                values(all_reduce(id(rank), floats(&input), *op).unwrap())
            };
            ReduceOperation::ALL.iter().map(reduce).collect::<Vec<_>>()
        };
        for results in join((0..n).map(|rank| spawn(move || peer(rank))).collect()) {
            for (op, result) in ReduceOperation::ALL.iter().copied().zip(results) {
                let expected: Vec<f64> = (0..len)
                    .map(|i| {
                        let all = (0..n as usize).map(|rank| ((i + rank) % 5) as f64 + 1.0);
                        match op {
                            ReduceOperation::Sum => all.sum(),
                            ReduceOperation::Mean => all.sum::<f64>() / f64::from(n),
                            ReduceOperation::Max => all.fold(f64::MIN, f64::max),
                            ReduceOperation::Min => all.fold(f64::MAX, f64::min),
                            ReduceOperation::Product => all.product(),
                            other => panic!("no test of {other}"),
                        }
                    })
                    .collect();
                assert_eq!(result.len(), len);
                let close = result.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6 * b.abs());
                assert!(close, "{n} peers, {len} elements, {op}: {result:?} is not {expected:?}");
            }
        }
    }
}

#[test]
fn autodiff_is_refused_because_gradients_would_be_lost() {
    let _guard = fresh();
    let error = register(id(0), Device::flex().autodiff(), config(2)).unwrap_err().to_string();
    assert!(error.contains("autodiff") && error.contains("`device.inner()`"), "{error}");
    let errors = peers(2, |rank| {
        let tensor = floats(&[1.0]);
        let tensor = if rank == 1 { tensor.autodiff() } else { tensor };
        let error = all_reduce(id(rank), tensor, ReduceOperation::Sum).unwrap_err();
        assert_sound(rank, 2);
        error
    });
    assert!(errors[0] == errors[1] && errors[0].to_string().contains("`tensor.inner()`"), "{errors:?}");
}

#[test]
fn shape_and_element_type_are_preserved() {
    let _guard = fresh();
    peers(2, |rank| {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let data = TensorData::new(vec![1.5f32; 6], [1, 2, 3]).convert_dtype(dtype);
            let tensor = tensor::<3>(data);
            let result = all_reduce(id(rank), tensor, ReduceOperation::Sum).unwrap();
            assert_eq!((result.dtype(), result.dims()), (dtype, [1, 2, 3]));
            assert_eq!(values(result), [3.0; 6]);
        }
    });
}

#[test]
fn a_transposed_or_shared_tensor_is_read_in_logical_order_and_left_unchanged() {
    let _guard = fresh();
    peers(2, |rank| {
        let square = Tensor::<2>::from_floats([[1.0, 2.0], [3.0, 4.0]], &Device::flex());
        let result = all_reduce(id(rank), square.clone().transpose(), ReduceOperation::Sum).unwrap();
        assert_eq!(values(result), [2.0, 6.0, 4.0, 8.0]);
        assert_eq!(values(square.clone()), [1.0, 2.0, 3.0, 4.0]);
        let result = all_reduce(id(rank), square.clone(), ReduceOperation::Sum).unwrap();
        assert_eq!((values(result), values(square)), (vec![2.0, 4.0, 6.0, 8.0], vec![1.0, 2.0, 3.0, 4.0]));
    });
}

#[test]
fn a_mean_of_large_f16_does_not_overflow() {
    let _guard = fresh();
    peers(4, |rank| {
        let data = TensorData::new(vec![60_000.0f32], [1]).convert_dtype(DType::F16);
        let tensor = tensor::<1>(data);
        let mean = all_reduce(id(rank), tensor, ReduceOperation::Mean).unwrap();
        assert_eq!(values(mean), [60_000.0]);
    });
}

#[test]
fn results_are_bit_identical_on_all_peers_and_in_all_runs() {
    let _guard = fresh();
    let mut seen: Option<Vec<f64>> = None;
    for run in 0..20 {
        reset_collective();
        let config = config(3).with_local_all_reduce_strategy(AllReduceStrategy::Tree(2 + run % 3));
        let peer = |rank: u32| {
            let config = config.clone();
            spawn(move || {
                register(id(rank), Device::flex(), config).unwrap();
                sum(rank, &[1e8, 1.0, 0.1].map(|x| if rank == 1 { -x } else { x / 3.0 })).unwrap()
            })
        };
        // A different order of arrival each time.
        let order = [[0, 1, 2], [2, 1, 0], [1, 2, 0]][run as usize % 3];
        for result in join(order.map(peer).into_iter().collect()) {
            assert_eq!(seen.get_or_insert_with(|| result.clone()), &result);
        }
    }
}

#[test]
fn reduce_gives_the_result_to_the_root_only() {
    let _guard = fresh();
    for strategy in [ReduceStrategy::Centralized, ReduceStrategy::Tree(2)] {
        reset_collective();
        let peer = move |rank: u32| {
            spawn(move || {
                let config = config(3).with_local_reduce_strategy(strategy);
                register(id(rank), Device::flex(), config).unwrap();
                let input = floats(&[rank as f32, 2.0]);
                reduce(id(rank), input, ReduceOperation::Mean, id(2)).unwrap().map(values)
            })
        };
        assert_eq!(join((0..3).map(peer).collect()), [None, None, Some(vec![1.0, 2.0])]);
    }
}

#[test]
fn broadcast_reaches_peers_that_call_first_and_do_not_know_the_shape() {
    let _guard = fresh();
    for strategy in [BroadcastStrategy::Centralized, BroadcastStrategy::Tree(3)] {
        for provider in 0..3 {
            reset_collective();
            let peer = move |rank: u32| {
                let config = config(3).with_local_broadcast_strategy(strategy);
                register(id(rank), Device::flex(), config).unwrap();
                let data = TensorData::new(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2]).convert_dtype(DType::F64);
                let tensor = (rank == provider).then(|| tensor(data));
                broadcast::<2>(id(rank), tensor).unwrap()
            };
            for result in join((0..3).map(|rank| spawn(move || peer(rank))).collect()) {
                assert_eq!((result.dtype(), result.dims()), (DType::F64, [2, 2]));
                assert_eq!(values(result), [1.0, 2.0, 3.0, 4.0]);
            }
        }
    }
}

/// Runs this test again in a process of its own, with this deadline. Returns true in that process.
fn with_deadline(deadline: &str, test: &str) -> bool {
    if std::env::var_os("COLLECTIVE_TEST_CHILD").is_some() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child
        .args([&format!("burn_collective::{test}"), "--exact", "--nocapture"])
        .env("COLLECTIVE_TEST_CHILD", "1")
        .env("BONFIRE_DEADLINE", deadline);
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}

#[test]
fn a_missing_peer_is_an_error_after_the_deadline() {
    if with_deadline("0.3", "a_missing_peer_is_an_error_after_the_deadline") {
        let alone = register(id(0), Device::flex(), config(2)).unwrap_err();
        assert!(alone.to_string().contains("only peers [10] had registered, and 2 are expected"), "{alone}");
        peers(3, |rank| {
            if rank < 2 {
                let late = sum(rank, &[1.0]).unwrap_err();
                assert!(late.to_string().contains("had not called it"), "{late}");
            }
        });
        // The session is still usable.
        join((0..3).map(|rank| spawn(move || assert_sound(rank, 3))).collect());
    }
}

#[test]
fn a_malformed_deadline_is_reported() {
    if with_deadline("soon", "a_malformed_deadline_is_reported") {
        let refusal = register(id(0), Device::flex(), config(1)).unwrap_err();
        assert!(refusal.to_string().contains("BONFIRE_DEADLINE is 'soon'"), "{refusal}");
    }
}

#[test]
fn configs_and_errors_are_values() {
    fn is_error<E: std::error::Error + Clone + PartialEq + Send + Sync + 'static>(_: &E) {}
    is_error(&CollectiveError::InvalidConfig);
    let address = |text: &str| text.parse::<Address>().unwrap();
    let nodes = [
        config(4).with_num_nodes(2),
        config(4).with_global_address(address("ws://localhost:3000")),
        config(4).with_node_address(address("127.0.0.1:3001")),
        config(4).with_data_service_port(3001),
    ];
    for config in nodes {
        assert!(!config.is_valid());
        let refused = register(id(0), Device::flex(), config).unwrap_err();
        assert_eq!(refused, CollectiveError::SeveralNodes);
        assert!(refused.to_string().contains("`Group::from_env`"), "{refused}");
    }
    let config = config(4)
        .with_global_all_reduce_strategy(AllReduceStrategy::Centralized)
        .with_global_reduce_strategy(ReduceStrategy::Tree(2))
        .with_global_broadcast_strategy(BroadcastStrategy::Centralized);
    assert!(config.is_valid() && CollectiveConfig::default().is_valid());
    assert_eq!([PeerId::from(3u32), PeerId::from(3i32), PeerId::from(3usize)], [PeerId(3); 3]);
    assert_eq!(PeerId(3).to_string(), "PeerId(3)");
}

#[test]
fn a_peer_that_expects_another_number_of_dimensions_gets_an_error_and_the_others_the_tensor() {
    let _guard = fresh();
    peers(3, |rank| {
        match rank {
            0 => assert_eq!(values(broadcast(id(0), Some(floats(&[1.0, 2.0]))).unwrap()), [1.0, 2.0]),
            1 => assert_eq!(values(broadcast::<1>(id(1), None).unwrap()), [1.0, 2.0]),
            _ => {
                let error = broadcast::<2>(id(2), None).unwrap_err().to_string();
                assert!(error.contains("has 1 dimensions, and this peer expects 2"), "{error}");
            }
        }
        assert_sound(rank, 3);
    });
}

#[test]
fn all_peers_get_the_same_mismatch_and_the_session_stays_usable() {
    use CollectiveError::*;
    use ReduceOperation::{Mean, Sum};
    let _guard = fresh();
    fn reduce_all(rank: u32, len: usize, op: ReduceOperation) -> Result<(), CollectiveError> {
        all_reduce(id(rank), floats(&vec![1.0; len]), op).map(drop)
    }
    fn reduce_to(rank: u32, len: usize, op: ReduceOperation, root: u32) -> Result<(), CollectiveError> {
        reduce(id(rank), floats(&vec![1.0; len]), op, id(root)).map(drop)
    }
    fn cast(rank: u32, provides: bool) -> Result<(), CollectiveError> {
        broadcast(id(rank), provides.then(|| floats(&[1.0]))).map(drop)
    }
    for offender in 0..3 {
        all_get(AllReduceShapeMismatch, move |r| reduce_all(r, if r == offender { 4 } else { 5 }, Sum));
        all_get(AllReduceOperationMismatch, move |r| reduce_all(r, 5, if r == offender { Mean } else { Sum }));
        all_get(ReduceShapeMismatch, move |r| reduce_to(r, if r == offender { 4 } else { 5 }, Sum, 0));
        all_get(ReduceOperationMismatch, move |r| reduce_to(r, 5, if r == offender { Mean } else { Sum }, 0));
        all_get(ReduceRootMismatch, move |r| reduce_to(r, 5, Sum, if r == offender { 0 } else { 1 }));
        all_get(RegisterNotFirstOperation, move |r| reduce_to(r, 5, Sum, 99));
        all_get(BroadcastMultipleTensors, move |r| cast(r, r != offender));
        all_get(BroadcastNoTensor, move |r| cast(r, false));
        all_get(AllReduceOperationMismatch, move |r| if r == offender { cast(r, true) } else { reduce_all(r, 5, Sum) });
        all_get(ReduceOperationMismatch, move |r| if r == offender { cast(r, true) } else { reduce_to(r, 5, Sum, 0) });
    }
}

#[test]
fn tensors_of_equal_size_but_different_shape_or_type_do_not_match() {
    let _guard = fresh();
    all_get(CollectiveError::AllReduceShapeMismatch, |rank| {
        let tensor = Tensor::<2>::ones(if rank == 1 { [3, 2] } else { [2, 3] }, &Device::flex());
        all_reduce(id(rank), tensor, ReduceOperation::Sum).map(drop)
    });
    all_get(CollectiveError::AllReduceShapeMismatch, |rank| {
        let dtype = if rank == 1 { DType::BF16 } else { DType::F16 };
        let tensor = Tensor::<1>::ones([2], (&Device::flex(), dtype));
        all_reduce(id(rank), tensor, ReduceOperation::Sum).map(drop)
    });
}

#[test]
fn only_registered_peers_take_part() {
    let _guard = fresh();
    let none = Err(CollectiveError::RegisterNotFirstOperation);
    assert_eq!(sum(0, &[1.0]), none.clone().map(|()| vec![]));
    assert_eq!(finish_collective(id(0)), none);
    register(id(0), Device::flex(), config(1)).unwrap();
    assert_eq!(sum(1, &[1.0]), none.clone().map(|()| vec![]));
    assert_eq!(broadcast::<1>(id(1), None).map(drop), none);
    assert_eq!(finish_collective(id(1)), Err(CollectiveError::MultipleUnregister));
    assert_sound(0, 1);
}

#[test]
fn invalid_registrations_are_rejected_at_once() {
    let _guard = fresh();
    let again = |rank, config| register(id(rank), Device::flex(), config);
    assert_eq!(again(0, config(0)), Err(CollectiveError::InvalidConfig));
    peers(2, |_| ());
    assert_eq!(again(0, config(2)), Err(CollectiveError::MultipleRegister));
    assert_eq!(again(2, config(3)), Err(CollectiveError::RegisterParamsMismatch));
    let strategy = config(2).with_local_reduce_strategy(ReduceStrategy::Centralized);
    assert_eq!(again(2, strategy), Err(CollectiveError::RegisterParamsMismatch));
}

#[test]
fn a_surplus_registration_is_rejected_and_later_operations_do_not_need_it() {
    let _guard = fresh();
    peers(2, |_| ());
    let surplus = register(id(2), Device::flex(), config(2));
    assert_eq!(surplus, Err(CollectiveError::RegisterParamsMismatch));
    join((0..2).map(|rank| spawn(move || assert_sound(rank, 2))).collect());
}

#[test]
fn concurrent_calls_of_one_peer_are_an_error_and_no_panic() {
    let _guard = fresh();
    peers(2, |_| ());
    let calls: Vec<_> = (0..2).map(|_| spawn(|| sum(0, &[1.0]))).collect();
    // One of the two is rejected; the other waits for the second peer.
    while !calls.iter().any(JoinHandle::is_finished) {
        std::thread::yield_now();
    }
    assert_eq!(sum(1, &[1.0]), Ok(vec![2.0]));
    let mut results = join(calls);
    results.sort_by_key(Result::is_err);
    assert_eq!(results[0], Ok(vec![2.0]));
    assert!(matches!(&results[1], Err(CollectiveError::Other(text)) if text.contains("another operation")));
}

#[test]
fn finish_shrinks_the_session_also_for_waiting_peers_and_new_ones_may_join() {
    let _guard = fresh();
    // Repeated, because the others may be waiting or not when the peer leaves.
    for _ in 0..50 {
        reset_collective();
        let results = peers(3, |rank| {
            let all = sum(rank, &[1.0]).unwrap();
            if rank == 1 {
                finish_collective(id(1)).unwrap();
                return (all, None);
            }
            (all, Some(sum(rank, &[1.0]).unwrap()))
        });
        assert!(results.iter().all(|(all, _)| all == &[3.0]));
        assert_eq!((&results[0].1, &results[2].1), (&Some(vec![2.0]), &Some(vec![2.0])));
    }
    register(id(7), Device::flex(), config(3)).unwrap();
    join([0, 2, 7].map(|rank| spawn(move || assert_sound(rank, 3))).into());
    for rank in [0, 2, 7] {
        finish_collective(id(rank)).unwrap();
        assert_eq!(finish_collective(id(rank)), Err(CollectiveError::MultipleUnregister));
    }
    // The session ends with the last peer, and the next one may have a different config.
    register(id(0), Device::flex(), config(1)).unwrap();
    assert_sound(0, 1);
}

#[test]
fn reset_releases_all_waiting_peers() {
    let _guard = fresh();
    peers(2, |_| ());
    let waiting = spawn(|| sum(0, &[1.0]));
    // Peer 0 may not have begun: then it finds itself unregistered, which is correct, too.
    reset_collective();
    let released = [CollectiveError::LocalServerMissing, CollectiveError::RegisterNotFirstOperation];
    assert!(released.contains(&waiting.join().unwrap().unwrap_err()));
    register(id(0), Device::flex(), config(1)).unwrap();
    finish_collective(id(0)).unwrap();
    let registering = spawn(|| register(id(0), Device::flex(), config(2)));
    // The peer is unknown until its registration waits.
    while finish_collective(id(0)) == Err(CollectiveError::MultipleUnregister) {
        std::thread::yield_now();
    }
    reset_collective();
    assert_eq!(registering.join().unwrap(), Err(CollectiveError::LocalServerMissing));
    peers(2, |rank| assert_sound(rank, 2));
}
