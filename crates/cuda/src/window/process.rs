//! Whether another process of this host has ended.

use serde::{Deserialize, Serialize};

/// A process of this host. Its number alone could belong to a later process.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ProcessId {
    number: u32,
    /// When it started, in the kernel's unit.
    start: u64,
}

impl ProcessId {
    /// This process. `None` if the system does not tell.
    pub fn own() -> Option<ProcessId> {
        ProcessId::running(std::process::id())
    }

    /// Whether the process has ended, and with it its work on GPUs: it has closed the driver's files. To be asked only
    /// about a process that was found by its number before: one of another container seems to have ended.
    pub fn has_ended(self) -> bool {
        ProcessId::running(self.number) != Some(self)
    }

    /// The process that has this number now, if it has not ended.
    fn running(number: u32) -> Option<ProcessId> {
        // In proc(5): the number, the name in parentheses, which may contain any character, and the state as field 3.
        // Then, among others, the number of threads as field 20 and the start as field 22.
        let text = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let mut fields = text.rsplit_once(')')?.1.split_whitespace();
        let state = fields.next()?;
        let threads: u64 = fields.nth(16)?.parse().ok()?;
        let start = fields.nth(1)?.parse().ok()?;
        // Zombies and dead processes have no files any more, unless only the first of several threads has ended.
        let ended = matches!(state, "Z" | "X") && threads <= 1;
        (!ended).then_some(ProcessId { number, start })
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_has_ended_before_it_is_waited_for_and_when_another_one_has_its_number() {
        let own = ProcessId::own().unwrap();
        assert!(!own.has_ended());
        assert!(ProcessId { start: own.start + 1, ..own }.has_ended());
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let running = ProcessId::running(child.id()).unwrap();
        assert!(!running.has_ended());
        drop(child.stdin.take());
        // Until the next line it is a zombie.
        while !running.has_ended() {
            std::thread::yield_now();
        }
        assert!(child.wait().unwrap().success());
        assert!(running.has_ended());
    }
}
