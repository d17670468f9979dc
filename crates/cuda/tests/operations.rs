//! Every operation on the memory of a library that is neither cubecl nor burn.
//!
//! Without a GPU they run on the software driver (`kernels/check --driver`): see `CONTRIBUTING.md`.

#[path = "operations/library.rs"]
mod library;

use std::ops::Range;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Barrier};

use bonfire_core::internal::{AgreedOperations, Peers, Ranges, Rows};
use bonfire_core::{Call, DType, Error, Group, Operation, ReduceOp, partition};
use bonfire_cuda::{DeviceOperation, RankRoute, Runtime, Transfer};
use bonfire_testing::process::{Process, is_child, report};
use bonfire_testing::{Kind, run_ranks};

use library::{Device, Library, Memory, device, live_allocations};

type Chunk = (Memory, Ranges);

const WIDTH: usize = size_of::<i32>();

fn value(rank: usize, i: usize) -> i32 {
    (rank * 1_000_003 + i * 7) as i32
}

fn values(rank: usize, range: Range<usize>) -> Vec<i32> {
    range.map(|i| value(rank, i)).collect()
}

fn bytes(range: Range<usize>) -> Range<usize> {
    WIDTH * range.start..WIDTH * range.end
}

/// A rank with its device.
struct Rank {
    group: Group,
    device: Device,
}

impl Rank {
    fn new(group: Group) -> Rank {
        let device = Device::new(device(group.rank()));
        Rank { group, device }
    }

    /// The memory of a range of the whole: in one piece, or in two on different streams.
    fn memory(&mut self, range: Range<usize>, pieces: usize, data: impl Fn(Range<usize>) -> Vec<i32>) -> Vec<Chunk> {
        let middle = if pieces == 2 { range.start + range.len() / 3 } else { range.end };
        let ranges = [range.start..middle, middle..range.end];
        let place = |(stream, range): (usize, &Range<usize>)| {
            let memory = self.device.create(&data(range.clone()), stream as u32);
            (memory, Ranges::from(bytes(range.clone())))
        };
        ranges[..pieces].iter().enumerate().map(place).collect()
    }

    fn start(&mut self, call: Call, sources: Vec<Chunk>, targets: Vec<Chunk>) -> Result<Transfer, Error> {
        const STREAM: u32 = 3;
        self.device.enter(STREAM);
        let (group, Device { id, server, .. }) = (&self.group, &mut self.device);
        let agreed = group.keep(|| RankRoute::<Library>::agree(group, *id))?;
        agreed.check_device(group.rank(), *id)?;
        let route = agreed.route().ok_or_else(|| Error::argument(call.operation, "the ranks have no route"))?;
        if !route.supports(&call) {
            return Err(Error::argument(call.operation, "the route does not support it"));
        }
        let (rank, peers) = (group.rank(), Peers::default());
        let job = DeviceOperation { call, rank, sources, targets, stream: STREAM, peers };
        let launch = route.prepare(server, job, group.deadline());
        bonfire_cuda::start(group, call, move || launch)
    }

    /// Makes a call and compares its result. Waits on the host, or else orders the streams after it.
    fn check(&mut self, operation: Operation, count: usize, pieces: usize, wait: bool) -> Result<(), Error> {
        use Operation::{AllGather, AllReduce, Broadcast, Gather, Reduce, ReduceScatter, Scatter};
        let (rank, n) = (self.group.rank(), self.group.world_size());
        let root = n - 1;
        let mut call = Call::new(operation, DType::I32, count);
        if matches!(operation, AllReduce | Reduce | ReduceScatter) {
            call = call.reducing(ReduceOp::Sum);
        }
        if matches!(operation, Reduce | Broadcast | Gather | Scatter) {
            call = call.rooted(root);
        }
        let (whole, own, is_root) = (0..count, partition(count, n, rank), rank == root);
        let read = match operation {
            AllGather | Gather => Some(own.clone()),
            Broadcast | Scatter => is_root.then(|| whole.clone()),
            _ => Some(whole.clone()),
        };
        let written = match operation {
            ReduceScatter | Scatter => Some(own),
            Reduce | Gather => is_root.then_some(whole),
            Broadcast => (!is_root).then_some(whole),
            _ => Some(whole),
        };
        let sources = read.map_or_else(Vec::new, |range| self.memory(range, pieces, |range| values(rank, range)));
        let targets = written.map_or_else(Vec::new, |range| self.memory(range, pieces, |range| vec![-1; range.len()]));
        let transfer = self.start(call, sources, targets.clone())?;
        let launched = transfer.launched()?;
        let following = if wait {
            launched.wait()?;
            None
        } else {
            self.device.engine.follow(launched.end()?);
            Some(launched)
        };
        let owner = |i: usize| (0..n).find(|peer| partition(count, n, *peer).contains(&i)).unwrap();
        let expected = |i: usize| match operation {
            AllReduce | Reduce | ReduceScatter => (0..n).map(|peer| value(peer, i)).fold(0, i32::wrapping_add),
            Broadcast | Scatter => value(root, i),
            AllGather | Gather => value(owner(i), i),
            _ => value(i / (count / n), rank * (count / n) + i % (count / n)),
        };
        for (memory, ranges) in &targets {
            let range = ranges.single().unwrap();
            let found = self.device.read(memory, 4)?;
            let expected: Vec<i32> = (range.start / WIDTH..range.end / WIDTH).map(expected).collect();
            assert!(found == expected, "{operation} of {count} in {pieces} pieces on rank {rank} of {n}");
        }
        following.map_or(Ok(()), |launched| launched.wait())
    }

    fn check_all(&mut self) -> Result<(), Error> {
        use Operation::{AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter, Scatter};
        let n = self.group.world_size();
        let all = [AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, AllToAll, Gather, Scatter];
        for operation in all {
            for count in [0, 1, 1000, 70_001] {
                let count = if operation == AllToAll { count / n * n } else { count };
                for (pieces, wait) in [(1, true), (2, false)] {
                    self.check(operation, count, pieces, wait)?;
                }
            }
        }
        Ok(())
    }
}

/// Starts this test in processes of their own: `threads` in one, or one for each of so many ranks.
fn start(name: &str, ranks: Option<usize>, gpus: usize, path: &str) -> Vec<Process> {
    let variables = [("SHIM_GPUS", gpus.to_string()), ("BONFIRE_CUDA", path.to_owned())];
    match ranks {
        Some(n) => Process::start_ranks_with(name, n, "auto", "60", &variables),
        None => vec![Process::start(name, &variables)],
    }
}

fn check_outcomes(mut processes: Vec<Process>) {
    let outcomes: Vec<_> = processes.iter().map(Process::outcome).collect();
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert!(processes.iter_mut().all(|process| process.end().success()));
}

/// NCCL needs a GPU for each rank.
fn nccl_serves(ranks: usize) -> bool {
    cfg!(feature = "nccl") && bonfire_cuda::gpus().unwrap() >= ranks
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn every_operation_between_threads() {
    if is_child() {
        let nccl = std::env::var("BONFIRE_CUDA").unwrap() == "nccl";
        for n in (1..=3).filter(|n| !nccl || nccl_serves(*n)) {
            run_ranks(Kind::Threads, n, |group| Rank::new(group).check_all().unwrap());
        }
        return report(&Ok("all".into()));
    }
    for path in ["auto", "push", "one-shot", "two-shot"] {
        for gpus in [1, 2] {
            check_outcomes(start("every_operation_between_threads", None, gpus, path));
        }
    }
    if cfg!(feature = "nccl") {
        check_outcomes(start("every_operation_between_threads", None, 3, "nccl"));
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn every_operation_between_processes() {
    if is_child() {
        let group = Group::from_env().unwrap();
        let nccl = std::env::var("BONFIRE_CUDA").unwrap() == "nccl";
        let outcome = if nccl && !nccl_serves(2) { Ok(()) } else { Rank::new(group).check_all() };
        return report(&outcome.map(|()| "all".into()));
    }
    for path in ["kernels", "nccl"].iter().take(1 + usize::from(cfg!(feature = "nccl"))) {
        check_outcomes(start("every_operation_between_processes", Some(2), 2, path));
    }
}

/// A program may drop its references before the other ranks have called.
#[test]
#[ignore = "needs a CUDA GPU"]
fn memory_is_kept_until_its_call_has_ended() {
    if !is_child() {
        return check_outcomes(start("memory_is_kept_until_its_call_has_ended", None, 1, "auto"));
    }
    let (dropped, ended) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let before = live_allocations();
    run_ranks(Kind::Threads, 2, move |group| {
        let mut rank = Rank::new(group);
        // The first call waits until the ranks have agreed.
        rank.check(Operation::AllReduce, 10, 1, true).unwrap();
        ended.wait();
        let call = Call::new(Operation::AllReduce, DType::I32, 10).reducing(ReduceOp::Sum);
        let transfer = (rank.group.rank() == 0).then(|| {
            let live = live_allocations();
            let memory = rank.memory(0..10, 1, |range| values(0, range));
            let transfer = rank.start(call, memory.clone(), memory).unwrap();
            assert_eq!(live_allocations(), live + 1, "the memory of a call that waits for a rank");
            transfer
        });
        dropped.wait();
        let transfer = transfer.unwrap_or_else(|| {
            let memory = rank.memory(0..10, 1, |range| values(1, range));
            rank.start(call, memory.clone(), memory).unwrap()
        });
        transfer.launched().unwrap().wait().unwrap();
        ended.wait();
    });
    assert_eq!(live_allocations(), before, "memory of calls that have ended");
    report(&Ok("freed".into()));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn memory_that_is_too_small_is_refused() {
    run_ranks(Kind::Threads, 1, |group| {
        let mut rank = Rank::new(group);
        let memory = rank.memory(0..10, 1, |range| values(0, range));
        let short = vec![(memory[0].0.clone(), Ranges::from(0..44))];
        let call = Call::new(Operation::AllReduce, DType::I32, 11).reducing(ReduceOp::Sum);
        let error = rank.start(call, short.clone(), short).and_then(Transfer::launched).map(drop).unwrap_err();
        assert!(error.to_string().contains("memory of 40 bytes was given for 44 bytes"), "{error}");
    });
}

/// All-reduces and copies between devices of a process, without a group.
#[test]
#[ignore = "needs a CUDA GPU"]
fn devices_without_a_group() {
    let (sender, receiver) = sync_channel(1);
    let receiver = Arc::new(std::sync::Mutex::new(receiver));
    run_ranks(Kind::Threads, 2, move |group| {
        let rank = group.rank();
        // Beside those of the other tests.
        let devices = [100, 101].map(library::device).to_vec();
        let mut device = Device::new(devices[rank]);
        assert!(device.engine.takes(&devices));
        // What this has allocated may wait for all GPUs, so the other device's first call has to come after it.
        group.barrier().unwrap();
        let all_reduce = |device: &mut Device, count: usize| {
            let memory = device.create(&values(rank, 0..count), 1);
            let call = Call::new(Operation::AllReduce, DType::I32, count).reducing(ReduceOp::Sum);
            let whole = vec![(memory.clone(), Ranges::from(0..WIDTH * count))];
            let (sources, targets, peers) = (whole.clone(), whole, Peers::default());
            let job = DeviceOperation { call, rank, sources, targets, stream: 1, peers };
            let Device { engine, server, .. } = device;
            engine.all_reduce(server, devices.clone(), job).and_then(|()| engine.sync()).map(|()| memory)
        };
        for count in [1, 1000, 70_001] {
            let sum = all_reduce(&mut device, count).unwrap();
            let expected: Vec<_> = (0..count).map(|i| value(0, i).wrapping_add(value(1, i))).collect();
            assert!(device.read(&sum, 2).unwrap() == expected, "{count} on device {rank}");
        }
        // Every second of these pairs of numbers is copied.
        if rank == 0 {
            let memory = device.create(&values(0, 0..8), 1);
            let Device { engine, server, .. } = &mut device;
            sender.send(engine.lend(server, memory, 8 * WIDTH, 1).unwrap()).unwrap();
        } else {
            let lent = receiver.lock().unwrap().recv().unwrap();
            let target = device.create(&[0; 4], 1);
            let Device { engine, server, .. } = &mut device;
            let rows = Rows { count: 2, bytes: 2 * WIDTH, pitch: 4 * WIDTH };
            engine.copy(server, lent, rows, target.clone()).unwrap();
            assert_eq!(device.read(&target, 2).unwrap(), [0, 1, 4, 5].map(|i| value(0, i)));
        }
        group.barrier().unwrap();
        // A mismatch makes both devices unusable, and is what their reads return.
        let failed = all_reduce(&mut device, 5 + rank);
        let status = Library::status(device.id);
        while status.failure().is_none() {
            std::thread::yield_now();
        }
        assert!(matches!(status.failure(), Some(Error::Mismatch { .. })), "{:?}", status.failure());
        assert!(failed.map_or(true, |memory| device.read(&memory, 1).is_err()));
        device.engine.forget();
    });
}
