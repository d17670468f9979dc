//! A fuzzer for readers of untrusted bytes: a test of a reader calls [`fuzz`].
//!
//! Inputs are well-formed messages and the files in `tests/corpus`, with some changes. Proptest makes the changes and
//! shrinks a failing input. A coverage-guided fuzzer would go deeper, but needs every dependency compiled for it. These
//! readers are shallow, and this test runs with all others, everywhere.

use std::cell::RefCell;
use std::fs;
#[cfg(unix)]
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

#[cfg(unix)]
use bonfire_core::internal::frame;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestError, TestRunner};
#[cfg(unix)]
use serde::{Serialize, de::DeserializeOwned};

/// How long each reader is tested, in seconds, unless `BONFIRE_FUZZ_SECONDS` says otherwise.
const SECONDS: f64 = 1.0;

/// Inputs between two checks of the clock.
const BATCH: u32 = 256;

/// The longest input in bytes, and the number of inputs to keep.
const LONGEST_INPUT: usize = 4096;
const POOL: usize = 512;

/// Runs `target` on `seeds`, on the files in `tests/corpus/NAME`, and on changed copies of both until the time is up.
/// `target` panics if the reader is wrong, and returns whether the reader accepted the bytes as a message. Accepted
/// inputs are changed further.
///
/// An input that makes `target` panic is written to the corpus.
pub fn fuzz(name: &str, seeds: impl IntoIterator<Item = Vec<u8>>, target: impl Fn(&[u8]) -> bool) {
    let folder =
        Path::new(&std::env::var("CARGO_MANIFEST_DIR").expect("cargo runs the test")).join("tests/corpus").join(name);
    let mut pool: Vec<Vec<u8>> = seeds.into_iter().collect();
    let seed_count = pool.len();
    for file in corpus_files(&folder) {
        pool.push(fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display())));
    }
    for (i, input) in pool.iter().enumerate() {
        let run = catch_unwind(AssertUnwindSafe(|| target(input)));
        run.unwrap_or_else(|panic| {
            let origin = if i < seed_count { "the seeds" } else { "the corpus" };
            eprintln!("{name}: input {i}, from {origin}: {}", input.escape_ascii());
            resume_unwind(panic)
        });
    }
    let seconds = std::env::var("BONFIRE_FUZZ_SECONDS").map_or(SECONDS, |text| text.parse().expect("a number"));
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let config = Config { cases: BATCH, failure_persistence: None, ..Config::default() };
    let strategy = (any::<Index>(), vec(change(), 1..6));
    let mut runs = 0u64;
    while Instant::now() < until {
        let taken = RefCell::new(Vec::new());
        // Each runner runs one batch, with random numbers of its own.
        let result = TestRunner::new(config.clone()).run(&strategy, |(seed, changes)| {
            let input = changed(&pool, seed, &changes);
            if target(&input) {
                taken.borrow_mut().push(input);
            }
            Ok(())
        });
        if let Err(TestError::Fail(reason, (seed, changes))) = result {
            let input = changed(&pool, seed, &changes);
            let file = write_to_corpus(&folder, &input);
            panic!("{name}: {reason}; the input is now {}: {}", file.display(), input.escape_ascii());
        }
        result.expect("no input is rejected");
        runs += u64::from(BATCH);
        for input in taken.into_inner() {
            match pool.len() {
                // Replaces any input except for the seeds.
                POOL.. => {
                    let at = seed_count + runs as usize % (pool.len() - seed_count);
                    pool[at] = input;
                    runs += 1;
                }
                _ => pool.push(input),
            }
        }
    }
    println!("{name}: {runs} inputs");
}

/// Tests that frames of arbitrary bytes are either read as a `T` or rejected. `messages` are the seeds.
#[cfg(unix)]
pub fn fuzz_frames<T: Serialize + DeserializeOwned>(name: &str, messages: &[T]) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let block_on = |stream: &mut &[u8]| runtime.block_on(frame::read::<T>(stream));
    fuzz(name, messages.iter().map(|message| frame::encode(message).unwrap()), |bytes| {
        let mut rest = bytes;
        let message = block_on(&mut rest);
        let length = bytes.first_chunk().map_or(0, |head| u32::from_le_bytes(*head) as usize);
        let read = bytes.len() - rest.len();
        assert!(read <= 4 + length.min(frame::LONGEST));
        if length > frame::LONGEST {
            assert!(matches!(&message, Err(e) if e.kind() == io::ErrorKind::InvalidData) && read == 4);
        }
        if let Ok(message) = message {
            assert_eq!(read, if message.is_some() { 4 + length } else { 0 });
        }
        // After a change the length prefix is rarely right, so the body is also decoded on its own.
        let Some((_, body)) = bytes.split_first_chunk::<4>() else { return false };
        let Ok(message) = frame::decode::<T>(body) else { return false };
        let frame = frame::encode(&message).unwrap();
        // Numbers may have been encoded in more bytes than they need. ShrinkError from that, encoding restores what was
        // read.
        assert!(frame.len() <= bytes.len());
        let again = block_on(&mut &frame[..]).unwrap().expect("a message");
        assert_eq!(frame::encode(&again).unwrap(), frame);
        assert!(frame::decode::<T>(&[body, &[0]].concat()).is_err(), "what follows a message is not ignored");
        true
    });
}

/// Returns the files of the corpus, in the same order on every machine.
fn corpus_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    files.sort();
    files
}

fn write_to_corpus(folder: &Path, input: &[u8]) -> PathBuf {
    // The Fowler-Noll-Vo hash (FNV-1a): the same input gets the same name.
    let hash = input
        .iter()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    let file = folder.join(format!("{hash:016x}"));
    let written = fs::create_dir_all(folder).and_then(|()| fs::write(&file, input));
    if let Err(e) = written {
        eprintln!("cannot write {}: {e}", file.display());
    }
    file
}

/// One change of an input. Positions are fractions of its length.
#[derive(Clone, Debug)]
enum Change {
    Flip(Index, u32),
    Set(Index, u8),
    /// Overwrites this many bytes with a number, little endian.
    Number(Index, usize, u64),
    /// Replaces a varint as postcard writes it: seven bits per byte.
    Varint(Index, u64),
    /// Replaces a run of decimal digits.
    Digits(Index, u64),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Cut(Index),
    /// Copies bytes of another input: which, from where, how many, to where, and whether they overwrite.
    Splice(Index, Index, usize, Index, bool),
}

fn change() -> impl Strategy<Value = Change> {
    let at = any::<Index>;
    prop_oneof![
        (at(), 0..8u32).prop_map(|(at, bit)| Change::Flip(at, bit)),
        (at(), any::<u8>()).prop_map(|(at, byte)| Change::Set(at, byte)),
        (at(), prop::sample::select(vec![1, 2, 4, 8]), number()).prop_map(|(at, n, x)| Change::Number(at, n, x)),
        (at(), number()).prop_map(|(at, number)| Change::Varint(at, number)),
        (at(), number()).prop_map(|(at, number)| Change::Digits(at, number)),
        (at(), vec(any::<u8>(), 1..16)).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        (at(), 1..32usize).prop_map(|(at, bytes)| Change::Remove(at, bytes)),
        at().prop_map(Change::Cut),
        (at(), at(), 1..64usize, at(), any::<bool>())
            .prop_map(|(other, from, n, to, over)| { Change::Splice(other, from, n, to, over) }),
    ]
}

/// Numbers at which readers are likely to fail.
fn number() -> impl Strategy<Value = u64> {
    let edge = (0..64u32, 0..3u64).prop_map(|(shift, by)| (1u64 << shift).wrapping_add(by).wrapping_sub(1));
    prop_oneof![0..20u64, edge, Just(u64::MAX), any::<u64>()]
}

fn changed(pool: &[Vec<u8>], seed: Index, changes: &[Change]) -> Vec<u8> {
    let mut input = if pool.is_empty() { Vec::new() } else { pool[seed.index(pool.len())].clone() };
    for change in changes {
        apply(&mut input, pool, change);
        input.truncate(LONGEST_INPUT);
    }
    input
}

fn apply(input: &mut Vec<u8>, pool: &[Vec<u8>], change: &Change) {
    let len = input.len();
    let within = |at: &Index| at.index(len.max(1));
    let overwrite = |input: &mut Vec<u8>, at: usize, bytes: &[u8]| {
        input.iter_mut().skip(at).zip(bytes).for_each(|(old, new)| *old = *new);
    };
    match change {
        Change::Flip(at, bit) => input.iter_mut().skip(within(at)).take(1).for_each(|byte| *byte ^= 1 << bit),
        Change::Set(at, byte) => overwrite(input, within(at), &[*byte]),
        Change::Number(at, width, number) => overwrite(input, within(at), &number.to_le_bytes()[..*width]),
        Change::Varint(at, number) => {
            let start = within(at).min(len);
            let old = input[start..].iter().position(|byte| *byte < 0x80).map_or(len, |end| start + end + 1);
            drop(input.splice(start..old, varint(*number)));
        }
        Change::Digits(at, number) => {
            let Some(start) = (within(at)..len).find(|i| input[*i].is_ascii_digit()) else { return };
            let digits = input[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
            input.splice(start..start + digits, number.to_string().into_bytes());
        }
        Change::Insert(at, bytes) => drop(input.splice(at.index(len + 1)..at.index(len + 1), bytes.iter().copied())),
        Change::Remove(at, bytes) => drop(input.drain(within(at).min(len)..len.min(within(at) + bytes))),
        Change::Cut(at) => input.truncate(at.index(len + 1)),
        Change::Splice(other, from, bytes, to, over) => {
            let Some(other) = pool.get(other.index(pool.len().max(1))) else { return };
            let from = from.index(other.len() + 1);
            let piece = &other[from..other.len().min(from + bytes)];
            let to = to.index(len + 1);
            let end = if *over { len.min(to + piece.len()) } else { to };
            drop(input.splice(to..end, piece.iter().copied()));
        }
    }
}

fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}
