//! At a tenth of its deadline, a rank that waits logs which ranks it waits for.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use bonfire_core::ReduceOp;
use bonfire_testing::{DEADLINE, Kind, run_ranks_with};
use log::{Level, LevelFilter, Log, Metadata, Record};

/// Records log lines, and wakes the threads that wait for one.
struct LogRecorder {
    lines: Mutex<Vec<String>>,
    more: Condvar,
}

static RECORDER: LogRecorder = LogRecorder { lines: Mutex::new(Vec::new()), more: Condvar::new() };

impl LogRecorder {
    /// Waits for a line with all of `words`. Panics if none is logged.
    fn wait_for(&self, words: &[&str]) {
        let found = |lines: &mut Vec<String>| lines.iter().any(|line| words.iter().all(|word| line.contains(word)));
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let (lines, waited) = self.more.wait_timeout_while(lines, DEADLINE, |lines| !found(lines)).unwrap();
        assert!(!waited.timed_out(), "no line with {words:?} in {lines:?}");
    }
}

impl Log for LogRecorder {
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
fn missing_ranks_are_logged_at_a_tenth_of_the_deadline_and_may_still_call() {
    log::set_logger(&RECORDER).expect("the only logger");
    log::set_max_level(LevelFilter::Warn);
    for kind in Kind::ALL {
        RECORDER.lines.lock().unwrap().clear();
        run_ranks_with(
            kind,
            3,
            |builder| builder.deadline(Duration::from_secs(10)),
            |group| {
                if group.rank() == 2 {
                    // This rank calls once its peers have logged warnings about it.
                    RECORDER.wait_for(&["rank 0 has waited", "for rank 2"]);
                    RECORDER.wait_for(&["rank 1 has waited", "for rank 2"]);
                }
                let mut data = [1.0f32; 1000];
                group.all_reduce(&mut data, ReduceOp::Sum).unwrap();
                assert_eq!(data, [3.0; 1000]);
            },
        );
    }
}
