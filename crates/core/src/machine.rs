//! What the system reports about memory, for the machine and for the control groups (containers, job steps) that this
//! process is in. `root` is the folder that has `proc` and `sys`: `/`, except in tests.

#![allow(missing_docs, reason = "used by the sibling packages only")]

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// A control group of this process.
pub struct Cgroup {
    folder: PathBuf,
    /// Whether it is of version 2, whose files have other names.
    unified: bool,
}

/// Returns the groups that this process is in, from its own up to the root: of version 2, and of version 1's hierarchy
/// of `controller`.
pub fn cgroups(root: &Path, controller: &str) -> Vec<Cgroup> {
    let mut groups = Vec::new();
    for line in read_to_string(root.join("proc/self/cgroup")).unwrap_or_default().lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let unified = controllers.is_empty();
        if !unified && !controllers.split(',').any(|name| name == controller) {
            continue;
        }
        let mount = root.join("sys/fs/cgroup").join(if unified { "" } else { controller });
        // In a container the path may be the host's, while the mount has the container's own group at its root.
        for group in Path::new(path.trim_start_matches('/')).ancestors() {
            groups.push(Cgroup { folder: mount.join(group), unified });
        }
    }
    groups
}

impl Cgroup {
    /// Returns the text of a file, without surrounding white space: of `two` in version 2, of `one` in version 1.
    pub fn read(&self, two: &str, one: &str) -> Option<String> {
        let name = if self.unified { two } else { one };
        read_to_string(self.folder.join(name)).ok().map(|text| text.trim().to_owned())
    }

    /// Returns how many bytes the processes of this group may still allocate, or `None` if there is no limit. Beyond
    /// it, the system kills one of them.
    fn spare_memory(&self) -> Option<u64> {
        // Version 2 writes "max" if there is no limit, version 1 a number above any machine's memory.
        let limit: u64 = self.read("memory.max", "memory.limit_in_bytes")?.parse().ok()?;
        let used: u64 = self.read("memory.current", "memory.usage_in_bytes")?.parse().ok()?;
        // Cached pages of files count as used, and are dropped when memory is needed. In version 1 only the fields with
        // this prefix include the groups below.
        let prefix = if self.unified { "" } else { "total_" };
        let is_cache = |name: &str| matches!(name.strip_prefix(prefix), Some("inactive_file" | "active_file"));
        let stat = self.read("memory.stat", "memory.stat").unwrap_or_default();
        let fields = stat.lines().filter_map(|line| line.split_once(' '));
        let cached: u64 = fields.filter(|(name, _)| is_cache(name)).filter_map(|(_, n)| n.parse::<u64>().ok()).sum();
        Some(limit.saturating_sub(used.saturating_sub(cached)))
    }
}

/// Returns how many bytes of memory this process may still allocate: what the machine has to spare, or what the limits
/// of its control groups leave of it. `None` if the system does not say.
pub fn spare_memory(root: &Path) -> Option<u64> {
    let groups = cgroups(root, "memory").into_iter().filter_map(|group| group.spare_memory());
    groups.chain(available_memory(root)).min()
}

/// Returns how many bytes of memory the machine has for new programs, as estimated by the system.
fn available_memory(root: &Path) -> Option<u64> {
    let info = read_to_string(root.join("proc/meminfo")).ok()?;
    let text = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Returns what a system with these files has to spare, in MiB. It has 8 GiB of memory.
    fn spare(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        let meminfo = ("proc/meminfo", "MemTotal: 16777216 kB\nMemFree:  1 kB\nMemAvailable:  8388608 kB\n");
        for (path, text) in files.iter().chain([&meminfo]) {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        spare_memory(root.path()).map(|bytes| bytes / MIB)
    }

    #[test]
    fn without_limits_the_machine_decides() {
        assert_eq!(spare(&[]), Some(8192));
        assert_eq!(spare(&[("proc/self/cgroup", "0::/\n")]), Some(8192));
        assert_eq!(spare_memory(Path::new("/no/such/root")), None);
        let unlimited = [
            ("proc/self/cgroup", "0::/job\n"),
            ("sys/fs/cgroup/job/memory.max", "max\n"),
            ("sys/fs/cgroup/job/memory.current", "1073741824\n"),
        ];
        assert_eq!(spare(&unlimited), Some(8192));
    }

    #[test]
    fn limits_of_version_2_and_of_ancestors_count_and_cached_files_do_not() {
        let mut files = vec![
            ("proc/self/cgroup", "0::/job/step\n"),
            ("sys/fs/cgroup/job/step/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/job/step/memory.current", "536870912\n"),
            ("sys/fs/cgroup/job/step/memory.stat", "anon 1\ninactive_file 67108864\nactive_file 67108864\nslab 7\n"),
        ];
        assert_eq!(spare(&files), Some(1024 - 512 + 128));
        // The step may have more than the job has left.
        files.extend([
            ("sys/fs/cgroup/job/memory.max", "2147483648\n"),
            ("sys/fs/cgroup/job/memory.current", "2040109465\n"),
        ]);
        assert_eq!(spare(&files), Some(102));
        // Used beyond the limit, which was lowered.
        files.push(("sys/fs/cgroup/job/memory.max", "1048576\n"));
        assert_eq!(spare(&files), Some(0));
    }

    #[test]
    fn limits_of_version_1_count() {
        let limited = [
            ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "536870912\n"),
            ("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "268435456\n"),
            ("sys/fs/cgroup/memory/box/memory.stat", "inactive_file 1\ntotal_inactive_file 33554432\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "536870912\n"),
        ];
        let at = |group: &'static str| [&[("proc/self/cgroup", group)], &limited[..]].concat();
        assert_eq!(spare(&at("4:cpu,memory:/box\n1:cpuset:/\n0::/\n")), Some(256 + 32));
        assert_eq!(spare(&at("4:memory:/\n")), Some(8192));
        // In a container: the path is the host's, and the container's own group is at the root of the mount.
        let container = [
            ("proc/self/cgroup", "4:memory:/docker/0123\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "67108864\n"),
        ];
        assert_eq!(spare(&container), Some(192));
    }
}
