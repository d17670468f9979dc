//! Sessions: peers that disagree, that are missing, and that come and go.

use super::*;

#[test]
fn all_peers_get_the_same_mismatch_and_the_session_stays_usable() {
    use CollectiveError::*;
    use ReduceOperation::{Mean, Sum};
    let _guard = fresh::<Flex>();
    fn reduce_all(rank: u32, len: usize, op: ReduceOperation) -> Result<(), CollectiveError> {
        all_reduce::<Flex>(id(rank), floats::<Flex>(&vec![1.0; len]), op).map(drop)
    }
    fn reduce_to(rank: u32, len: usize, op: ReduceOperation, root: u32) -> Result<(), CollectiveError> {
        reduce::<Flex>(id(rank), floats::<Flex>(&vec![1.0; len]), op, id(root)).map(drop)
    }
    fn cast(rank: u32, provides: bool) -> Result<(), CollectiveError> {
        broadcast::<Flex>(id(rank), provides.then(|| floats::<Flex>(&[1.0]))).map(drop)
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
    let _guard = fresh::<Flex>();
    let with = |shapes: [&'static [usize]; 2], dtypes: [DType; 2]| {
        all_get(CollectiveError::AllReduceShapeMismatch, move |rank| {
            let which = usize::from(rank == 1);
            let data = TensorData::full_dtype(shapes[which].to_vec(), 1.0, dtypes[which]);
            let tensor = tensor::<Flex>(data);
            all_reduce::<Flex>(id(rank), tensor, ReduceOperation::Sum).map(drop)
        });
    };
    with([&[2, 3], &[3, 2]], [DType::F32; 2]);
    with([&[2], &[2]], [DType::F16, DType::BF16]);
}

#[test]
fn only_registered_peers_take_part() {
    let _guard = fresh::<Flex>();
    let none = Err(CollectiveError::RegisterNotFirstOperation);
    assert_eq!(sum::<Flex>(0, &[1.0]), none.clone().map(|()| vec![]));
    assert_eq!(finish_collective::<Flex>(id(0)), none);
    register::<Flex>(id(0), Default::default(), config(1)).unwrap();
    assert_eq!(sum::<Flex>(1, &[1.0]), none.clone().map(|()| vec![]));
    assert_eq!(broadcast::<Flex>(id(1), None).map(drop), none);
    assert_eq!(finish_collective::<Flex>(id(1)), Err(CollectiveError::MultipleUnregister));
    assert_sound::<Flex>(0, 1);
}

#[test]
fn invalid_registrations_are_rejected_at_once() {
    let _guard = fresh::<Flex>();
    let again = |rank, config| register::<Flex>(id(rank), Default::default(), config);
    assert_eq!(again(0, config(0)), Err(CollectiveError::InvalidConfig));
    assert_eq!(again(0, config(1).with_num_nodes(2)), Err(CollectiveError::InvalidConfig));
    assert_eq!(again(0, config(1).with_data_service_port(1)), Err(CollectiveError::InvalidConfig));
    for (global, node) in [("nowhere:port", "127.0.0.1"), ("ws://127.0.0.1:3000", "http://:1")] {
        let nodes = config(1).with_num_nodes(2).with_data_service_port(1);
        let nodes = nodes.with_global_address(global.parse().unwrap()).with_node_address(node.parse().unwrap());
        assert_eq!(again(0, nodes), Err(CollectiveError::InvalidConfig), "{global} {node}");
    }
    peers::<Flex, _>(2, |_| ());
    assert_eq!(again(0, config(2)), Err(CollectiveError::MultipleRegister));
    assert_eq!(again(2, config(3)), Err(CollectiveError::RegisterParamsMismatch));
    let strategy = config(2).with_local_reduce_strategy(ReduceStrategy::Centralized);
    assert_eq!(again(2, strategy), Err(CollectiveError::RegisterParamsMismatch));
}

#[test]
fn a_surplus_registration_is_rejected_and_later_operations_do_not_need_it() {
    let _guard = fresh::<Flex>();
    peers::<Flex, _>(2, |_| ());
    let surplus = register::<Flex>(id(2), Default::default(), config(2));
    assert_eq!(surplus, Err(CollectiveError::RegisterParamsMismatch));
    join((0..2).map(|rank| spawn(move || assert_sound::<Flex>(rank, 2))).collect());
}

#[test]
fn concurrent_calls_of_one_peer_are_an_error_and_no_panic() {
    let _guard = fresh::<Flex>();
    peers::<Flex, _>(2, |_| ());
    let calls: Vec<_> = (0..2).map(|_| spawn(|| sum::<Flex>(0, &[1.0]))).collect();
    // One of the two is rejected; the other waits for the second peer.
    while !calls.iter().any(JoinHandle::is_finished) {
        std::thread::yield_now();
    }
    assert_eq!(sum::<Flex>(1, &[1.0]), Ok(vec![2.0]));
    let mut results = join(calls);
    results.sort_by_key(Result::is_err);
    assert_eq!(results[0], Ok(vec![2.0]));
    assert!(matches!(&results[1], Err(CollectiveError::Other(text)) if text.contains("another operation")));
}

#[test]
fn finish_shrinks_the_session_also_for_waiting_peers_and_new_ones_may_join() {
    let _guard = fresh::<Flex>();
    // Repeated, because the others may be waiting or not when the peer leaves.
    for _ in 0..50 {
        reset_collective::<Flex>();
        let results = peers::<Flex, _>(3, |rank| {
            let all = sum::<Flex>(rank, &[1.0]).unwrap();
            if rank == 1 {
                finish_collective::<Flex>(id(1)).unwrap();
                return (all, None);
            }
            (all, Some(sum::<Flex>(rank, &[1.0]).unwrap()))
        });
        assert!(results.iter().all(|(all, _)| all == &[3.0]));
        assert_eq!((&results[0].1, &results[2].1), (&Some(vec![2.0]), &Some(vec![2.0])));
    }
    register::<Flex>(id(7), Default::default(), config(3)).unwrap();
    join([0, 2, 7].map(|rank| spawn(move || assert_sound::<Flex>(rank, 3))).into());
    for rank in [0, 2, 7] {
        finish_collective::<Flex>(id(rank)).unwrap();
        assert_eq!(finish_collective::<Flex>(id(rank)), Err(CollectiveError::MultipleUnregister));
    }
    // The session ends with the last peer, and the next one may have a different config.
    register::<Flex>(id(0), Default::default(), config(1)).unwrap();
    assert_sound::<Flex>(0, 1);
}

#[test]
fn reset_releases_all_waiting_peers() {
    let _guard = fresh::<Flex>();
    peers::<Flex, _>(2, |_| ());
    let waiting = spawn(|| sum::<Flex>(0, &[1.0]));
    // Peer 0 may not have begun: then it finds itself unregistered, which is correct, too.
    reset_collective::<Flex>();
    let released = [CollectiveError::LocalServerMissing, CollectiveError::RegisterNotFirstOperation];
    assert!(released.contains(&waiting.join().unwrap().unwrap_err()));
    register::<Flex>(id(0), Default::default(), config(1)).unwrap();
    finish_collective::<Flex>(id(0)).unwrap();
    let registering = spawn(|| register::<Flex>(id(0), Default::default(), config(2)));
    // The peer is unknown until its registration waits.
    while finish_collective::<Flex>(id(0)) == Err(CollectiveError::MultipleUnregister) {
        std::thread::yield_now();
    }
    reset_collective::<Flex>();
    assert_eq!(registering.join().unwrap(), Err(CollectiveError::LocalServerMissing));
    peers::<Flex, _>(2, |rank| assert_sound::<Flex>(rank, 2));
}
