//! Ranks of several processes whose kernels use each other's memory.

use std::os::unix::process::ExitStatusExt;
use std::thread;
use std::time::{Duration, Instant};

use bonfire::server::DeviceCollectives;
use bonfire::{Builder, DType, Error, Group, ReduceOp};
use cubecl::cuda::CudaRuntime;
use rustix::process::Signal;

use super::{KERNELS, SOON, libraries_without_nccl, start_ranks};
use crate::groups::{Memory, check, mine, value};
use crate::processes::join;
use crate::software_driver::{SoftwareDriver, faulty_gpu, with_gpus};
use crate::{Devices, stays_on_gpus};
use bonfire_testing::logged;
use bonfire_testing::process::{Process, is_child, report, send_line};

/// The name of a test, as a process that runs it is started by.
fn full(name: &str) -> String {
    format!("windows::{name}")
}

/// More elements of 4 bytes than fit into staging memory, and no multiple of anything.
const LARGE: usize = 2_100_003;
/// Sizes of all-reduces in bytes, below and above those up to which kernels do them.
const SIZES: [usize; 4] = [4, 512 << 10, (512 << 10) + 4, (4 << 20) + 4];
const ALL_REDUCES: [&str; 3] = ["push_sum_i32", "one_shot_sum_i32", "two_shot_sum_i32"];
const OTHERS: [&str; 6] = ["reduce_scatter_sum_i32", "all_gather", "broadcast", "all_to_all", "gather", "scatter"];

fn end_well(mut ranks: Vec<Process>) {
    assert!(ranks.iter_mut().all(|rank| rank.end().success()));
}

/// Runs the test of this name in `n` processes that use kernels, each of which must report success.
fn all_succeed(name: &str, n: usize, gpus: usize) {
    let ranks = start_ranks(&full(name), n, gpus, &[KERNELS]);
    assert!(ranks.iter().all(|rank| rank.outcome() == Ok("all".into())), "{n} ranks on {gpus} GPUs");
    end_well(ranks);
}

/// One all-reduce of this many elements, whose result is checked.
fn all_reduce(group: &Group, memory: &Memory<CudaRuntime>, len: usize) -> Result<(), Error> {
    let (rank, n) = (group.rank(), group.world_size());
    let (source, target) = (memory.create(&mine(rank, len)), memory.create(&vec![0; len]));
    memory.client.start_all_reduce(group, &source, &target, DType::I32, ReduceOp::Sum)?.wait()?;
    let sum: Vec<i32> = (0..len).map(|i| (0..n).map(|rank| value(rank, i)).sum()).collect();
    assert!(memory.read(&target) == sum, "{len} elements on rank {rank}");
    Ok(())
}

/// Runs all operations on these lengths. No byte passes through the host, and NCCL does nothing.
fn all_by_kernels(group: &Group, devices: &Devices, memory: &Memory<CudaRuntime>, lengths: &[usize]) {
    let driver = SoftwareDriver::loaded();
    lengths.iter().try_for_each(|len| check(group, memory, *len)).unwrap();
    stays_on_gpus(devices);
    assert_eq!(driver.host_functions(), 0, "NCCL's stand-in calls one for each operation");
    for kernel in ALL_REDUCES.iter().chain(&OTHERS) {
        assert!(driver.launches(kernel) > 0, "{kernel}");
    }
}

#[test]
#[ignore = "needs the software driver"]
fn every_operation_between_processes_by_kernels() {
    SoftwareDriver::loaded();
    // Below and above the sizes up to which push and one-shot are chosen.
    const LENGTHS: [usize; 7] = [0, 1, 3, 7, 1000, 15_001, 140_003];
    if is_child() {
        let (group, devices, memory) = join();
        all_by_kernels(&group, &devices, &memory, &LENGTHS);
        return report(&Ok("all".into()));
    }
    for (n, gpus) in [(2, 2), (3, 3), (4, 4), (2, 1)] {
        all_succeed("every_operation_between_processes_by_kernels", n, gpus);
    }
}

#[test]
#[ignore = "needs the software driver"]
fn data_that_does_not_fit_into_a_window_takes_several_rounds() {
    const NAME: &str = "data_that_does_not_fit_into_a_window_takes_several_rounds";
    let driver = SoftwareDriver::loaded();
    if is_child() {
        let (group, devices, memory) = join();
        all_reduce(&group, &memory, LARGE).unwrap();
        assert_eq!(driver.launches("two_shot_sum_i32"), 2);
        all_by_kernels(&group, &devices, &memory, &[100, 20_000, LARGE]);
        return report(&Ok("all".into()));
    }
    all_succeed(NAME, 2, 2);
}

/// Two processes with two ranks each, all with GPUs of their own.
#[test]
#[ignore = "needs the software driver"]
fn processes_with_two_ranks_each() {
    SoftwareDriver::loaded();
    if is_child() {
        let groups = Builder::from_env().unwrap().connect_ranks(2).unwrap();
        thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let devices = Devices::new(group.rank() as u8, 1);
                    let memory = Memory::new(devices.client(0), 1);
                    all_by_kernels(&group, &devices, &memory, &[0, 5, 1000, 15_001, 140_003]);
                });
            }
        });
        return report(&Ok("all".into()));
    }
    all_succeed("processes_with_two_ranks_each", 2, 4);
}

/// All-reduces of several sizes. Sends how each was done, and in one line what was logged about the path.
fn send_paths() {
    let driver = SoftwareDriver::loaded();
    logged::record();
    let (group, devices, memory) = join();
    let counts = || {
        let counters = devices.all[0].counters();
        [ALL_REDUCES.map(|kernel| driver.launches(kernel)).iter().sum(), driver.host_functions(), counters.uploads]
    };
    let path = |bytes| {
        let before = counts();
        all_reduce(&group, &memory, bytes / 4).unwrap();
        let paths = ["kernels", "nccl", "host"].into_iter().zip(before.into_iter().zip(counts()));
        paths.filter(|(_, (before, after))| before != after).map(|(path, _)| path).collect::<Vec<_>>().join("+")
    };
    send_line(SIZES.map(path).join(" "));
    let lines = logged::lines().into_iter().filter(|line| line.contains("the GPUs of"));
    send_line(lines.collect::<Vec<_>>().join(" | "));
}

/// Checks what two ranks send: only rank 0 logs a line, with these words, and if there are none no rank does.
fn check_paths(ranks: Vec<Process>, paths: &str, words: &[&str], label: &str) {
    for (number, rank) in ranks.iter().enumerate() {
        assert_eq!(rank.read_line(), paths, "{label} on rank {number}");
        let lines = rank.read_line();
        let expected = if number == 0 { words } else { &[] };
        assert!(expected.iter().all(|word| lines.contains(word)), "{label}: {lines}");
        assert_eq!(lines.is_empty(), expected.is_empty(), "{label} on rank {number}: {lines}");
        assert!(!lines.contains(" | "), "{label}: {lines}");
    }
    end_well(ranks);
}

/// The GPUs, the settings, the expected paths, and words of rank 0's only line.
type Case<'a> = (usize, &'a [(&'a str, &'a str)], String, &'a [&'a str]);

#[test]
#[ignore = "needs the software driver"]
fn processes_use_the_path_that_their_gpus_the_libraries_and_the_user_allow() {
    const NAME: &str = "processes_use_the_path_that_their_gpus_the_libraries_and_the_user_allow";
    SoftwareDriver::loaded();
    if is_child() {
        return send_paths();
    }
    let folder = libraries_without_nccl();
    let no_nccl = ("LD_LIBRARY_PATH", folder.path().to_str().unwrap());
    let (no_peers, no_ipc, pcie) = (("SHIM_PEERS", "0"), ("SHIM_IPC", "0"), ("SHIM_NVLINK", "0"));
    let table = |table| ("BONFIRE_CUDA", table);
    let all = |path: &str| [path; 4].join(" ");
    let through_host = "through host memory: kernels: ";
    let cases: [Case<'_>; 14] = [
        (2, &[], "kernels kernels kernels nccl".into(), &[]),
        (2, &[pcie], "kernels kernels nccl nccl".into(), &[]),
        (2, &[no_nccl], all("kernels"), &[]),
        (2, &[table("nccl")], all("nccl"), &[]),
        (2, &[table("kernels:0-1000;host:1001-")], "kernels host host host".into(), &[]),
        // Opening the memory of the other process fails.
        (2, &[no_ipc], all("nccl"), &["kernels do not serve", "rank 0: ", "memory of rank 1", "--pid=host"]),
        (2, &[no_ipc, KERNELS], all("nccl"), &["kernels do not serve", "--pid=host"]),
        (2, &[no_ipc, no_nccl], all("host"), &[through_host, "memory of rank 1", "--pid=host", "libnccl"]),
        (2, &[no_peers], all("nccl"), &["kernels do not serve", "PEER_ACCESS_UNSUPPORTED"]),
        (2, &[no_peers, no_nccl], all("host"), &[through_host, "PEER_ACCESS_UNSUPPORTED", "libnccl"]),
        // Both on one GPU, by kernels only if the user asks for them.
        (1, &[no_nccl], all("host"), &[through_host, "ranks 0 and 1 of two processes share a GPU", "libnccl"]),
        (1, &[no_nccl, KERNELS], all("kernels"), &[]),
        (1, &[KERNELS], all("kernels"), &[]),
        (1, &[no_nccl, table("kernels:0-1000;auto:1001-")], "kernels host host host".into(), &[]),
    ];
    for (gpus, variables, paths, words) in cases {
        let variables: Vec<_> = [("BONFIRE_CUDA", "auto")].iter().chain(variables).copied().collect();
        let ranks = start_ranks(&full(NAME), 2, gpus, &variables);
        check_paths(ranks, &paths, words, &format!("{variables:?}"));
    }
}

/// A limit on the size of files is one on the driver's memory that processes can share.
#[test]
#[ignore = "needs the software driver"]
fn without_memory_for_a_window_on_one_rank_all_use_another_path() {
    const NAME: &str = "software::windows::without_memory_for_a_window_on_one_rank_all_use_another_path";
    SoftwareDriver::loaded();
    if is_child() {
        return send_paths();
    }
    let limited = ["sh", "-c", "trap '' XFSZ; ulimit -f 8192; exec \"$@\"", "sh"].map(str::to_owned);
    let command = |rank| if rank == 1 { limited.to_vec() } else { Vec::new() };
    let ranks = Process::start_ranks_by(command, NAME, 2, "tcp", "60", &with_gpus(2, &[KERNELS]));
    check_paths(ranks, &["nccl"; 4].join(" "), &["rank 1: allocating memory that other processes can open"], "limited");
}

/// Calls until one fails, and returns its error.
fn error_of_calls(group: &Group, memory: &Memory<CudaRuntime>) -> Error {
    let own = memory.create(&mine(group.rank(), LARGE));
    let call = || memory.client.start_all_reduce(group, &own, &own, DType::I32, ReduceOp::Max)?.wait();
    call().expect("all ranks are there");
    send_line("going");
    let error = loop {
        if let Err(error) = call() {
            break error;
        }
    };
    assert_eq!(memory.read(&memory.create(&[1, 2, 3])), [1, 2, 3]);
    error
}

#[test]
#[ignore = "needs the software driver"]
fn a_process_that_is_killed_in_an_operation_is_named_by_all_others_which_go_on_without_it() {
    const NAME: &str = "a_process_that_is_killed_in_an_operation_is_named_by_all_others_which_go_on_without_it";
    let driver = SoftwareDriver::loaded();
    if is_child() {
        let (group, devices, memory) = join();
        let error = error_of_calls(&group, &memory);
        send_line(serde_json::to_string(&Err::<String, _>(error)).unwrap());
        let smaller = group.shrink().unwrap();
        drop(group);
        let before = driver.launches("two_shot_sum_i32");
        all_reduce(&smaller, &memory, 140_003).unwrap();
        assert!(driver.launches("two_shot_sum_i32") > before);
        stays_on_gpus(&devices);
        return report(&Ok("all".into()));
    }
    for round in 0..6 {
        let victim = round % 3;
        // With one hardware queue, a kernel that still waits for the victim keeps the next group's waiting.
        let mut ranks = start_ranks(&full(NAME), 3, 3, &[KERNELS, ("SHIM_QUEUES", "1")]);
        assert!(ranks.iter().all(|rank| rank.read_line() == "going"));
        // At a different point of an operation each time.
        thread::sleep(Duration::from_millis(7) * round as u32);
        ranks[victim].signal(Signal::KILL);
        let killed = Instant::now();
        assert_eq!(ranks.remove(victim).end().signal(), Some(Signal::KILL.as_raw()));
        for rank in &ranks {
            let error = rank.outcome().expect_err("a peer was killed");
            assert!(matches!(error, Error::PeerLost { peer, .. } if peer == victim), "{error}");
            assert!(killed.elapsed() < SOON, "{:.1?}", killed.elapsed());
            assert_eq!(rank.outcome(), Ok("all".into()));
            assert!(killed.elapsed() < SOON, "{:.1?}", killed.elapsed());
        }
        end_well(ranks);
    }
}

/// A fault ends the work of its process on that GPU, and the peer's kernel waits for it.
#[test]
#[ignore = "needs the software driver"]
fn a_gpu_fault_in_one_process_is_named_by_both() {
    const NAME: &str = "a_gpu_fault_in_one_process_is_named_by_both";
    SoftwareDriver::loaded();
    if is_child() {
        let (group, _, memory) = join();
        let own = memory.create(&mine(group.rank(), LARGE));
        let begin = Instant::now();
        let error = loop {
            let call = memory.client.start_all_reduce(&group, &own, &own, DType::I32, ReduceOp::Max);
            if let Err(error) = call.and_then(|call| call.wait()) {
                break error;
            }
        };
        assert!(begin.elapsed() < SOON, "found after {:.1?}", begin.elapsed());
        report(&Err(error));
        return;
    }
    let ranks = start_ranks(&full(NAME), 2, 2, &[KERNELS, ("SHIM_FAULT", "1:two_shot:4")]);
    for rank in &ranks {
        let error = rank.outcome().expect_err("the GPU has a fault");
        assert_eq!(faulty_gpu(&error), (1, &[1][..]), "{error}");
    }
    end_well(ranks);
}

#[test]
#[ignore = "needs the software driver"]
fn two_groups_of_two_processes_are_in_flight_at_once() {
    const NAME: &str = "two_groups_of_two_processes_are_in_flight_at_once";
    const ROUNDS: usize = 60;
    let driver = SoftwareDriver::loaded();
    if is_child() {
        let (group, devices, memory) = join();
        let other = group.split(Some(0), 0).unwrap().unwrap();
        // When the other group opens its windows, this one has its own.
        all_reduce(&group, &memory, 10).unwrap();
        thread::scope(|scope| {
            // Other lengths in each, so that data of the other group would be noticed.
            for (group, unit) in [(&group, 997), (&other, 1499)] {
                let memory = &memory;
                scope.spawn(move || (0..ROUNDS).for_each(|round| all_reduce(group, memory, 1 + round * unit).unwrap()));
            }
        });
        stays_on_gpus(&devices);
        assert_eq!(driver.host_functions(), 0);
        return report(&Ok("all".into()));
    }
    all_succeed(NAME, 2, 2);
}

/// Windows are never freed, and used again once all peers have left them.
#[test]
#[ignore = "needs the software driver"]
fn later_groups_use_the_windows_of_earlier_ones() {
    SoftwareDriver::loaded();
    if is_child() {
        let (group, _, memory) = join();
        // A mapping of 10 MiB is a window, of this process or of a peer.
        let windows = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let size = |line: &str| {
                let (first, end) = line.split(' ').next()?.split_once('-')?;
                Some(u64::from_str_radix(end, 16).ok()? - u64::from_str_radix(first, 16).ok()?)
            };
            maps.lines().filter(|line| line.contains("software GPU") && size(line) == Some(10 << 20)).count()
        };
        for _ in 0..12 {
            let other = group.split(Some(0), 0).unwrap().unwrap();
            all_reduce(&other, &memory, 10_000).unwrap();
            assert!(windows() >= 2, "its own, and the peer's");
        }
        // A peer may leave its window a little after this rank has left the group.
        assert!(windows() <= 8, "{} windows", windows());
        return report(&Ok("all".into()));
    }
    all_succeed("later_groups_use_the_windows_of_earlier_ones", 2, 2);
}
