//! Shared memory between processes: which groups use it, that it is released, and operations of all sizes in sequence.

use std::fmt::Debug;
use std::ops::DerefMut;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use bonfire_core::{Algorithm, Builder, Element, Error, Group, Operation, ReduceOp, TransportKind, partition};
use bonfire_testing::process::{Process, is_child, report, send_line};
use bonfire_testing::transport::{Random, delay};
use bonfire_testing::{Kind, free_address, run_ranks};
use half::{bf16, f16};
use rustix::process::Signal;

/// Returns how many mappings of segments this process has.
fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux has it");
    maps.lines().filter(|line| line.contains("memfd:bonfire")).count()
}

/// Returns what this process's file descriptors refer to.
fn descriptors() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/proc/self/fd").expect("Linux has it");
    entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok()).collect()
}

/// Returns how many of them are anonymous shared memory.
fn memfds(all: &[PathBuf]) -> usize {
    all.iter().filter(|path| path.to_string_lossy().contains("memfd")).count()
}

#[test]
fn a_dropped_group_releases_its_shared_memory() {
    if is_child() {
        let outcome = Group::from_env().and_then(|group| {
            let while_it_lives = (mappings(), memfds(&descriptors()));
            group.all_reduce(&mut vec![1f32; 1_000_000], ReduceOp::Sum)?;
            let mut buffer = group.allocate::<f32>(1_000_000)?;
            buffer.fill(1.0);
            group.all_reduce(&mut buffer, ReduceOp::Sum)?;
            let before = descriptors().len();
            drop(group);
            let with_the_buffer = (mappings(), memfds(&descriptors()), buffer.iter().all(|x| *x == 2.0));
            drop(buffer);
            let after = (mappings(), memfds(&descriptors()), descriptors().len() < before);
            Ok(format!("{while_it_lives:?} {with_the_buffer:?} {after:?}"))
        });
        return report(&outcome);
    }
    let mut ranks = Process::start_ranks("a_dropped_group_releases_its_shared_memory", 2, "auto", "60");
    for rank in &mut ranks {
        // Two mappings and one descriptor while the group or a buffer of it lives, none afterwards.
        assert_eq!(rank.outcome(), Ok("(2, 1) (2, 1, true) (0, 0, true)".into()));
        assert!(rank.end().success());
    }
    assert!(!named_in_dev_shm());
}

/// Whether `/dev/shm`, where named shared memory appears, has an entry of Bonfire's.
fn named_in_dev_shm() -> bool {
    let entries = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).any(|name| name.to_string_lossy().contains("bonfire"))
}

#[test]
fn a_rank_killed_during_large_operations_is_lost_at_once() {
    if is_child() {
        let group = Group::from_env().expect("ranks find each other");
        // The parent selects the kind of buffer by the deadline.
        let mut data = memory(&group, group.deadline() > Duration::from_secs(60), vec![1f32; 4_000_000]);
        group.all_reduce(&mut data, ReduceOp::Mean).expect("all ranks are there");
        send_line("going");
        let error = loop {
            if let Err(error) = group.all_reduce(&mut data, ReduceOp::Mean) {
                break error;
            }
        };
        return report(&Err(error));
    }
    for (victim, deadline) in [(0, "60"), (1, "61"), (2, "60"), (0, "61")] {
        let name = "a_rank_killed_during_large_operations_is_lost_at_once";
        let ranks = Process::start_ranks(name, 3, "shm", deadline);
        ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "going"));
        ranks[victim].signal(Signal::KILL);
        let start = Instant::now();
        for (rank, process) in ranks.iter().enumerate().filter(|(rank, _)| *rank != victim) {
            let error = process.outcome().unwrap_err();
            assert!(matches!(error, Error::PeerLost { peer, .. } if peer == victim), "rank {rank} got {error:?}");
        }
        // About a tenth of a second on a quiet machine, and far below the deadline on any machine.
        assert!(start.elapsed() < Duration::from_secs(10), "after {:?}", start.elapsed());
        assert!(!named_in_dev_shm());
    }
}

/// A rank is stopped during operations on buffers in shared memory, and resumed after its peers have failed. It must
/// not write to the buffers that its peers have got back.
#[test]
fn a_resumed_rank_cannot_write_to_buffers_returned_to_its_peers() {
    const LEN: usize = 4_000_000;
    if is_child() {
        let resume = PathBuf::from(std::env::var_os("BONFIRE_TEST_GO_ON").expect("set by the parent"));
        let group = Group::from_env().expect("ranks find each other");
        let mut data = group.allocate::<f32>(LEN).expect("there is memory");
        group.all_reduce(&mut data, ReduceOp::Mean).expect("all ranks are there");
        send_line("going");
        let error = loop {
            if let Err(error) = group.all_reduce(&mut data, ReduceOp::Mean) {
                break error;
            }
        };
        data.fill(3.0);
        report(&Err(error));
        while !resume.exists() {
            thread::sleep(Duration::from_millis(5));
        }
        // New buffers are not placed where the stopped rank may still write, either.
        let fresh = group.allocate::<f32>(LEN).expect("there is memory");
        let untouched = data.iter().all(|x| *x == 3.0) && fresh.iter().all(|x| *x == 0.0);
        return send_line(untouched);
    }
    for victim in 0..2 {
        let directory = tempfile::tempdir().unwrap();
        let resume = directory.path().join("resume");
        let name = "a_resumed_rank_cannot_write_to_buffers_returned_to_its_peers";
        let mut ranks = start_with(name, 2, "2", &resume);
        ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "going"));
        ranks[victim].signal(Signal::STOP);
        let error = ranks[1 - victim].outcome().unwrap_err();
        assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [victim]), "{error:?}");
        ranks[victim].signal(Signal::CONT);
        ranks[victim].outcome().unwrap_err();
        std::fs::write(resume, "").unwrap();
        for rank in &mut ranks {
            assert_eq!(rank.read_line(), "true");
            assert!(rank.end().success());
        }
    }
}

/// Starts ranks that wait for the file `resume` before they end.
fn start_with(name: &str, n: usize, deadline: &str, resume: &Path) -> Vec<Process> {
    let address = free_address();
    let variables = |rank: usize| {
        [
            ("BONFIRE_RANK", rank.to_string()),
            ("BONFIRE_WORLD_SIZE", n.to_string()),
            ("BONFIRE_ADDRESS", address.clone()),
            ("BONFIRE_TRANSPORT", "shm".to_owned()),
            ("BONFIRE_DEADLINE", deadline.to_owned()),
            ("BONFIRE_TEST_GO_ON", resume.to_string_lossy().into_owned()),
        ]
    };
    (0..n).map(|rank| Process::start(name, &variables(rank))).collect()
}

type Settings = fn(Builder) -> Builder;

/// Connects one rank for each entry of `settings`, and returns what each gets from one operation.
fn connect_and_reduce(settings: Vec<Settings>) -> Vec<Result<i32, Error>> {
    let (address, n) = (free_address(), settings.len());
    let ranks: Vec<_> = settings
        .into_iter()
        .enumerate()
        .map(|(rank, set)| {
            let builder =
                Group::builder().rank(rank).world_size(n).address(address.clone()).deadline(bonfire_testing::DEADLINE);
            thread::spawn(move || {
                let group = set(builder.rendezvous_timeout(bonfire_testing::DEADLINE)).connect()?;
                let mut data = [1; 3000];
                group.all_reduce(&mut data, ReduceOp::Sum).map(|()| data[2999])
            })
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().expect("no rank panics")).collect()
}

#[test]
fn ranks_agree_on_a_transport() {
    let auto: Settings = |b| b;
    let tcp: Settings = |b| b.transport(TransportKind::Tcp);
    let shm: Settings = |b| b.transport(TransportKind::Shm);
    for requested in [[auto, auto, auto], [auto, tcp, auto], [tcp, auto, auto], [auto, auto, shm], [shm, shm, auto]] {
        assert_eq!(connect_and_reduce(requested.into()), [Ok(3), Ok(3), Ok(3)]);
    }
    for requested in [[shm, tcp, auto], [auto, tcp, shm], [tcp, shm, shm]] {
        for result in connect_and_reduce(requested.into()) {
            let Err(Error::Rendezvous { reason, .. }) = &result else { panic!("{result:?} is no failed rendezvous") };
            assert!(reason.contains("insists on shared memory") && reason.contains("BONFIRE_TRANSPORT"), "{reason}");
        }
    }
}

#[test]
fn plans_for_all_sizes_run_over_tcp_without_shared_memory() {
    let ring: Settings = |b| b.algorithms(Algorithm::Ring);
    assert_eq!(connect_and_reduce(vec![ring; 3]), [Ok(3), Ok(3), Ok(3)]);
    let conflicting = Group::builder().rank(0).world_size(2).address(free_address()).algorithms(Algorithm::Ring);
    let error = conflicting.transport(TransportKind::Shm).connect().unwrap_err();
    assert!(matches!(&error, Error::Config(text) if text.contains("algorithm")), "{error:?}");
}

#[test]
fn the_environment_sets_which_sizes_use_shared_memory() {
    const NAME: &str = "the_environment_sets_which_sizes_use_shared_memory";
    if is_child() {
        let outcome = Group::from_env().and_then(|group| {
            group.all_reduce(&mut [1f32; 10], ReduceOp::Sum)?;
            group.all_reduce(&mut vec![1f32; 100_000], ReduceOp::Sum)?;
            group.broadcast(&mut vec![1f32; 100_000], 1)?;
            let of = |operation| group.algorithms(operation);
            Ok(format!("{} {}", of(Operation::AllReduce), of(Operation::Broadcast)))
        });
        return report(&outcome);
    }
    let start = |table: &str, transport: &str| {
        let address = free_address();
        let variables = |rank: usize| {
            [
                ("BONFIRE_RANK", rank.to_string()),
                ("BONFIRE_WORLD_SIZE", "2".into()),
                ("BONFIRE_ADDRESS", address.clone()),
                ("BONFIRE_TRANSPORT", transport.into()),
                ("BONFIRE_ALGORITHMS", table.into()),
            ]
        };
        let ranks: Vec<_> = (0..2).map(|rank| Process::start(NAME, &variables(rank))).collect();
        ranks.iter().map(Process::outcome).collect::<Vec<_>>()
    };
    let table = "all_reduce=native:0-999;ring:1000-";
    assert_eq!(start(table, "shm"), vec![Ok::<_, Error>(format!("{table} broadcast=native:0-")); 2]);
    // Over TCP, `native` stands for TCP's defaults.
    let over_tcp = "all_reduce=doubling:0-999;ring:1000- broadcast=tree:0-";
    assert_eq!(start(table, "tcp"), vec![Ok::<_, Error>(over_tcp.into()); 2]);
    for outcome in start("all_reduce=native:0-999;ring:1001-", "auto") {
        let gap = "BONFIRE_ALGORITHMS is 'all_reduce=native:0-999;ring:1001-': no path for sizes from 1000 to 1000";
        assert!(matches!(&outcome, Err(Error::Config(text)) if text.contains(gap)), "{outcome:?}");
    }
}

/// Places these elements in shared memory, or in private memory of this process.
fn memory<T: Element>(group: &Group, shared: bool, elements: Vec<T>) -> Box<dyn DerefMut<Target = [T]>> {
    if !shared {
        return Box::new(elements);
    }
    let mut buffer = group.allocate(elements.len()).expect("there is memory");
    buffer.copy_from_slice(&elements);
    Box::new(buffer)
}

/// The input of rank `rank` to operation `number` at index `i`.
fn value(rank: usize, number: usize, i: usize) -> i64 {
    (rank * 1_000_003 + number * 7919 + i * 31) as i64 % 10_007
}

/// Runs one operation, drawn from the same random numbers on all ranks, and compares the result with an oracle.
fn random_operation(group: &Group, number: usize, random: &mut Random) {
    let (rank, n) = (group.rank(), group.world_size());
    let len = match random.next() % 8 {
        0 => 0,
        1..=3 => random.next() as usize % 1500,
        4..=6 => random.next() as usize % 40_000,
        _ => random.next() as usize % 400_000,
    } / n
        * n;
    let root = random.next() as usize % n;
    let in_place = random.next().is_multiple_of(2);
    let mine: Vec<i64> = (0..len).map(|i| value(rank, number, i)).collect();
    // The buffers of no rank, of all ranks, or of some ranks are in shared memory.
    let shared = match random.next() % 4 {
        0 => 0,
        1 | 2 => u64::MAX,
        _ => random.next(),
    };
    let [share_input, share_output] = [shared >> (2 * rank) & 1 == 1, shared >> (2 * rank + 1) & 1 == 1];
    let sum = |i: usize| (0..n).map(|rank| value(rank, number, i)).sum::<i64>();
    let mut data = memory(group, share_output, if in_place { mine.clone() } else { vec![-1; len] });
    let mine = memory(group, share_input, mine);
    let own = partition(len, n, rank);
    let kind = random.next() % 7;
    match (kind, in_place) {
        (0, true) => group.all_reduce(&mut data, ReduceOp::Sum),
        (0, false) => group.all_reduce_into(&mine, &mut data, ReduceOp::Sum),
        (1, true) => group.reduce(&mut data, ReduceOp::Sum, root),
        (1, false) => group.reduce_into(&mine, &mut data, ReduceOp::Sum, root),
        (2, true) => group.broadcast(&mut data, root),
        (2, false) => group.broadcast_into((rank == root).then_some(&mine[..]), &mut data, root),
        (3, true) => group.all_gather(&mut data),
        (3, false) => group.all_gather_into(&mine[own.clone()], &mut data),
        (4, true) => group.reduce_scatter(&mut data, ReduceOp::Sum),
        (4, false) => group.reduce_scatter_into(&mine, &mut data[own.clone()], ReduceOp::Sum),
        (5, true) => group.all_to_all(&mut data),
        (5, false) => group.all_to_all_into(&mine, &mut data),
        _ => group.barrier(),
    }
    .unwrap();
    let (wanted, range): (Vec<i64>, _) = match kind {
        0 => ((0..len).map(sum).collect(), 0..len),
        1 if rank == root => ((0..len).map(sum).collect(), 0..len),
        2 => ((0..len).map(|i| value(root, number, i)).collect(), 0..len),
        3 => ((0..n).flat_map(|r| partition(len, n, r).map(move |i| value(r, number, i))).collect(), 0..len),
        4 => (own.clone().map(sum).collect(), own),
        5 => ((0..len).map(|i| value(i / (len / n), number, rank * (len / n) + i % (len / n))).collect(), 0..len),
        _ => (Vec::new(), 0..0),
    };
    assert!(data[range] == wanted, "operation {number}, kind {kind} x {len}, in place {in_place}, rank {rank} of {n}");
}

#[test]
fn sequences_of_operations_of_all_kinds_and_sizes_are_exact() {
    let hosts = [(Kind::Hosts(&[0, 0, 1, 1]), 4), (Kind::Hosts(&[0, 1]), 5)];
    for (kind, n) in [2, 3, 4, 7].map(|n| (Kind::Shm, n)).into_iter().chain(hosts) {
        run_ranks(kind, n, move |group| {
            // All ranks draw the operations from the same seed, and the delays from a seed of their own.
            let (mut random, mut late) = (Random(n as u64 * 77), Random(group.rank() as u64 + 1));
            for number in 0..400 {
                delay(late.next());
                random_operation(&group, number, &mut random);
            }
        });
    }
}

/// Compares shared with private buffers on small whole numbers: all sums, and products of 7 ranks, are exact.
fn check_type<T: Element + Debug>(group: &Group, of: fn(u8) -> T) {
    let (rank, n) = (group.rank(), group.world_size());
    for len in [700, 70_000, 131_073] {
        let elements = |rank: usize| -> Vec<T> { (0..len).map(|i| of(((rank * 7 + i * 5) % 2 + 1) as u8)).collect() };
        let own = partition(len, n, rank);
        let bits = |elements: &[T]| bytemuck::cast_slice::<T, u8>(elements).to_vec();
        for op in ReduceOp::ALL.iter().copied() {
            let mut want = elements(rank);
            group.all_reduce(&mut want, op).unwrap();
            let mut data = memory(group, true, elements(rank));
            group.all_reduce(&mut data, op).unwrap();
            assert!(bits(&data) == bits(&want), "{op} of {} x {len} on rank {rank} of {n}", T::DTYPE);
            // From one part of a buffer to another, and to private memory, which peers cannot access.
            let middle = (len * size_of::<T>()).next_multiple_of(1 << 16) / size_of::<T>();
            let mut both = group.allocate::<T>(middle + len).unwrap();
            let (input, output) = both.split_at_mut(middle);
            input[..len].copy_from_slice(&elements(rank));
            group.all_reduce_into(&input[..len], output, op).unwrap();
            assert!(bits(output) == bits(&want), "{op} of {} x {len} on rank {rank} of {n}", T::DTYPE);
            let mut part = vec![T::zeroed(); own.len()];
            group.reduce_scatter_into(&input[..len], &mut part, op).unwrap();
            assert!(bits(&part) == bits(&want[own.clone()]), "{op} of {} x {len} on rank {rank} of {n}", T::DTYPE);
        }
    }
}

#[test]
fn shared_and_private_buffers_get_bit_identical_results_in_every_type() {
    for n in [2, 3] {
        run_ranks(Kind::Shm, n, |group| {
            check_type(&group, |x| x);
            check_type(&group, |x| x as i8);
            check_type(&group, u16::from);
            check_type(&group, i16::from);
            check_type(&group, u32::from);
            check_type(&group, i32::from);
            check_type(&group, u64::from);
            check_type(&group, i64::from);
            check_type(&group, |x| f16::from_f32(x.into()));
            check_type(&group, |x| bf16::from_f32(x.into()));
            check_type(&group, f32::from);
            check_type(&group, f64::from);
        });
    }
}

#[test]
fn buffers_work_on_every_transport_and_huge_ones_are_rejected() {
    for kind in Kind::ALL {
        run_ranks(kind, 2, move |group| {
            let mut data = group.allocate::<i32>(100_000).unwrap();
            assert!(data.iter().all(|x| *x == 0));
            data.fill(1);
            group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            let work = group.start_all_reduce(data, ReduceOp::Sum).unwrap();
            let data = work.wait().map_err(|(error, _)| error).unwrap();
            assert!(data.iter().all(|x| *x == 4));
            assert!(group.allocate::<f64>(0).unwrap().is_empty());
            for len in [1 << 46, usize::MAX / 8, usize::MAX] {
                let error = group.allocate::<f64>(len).unwrap_err();
                assert!(matches!(error, Error::Io { .. }), "{error:?}");
                assert!(error.to_string().contains("MiB"), "{error}");
            }
            group.barrier().unwrap();
        });
    }
    run_ranks(Kind::Shm, 2, |group| {
        // Fits into the address space, but no machine has so much memory to spare.
        let error = group.allocate::<u8>(400 << 30).unwrap_err();
        assert!(error.to_string().contains("to spare"), "{error}");
        group.barrier().unwrap();
    });
}

#[test]
fn buffers_can_be_allocated_and_dropped_in_any_order() {
    run_ranks(Kind::Shm, 3, |group| {
        let mut random = Random(5);
        let mut buffers = Vec::new();
        for i in 0..60 {
            let mut buffer = group.allocate::<i32>(10_000 + random.next() as usize % 300_000).unwrap();
            assert!(buffer.iter().all(|x| *x == 0));
            buffer.fill(i);
            group.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            buffers.push((3 * i, buffer));
            if random.next().is_multiple_of(2) {
                buffers.swap_remove(random.next() as usize % buffers.len());
            }
            assert!(buffers.iter().all(|(sum, buffer)| buffer.iter().all(|x| x == sum)));
        }
    });
}

#[test]
fn concurrent_groups_do_not_interfere() {
    let sums = |seed: i64| {
        run_ranks(Kind::Shm, 2, move |group| {
            (0..300).all(|i| {
                let mut data = vec![seed + i + group.rank() as i64; 1 + (i as usize * 997) % 30_000];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                data.iter().all(|x| *x == 2 * (seed + i) + 1)
            })
        })
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| sums(1 << 40));
        assert_eq!(sums(5), [true, true]);
        assert_eq!(other.join().unwrap(), [true, true]);
    });
}
