//! At a tenth of its deadline a rank that waits says in the log whom it waits for.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use bonfire_core::ReduceOp;
use bonfire_testing::{DEADLINE, Kind, run_ranks_with};
use log::{Level, LevelFilter, Log, Metadata, Record};

/// Keeps what is logged, and wakes who waits for it.
struct Kept {
    lines: Mutex<Vec<String>>,
    more: Condvar,
}

static KEPT: Kept = Kept { lines: Mutex::new(Vec::new()), more: Condvar::new() };

impl Kept {
    /// Waits for a line with all of `words`; panics where none comes.
    fn wait_for(&self, words: &[&str]) {
        let found = |lines: &mut Vec<String>| lines.iter().any(|line| words.iter().all(|word| line.contains(word)));
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let (lines, waited) = self.more.wait_timeout_while(lines, DEADLINE, |lines| !found(lines)).unwrap();
        assert!(!waited.timed_out(), "no line with {words:?} in {lines:?}");
    }
}

impl Log for Kept {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= Level::Warn
    }

    fn log(&self, record: &Record) {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).push(record.args().to_string());
        self.more.notify_all();
    }

    fn flush(&self) {}
}

#[test]
fn a_tenth_of_the_deadline_names_who_is_missing_and_the_late_rank_is_still_welcome() {
    log::set_logger(&KEPT).expect("the only logger");
    log::set_max_level(LevelFilter::Warn);
    for kind in Kind::ALL {
        KEPT.lines.lock().unwrap().clear();
        run_ranks_with(
            kind,
            3,
            |builder| builder.deadline(Duration::from_secs(10)),
            |group| {
                if group.rank() == 2 {
                    // This rank calls when the others have complained about it.
                    KEPT.wait_for(&["rank 0 has waited", "for rank 2"]);
                    KEPT.wait_for(&["rank 1 has waited", "for rank 2"]);
                }
                let mut data = [1.0f32; 1000];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [3.0; 1000]);
            },
        );
    }
}
