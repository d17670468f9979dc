//! Processors and memory, and the limits on this process's use of them.

use std::thread::available_parallelism;

use serde_json::json;

use super::findings::Findings;
use crate::floor::{Memory, hand_off};
use crate::machine::{Machine, count_list};
use crate::text::size;

pub fn processors(machine: &Machine, findings: &mut Findings) {
    const AREA: &str = "processors";
    if let Some(model) = machine.field("proc/cpuinfo", "model name") {
        findings.fact(AREA, "model", &*model, json!(model));
    }
    let online = machine.read("sys/devices/system/cpu/online").and_then(|list| count_list(&list));
    let allowed = machine.field("proc/self/status", "Cpus_allowed_list").and_then(|list| count_list(&list));
    let limit = machine.cpu_limit();
    let usable = available_parallelism().map_or(1, usize::from);
    let known = |number: Option<usize>| number.map_or("unknown".into(), |number| number.to_string());
    let text = format!(
        "{usable} usable: {} online, {} by affinity, {}",
        known(online),
        known(allowed),
        limit.map_or("no cgroup limit".into(), |limit| format!("{limit:.2} by cgroup"))
    );
    let value = json!({ "usable": usable, "online": online, "affinity": allowed, "cgroup": limit });
    findings.fact(AREA, "cores", text, value);
    judge_cores(usable, online, findings);
    let load = machine.read("proc/loadavg").and_then(|text| text.split(' ').next()?.parse::<f64>().ok());
    if let Some(load) = load {
        findings.fact(AREA, "load", format!("{load:.2} in the last minute"), json!(load));
        judge_load(load, usable, findings);
    }
    let seconds = hand_off();
    let text = format!("{:.2} us for a cache line from one thread to another", seconds * 1e6);
    findings.fact(AREA, "hand-off", text, json!({ "us": seconds * 1e6 }));
}

fn judge_cores(usable: usize, online: Option<usize>, findings: &mut Findings) {
    match online {
        _ if usable == 1 => findings.warn(
            "this process has one core, which all ranks on this machine would share",
            "give it more, by taskset, the container's cpuset or its CPU limit (docker run --cpus)",
        ),
        Some(online) if usable < online => findings.warn(
            format!("this process may use {usable} of {online} cores"),
            "if this is not intended, widen its affinity (taskset), cpuset or cgroup limit (docker run --cpus)",
        ),
        _ => {}
    }
}

fn judge_load(load: f64, usable: usize, findings: &mut Findings) {
    if load > usable as f64 / 2.0 {
        findings.warn(
            format!("other programs keep this machine busy: load {load:.2} on {usable} cores"),
            "end them before you trust times measured here, those above included",
        );
    }
}

pub fn memory(machine: &Machine, findings: &mut Findings) {
    const AREA: &str = "memory";
    let (memory, limit) = (machine.memory(), machine.memory_limit());
    if let Some((total, available)) = memory {
        let limited = limit.map_or("no cgroup limit".into(), |limit| format!("cgroup limit {}", size(limit)));
        let text = format!("{}, of which {} is free; {limited}", size(total), size(available));
        findings.fact(AREA, "size", text, json!({ "total": total, "available": available, "cgroup": limit }));
        judge_memory(available, limit, findings);
    }
    let threads = available_parallelism().map_or(1, usize::from);
    // Larger than the caches, but never more than a quarter of the free memory.
    let share = memory.map_or(u64::MAX, |(_, available)| available / 4 / threads as u64);
    let bytes = share.clamp(1 << 16, 1 << 26) as usize;
    let counts = if threads > 1 { vec![1, threads] } else { vec![1] };
    for count in counts {
        let measured = Memory::measure(count, &[bytes]);
        let (copy, add) = (measured.points[0].copy / 1e9, measured.points[0].add / 1e9);
        let name = if count == 1 { "one thread".into() } else { format!("{count} threads") };
        let text = format!("copy {copy:.1} GB/s, add {add:.1} GB/s, with {} each", size(bytes as u64));
        findings.fact(AREA, &name, text, json!({ "copy_gbps": copy, "add_gbps": add, "bytes": bytes }));
    }
    #[cfg(unix)]
    shared_memory(findings);
}

fn judge_memory(available: u64, limit: Option<u64>, findings: &mut Findings) {
    let usable = limit.map_or(available, |limit| limit.min(available));
    if usable < 1 << 30 {
        findings.warn(
            format!("{} of memory is little for training", size(usable)),
            "end other programs, or raise the container's limit (docker run --memory)",
        );
    }
}

#[cfg(unix)]
fn shared_memory(findings: &mut Findings) {
    let bytes = |blocks: u64, size: u64| blocks.saturating_mul(size);
    let space = rustix::fs::statvfs("/dev/shm").ok();
    let space = space.map(|fs| (bytes(fs.f_blocks, fs.f_frsize), bytes(fs.f_bavail, fs.f_frsize)));
    let text =
        space.map_or("not there".into(), |(all, free)| format!("{}, of which {} is free", size(all), size(free)));
    let value = json!(space.map(|(all, free)| json!({ "total": all, "free": free })));
    findings.fact("memory", "/dev/shm", text, value);
    judge_shared_memory(space.map(|(all, _)| all), findings);
}

#[cfg(unix)]
fn judge_shared_memory(size_of_shm: Option<u64>, findings: &mut Findings) {
    // 64 MiB is Docker's default.
    if size_of_shm.is_none_or(|bytes| bytes <= 64 << 20) {
        findings.warn(
            "/dev/shm is missing or too small for processes that exchange large data in shared memory",
            "mount -o remount,size=50% /dev/shm; for a container: docker run --shm-size=1g, or --ipc=host",
        );
    }
}

/// Descriptors that a rank has open besides its connections.
#[cfg(unix)]
const BASE_FILES: u64 = 32;
/// Connections of a rank to each other rank over TCP: control and data.
#[cfg(unix)]
const FILES_PER_PEER: u64 = 2;

#[cfg(unix)]
pub fn limits(findings: &mut Findings) {
    use rustix::process::{Resource, getrlimit};
    let limit = getrlimit(Resource::Nofile);
    let known = |limit: Option<u64>| limit.map_or("no limit".into(), |limit| limit.to_string());
    let text = format!("{}, can be raised to {}", known(limit.current), known(limit.maximum));
    findings.fact("limits", "open files", text, json!({ "soft": limit.current, "hard": limit.maximum }));
    if let Some(files) = limit.current {
        judge_files(files, findings);
    }
}

#[cfg(unix)]
fn judge_files(files: u64, findings: &mut Findings) {
    if files < 1024 {
        let ranks = files.saturating_sub(BASE_FILES) / FILES_PER_PEER;
        findings.warn(
            format!("a process may open {files} files, which is enough for about {ranks} ranks over TCP"),
            "raise the limit before you start many ranks: ulimit -n 65536, or LimitNOFILE= of the service",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(judge: impl FnOnce(&mut Findings)) -> Vec<String> {
        let mut findings = Findings::default();
        judge(&mut findings);
        findings.problems.into_iter().map(|problem| problem.what).collect()
    }

    #[test]
    fn too_few_cores_are_a_problem() {
        assert!(problems(|f| judge_cores(4, Some(4), f)).is_empty());
        assert!(problems(|f| judge_cores(4, None, f)).is_empty());
        assert_eq!(problems(|f| judge_cores(2, Some(64), f)), ["this process may use 2 of 64 cores"]);
        assert!(problems(|f| judge_cores(1, Some(1), f))[0].contains("one core"));
        assert!(problems(|f| judge_load(0.5, 2, f)).is_empty());
        assert!(problems(|f| judge_load(1.5, 2, f))[0].contains("load 1.50 on 2 cores"));
    }

    #[test]
    #[cfg(unix)]
    fn scarce_memory_and_files_are_problems() {
        assert!(problems(|f| judge_memory(8 << 30, None, f)).is_empty());
        assert!(problems(|f| judge_memory(8 << 30, Some(512 << 20), f))[0].starts_with("512 MiB"));
        assert!(problems(|f| judge_shared_memory(Some(1 << 30), f)).is_empty());
        assert_eq!(problems(|f| judge_shared_memory(Some(64 << 20), f)).len(), 1);
        assert_eq!(problems(|f| judge_shared_memory(None, f)).len(), 1);
        assert!(problems(|f| judge_files(1024, f)).is_empty());
        assert!(problems(|f| judge_files(256, f))[0].contains("about 112 ranks"));
        assert!(problems(|f| judge_files(3, f))[0].contains("about 0 ranks"));
    }

    #[test]
    fn a_machine_without_system_files_is_described() {
        let mut findings = Findings::default();
        let machine = Machine { root: std::path::Path::new("/nowhere") };
        processors(&machine, &mut findings);
        assert!(findings.text().contains("unknown online, unknown by affinity, no cgroup limit"));
    }
}
