//! `group::recorder`: one writer, and a reader whom it overtakes.

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use loom::thread;

use crate::call::{Call, Operation};
use crate::dtype::{DType, ReduceOp};
use crate::group::recorder::{CallSite, Recorder};
use crate::group::trace::{Message, Record, State};

/// Two operations in a row differ in every word of their records.
fn call(number: u64) -> Call {
    let (count, root) = (number as usize + 7, Some(number as usize));
    if number.is_multiple_of(2) {
        Call { operation: Operation::Reduce, dtype: DType::F16, count, reduction: Some(ReduceOp::Max), root, sizes: None }
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

fn begun(number: u64) -> u64 {
    100 * number + 8
}

fn ended(number: u64) -> u64 {
    100 * number + 80
}

fn write(recorder: &Recorder, number: u64) {
    let start = recorder.clock.start + Duration::from_nanos(begun(number));
    let entry = recorder.begin(&call(number), number + 5, message(number), site(number), start);
    recorder.clock.now.store(ended(number), Ordering::Relaxed);
    recorder.done(entry);
}

/// Every word of a record is of the same operation.
fn check(record: &Record) {
    let number = record.number;
    assert_eq!((record.sequence, record.call), (number + 5, call(number)));
    assert_eq!(record.message, message(number).map(|(peer, sends)| Message { peer, sends }));
    assert_eq!(record.at, format!("{}:{}", site(number).file(), site(number).line()));
    let ended = (record.state == State::Done).then_some(ended(number));
    assert_eq!((record.begun_ns, record.ended_ns), (begun(number), ended));
}

/// Operations `0..before` are there when the reader comes, those up to `all` overtake it.
fn overtaken(kept: usize, before: u64, all: u64) {
    let recorder = Arc::new(Recorder::of(kept));
    (0..before).for_each(|number| write(&recorder, number));
    let reader = thread::spawn({
        let recorder = recorder.clone();
        move || recorder.records().iter().for_each(check)
    });
    (before..all).for_each(|number| write(&recorder, number));
    reader.join().unwrap();
    let records = recorder.records();
    records.iter().for_each(check);
    assert!(records.iter().map(|record| record.number).eq(all - kept as u64..all));
    assert!(records.iter().all(|record| record.state == State::Done));
}

pub fn first() {
    overtaken(1, 0, 1);
}

pub fn second() {
    overtaken(1, 1, 2);
}

pub fn third() {
    overtaken(1, 1, 3);
}

pub fn ring() {
    overtaken(2, 2, 3);
}
