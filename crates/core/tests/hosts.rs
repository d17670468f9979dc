//! Groups over several hosts: processes that say that they are on different machines, and network namespaces.

mod common;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use bonfire::{Builder, Error, Group, Medium, ReduceOp};
use common::process::{Process, is_child, report, say};
use rustix::process::Signal;

/// One of four ranks on two machines, 0 and 1 on the first.
fn join() -> Result<Group, Error> {
    let builder = Builder::from_env()?;
    let rank: usize = std::env::var("BONFIRE_RANK").ok().and_then(|rank| rank.parse().ok()).expect("a rank");
    builder.machine(format!("machine {}", rank / 2)).connect()
}

#[test]
fn ranks_share_memory_on_a_host_and_nothing_is_left_of_it() {
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
        let mut ranks =
            Process::start_ranks("ranks_share_memory_on_a_host_and_nothing_is_left_of_it", 4, transport, "60");
        for rank in &mut ranks {
            assert_eq!(rank.outcome(), Ok(format!("{shares}, true, 0")));
            assert!(rank.end().success());
        }
    }
}

#[test]
fn a_rank_that_is_killed_or_stands_still_is_named_by_all() {
    if is_child() {
        let group = join().expect("ranks find each other");
        let mut data = vec![1f32; 5_000_000];
        group.all_reduce(&mut data, ReduceOp::Mean).expect("all ranks are there");
        say("going");
        let error = loop {
            if let Err(error) = group.all_reduce(&mut data, ReduceOp::Mean) {
                break error;
            }
        };
        return report(&Err(error));
    }
    let strike = |signal, deadline: &str, victim: usize| {
        let name = "a_rank_that_is_killed_or_stands_still_is_named_by_all";
        let mut ranks = Process::start_ranks(name, 4, "auto", deadline);
        ranks.iter().for_each(|rank| assert_eq!(rank.hear(), "going"));
        ranks[victim].signal(signal);
        let _victim = ranks.remove(victim);
        ranks.iter().map(|rank| rank.outcome().unwrap_err()).collect::<Vec<_>>()
    };
    for victim in 0..4 {
        let start = Instant::now();
        for error in strike(Signal::KILL, "60", victim) {
            assert!(matches!(error, Error::PeerLost { peer, .. } if peer == victim), "{victim}: {error:?}");
        }
        // Far from the deadline on any machine.
        assert!(start.elapsed() < Duration::from_secs(30), "after {:?}", start.elapsed());
    }
    for victim in [0, 3] {
        let errors = strike(Signal::STOP, "250", victim);
        assert!(
            errors.iter().all(|error| matches!(error, Error::PeerLost { peer, .. } if *peer == victim)),
            "{victim}: {errors:?}"
        );
    }
}

#[test]
fn shared_memory_among_all_does_not_ask_which_machine_it_is() {
    let address = common::free_address();
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            let builder = Group::builder().rank(rank).world_size(2).address(address.clone());
            let builder = builder.machine(format!("machine {rank}")).transport(Medium::Shm);
            std::thread::spawn(move || builder.connect().map(|group| group.barrier()))
        })
        .collect();
    for rank in ranks {
        assert_eq!(rank.join().unwrap().unwrap(), Ok(()));
    }
}

/// Real links, and every element checked.
#[test]
fn an_all_reduce_crosses_links_of_1_gbit_per_second() {
    let found = |tool: &str| {
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).any(|p| p.join(tool).exists())
    };
    if !rustix::process::geteuid().is_root() || !found("ip") || !found("tc") {
        eprintln!("SKIPPED: network namespaces need root and iproute2");
        return;
    }
    let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = env!("CARGO_BIN_EXE_bonfire");
    let output = Command::new("scripts/hosts")
        .args(["-n", "2", "-r", "2", "--", program, "perf", "all_reduce", "--transport", "auto"])
        .args(["-b", "8M", "-e", "8M", "-n", "2", "-w", "1", "--json"])
        .env("BONFIRE", program)
        .current_dir(repository)
        .output()
        .expect("the script starts");
    let (said, problems) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if problems.contains("Operation not permitted") {
        eprintln!("SKIPPED: this root may not make network namespaces: {problems}");
        return;
    }
    assert!(output.status.success(), "{said}{problems}");
    let line = said.lines().last().expect("a line of figures");
    let figures: serde_json::Value = serde_json::from_str(line).expect("JSON");
    assert_eq!((&figures["wrong"], &figures["ranks"]), (&0.into(), &4.into()), "{line}");
}
