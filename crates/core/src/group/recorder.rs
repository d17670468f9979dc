//! The recorder: what a rank's last operations were.
//!
//! A ring of slots, one cache line each. The thread whose turn it is writes, and never waits; anybody may read at any
//! time, also while an operation hangs. A writer marks a slot as being written, fills it, and gives it its number; a
//! reader that finds another number after reading than before, or the mark, has read a mixture and tries again (a
//! sequence lock, of atomics only, so that even a mixture is no undefined behaviour).

mod clock;

use std::panic::Location;
use std::ptr;
use std::time::Instant;

use self::clock::Clock;
use super::record::{CallSite, Message, Record, State};
use crate::sync::{AtomicPtr, AtomicU64, Ordering, TRIES, fence};
use crate::types::{Call, Fingerprint, Site};

/// How many operations are remembered: 64 KiB for each rank of a group. A power of two, so that finding a slot is cheap.
pub(crate) const KEPT: usize = 1024;

/// The last operations of one rank in one group. What is written in each operation shares no cache line with another rank
/// (two, since processors fetch lines in pairs).
#[repr(align(128))]
pub(crate) struct Recorder {
    slots: Box<[Slot]>,
    /// Operations begun so far.
    begun: AtomicU64,
    /// Those of them that are collectives.
    collectives: AtomicU64,
    pub clock: Clock,
}

/// An operation that was begun, to say later how it ended.
#[derive(Clone, Copy)]
pub(crate) struct Entry(u64);

/// One operation.
#[repr(align(64))]
#[derive(Default)]
struct Slot {
    /// 0: nothing yet; odd: being written; else twice the operation's number, counted from 1.
    version: AtomicU64,
    sequence: AtomicU64,
    count: AtomicU64,
    /// Operation, element type, reduction and root, as a tag has them.
    what: AtomicU64,
    /// 0 for a collective, else the peer plus one, and whether this rank sends.
    message: AtomicU64,
    begun: AtomicU64,
    /// When it ended, and how in the lowest two bits; 0 while it has not.
    ended: AtomicU64,
    /// Null, or from a `&'static Location`.
    at: AtomicPtr<Location<'static>>,
}

const DONE: u64 = 1;
const FAILED: u64 = 2;
const HOW: u64 = 3;
const SENDS: u64 = 1 << 63;

impl Recorder {
    pub fn new() -> Recorder {
        Recorder::of(KEPT)
    }

    /// Remembers so many operations, a power of two.
    pub fn of(kept: usize) -> Recorder {
        Recorder {
            slots: (0..kept).map(|_| Slot::default()).collect(),
            begun: AtomicU64::new(0),
            collectives: AtomicU64::new(0),
            clock: Clock::new(),
        }
    }

    /// An operation begins. `begin` and the two after it are for the thread whose turn it is, so there is one writer.
    #[inline]
    pub fn begin(
        &self,
        call: &Call,
        sequence: u64,
        message: Option<(usize, bool)>,
        at: CallSite,
        start: Instant,
    ) -> Entry {
        let number = self.begun.load(Ordering::Relaxed);
        let slot = self.slot(number);
        let message = message.map_or(0, |(peer, sends)| (peer as u64 + 1) | if sends { SENDS } else { 0 });
        slot.version.store(2 * number + 1, Ordering::Relaxed);
        // Who sees a word of what follows sees the mark, too: pairs with the fence in `read`.
        fence(Ordering::Release);
        slot.sequence.store(sequence, Ordering::Relaxed);
        slot.count.store(call.count as u64, Ordering::Relaxed);
        slot.what.store(pack(call), Ordering::Relaxed);
        slot.message.store(message, Ordering::Relaxed);
        slot.begun.store(self.clock.at(start), Ordering::Relaxed);
        slot.ended.store(0, Ordering::Relaxed);
        slot.at.store(ptr::from_ref(at).cast_mut(), Ordering::Relaxed);
        // Who sees this number sees all of the above.
        slot.version.store(2 * (number + 1), Ordering::Release);
        self.begun.store(number + 1, Ordering::Relaxed);
        if message == 0 {
            self.collectives.store(sequence + 1, Ordering::Relaxed);
        }
        Entry(number)
    }

    /// The operation is done. By the coarse clock: the fine one costs several times the rest of the recorder.
    #[inline]
    pub fn done(&self, entry: Entry) {
        self.end(entry, self.clock.coarse(), DONE);
    }

    /// The operation has failed.
    pub fn failed(&self, entry: Entry) {
        self.end(entry, self.clock.at(Instant::now()), FAILED);
    }

    /// One word, so no reader sees a half of it; the operation stays the same, and so does the number of the slot.
    #[inline]
    fn end(&self, entry: Entry, when: u64, how: u64) {
        self.slot(entry.0).ended.store(when & !HOW | how, Ordering::Relaxed);
    }

    /// Collectives begun so far.
    pub fn collectives(&self) -> u64 {
        self.collectives.load(Ordering::Relaxed)
    }

    /// What is remembered, oldest first.
    pub fn records(&self) -> Vec<Record> {
        let mut records: Vec<_> = self.slots.iter().filter_map(Slot::read).collect();
        records.sort_by_key(|record| record.number);
        records
    }

    fn slot(&self, number: u64) -> &Slot {
        &self.slots[number as usize & (self.slots.len() - 1)]
    }
}

impl Slot {
    /// The operation in this slot, if there is one. Operations that overtake the reader again and again would make it
    /// give up: it is then left out.
    fn read(&self) -> Option<Record> {
        (0..TRIES).find_map(|_| self.try_read())?
    }

    /// `None` for a mixture, `Some(None)` for nothing.
    fn try_read(&self) -> Option<Option<Record>> {
        let version = self.version.load(Ordering::Acquire);
        if version == 0 {
            return Some(None);
        }
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let (sequence, count, what) = (word(&self.sequence), word(&self.count), word(&self.what));
        let (message, begun, ended) = (word(&self.message), word(&self.begun), word(&self.ended));
        let at = self.at.load(Ordering::Relaxed);
        // A word of a later operation would make its mark visible here: pairs with the fence in `begin`.
        fence(Ordering::Acquire);
        if !version.is_multiple_of(2) || self.version.load(Ordering::Relaxed) != version {
            return None;
        }
        // SAFETY: `begin` stores nothing but what it got as a `&'static Location`; before that it is null.
        let at = unsafe { at.as_ref() }?;
        let state = match ended & HOW {
            DONE => State::Done,
            FAILED => State::Failed,
            _ => State::Begun,
        };
        Some(Some(Record {
            number: version / 2 - 1,
            sequence,
            call: unpack(what, count)?,
            message: message
                .checked_sub(1)
                .map(|message| Message { peer: (message & !SENDS) as usize, sends: message & SENDS != 0 }),
            state,
            begun_ns: begun,
            // The coarse clock is behind the fine one.
            ended_ns: (state != State::Begun).then(|| (ended & !HOW).max(begun)),
            at: format!("{}:{}", at.file(), at.line()),
        }))
    }
}

/// All of a call but its count, which has a word of its own.
#[inline]
fn pack(call: &Call) -> u64 {
    let reduction = call.reduction.map_or(0, |op| op as u64 + 1);
    // A root that does not fit is no rank of any group that could be made.
    let root = call.root.map_or(0, |root| u64::from(root as u32) + 1);
    let sizes = u64::from(Fingerprint::to_word(call.sizes));
    call.operation as u64 | (call.dtype as u64) << 5 | reduction << 10 | root << 13 | sizes << 48
}

/// The inverse of [`pack`], by way of a site, which knows the numbers.
fn unpack(what: u64, count: u64) -> Option<Call> {
    let mut bytes = [0; Site::BYTES];
    let absent = |number: u64| number.checked_sub(1).map_or(u32::MAX, |number| number as u32);
    bytes[8..16].copy_from_slice(&count.to_le_bytes());
    bytes[16..20].copy_from_slice(&absent(what >> 13 & 0x7_ffff_ffff).to_le_bytes());
    bytes[20..24].copy_from_slice(&absent(what >> 10 & 7).to_le_bytes());
    (bytes[24], bytes[25]) = (what as u8 & 0x1f, (what >> 5) as u8 & 0x1f);
    bytes[26..28].copy_from_slice(&((what >> 48) as u16).to_le_bytes());
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

    fn begin(recorder: &Recorder, number: u64) -> Entry {
        let message = (number % 3 == 1).then_some((number as usize % 5, number.is_multiple_of(2)));
        recorder.begin(&call(number as usize), number, message, Location::caller(), Instant::now())
    }

    /// Everything in a record follows from its number here.
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
            for sizes in [0, 1, u16::MAX].map(Fingerprint::from_word) {
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
    fn an_operation_is_begun_until_it_has_ended() {
        let recorder = Recorder::new();
        assert_eq!((recorder.records(), recorder.collectives()), (vec![], 0));
        let start = Instant::now();
        let entries = [begin(&recorder, 0), begin(&recorder, 1), begin(&recorder, 2)];
        recorder.done(entries[0]);
        recorder.failed(entries[1]);
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
    fn the_ring_keeps_the_last_ones() {
        let recorder = Recorder::new();
        let total = 3 * KEPT as u64 + 17;
        (0..total).for_each(|number| recorder.done(begin(&recorder, number)));
        let records = recorder.records();
        assert!(records.iter().map(|record| record.number).eq(total - KEPT as u64..total));
        records.iter().for_each(check);
    }

    #[test]
    fn a_reader_beside_the_writer_sees_no_mixture() {
        let recorder = Recorder::new();
        // Always the slot that is written next.
        let next = || recorder.slot(recorder.begun.load(Ordering::Relaxed)).read();
        let mut number = 0;
        std::thread::scope(|scope| {
            let reader = scope.spawn(move || (0..100_000).filter_map(|_| next()).for_each(|record| check(&record)));
            while !reader.is_finished() || number < 2 * KEPT as u64 {
                recorder.done(begin(&recorder, number));
                number += 1;
            }
        });
        assert!(recorder.records().iter().map(|record| record.number).eq(number - KEPT as u64..number));
    }
}
