//! The ranks of a run, and what makes one of them fail.

use std::path::PathBuf;
use std::process::{self, ExitCode};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{fs, ptr, thread};

use bonfire::{Group, ReduceOp};
use rustix::process::{Resource, Rlimit, Signal, getpid, kill_process, setrlimit};

/// A way to fail.
pub struct Fault {
    pub name: &'static str,
    /// What the launcher says about the rank, and its own exit status.
    pub ended: &'static str,
    pub status: u8,
    /// Whether the launcher and its ranks need a control group with little memory.
    pub needs_cgroup: bool,
    fail: fn(),
}

pub const FAULTS: &[Fault] = &[
    Fault { name: "exit", ended: "exited with status 3", status: 3, needs_cgroup: false, fail: || process::exit(3) },
    Fault {
        name: "panic",
        ended: "exited with status 101",
        status: 101,
        needs_cgroup: false,
        fail: || panic!("out of luck"),
    },
    // Its group is dropped a second before it ends, so the other ranks end first.
    Fault {
        name: "slow panic",
        ended: "exited with status 101",
        status: 101,
        needs_cgroup: false,
        fail: || panic!("out of luck"),
    },
    Fault { name: "SIGKILL", ended: "was killed by SIGKILL", status: 137, needs_cgroup: false, fail: killed },
    Fault { name: "SIGSEGV", ended: "was killed by SIGSEGV", status: 139, needs_cgroup: false, fail: bad_access },
    Fault {
        name: "no memory (RLIMIT_AS)",
        ended: "was killed by SIGABRT",
        status: 134,
        needs_cgroup: false,
        fail: || {
            let most = Some(1 << 30);
            setrlimit(Resource::As, Rlimit { current: most, maximum: most }).expect("a process may lower its limits");
            use_memory();
        },
    },
    Fault {
        name: "no memory (cgroup)",
        ended: "was killed by SIGKILL, because its control group may use no more than 512 MiB of memory",
        status: 137,
        needs_cgroup: true,
        fail: use_memory,
    },
];

fn killed() {
    kill_process(getpid(), Signal::KILL).expect("a signal to itself");
}

fn bad_access() {
    // SAFETY: none: no memory is mapped in the first page, and the access ends the process.
    unsafe { ptr::without_provenance::<u8>(64).read_volatile() };
}

/// Takes memory without end.
fn use_memory() {
    let mut taken = Vec::new();
    loop {
        taken.push(vec![1u8; 16 << 20]);
    }
}

/// The name of a fault that only the others see: the victim ends as if all were well. Rank 1 meets it in a subgroup,
/// where ranks have other numbers.
pub const LEAVES: &str = "leaves";

/// What a victim that hangs prints last.
pub const HANGS: &str = "waiting for nothing";

/// A control group with little memory. Dropping it removes it: its processes have ended by then.
pub struct Cgroup(pub PathBuf);

impl Cgroup {
    pub fn new() -> Result<Cgroup, String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let kinds = [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")];
        let (root, limit) = kinds
            .into_iter()
            .find(|(root, _)| fs::exists(format!("{root}/cgroup.procs")).unwrap_or(false))
            .ok_or("there are no control groups")?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let cgroup = Cgroup(PathBuf::from(format!("{root}/bonfire-{}-{number}", process::id())));
        let made = fs::create_dir(&cgroup.0).and_then(|()| fs::write(cgroup.0.join(limit), "512M"));
        made.map_err(|error| format!("a control group cannot be made: {error}"))?;
        Ok(cgroup)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Delays the end of a process that panics.
struct Slow(bool);

impl Drop for Slow {
    fn drop(&mut self) {
        if self.0 {
            thread::sleep(Duration::from_secs(1));
        }
    }
}

/// The program of a rank: rank `victim` fails in the middle of a run, or hangs if there is no fault of this name. The
/// others end when they learn of it.
pub fn rank(fault: &str, victim: usize, others_panic: bool) -> ExitCode {
    let (name, fault) = (fault, FAULTS.iter().find(|known| known.name == fault));
    let mut slow = Slow(false);
    let group = Group::from_env().expect("ranks find each other");
    if name == LEAVES {
        return leave_early(&group, victim);
    }
    let mut data = vec![1f32; 1000];
    for step in 0.. {
        if group.rank() == victim && step == 20 {
            slow.0 = name == "slow panic";
            match fault {
                Some(fault) => (fault.fail)(),
                // A hang.
                None => {
                    println!("{HANGS}");
                    loop {
                        thread::park();
                    }
                }
            }
        }
        match group.all_reduce(&mut data, ReduceOp::Mean) {
            Err(error) if others_panic => panic!("{error}"),
            Err(error) => {
                eprintln!("step {step}: {error}");
                return ExitCode::FAILURE;
            }
            Ok(()) => {}
        }
    }
    ExitCode::SUCCESS
}

/// Makes a subgroup of all ranks but 0, and ends in it on the victim.
fn leave_early(group: &Group, victim: usize) -> ExitCode {
    let pair = if group.rank() > 0 { Some(group.subgroup(&[1, 2]).expect("both make it")) } else { None };
    if group.rank() == victim {
        return ExitCode::SUCCESS;
    }
    let ended = pair.as_ref().unwrap_or(group).barrier();
    eprintln!("{}", ended.expect_err("a barrier needs all ranks"));
    ExitCode::FAILURE
}
