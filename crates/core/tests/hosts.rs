//! Groups over several hosts, simulated by processes that claim to be on different machines, or in network namespaces.

#[cfg(target_os = "linux")]
#[path = "hosts/large_packets.rs"]
mod large_packets;
#[cfg(target_os = "linux")]
#[path = "hosts/network.rs"]
mod network;
#[cfg(target_os = "linux")]
#[path = "hosts/start.rs"]
mod start;

use std::time::{Duration, Instant};

use bonfire_core::{Builder, Error, Group, ReduceOp, TransportKind};
use bonfire_testing::process::{Process, is_child, report, send_line};
use rustix::process::Signal;

/// Joins as one of four ranks on two machines. Ranks 0 and 1 are on the first.
fn join() -> Result<Group, Error> {
    let builder = Builder::from_env()?;
    let rank: usize = std::env::var("BONFIRE_RANK").ok().and_then(|rank| rank.parse().ok()).expect("a rank");
    builder.machine(format!("machine {}", rank / 2)).connect()
}

#[test]
fn ranks_of_a_host_share_memory_and_release_it() {
    if is_child() {
        let mappings = || {
            let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux has it");
            maps.lines().filter(|line| line.contains("memfd:bonfire")).count()
        };
        let outcome = join().and_then(|group| {
            let shares = mappings() > 0;
            let mut data = vec![1f32; 1_000_000];
            group.all_reduce(&mut data, ReduceOp::Sum)?;
            drop(group);
            Ok(format!("{shares}, {}, {}", data.iter().all(|x| *x == 4.0), mappings()))
        });
        return report(&outcome);
    }
    for (transport, shares) in [("auto", true), ("tcp", false)] {
        let mut ranks = Process::start_ranks("ranks_of_a_host_share_memory_and_release_it", 4, transport, "60");
        for rank in &mut ranks {
            assert_eq!(rank.outcome(), Ok(format!("{shares}, true, 0")));
            assert!(rank.end().success());
        }
    }
}

#[test]
fn a_killed_or_stopped_rank_is_named_by_all_peers() {
    if is_child() {
        let group = join().expect("ranks find each other");
        let mut data = vec![1f32; 5_000_000];
        group.all_reduce(&mut data, ReduceOp::Mean).expect("all ranks are there");
        send_line("going");
        let error = loop {
            if let Err(error) = group.all_reduce(&mut data, ReduceOp::Mean) {
                break error;
            }
        };
        return report(&Err(error));
    }
    let errors_after = |signal, deadline: &str, victim: usize| {
        let name = "a_killed_or_stopped_rank_is_named_by_all_peers";
        let mut ranks = Process::start_ranks(name, 4, "auto", deadline);
        ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "going"));
        ranks[victim].signal(signal);
        let _victim = ranks.remove(victim);
        ranks.iter().map(|rank| rank.outcome().unwrap_err()).collect::<Vec<_>>()
    };
    for victim in 0..4 {
        let start = Instant::now();
        for error in errors_after(Signal::KILL, "60", victim) {
            assert!(matches!(error, Error::PeerLost { peer, .. } if peer == victim), "{victim}: {error:?}");
        }
        // Far below the deadline on any machine.
        assert!(start.elapsed() < Duration::from_secs(30), "after {:?}", start.elapsed());
    }
    for victim in [0, 3] {
        let errors = errors_after(Signal::STOP, "250", victim);
        assert!(
            errors.iter().all(|error| matches!(error, Error::PeerLost { peer, .. } if *peer == victim)),
            "{victim}: {errors:?}"
        );
    }
}

#[test]
fn explicit_shared_memory_ignores_the_names_of_machines() {
    let address = bonfire_testing::free_address();
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let builder = Group::builder().rank(rank).world_size(2).address(address.clone());
            let builder = builder.machine(format!("machine {rank}")).transport(TransportKind::Shm);
            std::thread::spawn(move || builder.connect().map(|group| group.barrier()))
        })
        .collect();
    for rank in ranks {
        assert_eq!(rank.join().unwrap().unwrap(), Ok(()));
    }
}
