//! The recorder: a ring buffer of a rank's last operations.
//!
//! Each slot is one cache line. The thread whose turn it is writes and never waits; any thread may read at any time,
//! even while an operation hangs. Each slot is a sequence lock: the writer marks the slot as being written, fills it,
//! and stores its version. A reader that finds the mark, or another version after reading than before, has read a torn
//! record and retries. All words are atomics, so a torn read is not undefined behaviour. The models in
//! `tests/loom/recorder.rs` have rings of one and two slots.
//!
//! # What is recorded
//!
//! An operation is recorded from its turn on, not from its call, so operations that wait for their turn are not in the
//! ring. Messages are recorded like collectives. The call site is where the program calls the public method
//! (`#[track_caller]`), also if that is a method of a layer above, such as `DataParallel::sync`: see `journal`.
//!
//! # Clocks
//!
//! The begin is the start of the operation's deadline, for which the clock was read already. The end of a successful
//! operation is read from the coarse clock (1 to 4 ms on Linux): the fine one takes 19 ns, several times as long as the
//! rest of the recorder. The end of a failed operation is read from the fine clock.

mod clock;

use std::panic::Location;
use std::ptr;
use std::time::Instant;

use self::clock::Clock;
use super::record::{CallSite, Message, Record, State};
use crate::sync::{AtomicPtr, AtomicU64, MAX_READ_RETRIES, Ordering, fence};
use crate::types::{Call, Fingerprint, Site};

/// Operations that a recorder keeps: 64 KiB for each rank of a group. A power of two, so that finding a slot is cheap.
pub(crate) const CAPACITY: usize = 1024;

/// The last operations of one rank in one group. Aligned to two cache lines, since processors fetch lines in pairs:
/// what every operation writes shares no line with another rank.
#[repr(align(128))]
pub(crate) struct Recorder {
    slots: Box<[Slot]>,
    /// Operations begun so far.
    begun: AtomicU64,
    /// Collectives among them.
    collectives: AtomicU64,
    pub clock: Clock,
}

/// Identifies an operation that was begun, to record later how it ended.
#[derive(Clone, Copy)]
pub(crate) struct OperationNumber(u64);

/// One recorded operation.
#[repr(align(64))]
#[derive(Default)]
struct Slot {
    /// 0: empty; odd: being written; otherwise twice the operation's number, counted from 1.
    version: AtomicU64,
    sequence: AtomicU64,
    count: AtomicU64,
    /// Operation, element type, reduction, root and sizes, packed by [`pack`].
    call: AtomicU64,
    /// 0 for a collective, otherwise the peer plus one, with [`SENDS`] set if this rank sends.
    message: AtomicU64,
    begun: AtomicU64,
    /// When it ended, with the outcome in the lowest two bits; 0 until then.
    ended: AtomicU64,
    /// Null, or from a `&'static Location`.
    at: AtomicPtr<Location<'static>>,
}

const DONE: u64 = 1;
const FAILED: u64 = 2;
const OUTCOME: u64 = 3;
const SENDS: u64 = 1 << 63;

impl Recorder {
    pub fn new() -> Recorder {
        Recorder::of(CAPACITY)
    }

    /// Keeps the last `capacity` operations, a power of two.
    pub fn of(capacity: usize) -> Recorder {
        Recorder {
            slots: (0..capacity).map(|_| Slot::default()).collect(),
            begun: AtomicU64::new(0),
            collectives: AtomicU64::new(0),
            clock: Clock::new(),
        }
    }

    /// Records a begin. Only the thread whose turn it is calls this, `done` and `failed`, so there is one writer.
    #[inline]
    pub fn begin(
        &self,
        call: &Call,
        sequence: u64,
        message: Option<(usize, bool)>,
        at: CallSite,
        start: Instant,
    ) -> OperationNumber {
        let number = self.begun.load(Ordering::Relaxed);
        let slot = self.slot(number);
        let message = message.map_or(0, |(peer, sends)| (peer as u64 + 1) | if sends { SENDS } else { 0 });
        slot.version.store(2 * number + 1, Ordering::Relaxed);
        // A reader that sees any word stored below also sees the mark: pairs with the fence in `try_read`.
        fence(Ordering::Release);
        slot.sequence.store(sequence, Ordering::Relaxed);
        slot.count.store(call.count as u64, Ordering::Relaxed);
        slot.call.store(pack(call), Ordering::Relaxed);
        slot.message.store(message, Ordering::Relaxed);
        slot.begun.store(self.clock.at(start), Ordering::Relaxed);
        slot.ended.store(0, Ordering::Relaxed);
        slot.at.store(ptr::from_ref(at).cast_mut(), Ordering::Relaxed);
        // A reader that sees this version sees all of the above.
        slot.version.store(2 * (number + 1), Ordering::Release);
        self.begun.store(number + 1, Ordering::Relaxed);
        if message == 0 {
            self.collectives.store(sequence + 1, Ordering::Relaxed);
        }
        OperationNumber(number)
    }

    /// Records success. Uses the coarse clock: the fine one costs several times the rest of the recorder.
    #[inline]
    pub fn done(&self, operation: OperationNumber) {
        self.end(operation, self.clock.coarse(), DONE);
    }

    /// Records failure.
    pub fn failed(&self, operation: OperationNumber) {
        self.end(operation, self.clock.at(Instant::now()), FAILED);
    }

    /// Stores time and outcome in one word, so no reader sees half of it. The version stays: the operation is the same.
    #[inline]
    fn end(&self, operation: OperationNumber, time: u64, outcome: u64) {
        self.slot(operation.0).ended.store(time & !OUTCOME | outcome, Ordering::Relaxed);
    }

    /// Returns the number of collectives begun so far.
    pub fn collectives(&self) -> u64 {
        self.collectives.load(Ordering::Relaxed)
    }

    /// Returns the kept operations, oldest first.
    pub fn records(&self) -> Vec<Record> {
        let mut records: Vec<_> = self.slots.iter().filter_map(Slot::read).collect();
        records.sort_by_key(|record| record.number);
        records
    }

    /// Returns the operation that was begun last, if there is one.
    pub fn last(&self) -> Option<Record> {
        // Relaxed: the slot says itself which operation it has.
        self.slot(self.begun.load(Ordering::Relaxed).checked_sub(1)?).read()
    }

    fn slot(&self, number: u64) -> &Slot {
        &self.slots[number as usize & (self.slots.len() - 1)]
    }
}

impl Slot {
    /// Returns the operation in this slot, if there is one. After [`MAX_READ_RETRIES`] torn reads, with operations
    /// overtaking the reader each time, the operation is left out.
    fn read(&self) -> Option<Record> {
        (0..MAX_READ_RETRIES).find_map(|_| self.try_read())?
    }

    /// Returns `None` for a torn record, `Some(None)` for an empty slot.
    fn try_read(&self) -> Option<Option<Record>> {
        let version = self.version.load(Ordering::Acquire);
        if version == 0 {
            return Some(None);
        }
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let (sequence, count, packed) = (word(&self.sequence), word(&self.count), word(&self.call));
        let (message, begun, ended) = (word(&self.message), word(&self.begun), word(&self.ended));
        let at = self.at.load(Ordering::Relaxed);
        // If any word above is from a later operation, its mark is visible below: pairs with the fence in `begin`.
        fence(Ordering::Acquire);
        if !version.is_multiple_of(2) || self.version.load(Ordering::Relaxed) != version {
            return None;
        }
        // SAFETY: `begin` stores only pointers that it got as `&'static Location`; before that the pointer is null.
        let at = unsafe { at.as_ref() }?;
        let state = match ended & OUTCOME {
            DONE => State::Done,
            FAILED => State::Failed,
            _ => State::Begun,
        };
        Some(Some(Record {
            number: version / 2 - 1,
            sequence,
            call: unpack(packed, count)?,
            message: message
                .checked_sub(1)
                .map(|message| Message { peer: (message & !SENDS) as usize, sends: message & SENDS != 0 }),
            state,
            begun_ns: begun,
            // The coarse clock lags behind the fine one.
            ended_ns: (state != State::Begun).then(|| (ended & !OUTCOME).max(begun)),
            at: format!("{}:{}", at.file(), at.line()),
        }))
    }
}

/// Packs a call without its count, which has a word of its own. 16 bits are left for the fingerprint of the sizes,
/// which is shortened: more would not fit a slot of one cache line.
#[inline]
fn pack(call: &Call) -> u64 {
    let reduction = call.reduction.map_or(0, |op| op as u64 + 1);
    // A root beyond 32 bits is not a rank of any group that can exist.
    let root = call.root.map_or(0, |root| u64::from(root as u32) + 1);
    let sizes = u64::from(call.sizes.map_or(0, Fingerprint::shortened));
    call.operation as u64 | (call.dtype as u64) << 5 | reduction << 10 | root << 13 | sizes << 48
}

/// The inverse of [`pack`]. It goes through the bytes of a [`Site`], whose parser checks the numbers.
fn unpack(packed: u64, count: u64) -> Option<Call> {
    let mut bytes = [0; Site::BYTES];
    let absent = |number: u64| number.checked_sub(1).map_or(u32::MAX, |number| number as u32);
    bytes[8..16].copy_from_slice(&count.to_le_bytes());
    bytes[16..20].copy_from_slice(&absent(packed >> 13 & 0x7_ffff_ffff).to_le_bytes());
    bytes[20..24].copy_from_slice(&absent(packed >> 10 & 7).to_le_bytes());
    (bytes[24], bytes[25]) = (packed as u8 & 0x1f, (packed >> 5) as u8 & 0x1f);
    bytes[28..30].copy_from_slice(&((packed >> 48) as u16).to_le_bytes());
    Site::from_bytes(&bytes).map(|site| site.call)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{DType, Operation, ReduceOp};

    fn call(count: usize) -> Call {
        let (reduction, root) = (Some(ReduceOp::Max), Some(count % 7));
        Call { operation: Operation::Reduce, dtype: DType::BF16, count, reduction, root, sizes: None }
    }

    fn begin(recorder: &Recorder, number: u64) -> OperationNumber {
        let message = (number % 3 == 1).then_some((number as usize % 5, number.is_multiple_of(2)));
        recorder.begin(&call(number as usize), number, message, Location::caller(), Instant::now())
    }

    /// Checks a record made by `begin` above, all of whose fields follow from its number.
    fn check(record: &Record) {
        let number = record.number;
        assert_eq!((record.sequence, record.call), (number, call(number as usize)));
        let message = Message { peer: number as usize % 5, sends: number.is_multiple_of(2) };
        assert_eq!(record.message, (number % 3 == 1).then_some(message));
        assert!(record.at.contains("recorder.rs:"), "{}", record.at);
        assert_eq!(record.ended_ns.is_some(), record.state != State::Begun);
    }

    #[test]
    fn a_slot_is_one_cache_line() {
        assert_eq!(size_of::<Slot>(), 64);
    }

    #[test]
    fn calls_survive_packing() {
        let mut all = vec![call(0), call(usize::MAX)];
        for operation in Operation::ALL.iter().copied() {
            for sizes in [0, 1, 0xffff].map(Fingerprint::from_word) {
                all.push(Call { operation, dtype: DType::F32, count: 1, reduction: None, root: None, sizes });
            }
        }
        all.extend(DType::ALL.iter().map(|dtype| Call { dtype: *dtype, ..call(3) }));
        for reduction in ReduceOp::ALL.iter().copied() {
            all.push(Call {
                reduction: Some(reduction),
                root: Some(1 << 31),
                sizes: Fingerprint::from_word(0xabcd),
                ..call(5)
            });
        }
        for call in all {
            assert_eq!(unpack(pack(&call), call.count as u64), Some(call));
        }
    }

    #[test]
    fn operations_are_in_progress_until_they_end() {
        let recorder = Recorder::new();
        assert_eq!((recorder.records(), recorder.collectives()), (vec![], 0));
        let start = Instant::now();
        let begun = [begin(&recorder, 0), begin(&recorder, 1), begin(&recorder, 2)];
        recorder.done(begun[0]);
        recorder.failed(begun[1]);
        let records = recorder.records();
        records.iter().for_each(check);
        assert_eq!(records.iter().map(|r| r.state).collect::<Vec<_>>(), [State::Done, State::Failed, State::Begun]);
        assert_eq!(recorder.collectives(), 3);
        for record in &records {
            assert!(record.begun_ns >= recorder.clock.at(start));
            assert!(record.ended_ns.is_none_or(|ended| ended >= record.begun_ns));
        }
    }

    #[test]
    fn the_ring_keeps_the_last_operations() {
        let recorder = Recorder::new();
        let total = 3 * CAPACITY as u64 + 17;
        (0..total).for_each(|number| recorder.done(begin(&recorder, number)));
        let records = recorder.records();
        assert!(records.iter().map(|record| record.number).eq(total - CAPACITY as u64..total));
        records.iter().for_each(check);
    }

    #[test]
    fn a_concurrent_reader_sees_no_torn_record() {
        let recorder = Recorder::new();
        // Always reads the slot that is written next.
        let next = || recorder.slot(recorder.begun.load(Ordering::Relaxed)).read();
        let mut number = 0;
        std::thread::scope(|scope| {
            let reader = scope.spawn(move || (0..100_000).filter_map(|_| next()).for_each(|record| check(&record)));
            while !reader.is_finished() || number < 2 * CAPACITY as u64 {
                recorder.done(begin(&recorder, number));
                number += 1;
            }
        });
        assert!(recorder.records().iter().map(|record| record.number).eq(number - CAPACITY as u64..number));
    }
}
