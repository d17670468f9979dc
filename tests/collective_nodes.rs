//! The tensor API over several nodes. A session belongs to a process and a backend type, so nodes are processes that
//! run this binary again, or, where only the registration matters, threads with a backend of their own each.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{JoinHandle, spawn};

use bonfire::burn_collective::{AllReduceStrategy, GlobalCollectiveError, NodeId, ReduceOperation};
use bonfire::{
    CollectiveConfig, CollectiveError, GradientsParamsExt, PeerId, all_reduce, broadcast, finish_collective, reduce,
    register, start_global_orchestrator,
};
use bonfire_testing::wire;
use burn::backend::{Flex, NdArray};
use burn::module::ParamId;
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
use rustix::process::{Pid, Signal, kill_process};

/// A port below those that the system gives to outgoing connections, so that none of them takes it meanwhile.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let candidate = std::process::id() * 64 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 12_000 + (candidate % 20_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// An orchestrator that ends with the test process. Nodes may connect before it listens.
fn orchestrator() -> u16 {
    let port = free_port();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    spawn(move || runtime.block_on(start_global_orchestrator(port)));
    port
}

/// A node's config. Addresses take every accepted form.
fn config(node: u16, nodes: u32, devices: usize, orchestrator: u16, data: u16) -> CollectiveConfig {
    let (global, own) = match node % 4 {
        0 => (format!("ws://127.0.0.1:{orchestrator}"), format!("ws://127.0.0.1:{data}")),
        1 => (format!("127.0.0.1:{orchestrator}"), format!("127.0.0.1:{data}")),
        2 => (format!("http://localhost:{orchestrator}/"), format!("http://127.0.0.1:{data}/")),
        _ => (format!("localhost:{orchestrator}"), "127.0.0.1".to_string()),
    };
    CollectiveConfig::default()
        .with_num_devices(devices)
        .with_num_nodes(nodes)
        .with_global_address(global.parse().unwrap())
        .with_node_address(own.parse().unwrap())
        .with_data_service_port(data)
}

/// Runs this test again as `nodes` processes, and returns None. In them, returns the node's number and the ports.
fn as_nodes(test: &str, nodes: u16) -> Option<(u16, Vec<u16>)> {
    if let (Ok(node), Ok(ports)) = (std::env::var("COLLECTIVE_TEST_NODE"), std::env::var("COLLECTIVE_TEST_PORTS")) {
        let ports = ports.split(',').map(|port| port.parse().unwrap()).collect();
        return Some((node.parse().unwrap(), ports));
    }
    let mut ports = vec![orchestrator()];
    ports.extend((0..nodes).map(|_| free_port()));
    ports.push(gate(nodes.saturating_sub(1)));
    let ports = ports.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
    // The last one first: ids must not depend on the order of arrival.
    let children: Vec<Child> = (0..nodes).rev().map(|node| child(test, node, &ports)).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() || text.contains("dies on purpose"), "{text}");
    }
    None
}

/// Keeps the connections of survivors open until all of them have connected.
fn gate(survivors: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    spawn(move || drop((0..survivors).map(|_| listener.accept().unwrap()).collect::<Vec<_>>()));
    port
}

fn child(test: &str, node: u16, ports: &str) -> Child {
    command(test, node, ports).spawn().unwrap()
}

fn command(test: &str, node: u16, ports: &str) -> Command {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--nocapture"]).env("BONFIRE_DEADLINE", "20").env("RUST_BACKTRACE", "0");
    child.env("COLLECTIVE_TEST_NODE", node.to_string()).env("COLLECTIVE_TEST_PORTS", ports);
    child.stdout(Stdio::null()).stderr(Stdio::piped());
    child
}

fn join<T>(threads: Vec<JoinHandle<T>>) -> Vec<T> {
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

fn tensor<B: Backend>(values: Vec<f32>, dtype: DType) -> B::FloatTensorPrimitive {
    let shape = [values.len()];
    B::float_from_data(TensorData::new(values, shape).convert_dtype(dtype), &Default::default())
}

fn values<B: Backend>(tensor: B::FloatTensorPrimitive) -> Vec<f32> {
    Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(tensor)).into_data().iter::<f32>().collect()
}

fn sum<B: Backend>(peer: PeerId, input: Vec<f32>) -> Result<Vec<f32>, CollectiveError> {
    all_reduce::<B>(peer, tensor::<B>(input, DType::F32), ReduceOperation::Sum).map(values::<B>)
}

/// Devices of each node. Peers are numbered through.
const DEVICES: [usize; 3] = [2, 1, 3];
const PEERS: u32 = 6;

#[test]
fn every_operation_runs_over_nodes_with_different_numbers_of_devices() {
    let Some((node, ports)) = as_nodes("every_operation_runs_over_nodes_with_different_numbers_of_devices", 3) else {
        return;
    };
    let devices = DEVICES[node as usize];
    let first: usize = DEVICES[..node as usize].iter().sum();
    let strategies = [AllReduceStrategy::Ring, AllReduceStrategy::Tree(2), AllReduceStrategy::Centralized];
    // One session after the other: the orchestrator and the backend support several.
    for strategy in strategies {
        let config = config(node, 3, devices, ports[0], ports[1 + node as usize]);
        let config = config.with_global_all_reduce_strategy(strategy);
        let peer = |peer: usize| {
            let config = config.clone();
            spawn(move || {
                register::<Flex>(peer.into(), Default::default(), config).unwrap();
                every_operation(peer as u32);
                finish_collective::<Flex>(peer.into()).unwrap();
            })
        };
        join((first..first + devices).map(peer).collect());
    }
}

fn every_operation(me: u32) {
    let peer = PeerId(me);
    for len in [5, 1, 0, 4, 100_003] {
        for op in ReduceOperation::ALL.iter().copied() {
            let at = |rank: u32, i: usize| ((i + rank as usize) % 4) as f32 + 1.0;
            let input = (0..len).map(|i| at(me, i)).collect();
            let result = all_reduce::<Flex>(peer, tensor::<Flex>(input, DType::F32), op).map(values::<Flex>).unwrap();
            assert_eq!(result.len(), len);
            for (i, result) in result.into_iter().enumerate() {
                let all = (0..PEERS).map(|rank| at(rank, i));
                let expected = match op {
                    ReduceOperation::Sum => all.sum(),
                    ReduceOperation::Mean => all.sum::<f32>() / PEERS as f32,
                    ReduceOperation::Max => all.fold(f32::MIN, f32::max),
                    ReduceOperation::Min => all.fold(f32::MAX, f32::min),
                    ReduceOperation::Product => all.product(),
                    other => panic!("no test of {other}"),
                };
                assert_eq!(result, expected, "{op} of {len} elements at {i}");
            }
        }
    }
    for dtype in [DType::F16, DType::F64, DType::BF16] {
        let mean = all_reduce::<Flex>(peer, tensor::<Flex>(vec![49_152.0; 3], dtype), ReduceOperation::Mean).unwrap();
        assert_eq!(values::<Flex>(mean), [49_152.0; 3], "{dtype:?}");
    }
    // 256 + 1 is 256 in bf16: a sum that was rounded on every node would lose the small ones.
    let small = if me == 0 { 256.0 } else { 1.0 };
    let rounded = all_reduce::<Flex>(peer, tensor::<Flex>(vec![small], DType::BF16), ReduceOperation::Sum).unwrap();
    assert_eq!(values::<Flex>(rounded), [260.0]);
    for root in 0..PEERS {
        let input = tensor::<Flex>(vec![me as f32; 5], DType::F32);
        let reduced = reduce::<Flex>(peer, input, ReduceOperation::Mean, PeerId(root)).unwrap();
        assert_eq!(reduced.map(values::<Flex>), (root == me).then(|| vec![2.5; 5]));
        let provided = (root == me).then(|| tensor::<Flex>(vec![root as f32, 7.0], DType::F16));
        assert_eq!(values::<Flex>(broadcast::<Flex>(peer, provided).unwrap()), [root as f32, 7.0]);
        // Mismatches reach all peers, and the session stays usable.
        let shape = sum::<Flex>(peer, vec![0.0; if me == root { 3 } else { 4 }]);
        assert_eq!(shape, Err(CollectiveError::AllReduceShapeMismatch));
        let both = broadcast::<Flex>(peer, (me == root || me == 0).then(|| tensor::<Flex>(vec![1.0], DType::F32)));
        let expected = if root == 0 { Ok(()) } else { Err(CollectiveError::BroadcastMultipleTensors) };
        assert_eq!(both.map(drop), expected);
        let input = tensor::<Flex>(vec![1.0], DType::F32);
        let roots = reduce::<Flex>(peer, input, ReduceOperation::Sum, PeerId(if me == root { 0 } else { 1 }));
        assert_eq!(roots.map(drop), Err(CollectiveError::ReduceRootMismatch));
    }
    let input = tensor::<Flex>(vec![1.0], DType::F32);
    let unknown = reduce::<Flex>(peer, input, ReduceOperation::Sum, PeerId(99));
    assert_eq!(unknown.map(drop), Err(CollectiveError::RegisterNotFirstOperation));
    assert_eq!(broadcast::<Flex>(peer, None).map(drop), Err(CollectiveError::BroadcastNoTensor));
    let gradients = |ids: &[u64]| {
        let mut gradients = GradientsParams::new();
        for id in ids {
            gradients.register::<Flex, 1>(ParamId::from(*id), Tensor::full([2], me as f32, &Default::default()));
        }
        gradients
    };
    let mut reduced = gradients(&[3, 1]).all_reduce::<Flex>(peer, ReduceOperation::Mean).unwrap();
    let gradient = reduced.remove::<Flex, 1>(ParamId::from(3)).unwrap();
    assert_eq!(gradient.into_data().to_vec::<f32>().unwrap(), [2.5, 2.5]);
    let lacking = gradients(if me == 5 { &[1] } else { &[1, 2] }).all_reduce::<Flex>(peer, ReduceOperation::Mean);
    assert_eq!(lacking.map(drop), Err(CollectiveError::AllReduceShapeMismatch));
}

#[test]
fn a_node_that_dies_is_named_and_later_calls_fail_at_once() {
    let Some((node, ports)) = as_nodes("a_node_that_dies_is_named_and_later_calls_fail_at_once", 4) else { return };
    let peer = PeerId(u32::from(node));
    let config = config(node, 4, 1, ports[0], ports[1 + node as usize]);
    register::<Flex>(peer, Default::default(), config).unwrap();
    for _ in 0..9 {
        assert_eq!(sum::<Flex>(peer, vec![1.0; 5]).unwrap(), [4.0; 5]);
    }
    let tenth = sum::<Flex>(peer, vec![1.0; 5]);
    if node == 2 {
        eprintln!("node 2 dies on purpose");
        std::process::abort();
    }
    let lost = CollectiveError::Global(GlobalCollectiveError::PeerLost(NodeId::from(2u32)));
    // Node 2 may die so soon that the others miss the last bytes that it sent.
    assert!(tenth == Ok(vec![4.0; 5]) || tenth == Err(lost.clone()), "{tenth:?}");
    assert_eq!(sum::<Flex>(peer, vec![1.0; 5]), Err(lost.clone()));
    assert_eq!(broadcast::<Flex>(peer, None).map(drop), Err(lost));
    let mut gate = TcpStream::connect(("127.0.0.1", ports[5])).unwrap();
    assert_eq!(gate.read(&mut [0]).unwrap(), 0);
}

/// Answers a connection as something that is not the orchestrator, after its first bytes.
fn refuse(mut stream: TcpStream, answer: &[u8]) {
    let _ = stream.read(&mut [0; 8]);
    let _ = stream.write_all(answer);
}

const WEB_SERVER: &[u8] = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n";

/// At the orchestrator's port are a server of another kind, and then a job with another secret, until both have ended.
#[test]
fn nodes_wait_for_an_orchestrator_whose_port_others_have_before() {
    const TEST: &str = "nodes_wait_for_an_orchestrator_whose_port_others_have_before";
    if let Some((node, ports)) = std::env::var_os("COLLECTIVE_TEST_NODE").and_then(|_| as_nodes(TEST, 0)) {
        let config = config(node, 2, 1, ports[0], ports[1 + usize::from(node)]);
        register::<Flex>(PeerId(node.into()), Default::default(), config).unwrap();
        assert_eq!(sum::<Flex>(PeerId(node.into()), vec![f32::from(node) + 1.0]).unwrap(), [3.0]);
        return finish_collective::<Flex>(PeerId(node.into())).unwrap();
    }
    let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
    let text = ports.iter().map(u16::to_string).collect::<Vec<_>>().join(",");
    let server = TcpListener::bind(("127.0.0.1", ports[0])).unwrap();
    let nodes = [0, 1].map(|node| child(TEST, node, &text));
    let other_secret = [b"BNFA", &wire::VERSION.to_le_bytes()[..], &[3, 0]].concat();
    for answer in [WEB_SERVER, &other_secret] {
        (0..4).for_each(|_| refuse(server.accept().unwrap().0, answer));
    }
    drop(server);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    spawn(move || runtime.block_on(start_global_orchestrator(ports[0])));
    for node in nodes {
        let output = node.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Registers three nodes, as threads, and returns their results.
fn register_three(configs: [CollectiveConfig; 3]) -> Vec<Result<(), CollectiveError>> {
    let [a, b, c] = configs;
    join(vec![
        spawn(|| register::<Flex>(PeerId(0), Default::default(), a)),
        spawn(|| register::<NdArray<f32>>(PeerId(1), Default::default(), b)),
        spawn(|| register::<NdArray<f64>>(PeerId(2), Default::default(), c)),
    ])
}

#[test]
fn contradicting_nodes_all_get_an_error_and_the_next_ones_are_served() {
    let port = orchestrator();
    let data: Vec<u16> = (0..3).map(|_| free_port()).collect();
    let right = |node: u16| config(node, 3, 1, port, data[node as usize]);
    let other = |node| right(node).with_global_reduce_strategy(bonfire::burn_collective::ReduceStrategy::Centralized);
    let both_get = |error: GlobalCollectiveError, a: CollectiveConfig, b: CollectiveConfig| {
        let results = join(vec![
            spawn(|| register::<Flex>(PeerId(0), Default::default(), a)),
            spawn(|| register::<NdArray<f32>>(PeerId(1), Default::default(), b)),
        ]);
        assert_eq!(results, vec![Err(CollectiveError::Global(error)); 2]);
    };
    both_get(GlobalCollectiveError::RegisterParamsMismatch, right(0), right(1).with_num_nodes(2));
    both_get(GlobalCollectiveError::RegisterParamsMismatch, right(0), other(1));
    let twin = right(1).with_node_address(format!("ws://127.0.0.1:{}", data[0]).parse().unwrap());
    both_get(GlobalCollectiveError::DoubleRegister, right(0), twin);
    // Strangers and nodes that have disconnected do no harm.
    let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    let _ = stranger.read_to_end(&mut answer);
    drop(TcpStream::connect(("127.0.0.1", port)).unwrap());
    let _idle = TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert_eq!(register_three([right(0), right(1), right(2)]), [Ok(()), Ok(()), Ok(())]);
    finish_collective::<Flex>(PeerId(0)).unwrap();
    finish_collective::<NdArray<f32>>(PeerId(1)).unwrap();
    finish_collective::<NdArray<f64>>(PeerId(2)).unwrap();
}

#[test]
fn registration_without_orchestrator_or_nodes_ends_by_the_deadline() {
    const TEST: &str = "registration_without_orchestrator_or_nodes_ends_by_the_deadline";
    if std::env::var_os("COLLECTIVE_TEST_NODE").is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([TEST, "--exact"]).env("COLLECTIVE_TEST_NODE", "0").env("BONFIRE_DEADLINE", "0.5");
        let output = child.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    }
    let attempt = |config| register::<Flex>(PeerId(0), Default::default(), config).unwrap_err();
    let config = |port| config(0, 2, 1, port, free_port());
    let unreachable = CollectiveError::Global(GlobalCollectiveError::OrchestratorUnreachable);
    assert_eq!(attempt(config(free_port())), unreachable);
    let alone = attempt(config(orchestrator())).to_string();
    assert!(alone.contains("has not answered within") && alone.contains("fewer than 2 nodes"), "{alone}");
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    spawn(move || other.incoming().for_each(|stream| refuse(stream.unwrap(), WEB_SERVER)));
    let wrong = CollectiveError::Global(GlobalCollectiveError::WrongOrchestratorResponse);
    assert_eq!(attempt(config(port)), wrong);
    let no_port = config(1).with_global_address("localhost".parse().unwrap());
    assert_eq!(attempt(no_port), CollectiveError::InvalidConfig);
    // The peer is free to try again.
    assert_eq!(attempt(CollectiveConfig::default().with_num_nodes(2)), CollectiveError::InvalidConfig);
    register::<Flex>(PeerId(0), Default::default(), CollectiveConfig::default()).unwrap();
}

#[test]
fn nodes_and_their_orchestrator_authenticate_each_other() {
    const TEST: &str = "nodes_and_their_orchestrator_authenticate_each_other";
    const ORCHESTRATOR: u16 = 9;
    const STRANGER: u16 = 8;
    if std::env::var_os("COLLECTIVE_TEST_NODE").is_some() {
        let Some((node, ports)) = as_nodes(TEST, 0) else { return };
        if node == ORCHESTRATOR {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            return runtime.block_on(start_global_orchestrator(ports[0]));
        }
        let peer = PeerId(node.into());
        let own = ports[1 + usize::from(node % 2)];
        let registered = register::<Flex>(peer, Default::default(), config(node, 2, 1, ports[0], own));
        if node == STRANGER {
            let error = registered.unwrap_err().to_string();
            return assert!(error.contains("it has a secret, and this rank none"), "{error}");
        }
        registered.unwrap();
        assert_eq!(sum::<Flex>(peer, vec![f32::from(node) + 1.0]).unwrap(), [3.0]);
        return finish_collective::<Flex>(peer).unwrap();
    }
    let ports = (0..3).map(|_| free_port().to_string()).collect::<Vec<_>>().join(",");
    let secret = "of nodes that find each other by it";
    let start = |node: u16| command(TEST, node, &ports).env("BONFIRE_SECRET", secret).spawn().unwrap();
    let succeeds = |child: Child| {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let orchestrator = start(ORCHESTRATOR);
    // It tries again until its time is up.
    succeeds(command(TEST, STRANGER, &ports).env("BONFIRE_DEADLINE", "1").spawn().unwrap());
    for node in [start(0), start(1)] {
        succeeds(node);
    }
    kill_process(Pid::from_child(&orchestrator), Signal::INT).unwrap();
    succeeds(orchestrator);
    // It refuses to listen where strangers can reach it.
    succeeds(command(TEST, ORCHESTRATOR, &ports).env("BONFIRE_HOST", "0.0.0.0").spawn().unwrap());
}

#[test]
fn the_orchestrator_ends_on_ctrl_c() {
    const TEST: &str = "the_orchestrator_ends_on_ctrl_c";
    if let Some((_, ports)) = std::env::var_os("COLLECTIVE_TEST_NODE").and_then(|_| as_nodes(TEST, 0)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(start_global_orchestrator(ports[0]));
        return;
    }
    let port = free_port();
    let child = child(TEST, 0, &port.to_string());
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        std::thread::yield_now();
    }
    // It listens before it waits for the signal, but an answer comes from the loop that does both.
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(&wire::prologue(wire::VERSION, false, wire::REGISTRATION, [0, 0, 2], 0)).unwrap();
    stream.read_exact(&mut [0; wire::ANSWER]).unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
