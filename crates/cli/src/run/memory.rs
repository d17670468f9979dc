//! Ranks that the system killed because memory ran out. To them it is a SIGKILL like any other, and they print nothing.

use rustix::process::Signal;

use super::rank::End;
use crate::machine::{Machine, MemoryShortage};

/// The counters of the control group of the launcher, in which the ranks start.
pub struct MemoryKills<'a> {
    machine: Machine<'a>,
    /// What is explained by the ends of ranks, or was counted before any rank started.
    seen: MemoryShortage,
}

impl<'a> MemoryKills<'a> {
    /// Reads the counters, before the first rank starts.
    pub fn new(machine: Machine<'a>) -> Self {
        Self { seen: machine.memory_shortage(), machine }
    }

    /// Returns how a rank ended that the launcher did not kill itself: as it seemed, or because memory ran out. The
    /// system counts a process that it kills before it sends the signal.
    pub fn explain(&mut self, end: End) -> End {
        if !matches!(end, End::Killed(signal) if signal == Signal::KILL.as_raw()) {
            return end;
        }
        let now = self.machine.memory_shortage();
        if now.kills <= self.seen.kills {
            return end;
        }
        // Each kill explains one end: another rank may have got its SIGKILL from a user.
        self.seen.kills += 1;
        let limit = if now.at_limit > self.seen.at_limit { self.machine.memory_limit() } else { None };
        End::OutOfMemory { limit }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::machine::tests::root;

    const KILLED: End = End::Killed(9);

    fn said(kills: &mut MemoryKills, end: End) -> String {
        kills.explain(end).to_string()
    }

    /// Checks a control group whose files are at `folder`: `counters` returns their names and texts, given how many
    /// processes were killed and how often the limit was met.
    fn check(group: &str, folder: &str, limit: &str, counters: impl Fn(u32, u32) -> Vec<(&'static str, String)>) {
        let root = root(&[("proc/self/cgroup", group), (&format!("{folder}/{limit}"), "67108864\n")]);
        let count = |kills, failures| {
            for (name, text) in counters(kills, failures) {
                fs::write(root.path().join(folder).join(name), text).unwrap();
            }
        };
        count(3, 7);
        let mut kills = MemoryKills::new(Machine { root: root.path() });
        assert_eq!(said(&mut kills, KILLED), "was killed by SIGKILL");
        count(4, 8);
        assert_eq!(said(&mut kills, End::Exited(1)), "exited with status 1");
        let why = "was killed by SIGKILL, because its control group may use no more than 64 MiB of memory";
        assert_eq!(said(&mut kills, KILLED), why);
        assert_eq!(said(&mut kills, KILLED), "was killed by SIGKILL");
    }

    #[test]
    fn a_kill_of_the_control_group_explains_one_end() {
        check("4:memory:/job\n0::/\n", "sys/fs/cgroup/memory/job", "memory.limit_in_bytes", |kills, failures| {
            vec![
                ("memory.oom_control", format!("oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")),
                ("memory.failcnt", format!("{failures}\n")),
            ]
        });
        check("0::/job\n", "sys/fs/cgroup/job", "memory.max", |kills, failures| {
            vec![("memory.events", format!("low 0\nmax 900\noom {failures}\noom_kill {kills}\n"))]
        });
    }

    #[test]
    fn a_machine_without_memory_is_no_limit() {
        let folder = root(&[
            ("proc/self/cgroup", "0::/job\n"),
            ("sys/fs/cgroup/job/memory.max", "67108864\n"),
            ("sys/fs/cgroup/job/memory.events", "oom 0\noom_kill 0\n"),
        ]);
        let mut kills = MemoryKills::new(Machine { root: folder.path() });
        fs::write(folder.path().join("sys/fs/cgroup/job/memory.events"), "oom 0\noom_kill 1\n").unwrap();
        assert_eq!(said(&mut kills, KILLED), "was killed by SIGKILL, because the machine had no memory left");
        // Where nothing is counted, nothing is claimed.
        let none = folder.path().join("none");
        let mut kills = MemoryKills::new(Machine { root: &none });
        assert_eq!(said(&mut kills, KILLED), "was killed by SIGKILL");
    }
}
