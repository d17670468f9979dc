//! The tensor API within one process, on NdArray and Flex. A session belongs to a backend type and the process, so
//! every test holds the lock. Deadlines come from the environment: tests that need a short one run in a child process.

#[path = "collective/clones.rs"]
mod clones;
#[path = "collective/sessions.rs"]
mod sessions;

use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, spawn};

use bonfire::burn_collective::{AllReduceStrategy, BroadcastStrategy, ReduceOperation, ReduceStrategy};
use bonfire::{
    CollectiveConfig, CollectiveError, GradientsParamsExt, PeerId, all_reduce, broadcast, finish_collective, reduce,
    register, reset_collective,
};
use burn::backend::{Autodiff, Flex, NdArray};
use burn::module::{Module, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};

type Double = NdArray<f64>;

fn fresh<B: Backend>() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    let guard = SERIAL.lock().unwrap_or_else(PoisonError::into_inner);
    reset_collective::<B>();
    guard
}

fn config(devices: usize) -> CollectiveConfig {
    CollectiveConfig::default().with_num_devices(devices)
}

/// Runs `body` as each of `n` registered peers, with ids 10, 11 and so on.
fn peers<B: Backend, T: Send + 'static>(n: u32, body: impl Fn(u32) -> T + Clone + Send + 'static) -> Vec<T> {
    let peer = |rank| {
        let body = body.clone();
        spawn(move || {
            register::<B>(id(rank), Default::default(), config(n as usize)).unwrap();
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

fn floats<B: Backend>(values: &[f32]) -> B::FloatTensorPrimitive {
    tensor::<B>(TensorData::new(values.to_vec(), [values.len()]))
}

fn tensor<B: Backend>(data: TensorData) -> B::FloatTensorPrimitive {
    B::float_from_data(data, &Default::default())
}

fn values<B: Backend>(tensor: B::FloatTensorPrimitive) -> Vec<f64> {
    Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(tensor)).into_data().iter::<f64>().collect()
}

fn sum<B: Backend>(rank: u32, input: &[f32]) -> Result<Vec<f64>, CollectiveError> {
    all_reduce::<B>(id(rank), floats::<B>(input), ReduceOperation::Sum).map(values::<B>)
}

/// Whether the session still works for these ranks.
fn assert_sound<B: Backend>(rank: u32, ranks: u32) {
    assert_eq!(sum::<B>(rank, &[1.0, 2.0]).unwrap(), [ranks as f64, 2.0 * ranks as f64]);
}

/// Checks that all peers, the one that differs included, get the same error and stay usable.
fn all_get(expected: CollectiveError, wrong: impl Fn(u32) -> Result<(), CollectiveError> + Clone + Send + 'static) {
    let errors = peers::<Flex, _>(3, move |rank| {
        let error = wrong(rank).unwrap_err();
        assert_sound::<Flex>(rank, 3);
        error
    });
    assert_eq!(errors, vec![expected; 3]);
    reset_collective::<Flex>();
}

fn reduces_with_every_operation_size_and_strategy<B: Backend>() {
    let _guard = fresh::<B>();
    let strategies = [AllReduceStrategy::Centralized, AllReduceStrategy::Tree(2), AllReduceStrategy::Ring];
    for (n, len, strategy) in [(1, 3), (2, 1), (3, 3), (4, 3), (4, 5), (5, 6), (5, 11), (3, 0), (2, 40_000)]
        .into_iter()
        .flat_map(|(n, len)| strategies.map(|strategy| (n, len, strategy)))
    {
        reset_collective::<B>();
        let peer = move |rank: u32| {
            let config = config(n as usize).with_local_all_reduce_strategy(strategy);
            register::<B>(id(rank), Default::default(), config).unwrap();
            let reduce = |op: &ReduceOperation| {
                let input: Vec<f32> = (0..len).map(|i| ((i + rank as usize) % 5) as f32 + 1.0).collect();
                values::<B>(all_reduce::<B>(id(rank), floats::<B>(&input), *op).unwrap())
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
fn all_reduce_on_ndarray_f32() {
    reduces_with_every_operation_size_and_strategy::<NdArray<f32>>();
}

#[test]
fn all_reduce_on_ndarray_f64() {
    reduces_with_every_operation_size_and_strategy::<Double>();
}

#[test]
fn all_reduce_on_flex() {
    reduces_with_every_operation_size_and_strategy::<Flex>();
}

#[test]
fn a_backend_with_autodiff_is_refused_at_once_because_gradients_would_be_lost() {
    let _guard = fresh::<Autodiff<Flex>>();
    let error = register::<Autodiff<Flex>>(id(0), Default::default(), config(2)).unwrap_err().to_string();
    assert!(error.contains("autodiff") && error.contains("`register::<Flex>`"), "{error}");
}

#[test]
fn shape_and_element_type_are_preserved() {
    let _guard = fresh::<Flex>();
    peers::<Flex, _>(2, |rank| {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let data = TensorData::new(vec![1.5f32; 6], [1, 2, 3]).convert_dtype(dtype);
            let tensor = tensor::<Flex>(data);
            let result = all_reduce::<Flex>(id(rank), tensor, ReduceOperation::Sum).unwrap();
            let data = Tensor::<Flex, 3>::from_primitive(TensorPrimitive::Float(result)).into_data();
            assert_eq!((data.dtype, &data.shape[..]), (dtype, &[1, 2, 3][..]));
            assert!(data.iter::<f32>().all(|x| x == 3.0));
        }
    });
}

#[test]
fn a_transposed_or_shared_tensor_is_read_in_logical_order_and_left_unchanged() {
    let _guard = fresh::<Flex>();
    peers::<Flex, _>(2, |rank| {
        let square = Tensor::<Flex, 2>::from_floats([[1.0, 2.0], [3.0, 4.0]], &Default::default());
        let turned = square.clone().transpose().into_primitive().tensor();
        let result = all_reduce::<Flex>(id(rank), turned, ReduceOperation::Sum).unwrap();
        let result = Tensor::<Flex, 2>::from_primitive(TensorPrimitive::Float(result));
        assert_eq!(result.into_data().to_vec::<f32>().unwrap(), [2.0, 6.0, 4.0, 8.0]);
        assert_eq!(square.into_data().to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0]);
    });
}

/// The memory of a peer's tensor decides how it is read, and must not matter to the other peers.
#[test]
fn peers_whose_tensors_are_shared_unique_or_transposed_reduce_together() {
    const PEERS: u32 = 3;
    const MEMORY: u32 = 4;
    /// Returns the sum of a tensor of `dims` whose memory is of this kind, and what a clone of it holds afterwards.
    fn sum_of(rank: u32, memory: u32, dims: [usize; 2]) -> Result<[Vec<f64>; 2], CollectiveError> {
        let [rows, columns] = dims;
        let values_of = |data: Tensor<Flex, 2>| data.into_data().iter::<f64>().collect::<Vec<_>>();
        let numbers = (0..rows * columns).map(|i| (i % 97) as f32 + rank as f32).collect();
        let matrix = Tensor::<Flex, 2>::from_data(TensorData::new(numbers, dims), &Default::default());
        let kept = match memory {
            0 => Some(matrix.clone()),
            _ => None,
        };
        let matrix = match memory {
            // In memory it is a transposed matrix, not shared.
            2 => {
                let transposed = values_of(matrix.transpose()).into_iter().map(|x| x as f32).collect();
                let data = TensorData::new::<f32, _>(transposed, [columns, rows]);
                Tensor::from_data(data, &Default::default()).transpose()
            }
            // Rows of a larger matrix.
            3 => Tensor::cat(vec![matrix.clone(), matrix], 0).slice([rows..2 * rows, 0..columns]),
            _ => matrix,
        };
        let reduced = all_reduce::<Flex>(id(rank), matrix.into_primitive().tensor(), ReduceOperation::Sum)?;
        let reduced = values_of(Tensor::from_primitive(TensorPrimitive::Float(reduced)));
        Ok([reduced, kept.map(values_of).unwrap_or_default()])
    }
    let _guard = fresh::<Flex>();
    for dims in [[2, 3], [90, 400]] {
        for mix in 0..MEMORY.pow(PEERS) {
            reset_collective::<Flex>();
            let memory = move |rank: u32| mix / MEMORY.pow(rank) % MEMORY;
            let numbers = |rank: u32| (0..dims[0] * dims[1]).map(move |i| (i % 97) as f64 + f64::from(rank));
            let expected: Vec<f64> = numbers(0).map(|x| 3.0 * x + 3.0).collect();
            let results = peers::<Flex, _>(PEERS, move |rank| sum_of(rank, memory(rank), dims));
            for (rank, result) in (0..).zip(results) {
                let [reduced, kept] = result.unwrap_or_else(|error| panic!("rank {rank} of mix {mix}: {error}"));
                assert!(reduced == expected, "rank {rank} of mix {mix}");
                assert!(kept.is_empty() || kept.into_iter().eq(numbers(rank)), "rank {rank} of mix {mix}");
            }
        }
    }
}

#[test]
fn a_mean_of_large_f16_does_not_overflow() {
    let _guard = fresh::<Flex>();
    peers::<Flex, _>(4, |rank| {
        let data = TensorData::new(vec![60_000.0f32], [1]).convert_dtype(DType::F16);
        let tensor = tensor::<Flex>(data);
        let mean = all_reduce::<Flex>(id(rank), tensor, ReduceOperation::Mean).unwrap();
        assert_eq!(values::<Flex>(mean), [60_000.0]);
    });
}

#[test]
fn results_are_bit_identical_on_all_peers_and_in_all_runs() {
    let _guard = fresh::<NdArray>();
    let mut seen: Option<Vec<f64>> = None;
    for run in 0..20 {
        reset_collective::<NdArray>();
        let config = config(3).with_local_all_reduce_strategy(AllReduceStrategy::Tree(2 + run % 3));
        let peer = |rank: u32| {
            let config = config.clone();
            spawn(move || {
                register::<NdArray>(id(rank), Default::default(), config).unwrap();
                sum::<NdArray>(rank, &[1e8, 1.0, 0.1].map(|x| if rank == 1 { -x } else { x / 3.0 })).unwrap()
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
    let _guard = fresh::<Double>();
    for strategy in [ReduceStrategy::Centralized, ReduceStrategy::Tree(2)] {
        reset_collective::<Double>();
        let peer = move |rank: u32| {
            spawn(move || {
                let config = config(3).with_local_reduce_strategy(strategy);
                register::<Double>(id(rank), Default::default(), config).unwrap();
                let input = floats::<Double>(&[rank as f32, 2.0]);
                reduce::<Double>(id(rank), input, ReduceOperation::Mean, id(2)).unwrap().map(values::<Double>)
            })
        };
        assert_eq!(join((0..3).map(peer).collect()), [None, None, Some(vec![1.0, 2.0])]);
    }
}

#[test]
fn broadcast_reaches_peers_that_call_first_and_do_not_know_the_shape() {
    let _guard = fresh::<Flex>();
    for strategy in [BroadcastStrategy::Centralized, BroadcastStrategy::Tree(3)] {
        for provider in 0..3 {
            reset_collective::<Flex>();
            let peer = move |rank: u32| {
                let config = config(3).with_local_broadcast_strategy(strategy);
                register::<Flex>(id(rank), Default::default(), config).unwrap();
                let data = TensorData::new(vec![1.0f32, 2.0, 3.0, 4.0], [2, 2]).convert_dtype(DType::F64);
                let tensor = (rank == provider).then(|| tensor::<Flex>(data));
                let result = broadcast::<Flex>(id(rank), tensor).unwrap();
                Tensor::<Flex, 2>::from_primitive(TensorPrimitive::Float(result)).into_data()
            };
            for data in join((0..3).map(|rank| spawn(move || peer(rank))).collect()) {
                assert_eq!(data.to_vec::<f64>().unwrap(), [1.0, 2.0, 3.0, 4.0]);
                assert_eq!(&data.shape[..], [2, 2]);
            }
        }
    }
}

#[test]
fn sessions_of_different_backends_are_independent() {
    let _guard = fresh::<Flex>();
    reset_collective::<Double>();
    register::<Flex>(id(0), Default::default(), config(1)).unwrap();
    register::<Double>(id(0), Default::default(), config(1)).unwrap();
    reset_collective::<Flex>();
    assert_sound::<Double>(0, 1);
    assert!(sum::<Flex>(0, &[1.0]).is_err());
}

type Trained = Autodiff<Flex>;

fn gradients(model: &Linear<Trained>, scale: f32) -> GradientsParams {
    let input = Tensor::<Trained, 2>::full([1, 2], scale, &Default::default());
    GradientsParams::from_grads(model.forward(input).sum().backward(), model)
}

#[test]
fn gradients_are_averaged() {
    let _guard = fresh::<Flex>();
    let model: Linear<Trained> = LinearConfig::new(2, 3).init(&Default::default());
    let (weight, bias) = (model.weight.id, model.bias.as_ref().unwrap().id);
    for result in peers::<Flex, _>(2, move |rank| {
        let grads = gradients(&model.clone().fork(&Default::default()), rank as f32 + 1.0);
        let mut grads = grads.all_reduce::<Flex>(id(rank), ReduceOperation::Mean).unwrap();
        let data = |tensor: TensorData| tensor.to_vec::<f32>().unwrap();
        let weight = data(grads.remove::<Flex, 2>(weight).unwrap().into_data());
        let bias = data(grads.remove::<Flex, 1>(bias).unwrap().into_data());
        (weight, bias, grads.len())
    }) {
        assert_eq!(result, (vec![1.5; 6], vec![1.0; 3], 0));
    }
}

#[test]
fn a_gradient_that_one_peer_lacks_is_the_same_error_on_all_peers() {
    let _guard = fresh::<Flex>();
    let gradients = |ids: &'static [u64]| {
        let mut grads = GradientsParams::new();
        for id in ids {
            grads.register::<Flex, 1>(ParamId::from(*id), Tensor::zeros([2], &Default::default()));
        }
        grads
    };
    all_get(CollectiveError::AllReduceShapeMismatch, move |rank| {
        let grads = gradients(if rank == 1 { &[1] } else { &[1, 2] });
        grads.all_reduce::<Flex>(id(rank), ReduceOperation::Sum).map(drop)
    });
}

#[test]
fn calls_may_come_from_within_an_async_runtime() {
    let _guard = fresh::<Flex>();
    let peer = |rank| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        spawn(move || {
            runtime.block_on(async move {
                register::<Flex>(id(rank), Default::default(), config(2)).unwrap();
                assert_sound::<Flex>(rank, 2);
            })
        })
    };
    join([peer(0), peer(1)].into());
}

/// Runs this test again in a process of its own, with this deadline. Returns true in that process.
fn with_deadline(deadline: &str, test: &str) -> bool {
    if std::env::var_os("COLLECTIVE_TEST_CHILD").is_some() {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture"]).env("COLLECTIVE_TEST_CHILD", "1").env("BONFIRE_DEADLINE", deadline);
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}

#[test]
fn a_missing_peer_is_an_error_after_the_deadline() {
    if with_deadline("0.3", "a_missing_peer_is_an_error_after_the_deadline") {
        let alone = register::<Flex>(id(0), Default::default(), config(2)).unwrap_err();
        assert!(alone.to_string().contains("only peers [10] had registered, and 2 are expected"), "{alone}");
        peers::<Flex, _>(3, |rank| {
            if rank < 2 {
                let late = sum::<Flex>(rank, &[1.0]).unwrap_err();
                assert!(late.to_string().contains("timed out"), "{late}");
            }
        });
        // The session is still usable.
        join((0..3).map(|rank| spawn(move || assert_sound::<Flex>(rank, 3))).collect());
    }
}

#[test]
fn peers_that_register_with_different_backends_are_told_so() {
    if with_deadline("0.1", "peers_that_register_with_different_backends_are_told_so") {
        fn late<B: Backend>(rank: u32) -> String {
            register::<B>(id(rank), Default::default(), config(2)).unwrap_err().to_string()
        }
        let alone = late::<Flex>(0);
        assert!(alone.contains("only peers [10] had registered, and 2 are expected"), "{alone}");
        assert!(!alone.contains("backend"), "{alone}");
        let other = late::<NdArray<f32>>(1);
        assert!(other.contains("peers [10] have registered with the backend Flex, not with NdArray"), "{other}");
        reset_collective::<Flex>();
        register::<Double>(id(2), Default::default(), config(1)).unwrap();
        let other = late::<NdArray<f32>>(1);
        assert!(other.contains("peers [12] have registered with the backend NdArray<f64"), "{other}");
        assert!(!other.contains("[10]"), "{other}");
    }
}

#[test]
fn a_malformed_deadline_is_reported() {
    if with_deadline("soon", "a_malformed_deadline_is_reported") {
        let refusal = register::<Flex>(id(0), Default::default(), config(1)).unwrap_err();
        assert!(refusal.to_string().contains("BONFIRE_DEADLINE is 'soon'"), "{refusal}");
    }
}

#[test]
fn configs_and_errors_are_values() {
    fn is_error<E: std::error::Error + Clone + PartialEq + Send + Sync + 'static>(_: &E) {}
    is_error(&CollectiveError::InvalidConfig);
    let address = |text: &str| text.parse::<bonfire::burn_collective::Address>().unwrap();
    let config = config(4)
        .with_local_all_reduce_strategy(AllReduceStrategy::Ring)
        .with_num_nodes(2)
        .with_global_address(address("ws://localhost:3000"))
        .with_node_address(address("127.0.0.1:3001"))
        .with_data_service_port(3001)
        .with_global_all_reduce_strategy(AllReduceStrategy::Centralized)
        .with_global_reduce_strategy(ReduceStrategy::Tree(2))
        .with_global_broadcast_strategy(BroadcastStrategy::Centralized);
    assert!(config.is_valid() && CollectiveConfig::default().is_valid());
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<CollectiveConfig>(&text).unwrap(), config);
    let shown = config.to_string();
    for part in ["4 devices", "Ring", "2 nodes", "ws://localhost:3000", "127.0.0.1:3001"] {
        assert!(shown.contains(part), "{shown}");
    }
    assert_eq!([PeerId::from(3u32), PeerId::from(3i32), PeerId::from(3usize)], [PeerId(3); 3]);
    assert_eq!(PeerId(3).to_string(), "PeerId(3)");
}
