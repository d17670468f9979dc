//! Processes that the ranks left behind and whose parent is now the launcher, because it is the first process of a
//! container, or a subreaper (prctl(2)). Nothing else waits for them, and what is not waited for keeps its number.

use rustix::process::{Pid, WaitId, WaitIdOptions, child_subreaper, getpid, waitid};

use crate::machine::Machine;

/// Whether processes without a parent become children of this process.
pub fn are_adopted() -> bool {
    getpid().is_init() || child_subreaper().is_ok_and(|is_set| is_set.is_some())
}

/// Waits for the children of this process that have ended, apart from its ranks, which are waited for elsewhere.
pub fn reap(machine: &Machine<'_>, is_rank: impl Fn(Pid) -> bool) {
    let processes = machine.list("proc").into_iter().filter_map(|name| Pid::from_raw(name.parse().ok()?));
    for process in processes {
        let stat = machine.read(&format!("proc/{}/stat", process.as_raw_pid()));
        if stat.is_some_and(|stat| is_ended_child(&stat)) && !is_rank(process) {
            let ended = waitid(WaitId::Pid(process), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
            log::debug!("reaped the orphan {}: {ended:?}", process.as_raw_pid());
        }
    }
}

/// Whether this is the `stat` (proc(5)) of a child of this process that has ended and was not waited for.
fn is_ended_child(stat: &str) -> bool {
    // The state and then the parent follow the name, which is in brackets and may hold any characters.
    let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.next() == Some("Z") && fields.next() == Some(&getpid().as_raw_pid().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ended_children_of_this_process_are_recognised() {
        let own = getpid().as_raw_pid();
        assert!(is_ended_child(&format!("12 (a name) Z) Z {own} 1 1 0")));
        for other in
            [format!("12 (sh) S {own} 1"), format!("12 (Z {own}) S 1 1"), "12 (sh) Z 0 1".into(), String::new()]
        {
            assert!(!is_ended_child(&other), "{other}");
        }
    }
}
