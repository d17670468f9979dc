//! What the system may do to a process at any time: interrupt its calls, and limit its memory.
#![cfg(all(feature = "shm", target_os = "linux"))]

use std::fs;
use std::path::PathBuf;

use bonfire_core::{Error, Group, ReduceOp};
use bonfire_testing::free_address;
use bonfire_testing::process::{Process, is_child, report};

/// Starts the ranks of a group, each through `command`, and returns what they report.
fn outcomes(name: &str, n: usize, transport: &str, command: &[String]) -> Vec<Result<String, Error>> {
    let address = free_address();
    let start = |rank: usize| {
        let variables = [
            ("BONFIRE_RANK", rank.to_string()),
            ("BONFIRE_WORLD_SIZE", n.to_string()),
            ("BONFIRE_ADDRESS", address.clone()),
            ("BONFIRE_TRANSPORT", transport.to_owned()),
            ("BONFIRE_DEADLINE", "60".into()),
        ];
        Process::start_by(command, name, &variables)
    };
    let ranks: Vec<_> = (0..n).map(start).collect();
    ranks.iter().map(Process::outcome).collect()
}

fn sum(group: &Group, data: &mut [i32]) -> Result<i32, Error> {
    data.fill(group.rank() as i32 + 1);
    group.all_reduce(data, ReduceOp::Sum)?;
    let (first, rest) = data.split_first().expect("it is not empty");
    assert!(rest.iter().all(|element| element == first));
    Ok(*first)
}

/// Every other one of these calls is interrupted by a signal, before it does anything.
#[test]
#[ignore = "needs strace, and permission to trace"]
fn interrupted_system_calls_are_repeated() {
    if is_child() {
        return report(&Group::from_env().and_then(|group| {
            let mut buffer = group.allocate::<i32>(1_000_000)?;
            let sums = [sum(&group, &mut buffer)?, sum(&group, &mut vec![0; 1_000_000])?];
            drop(buffer);
            Ok(format!("{sums:?}"))
        }));
    }
    let calls = "fallocate,ftruncate,connect,sendmsg,recvmsg,poll";
    let inject = format!("inject={calls}:error=EINTR:when=1+2");
    let trace = format!("trace={calls}");
    let command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", &trace, "-e", &inject].map(String::from);
    for transport in ["shm", "tcp"] {
        for outcome in outcomes("interrupted_system_calls_are_repeated", 3, transport, &command) {
            assert_eq!(outcome, Ok("[6, 6]".into()), "{transport}");
        }
    }
}

/// A control group with a limit on memory, of version 1 or 2. It is removed when dropped.
struct Limited(PathBuf);

impl Limited {
    fn new(bytes: u64) -> Limited {
        let one = PathBuf::from("/sys/fs/cgroup/memory");
        let (mount, limit) = match one.is_dir() {
            true => (one, "memory.limit_in_bytes"),
            false => ("/sys/fs/cgroup".into(), "memory.max"),
        };
        let folder = mount.join(format!("bonfire-test-{}", std::process::id()));
        fs::create_dir(&folder).expect("permission to create a control group");
        fs::write(folder.join(limit), bytes.to_string()).expect("a group with the memory controller");
        Limited(folder)
    }

    /// A command that enters the group and becomes its arguments.
    fn enter(&self) -> [String; 4] {
        let enter = format!("echo $$ >{}/cgroup.procs && exec \"$@\"", self.0.display());
        ["sh", "-c", &enter, "sh"].map(String::from)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        // The kernel takes a moment to release the memory of the last process.
        while fs::remove_dir(&self.0).is_err_and(|e| e.kind() == std::io::ErrorKind::ResourceBusy) {
            std::thread::yield_now();
        }
    }
}

/// Two ranks allocate at the same time until there is no more.
#[test]
#[ignore = "needs root and control groups"]
fn a_limit_on_memory_is_an_error_and_no_signal() {
    const BUFFER: usize = 8 << 20;
    const LIMIT: u64 = 512 << 20;
    if is_child() {
        return report(&Group::from_env().and_then(|group| {
            let mut buffers = Vec::new();
            let error = loop {
                match group.allocate::<i32>(BUFFER / 4) {
                    Ok(buffer) => buffers.push(buffer),
                    Err(error) => break error,
                }
            };
            assert!(error.to_string().contains("MiB of memory to spare"), "{error}");
            let fair = buffers.len() as u64 * BUFFER as u64 > LIMIT / 8;
            let sums = [sum(&group, &mut buffers[0])?, sum(&group, &mut vec![0; 100_000])?];
            Ok(format!("{fair} {sums:?}"))
        }));
    }
    let limited = Limited::new(LIMIT);
    for outcome in outcomes("a_limit_on_memory_is_an_error_and_no_signal", 2, "shm", &limited.enter()) {
        assert_eq!(outcome, Ok("true [3, 3]".into()));
    }
}
