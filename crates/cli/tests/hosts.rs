//! Ranks on several hosts, in network namespaces.
#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::{Command, Stdio};

/// Checks every element that crossed the links.
#[test]
#[ignore = "needs root, iproute2 and network namespaces"]
fn an_all_reduce_crosses_links_of_1_gbit_per_second() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let program = env!("CARGO_BIN_EXE_bonfire");
    let output = Command::new("scripts/hosts")
        .args(["-n", "2", "-r", "2", "--", program, "perf", "all_reduce", "--transport", "auto"])
        .args(["-b", "8M", "-e", "8M", "-n", "2", "-w", "1", "--json"])
        .env("BONFIRE", program)
        .current_dir(repository)
        .output()
        .expect("the script starts");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    let line = stdout.lines().last().expect("a line of figures");
    let figures: serde_json::Value = serde_json::from_str(line).expect("JSON");
    assert_eq!((&figures["wrong"], &figures["ranks"]), (&0.into(), &4.into()), "{line}");
}

/// A network namespace in which few ports are given to sockets that ask for any. Dropping it deletes it.
struct FewPorts(String);

impl FewPorts {
    fn new(ports: &str) -> FewPorts {
        let few = FewPorts(format!("bonfire-ports-{}", std::process::id()));
        let ip = Command::new("ip").args(["netns", "add", &few.0]).status();
        assert!(ip.expect("iproute2").success(), "root may add namespaces");
        let set = format!("ip link set lo up && echo '{ports}' >/proc/sys/net/ipv4/ip_local_port_range");
        assert!(few.command(&["sh", "-c", &set]).status().expect("ip starts").success());
        few
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0]).args(words);
        command
    }
}

impl Drop for FewPorts {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

/// Each has a port for rank 0 that no socket of another run is given, neither its rank 0 nor any that its other ranks
/// listen at.
#[test]
#[ignore = "needs root, iproute2 and network namespaces"]
fn runs_at_the_same_time_do_not_meet_although_ports_are_few() {
    const RUNS: usize = 10;
    let program = env!("CARGO_BIN_EXE_bonfire");
    let run = |namespace: &FewPorts| {
        let mut command = namespace.command(&[program, "run", "-n", "3", "--rendezvous-timeout", "60", "--no-prefix"]);
        command.args(["--", program, "perf", "all_reduce", "--transport", "auto"]);
        command.args(["-b", "64", "-e", "64", "-n", "1", "-w", "0", "--json"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the launcher starts")
    };
    for _ in 0..3 {
        // Anew, because closed connections keep their ports for a minute. A run has about ten at a time.
        let namespace = FewPorts::new("40000 40149");
        let runs: Vec<_> = (0..RUNS).map(|_| run(&namespace)).collect();
        for run in runs {
            let output = run.wait_with_output().expect("its output");
            let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
            assert!(output.status.success(), "{stdout}{stderr}");
            // Every answer is that of a rank of the same run.
            assert!(!stderr.contains("retries") && !stderr.contains("refused a connection"), "{stderr}");
        }
    }
}
