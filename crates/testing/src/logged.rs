//! Log lines, for tests that wait for what a rank does meanwhile. The log of a process is of one of its tests only.

use std::sync::{Condvar, Mutex, PoisonError};

use log::{LevelFilter, Log, Metadata, Record};

struct LogRecorder {
    lines: Mutex<Vec<String>>,
    more: Condvar,
}

static RECORDER: LogRecorder = LogRecorder { lines: Mutex::new(Vec::new()), more: Condvar::new() };

/// Starts to record warnings and errors. Called once per process.
pub fn record() {
    record_from(LevelFilter::Warn);
}

/// As [`record`], from another level on.
pub fn record_from(level: LevelFilter) {
    log::set_logger(&RECORDER).expect("the only logger");
    log::set_max_level(level);
}

/// Forgets the lines so far.
pub fn clear() {
    RECORDER.lines.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// Returns the lines so far.
pub fn lines() -> Vec<String> {
    RECORDER.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Waits for a line with all of `words`. Panics if none is logged.
pub fn wait_for(words: &[&str]) {
    let found = |lines: &mut Vec<String>| lines.iter().any(|line| words.iter().all(|word| line.contains(word)));
    let lines = RECORDER.lines.lock().unwrap_or_else(PoisonError::into_inner);
    let (lines, waited) = RECORDER.more.wait_timeout_while(lines, crate::DEADLINE, |lines| !found(lines)).unwrap();
    assert!(!waited.timed_out(), "no line with {words:?} in {lines:?}");
}

impl Log for LogRecorder {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record) {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).push(record.args().to_string());
        self.more.notify_all();
    }

    fn flush(&self) {}
}
