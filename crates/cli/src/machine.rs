//! What the system reports about this machine: files on Linux; elsewhere most is unknown.

use std::fs;
use std::path::Path;

use bonfire_core::internal::cgroups;

/// How often memory ran out. The counters only grow.
#[cfg(unix)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryShortage {
    /// Processes of this process's control group that the system killed for it, whatever the reason of the shortage.
    pub kills: u64,
    /// How often the group or one above it reached its limit and could not make room.
    pub at_limit: u64,
}

/// The files of `/proc` and `/sys`, below another root in tests.
pub struct Machine<'a> {
    pub root: &'a Path,
}

impl Machine<'static> {
    pub fn this() -> Self {
        Machine { root: Path::new("/") }
    }
}

impl Machine<'_> {
    /// Returns a file's text without surrounding white space.
    pub fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }

    /// Returns the value of `name` in a file of lines `name: value`.
    pub fn field(&self, path: &str, name: &str) -> Option<String> {
        let text = self.read(path)?;
        let mut fields = text.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(other, _)| other.trim_end() == name).map(|(_, value)| value.trim().to_owned())
    }

    /// Returns the sorted names in a directory.
    pub fn list(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    }

    /// Returns bytes of memory: in total, and available to new programs.
    pub fn memory(&self) -> Option<(u64, u64)> {
        let bytes = |name: &str| {
            let value = self.field("proc/meminfo", name)?;
            value.strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kilobytes| kilobytes * 1024)
        };
        Some((bytes("MemTotal")?, bytes("MemAvailable")?))
    }

    /// Returns the bytes of memory that the process's cgroup and its ancestors allow.
    pub fn memory_limit(&self) -> Option<u64> {
        // Version 1 writes "no limit" as a number above any machine's memory.
        let bytes = |text: String| text.parse::<u64>().ok().filter(|bytes| *bytes < 1 << 60);
        self.cgroup_files("memory", "memory.max", "memory.limit_in_bytes").filter_map(bytes).min()
    }

    /// Returns how often memory ran out in the process's cgroup; zeros where nothing is counted.
    #[cfg(unix)]
    pub fn memory_shortage(&self) -> MemoryShortage {
        let count = |text: &str, name: &str| {
            let mut fields = text.lines().filter_map(|line| line.split_once(' '));
            fields.find(|(other, _)| *other == name).and_then(|(_, number)| number.trim().parse::<u64>().ok())
        };
        let kills = self.cgroup_files("memory", "memory.events", "memory.oom_control");
        // Version 1 has a file with nothing but this number.
        let failures = self.cgroup_files("memory", "memory.events", "memory.failcnt");
        MemoryShortage {
            // That of its own group: in version 2 it includes those below, in version 1 no others.
            kills: kills.filter_map(|text| count(&text, "oom_kill")).next().unwrap_or(0),
            at_limit: failures.filter_map(|text| count(&text, "oom").or_else(|| text.parse().ok())).sum(),
        }
    }

    /// Returns the processor time that the process's cgroup and its ancestors allow, in processors.
    pub fn cpu_limit(&self) -> Option<f64> {
        let share = |quota: &str, period: &str| Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?);
        let two = self.cgroup_files("cpu", "cpu.max", "");
        let two = two.filter_map(|text| text.split_once(' ').and_then(|(quota, period)| share(quota, period)));
        let quotas = self.cgroup_files("cpu", "", "cpu.cfs_quota_us");
        let periods = self.cgroup_files("cpu", "", "cpu.cfs_period_us");
        // Version 1 writes "no quota" as -1.
        let one = quotas.zip(periods).filter_map(|(quota, period)| share(&quota, &period)).filter(|share| *share > 0.0);
        two.chain(one).min_by(f64::total_cmp)
    }

    /// Returns the texts of a file in the process's cgroup and all its ancestors: `two` in version 2, `one` in version
    /// 1's hierarchy of `controller`.
    fn cgroup_files<'a>(&self, controller: &str, two: &'a str, one: &'a str) -> impl Iterator<Item = String> + 'a {
        cgroups(self.root, controller).into_iter().filter_map(move |group| group.read(two, one))
    }
}

/// Returns how many processors a list such as `0-3,8` names.
pub fn count_list(list: &str) -> Option<usize> {
    let mut count = 0;
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        count += last.checked_sub(first)? + 1;
    }
    Some(count)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Creates a root directory with these files.
    pub fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn processor_lists_are_counted() {
        assert_eq!(["0", "0-3", "0-3,8", "0,2,4-5"].map(count_list), [1, 4, 5, 4].map(Some));
        assert_eq!(["", "x", "3-1"].map(count_list), [None; 3]);
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let root = root(&[("proc/meminfo", "MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable:  1024 kB\n")]);
        assert_eq!(Machine { root: root.path() }.memory(), Some((2 << 20, 1 << 20)));
        assert_eq!(Machine { root: &root.path().join("none") }.memory(), None);
    }

    #[test]
    fn limits_of_cgroups_version_2_include_ancestors() {
        let root = root(&[
            ("proc/self/cgroup", "0::/job/step\n"),
            ("sys/fs/cgroup/job/memory.max", "1073741824\n"),
            ("sys/fs/cgroup/job/step/memory.max", "max\n"),
            ("sys/fs/cgroup/job/step/cpu.max", "150000 100000\n"),
            ("sys/fs/cgroup/job/cpu.max", "max 100000\n"),
        ]);
        let machine = Machine { root: root.path() };
        assert_eq!((machine.memory_limit(), machine.cpu_limit()), (Some(1 << 30), Some(1.5)));
    }

    #[test]
    fn limits_of_cgroups_version_1() {
        let root = root(&[
            ("proc/self/cgroup", "4:memory:/box\n1:cpu,cpuacct:/box\n0::/\n"),
            ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "536870912\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "50000\n"),
            ("sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n"),
        ]);
        let machine = Machine { root: root.path() };
        assert_eq!((machine.memory_limit(), machine.cpu_limit()), (Some(512 << 20), Some(0.5)));
        let none = Machine { root: &root.path().join("none") };
        assert_eq!((none.memory_limit(), none.cpu_limit()), (None, None));
    }
}
