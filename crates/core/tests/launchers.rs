//! The rendezvous by the variables of launchers: processes with recorded environments, on one host and on two.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;

use bonfire_core::launch::launch;
use bonfire_core::{Builder, Error, Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, report, send_line};

type Variables = Vec<(&'static str, String)>;

/// The job number, a different one in each test process.
fn job() -> u32 {
    std::process::id()
}

/// The variables of a task of srun, with `each` tasks on each of `hosts` hosts.
fn srun(rank: usize, each: usize, hosts: usize, list: &str) -> Variables {
    vec![
        ("SLURM_JOB_ID", job().to_string()),
        ("SLURM_STEP_ID", "0".into()),
        ("SLURM_PROCID", rank.to_string()),
        ("SLURM_STEP_NUM_TASKS", (each * hosts).to_string()),
        ("SLURM_STEP_NUM_NODES", hosts.to_string()),
        ("SLURM_STEP_NODELIST", list.to_owned()),
        ("BONFIRE_DEADLINE", "60".into()),
    ]
}

fn torchrun(rank: usize, size: usize, port: u16) -> Variables {
    vec![
        ("TORCHELASTIC_RUN_ID", job().to_string()),
        ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", size.to_string()),
        ("LOCAL_WORLD_SIZE", size.to_string()),
        ("MASTER_ADDR", "no-such-host.invalid".into()),
        ("MASTER_PORT", port.to_string()),
    ]
}

fn mpirun(rank: usize, size: usize) -> Variables {
    vec![
        ("OMPI_COMM_WORLD_RANK", rank.to_string()),
        ("OMPI_COMM_WORLD_SIZE", size.to_string()),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", size.to_string()),
        ("PMIX_NAMESPACE", format!("prterun-test-{}@1", job())),
    ]
}

fn hydra(rank: usize, size: usize) -> Variables {
    vec![("PMI_RANK", rank.to_string()), ("PMI_SIZE", size.to_string()), ("MPI_LOCALNRANKS", size.to_string())]
}

/// Runs an all_reduce and returns its result as text.
fn sum(group: &Group) -> Result<String, Error> {
    let mut data = [group.rank() as i64 + 1; 5];
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    Ok(format!("{data:?}"))
}

#[test]
fn ranks_of_one_host_connect_without_a_secret() {
    if is_child() {
        return report(&Group::from_env().and_then(|group| sum(&group)));
    }
    const NAME: &str = "ranks_of_one_host_connect_without_a_secret";
    // torchrun's agent occupies the port.
    let agent = TcpListener::bind("0.0.0.0:0").expect("a port");
    let port = agent.local_addr().expect("an address").port();
    let launchers: [&dyn Fn(usize) -> Variables; 4] =
        [&|rank| srun(rank, 3, 1, "no-such-host"), &|rank| torchrun(rank, 3, port), &|rank| mpirun(rank, 3), &|rank| {
            hydra(rank, 3)
        }];
    // A rank may be started by a script, which has the same variables.
    let script = ["sh", "-c", "\"$@\"; exit", "sh"].map(String::from);
    for (launcher, command) in launchers.into_iter().flat_map(|launcher| [(launcher, &[][..]), (launcher, &script)]) {
        let mut ranks: Vec<_> = (0..3).map(|rank| Process::start_by(command, NAME, &launcher(rank))).collect();
        for rank in &mut ranks {
            assert_eq!(rank.outcome(), Ok("[6, 6, 6, 6, 6]".into()));
            assert!(rank.end().success());
        }
    }
}

#[test]
fn a_process_that_is_a_rank_prints_on_rank_0_only() {
    if is_child() {
        // On any thread of it: no rank's program is known to run on this one.
        let first = thread::spawn(bonfire_core::launch::is_first_rank).join().expect("no panic");
        return report(&Ok(first.to_string()));
    }
    const NAME: &str = "a_process_that_is_a_rank_prints_on_rank_0_only";
    let cases = [(vec![], "true"), (mpirun(0, 3), "true"), (mpirun(2, 3), "false"), (srun(1, 3, 1, "a-host"), "false")];
    for (variables, first) in cases {
        let mut rank = Process::start(NAME, &variables);
        assert_eq!(rank.outcome(), Ok(first.into()), "{variables:?}");
        assert!(rank.end().success());
    }
}

#[test]
fn settings_in_code_take_precedence() {
    if is_child() {
        let number = |name| std::env::var(name).expect("set by the test").parse::<usize>().expect("a number");
        let address = std::env::var("GIVEN_ADDRESS").expect("set by the test");
        let builder = Builder::from_env().expect("missing settings are no error yet");
        let builder = builder.rank(number("GIVEN_RANK")).world_size(2).address(address);
        return report(&builder.connect().and_then(|group| sum(&group)));
    }
    for others in [vec![], srun(7, 4, 2, "node[1-2]"), mpirun(0, 9)] {
        let address = bonfire_testing::free_address();
        let given = |rank: usize| vec![("GIVEN_RANK", rank.to_string()), ("GIVEN_ADDRESS", address.clone())];
        let start = |rank| Process::start("settings_in_code_take_precedence", &[given(rank), others.clone()].concat());
        for rank in [0, 1].map(start) {
            assert_eq!(rank.outcome(), Ok("[3, 3, 3, 3, 3]".into()));
        }
    }
}

#[test]
fn invalid_environments_are_rejected_at_once() {
    if is_child() {
        return report(&Group::from_env().map(|group| format!("rank {}", group.rank())));
    }
    let plain = |rank: &str, size: &str| vec![("RANK", rank.to_owned()), ("WORLD_SIZE", size.to_owned())];
    let on_two = ("OMPI_COMM_WORLD_LOCAL_SIZE", "1".to_owned());
    let pod = |ranks: &str| {
        vec![("PET_NODE_RANK", "0".into()), ("PET_NNODES", "2".into()), ("PET_NPROC_PER_NODE", ranks.to_owned())]
    };
    let cases: [(Variables, &[&str]); 8] = [
        (vec![], &["BONFIRE_RANK is not set", "torchrun", "Slurm", "bonfire run -n"]),
        (srun(1, 2, 2, "node[1-2]"), &["several hosts", "BONFIRE_SECRET_FILE", "chmod 600"]),
        (srun(1, 2, 2, "node[1-"), &["SLURM_STEP_NODELIST is 'node[1-'", "a bracket is never closed"]),
        ([srun(1, 2, 1, "node1"), plain("0", "2")].concat(), &["SLURM_PROCID is 1", "RANK is 0", "BONFIRE_RANK"]),
        ([mpirun(0, 2), vec![on_two]].concat(), &["BONFIRE_ADDRESS", "BONFIRE_TRANSPORT=mpi"]),
        (plain("1", "2"), &["BONFIRE_ADDRESS is not set", "MASTER_ADDR"]),
        (plain("2", "2"), &["RANK is 2", "WORLD_SIZE is 2"]),
        (pod("4"), &["PET_NPROC_PER_NODE is '4'", "torchrun"]),
    ];
    for (variables, parts) in cases {
        let error = Process::start("invalid_environments_are_rejected_at_once", &variables).outcome().unwrap_err();
        let Error::Config(reason) = &error else { panic!("{variables:?}: {error:?}") };
        assert!(parts.iter().all(|part| reason.contains(part)), "{variables:?}: {reason}");
    }
}

#[test]
fn an_unknown_launcher_does_not_mean_threads() {
    if is_child() {
        let trained = launch(4, |group: Group| Ok::<_, Error>(group.rank()));
        return report(&trained.map(|ranks| format!("{ranks:?}")).map_err(|failed| *failed.error));
    }
    const NAME: &str = "an_unknown_launcher_does_not_mean_threads";
    assert_eq!(Process::start(NAME, &[]).outcome(), Ok("[0, 1, 2, 3]".into()));
    let error = Process::start(NAME, &[("PMIX_RANK", "1".into())]).outcome().unwrap_err();
    assert!(matches!(&error, Error::Config(reason) if reason.contains("PMIX_RANK is 1")), "{error:?}");
}

#[test]
fn a_variable_that_is_not_utf_8_does_not_count_as_unset() {
    const NAME: &str = "a_variable_that_is_not_utf_8_does_not_count_as_unset";
    if is_child() {
        return report(&Group::from_env().map(|group| format!("{:?}", group.deadline())));
    }
    let plain = [("BONFIRE_RANK", "0".to_owned()), ("BONFIRE_WORLD_SIZE", "1".to_owned())];
    assert_eq!(Process::start(NAME, &plain).outcome(), Ok("300s".into()));
    for name in ["BONFIRE_DEADLINE", "BONFIRE_RANK"] {
        let script = format!("{name}=$(printf '\\377') exec \"$@\"");
        let script = ["sh", "-c", &script, "sh"].map(String::from);
        let error = Process::start_by(&script, NAME, &plain).outcome().unwrap_err();
        let named = format!("{name} is \"\\xFF\", which is not UTF-8");
        assert!(matches!(&error, Error::Config(reason) if *reason == named), "{error:?}");
    }
}

#[test]
fn a_port_in_use_is_reported_with_its_variable() {
    if is_child() {
        let soon = Builder::from_env().expect("valid settings").rendezvous_timeout(Duration::from_secs(2));
        return report(&soon.connect().map(|group| format!("rank {}", group.rank())));
    }
    let taken = |port: u16| TcpListener::bind(("127.0.0.1", port)).ok().map(|listener| (listener, port));
    let (_listener, port) = (61440..=u16::MAX).find_map(taken).expect("a free port");
    let rank = [vec![("SLURM_JOB_ID", (port - 61440).to_string())], srun(0, 2, 1, "node1")[1..].to_vec()].concat();
    let error = Process::start("a_port_in_use_is_reported_with_its_variable", &rank).outcome().unwrap_err();
    let reason = error.to_string();
    for part in ["BONFIRE_ADDRESS", "SLURM_JOB_ID", "choose another port", &port.to_string()] {
        assert!(reason.contains(part), "{reason}");
    }
}

/// Two hosts: network namespaces with two links between them, `eth9` and `ib9`, and a hosts file each.
struct Hosts([String; 2]);

impl Hosts {
    fn new(name: &str) -> Hosts {
        let hosts = Hosts(["a", "b"].map(|host| format!("bonfire-{}-{name}-{host}", job())));
        let [a, b] = &hosts.0;
        ip(&format!("netns add {a}"));
        ip(&format!("netns add {b}"));
        for (link, net) in [("eth9", 78), ("ib9", 79)] {
            ip(&format!("link add {link} netns {a} type veth peer name {link} netns {b}"));
            for (host, number) in [(a, 1), (b, 2)] {
                ip(&format!("-n {host} addr add 10.{net}.0.{number}/24 dev {link}"));
                ip(&format!("-n {host} link set {link} up"));
            }
        }
        for host in [a, b] {
            ip(&format!("-n {host} link set lo up"));
            fs::create_dir_all(folder(host)).expect("a folder for its files");
        }
        hosts
    }

    /// Writes the hosts file of each host.
    fn name(&self, names: [&str; 2]) {
        for (host, names) in self.0.iter().zip(names) {
            fs::write(folder(host).join("hosts"), format!("127.0.0.1 localhost\n{names}\n")).expect("its hosts file");
        }
    }

    /// Starts `each` ranks on each host, with the variables of srun, a secret, and `more`.
    fn start(&self, test: &str, each: usize, more: &[(&'static str, String)]) -> Vec<Process> {
        let secret = [("BONFIRE_SECRET", "of a job on two hosts, which both know".to_owned())];
        let start = |rank: usize| {
            let enter = ["ip", "netns", "exec", &self.0[rank / each]].map(String::from);
            let variables = [&srun(rank, each, 2, "node[001-002]")[..], &secret, more].concat();
            Process::start_by(&enter, test, &variables)
        };
        (0..2 * each).map(start).collect()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &self.0 {
            let _ = Command::new("ip").args(["netns", "del", host]).output();
            let _ = fs::remove_dir_all(folder(host));
        }
    }
}

/// The folder from which `ip netns exec` takes a namespace's own files of /etc.
fn folder(host: &str) -> PathBuf {
    PathBuf::from("/etc/netns").join(host)
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().expect("ip starts");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Rank 0's host name resolves to loopback on its own host, as on Debian. The other ranks of that host reach it there.
#[test]
#[ignore = "needs root, iproute2 and network namespaces"]
fn ranks_of_two_hosts_do_not_listen_on_loopback() {
    if is_child() {
        let outcome = Group::from_env().and_then(|group| {
            let all = sum(&group)?;
            let half = group.split(Some(group.rank() as u64 % 2), 0)?.expect("a color");
            Ok(format!("{all} {}", sum(&half)?))
        });
        return report(&outcome);
    }
    let hosts = Hosts::new("names");
    hosts.name(["127.0.1.1 node001\n10.78.0.2 node002", "10.78.0.1 node001\n127.0.1.1 node002"]);
    for transport in ["auto", "tcp"] {
        let transport = [("BONFIRE_TRANSPORT", transport.to_owned())];
        for rank in hosts.start("ranks_of_two_hosts_do_not_listen_on_loopback", 2, &transport) {
            assert_eq!(rank.outcome(), Ok("[10, 10, 10, 10, 10] [3, 3, 3, 3, 3]".into()));
        }
    }
}

#[test]
#[ignore = "needs root, iproute2 and network namespaces"]
fn data_uses_the_selected_interface() {
    if is_child() {
        let outcome = Group::from_env().and_then(|group| {
            sum(&group)?;
            let connections = ["/proc/net/tcp", "/proc/net/tcp6"].map(|file| fs::read_to_string(file).expect("Linux"));
            // Whether an established connection has an address in this network, in the kernel's notation.
            let on = |net: &str| {
                let established = |line: &&str| line.split_whitespace().nth(3) == Some("01") && line.contains(net);
                connections.iter().any(|list| list.lines().any(|line| established(&line)))
            };
            group.barrier()?;
            Ok(format!("eth {}, ib {}", on("004E0A:"), on("004F0A:")))
        });
        return report(&outcome);
    }
    let hosts = Hosts::new("interface");
    hosts.name(["10.78.0.1 node001", "10.78.0.1 node001"]);
    let named = |name: &str| [("BONFIRE_IFACE", name.to_owned()), ("BONFIRE_TRANSPORT", "tcp".into())];
    for (interface, expected) in [("ib", "eth true, ib true"), ("eth9", "eth true, ib false")] {
        for rank in hosts.start("data_uses_the_selected_interface", 1, &named(interface)) {
            assert_eq!(rank.outcome(), Ok(expected.into()), "{interface}");
        }
    }
    for rank in hosts.start("data_uses_the_selected_interface", 1, &named("wlan")) {
        let error = rank.outcome().unwrap_err().to_string();
        assert!(error.contains("BONFIRE_IFACE is 'wlan'") && error.contains("ib9 (10.79.0."), "{error}");
    }
}

/// Forwards what is logged about rank 0's host name to the parent.
struct NameLog;

impl log::Log for NameLog {
    fn enabled(&self, _: &log::Metadata) -> bool {
        true
    }

    fn log(&self, record: &log::Record) {
        let words = record.args().to_string();
        if words.contains("node001") {
            send_line(words);
        }
    }

    fn flush(&self) {}
}

/// Like the name of a pod, which gets its address when it has started.
#[test]
#[ignore = "needs root, iproute2 and network namespaces"]
fn a_host_name_that_resolves_late_is_awaited() {
    if is_child() {
        if std::env::var("SLURM_PROCID").is_ok_and(|rank| rank == "0") {
            log::set_logger(&NameLog).expect("the only one");
            log::set_max_level(log::LevelFilter::Info);
        }
        return report(&Group::from_env().and_then(|group| sum(&group)));
    }
    let hosts = Hosts::new("late");
    hosts.name(["", ""]);
    let ranks = hosts.start("a_host_name_that_resolves_late_is_awaited", 1, &[]);
    let recognised = ranks[0].read_line();
    assert!(
        recognised.starts_with(&format!("rank 0 of 2 by Slurm (job {}, step 0): rank 0 at node001:", job())),
        "{recognised}"
    );
    let waits = ranks[0].read_line();
    assert!(waits.contains("node001") && waits.contains("does not resolve"), "{waits}");
    hosts.name(["10.78.0.1 node001", "10.78.0.1 node001"]);
    for rank in ranks {
        assert_eq!(rank.outcome(), Ok("[3, 3, 3, 3, 3]".into()));
    }
}
