//! Operations on burn's tensors, compared with what burn computes on one rank.

use bonfire::tensor::operation::{
    all_gather, all_gather_v, all_reduce, all_to_all, all_to_all_v, broadcast, exchange, gather, recv, reduce,
    reduce_scatter, reduce_scatter_v, scatter, send,
};
use bonfire::{Error, Group, ReduceOp};
use bonfire_testing::{Kind, errors, run_ranks};
use burn::tensor::{Bool, BoolStore, DType, Float, Int, TensorData};

use super::checks::{every_rank_of_numbers, every_rank_of_tensor, moves, of_rank, reduces, same};
use crate::burn_version::{Inner, Tensor, device, inner_device};
use crate::tensor_version::{DeviceCommunicator, computes_in};

const BOOL: DType = DType::Bool(BoolStore::Native);

#[test]
fn one_to_five_ranks_match_burn_on_one_rank() {
    for n in 1..=5 {
        run_ranks(Kind::Threads, n, |group| {
            every_rank_of_numbers::<Float>(&group, DType::F32);
            every_rank_of_numbers::<Float>(&group, DType::F64);
            every_rank_of_numbers::<Float>(&group, DType::F16);
            every_rank_of_numbers::<Float>(&group, DType::BF16);
            every_rank_of_numbers::<Int>(&group, DType::I32);
            every_rank_of_numbers::<Int>(&group, DType::I64);
            every_rank_of_tensor::<Bool>(&group, BOOL);
        });
    }
}

#[test]
fn tcp_and_shared_memory_match_burn_on_one_rank() {
    for kind in [Kind::Tcp, Kind::Shm] {
        run_ranks(kind, 3, |group| {
            moves::<3, Int>(&group, DType::I16);
            moves::<2, Bool>(&group, BOOL);
            reduces::<3, Float>(&group, DType::F16);
            reduces::<2, Int>(&group, DType::U8);
        });
    }
}

#[test]
fn views_are_read_in_logical_order() {
    run_ranks(Kind::Threads, 2, |group| {
        let device = inner_device();
        let table = Inner::<1, Int>::arange(0..6, &device).reshape([2, 3]) + group.rank() as i32 * 10;
        let turned = all_gather(table.clone().transpose(), 1, &group).unwrap();
        assert_eq!(turned.to_data().iter::<i64>().collect::<Vec<_>>(), [0, 3, 10, 13, 1, 4, 11, 14, 2, 5, 12, 15]);
        let row = all_reduce(table.clone().slice([1..2, 0..3]), ReduceOp::Max, &group).unwrap();
        assert_eq!(row.to_data().iter::<i64>().collect::<Vec<_>>(), [13, 14, 15]);
        let expanded = Inner::<1>::ones([1], &device).expand([3]);
        assert_eq!(all_reduce(expanded, ReduceOp::Sum, &group).unwrap().to_data(), TensorData::from([2f32; 3]));
    });
}

#[test]
fn messages_keep_shape_and_type() {
    run_ranks(Kind::Threads, 2, |group| {
        let device = inner_device();
        let table = || of_rank::<3, Int>(0, [2, 3, 2], DType::I16);
        if group.rank() == 0 {
            send(table(), 1, &group).unwrap();
            send(table().equal_elem(3), 1, &group).unwrap();
        } else {
            same(recv([2, 3, 2], 0, (&device, DType::I16), &group), &table());
            same(recv([2, 3, 2], 0, &device, &group), &table().equal_elem(3));
        }
    });
}

#[test]
fn invalid_arguments_are_rejected_and_the_group_stays_usable() {
    run_ranks(Kind::Threads, 2, |group| {
        let device = inner_device();
        let table = || Inner::<2>::ones([3, 2], &device);
        let refused = |result: Result<Inner<2>, Error>, words: &str| match result {
            Err(Error::InvalidArgument { reason, .. }) if reason.contains(words) => {}
            other => panic!("{other:?} does not mention '{words}'"),
        };
        for dim in [2, -3, isize::MIN] {
            refused(all_gather(table(), dim, &group), "give one from -2 to 1");
            refused(reduce_scatter(table(), ReduceOp::Sum, dim, &group), "give one from -2 to 1");
            refused(all_to_all(table(), dim, &group), "give one from -2 to 1");
        }
        refused(reduce_scatter(table(), ReduceOp::Sum, 0, &group), "multiple of 2");
        refused(all_to_all(table(), 0, &group), "multiple of 2");
        refused(all_gather_v(table(), 0, Some(&[3]), &group), "1 sizes for 2 ranks");
        refused(all_gather_v(table(), 0, Some(&[4, 4]), &group), "its tensor has 3");
        refused(reduce_scatter_v(table(), ReduceOp::Sum, 0, &[2, 2], &group), "do not add up");
        refused(reduce_scatter_v(table(), ReduceOp::Sum, 0, &[usize::MAX, 4], &group), "do not add up");
        refused(all_to_all_v(table(), 0, &[3, 1], None, &group), "do not add up");
        refused(all_to_all_v(table(), 0, &[3, 0], Some(&[0]), &group), "1 sizes for 2 ranks");
        refused(all_to_all_v(table(), 0, &[3, 0], Some(&[usize::MAX, 3]), &group), "no tensor is so long");
        refused(broadcast(table(), 2, &group), "root 2");
        refused(scatter(None, group.rank(), 0, &device, &group), "gives the only tensor");
        refused(recv([usize::MAX, 2], 1 - group.rank(), &device, &group), "no tensor");
        assert!(gather(table(), 5, 0, &group).is_err());
        same(all_reduce(table(), ReduceOp::Sum, &group), &(table() * 2));
    });
}

/// Two ranks whose tensors have equally many elements and different shapes.
#[test]
fn different_shapes_are_detected_by_all_ranks() {
    type Call = fn(&Group, Inner<2>) -> Result<(), Error>;
    let calls: [Call; 8] = [
        |group, tensor| all_reduce(tensor, ReduceOp::Sum, group).map(drop),
        |group, tensor| broadcast(tensor, 0, group).map(drop),
        |group, tensor| all_gather(tensor, 0, group).map(drop),
        |group, tensor| all_gather_v(tensor, 0, None, group).map(drop),
        |group, tensor| gather(tensor, 0, 1, group).map(drop),
        |group, tensor| reduce_scatter(tensor, ReduceOp::Sum, 0, group).map(drop),
        |group, tensor| all_to_all(tensor, 1, group).map(drop),
        |group, tensor| all_to_all_v(tensor, 0, &[1, 1], None, group).map(drop),
    ];
    for (index, call) in calls.into_iter().enumerate() {
        let results = run_ranks(Kind::Threads, 2, move |group| {
            let shape = match (index, group.rank()) {
                (7, rank) => [2, 3 + rank],
                (_, 0) => [2, 4],
                _ => [4, 2],
            };
            call(&group, Inner::ones(shape, &inner_device()))
        });
        for error in errors(results) {
            assert!(matches!(error, Error::Mismatch { .. }), "{index}: {error}");
        }
    }
}

#[test]
fn float_tensors_with_autodiff_are_refused_on_all_ranks_because_gradients_would_be_lost() {
    #[track_caller]
    fn refused<T>(result: Result<T, Error>) {
        let Err(Error::InvalidArgument { reason, .. }) = result else { panic!("it was not refused") };
        assert!(reason.contains("`tensor::autodiff`") && reason.contains("`tensor.inner()`"), "{reason}");
    }

    run_ranks(Kind::Threads, 2, |group| {
        let (rank, device) = (group.rank(), device());
        let leaf = Tensor::<2>::ones([2, 2], &device).require_grad();
        // Of this tensor burn 0.21 does not tell that it is tracked.
        let tensor = || leaf.clone() * 2.0;
        refused(all_reduce(tensor(), ReduceOp::Sum, &group));
        refused(all_reduce(leaf.clone(), ReduceOp::Sum, &group));
        refused(reduce(tensor(), ReduceOp::Sum, 0, &group));
        refused(broadcast(tensor(), 0, &group));
        refused(all_gather(tensor(), 0, &group));
        refused(all_gather_v(tensor(), 0, None, &group));
        refused(reduce_scatter(tensor(), ReduceOp::Sum, 0, &group));
        refused(gather(tensor(), 0, 0, &group));
        refused(all_to_all(tensor(), 0, &group));
        refused(all_to_all_v(tensor(), 0, &[1, 1], None, &group));
        refused(send(tensor(), 1 - rank, &group));
        refused(exchange(tensor(), 1 - rank, [2, 2], 1 - rank, &group));
        // Also on the rank that passes no tensor: it would wait for the other one.
        refused(scatter((rank == 0).then(tensor), 0, 0, &device, &group));
        let received: Result<Tensor<2>, Error> = recv([2, 2], 1 - rank, &device, &group);
        refused(received);
        // Nothing was sent. Tensors without gradients are not concerned.
        let counts = Tensor::<1, Int>::from_data([rank as i64], &device);
        let all = all_gather(counts, 0, &group).unwrap();
        assert_eq!(all.into_data().iter::<i64>().collect::<Vec<_>>(), [0, 1]);
        let sum = Tensor::<2>::from_inner(all_reduce(tensor().inner(), ReduceOp::Sum, &group).unwrap());
        assert_eq!(sum.into_data(), TensorData::from([[4f32; 2]; 2]));
    });
}

#[test]
fn tensors_that_a_device_or_the_group_lacks_are_typed_errors_before_anything_is_sent() {
    run_ranks(Kind::Threads, 2, |group| {
        let (rank, device) = (group.rank(), inner_device());
        let refused = |result: Result<(), Error>, words: &str| match result {
            Err(Error::InvalidArgument { reason, .. }) if reason.contains(words) => {}
            other => panic!("{other:?} does not mention '{words}'"),
        };
        let received: Result<Inner<1>, Error> = recv([2], 1 - rank, (&device, DType::I32), &group);
        refused(received.map(drop), "cannot be sent as float tensors");
        let received: Result<Inner<1, Int>, Error> = recv([2], 1 - rank, (&device, DType::F32), &group);
        refused(received.map(drop), "cannot be sent as int tensors");
        // What the root has counts there, so that it alone would know.
        let scattered: Result<Inner<1>, Error> = scatter(None, 1 - rank, 0, (&device, BOOL), &group);
        refused(scattered.map(drop), "Bool");
        assert!(!computes_in(DType::Flex32));
        let received: Result<Inner<1>, Error> = recv([2], 1 - rank, (&device, DType::Flex32), &group);
        refused(received.map(drop), "has no tensors of Flex32");
        assert_eq!(group.trace().operations.len(), 0, "nothing was sent");
    });
}

#[test]
fn traces_name_the_line_of_the_caller() {
    run_ranks(Kind::Threads, 2, |group| {
        let x = || of_rank::<2, Float>(group.rank(), [2, 2], DType::F32);
        all_reduce(x(), ReduceOp::Sum, &group).unwrap();
        reduce(x(), ReduceOp::Sum, 0, &group).unwrap();
        broadcast(x(), 0, &group).unwrap();
        all_gather_v(x(), 0, None, &group).unwrap();
        reduce_scatter(x(), ReduceOp::Sum, 0, &group).unwrap();
        gather(x(), 0, 0, &group).unwrap();
        all_to_all_v(x(), 0, &[1, 1], None, &group).unwrap();
        exchange(x(), 1 - group.rank(), [2, 2], 1 - group.rank(), &group).unwrap();
        let communicator = DeviceCommunicator::new(group.clone(), inner_device(), None, "tp").unwrap();
        communicator.all_gather_v(x(), None, None).unwrap();
        let records = group.trace().operations;
        assert!(records.len() >= 11);
        for record in records {
            assert!(record.at.starts_with(file!()), "{} is recorded at {}", record.call, record.at);
        }
    });
}
