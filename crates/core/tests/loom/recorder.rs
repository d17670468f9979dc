//! Models of `group::recorder`: one writer, and a reader that it overtakes.

use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

use loom::thread;

use super::check;
use crate::group::record::CallSite;
use crate::group::recorder::Recorder;
use crate::group::{Message, Record, State};
use crate::types::{Call, DType, Operation, ReduceOp};

/// Consecutive operations differ in every word of their records.
fn call(number: u64) -> Call {
    let (count, root) = (number as usize + 7, Some(number as usize));
    if number.is_multiple_of(2) {
        Call {
            operation: Operation::Reduce,
            dtype: DType::F16,
            count,
            reduction: Some(ReduceOp::Max),
            root,
            sizes: None,
        }
    } else {
        Call { operation: Operation::AllToAll, dtype: DType::I64, count, reduction: None, root: None, sizes: None }
    }
}

fn message(number: u64) -> Option<(usize, bool)> {
    (!number.is_multiple_of(3)).then_some((number as usize, number.is_multiple_of(2)))
}

fn site(number: u64) -> CallSite {
    if number.is_multiple_of(2) { Location::caller() } else { odd() }
}

fn odd() -> CallSite {
    Location::caller()
}

/// A recorder, and a time after its creation.
struct Subject(Recorder, Instant);

impl Subject {
    fn of(kept: usize) -> Subject {
        Subject(Recorder::of(kept), Instant::now())
    }

    fn begun(&self, number: u64) -> Instant {
        self.1 + Duration::from_nanos(100 * number)
    }

    fn write(&self, number: u64) {
        let entry = self.0.begin(&call(number), number + 5, message(number), site(number), self.begun(number));
        match ended(number) {
            State::Failed => self.0.failed(entry),
            _ => self.0.done(entry),
        }
    }

    /// Checks that all words of a record are from the same operation.
    fn check(&self, record: &Record) {
        let number = record.number;
        assert_eq!((record.sequence, record.call), (number + 5, call(number)));
        assert_eq!(record.message, message(number).map(|(peer, sends)| Message { peer, sends }));
        assert_eq!(record.at, format!("{}:{}", site(number).file(), site(number).line()));
        assert_eq!(record.begun_ns, self.0.clock.at(self.begun(number)));
        assert!(record.state == State::Begun || record.state == ended(number), "{record:?}");
        assert_eq!(record.ended_ns.is_some(), record.state != State::Begun);
    }
}

fn ended(number: u64) -> State {
    if number.is_multiple_of(2) { State::Done } else { State::Failed }
}

/// Operations `0..before` are recorded before the reader starts. Those up to `all` overtake it.
fn overtaken(kept: usize, before: u64, all: u64) {
    let subject = Arc::new(Subject::of(kept));
    (0..before).for_each(|number| subject.write(number));
    let reader = thread::spawn({
        let subject = subject.clone();
        move || subject.0.records().iter().for_each(|record| subject.check(record))
    });
    (before..all).for_each(|number| subject.write(number));
    reader.join().unwrap();
    let records = subject.0.records();
    records.iter().for_each(|record| subject.check(record));
    assert!(records.iter().map(|record| record.number).eq(all - kept as u64..all));
    assert!(records.iter().all(|record| record.state != State::Begun));
}

#[test]
fn an_operation_is_recorded_while_others_read() {
    check(3, || overtaken(1, 0, 1));
}

#[test]
fn an_operation_takes_the_place_of_one_that_is_read() {
    check(3, || overtaken(1, 1, 2));
}

#[test]
fn two_operations_overtake_a_reader() {
    check(1, || overtaken(1, 1, 3));
}

#[test]
fn a_ring_is_written_over_while_it_is_read() {
    check(3, || overtaken(2, 2, 3));
}
