//! What the system may do to a process at any time: interrupt its calls, and limit its memory.
#![cfg(all(feature = "shm", target_os = "linux"))]

#[cfg(target_arch = "x86_64")]
#[path = "system/calls.rs"]
mod calls;
#[cfg(target_arch = "x86_64")]
#[path = "system/faults.rs"]
mod faults;

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bonfire_core::{Error, Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, report};
use bonfire_testing::resources::Limited;

/// Starts the ranks of a group, each through `command`, and returns what they report.
fn outcomes(name: &str, n: usize, transport: &str, command: &[String]) -> Vec<Result<String, Error>> {
    let ranks = Process::start_ranks_by(|_| command.to_vec(), name, n, transport, "60", &[]);
    ranks.iter().map(Process::outcome).collect()
}

fn sum(group: &Group, data: &mut [i32]) -> Result<i32, Error> {
    data.fill(group.rank() as i32 + 1);
    group.all_reduce(data, ReduceOp::Sum)?;
    let (first, rest) = data.split_first().expect("it is not empty");
    assert!(rest.iter().all(|element| element == first));
    Ok(*first)
}

/// Signals to all threads of this process, one each in a millisecond, as from a profiler.
fn storm() {
    extern "C" fn count(_: libc::c_int) {
        SIGNALS.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: a valid action; the handler only increments an atomic. Without SA_RESTART the system repeats no call.
    let set = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = count as *const () as usize;
        libc::sigaction(libc::SIGPROF, &action, std::ptr::null_mut())
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    std::thread::spawn(|| {
        loop {
            for thread in fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
                let id: Option<libc::c_long> = thread.file_name().to_str().and_then(|id| id.parse().ok());
                // SAFETY: a signal with a handler, to a thread of this process. The thread may have ended.
                unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), id.unwrap_or(0), libc::SIGPROF) };
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

static SIGNALS: AtomicU64 = AtomicU64::new(0);

#[test]
fn a_storm_of_signals_changes_no_number_and_no_transport() {
    if is_child() {
        storm();
        return report(&Group::from_env().and_then(|group| {
            let mut buffer = group.allocate::<i32>(1_000_000)?;
            let sums = loop {
                let sums = [sum(&group, &mut buffer)?, sum(&group, &mut vec![0; 100_000])?, sum(&group, &mut [0; 10])?];
                // All ranks go on until each has had its signals.
                let mut waiting = [u8::from(SIGNALS.load(Ordering::Relaxed) < 1000)];
                group.all_reduce(&mut waiting, ReduceOp::Max)?;
                if waiting == [0] {
                    break sums;
                }
            };
            let maps = fs::read_to_string("/proc/self/maps").map_err(|e| Error::io("reading the mappings", e))?;
            Ok(format!("{sums:?}, memory is shared: {}", maps.contains("memfd:bonfire")))
        }));
    }
    for (transport, shared) in [("auto", true), ("tcp", false)] {
        for outcome in outcomes("a_storm_of_signals_changes_no_number_and_no_transport", 3, transport, &[]) {
            assert_eq!(outcome, Ok(format!("[6, 6, 6], memory is shared: {shared}")), "{transport}");
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
