//! Conversations that begin as those of a rank and go on wrongly: truncated, repeated, reordered, too long, garbled, or
//! with what another rank said.
//!
//! Strangers without the secret do no harm: the ranks beside them connect and compute. Without a secret they get
//! further, as a rank that breaks the protocol: its peer gets a typed error in time, or what the rank sent. Neither
//! leaves descriptors, threads or memory behind, for which each test has a process of its own.
//!
//! `BONFIRE_STRANGERS` is the number of rounds (2 by default), and `BONFIRE_STRANGERS_SEED` repeats those of a run.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use bonfire_core::{Builder, Error, Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, send_line};
use bonfire_testing::relay::{dial, relay};
use bonfire_testing::resources::{Resources, listening};
use bonfire_testing::settings::{number, seed};
use bonfire_testing::transport::Random;
use bonfire_testing::{free_address, in_parallel, wire};

use super::{bare, connecting, rank};

const SEED: &str = "BONFIRE_STRANGERS_SEED";

/// How long a stranger waits for an answer. One that goes on without it is as strange.
const SHORTLY: Duration = Duration::from_millis(20);

/// Longer than any deadline in a round.
const LIMIT: Duration = Duration::from_secs(120);

/// More than an allocator keeps, and less than the shortest message that is too long.
const SLACK: usize = 64 << 10;

/// What a rank sent on a connection.
struct Conversation {
    bytes: Vec<u8>,
    /// Where messages end.
    ends: Vec<usize>,
}

impl Conversation {
    fn new(bytes: Vec<u8>) -> Conversation {
        // The prologue; in a conversation without a secret, frames follow it, of which each begins with its length.
        let mut ends = vec![32.min(bytes.len())];
        while let Some(length) = bytes.get(ends[ends.len() - 1]..).and_then(|rest| rest.first_chunk()) {
            let end = ends[ends.len() - 1].saturating_add(4 + u32::from_le_bytes(*length) as usize);
            if end > bytes.len() {
                break;
            }
            ends.push(end);
        }
        Conversation { bytes, ends }
    }

    fn purpose(&self) -> u8 {
        self.bytes[7]
    }
}

/// Random numbers below a bound.
struct Chance(Random);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        (self.0.next() >> 33) as usize % bound.max(1)
    }

    fn one_of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// A valid beginning of `own` and a wrong continuation.
    fn garble(&mut self, own: &Conversation, others: &[Conversation]) -> Vec<u8> {
        let whole = &own.bytes[..];
        let cut = if self.below(4) == 0 { self.below(whole.len() + 1) } else { *self.one_of(&own.ends) };
        let (begin, rest) = whole.split_at(cut);
        let mut rest = rest.to_vec();
        for _ in 0..=self.below(3) {
            let middle = self.below(rest.len() + 1);
            match self.below(7) {
                // Less, twice, and in another order.
                0 => rest.truncate(middle),
                1 => rest.extend_from_within(..middle),
                2 => rest.rotate_left(middle),
                // A length that is too large, with and without as many bytes.
                3 => drop(rest.splice(middle..middle, [0xff, 0xff, 0xff, self.below(256) as u8])),
                4 => drop(rest.splice(middle..middle, std::iter::repeat_n(self.below(256) as u8, 300 << 10))),
                // What another rank said, from anywhere on.
                5 => {
                    let other = &self.one_of(others).bytes;
                    rest.extend(&other[self.below(other.len())..]);
                }
                _ => {
                    for _ in 0..=self.below(8) {
                        let at = self.below(rest.len());
                        if let Some(byte) = rest.get_mut(at) {
                            *byte ^= 1 << self.below(8);
                        }
                    }
                }
            }
        }
        [begin, &rest].concat()
    }

    /// Sends `bytes` in some parts, reads in between, and ends the connection or leaves it open.
    fn say(&mut self, mut stream: TcpStream, bytes: &[u8]) -> Option<TcpStream> {
        stream.set_read_timeout(Some(SHORTLY)).expect("a connection");
        stream.set_write_timeout(Some(SHORTLY)).expect("a connection");
        for part in bytes.chunks(1 + self.below(bytes.len() + 1)) {
            // The listener may have closed it, or may have stopped reading.
            if stream.write_all(part).is_err() {
                break;
            }
            let _ = stream.read(&mut [0; 4096]);
        }
        match self.below(4) {
            0 => drop(stream.shutdown(Shutdown::Write)),
            1 => return None,
            _ => {}
        }
        Some(stream)
    }
}

/// Runs a job of two ranks and records what rank 1 says to rank 0.
fn recorded(settings: impl Fn(usize, &str) -> Builder) -> Vec<Conversation> {
    let address = free_address();
    let (relayed, recordings) = relay(address.clone());
    let ranks = [connecting(settings(0, &address)), connecting(settings(1, &relayed.to_string()))];
    super::assert_all_connect(ranks.into());
    let recordings = recordings.lock().unwrap();
    let said = recordings.iter().map(|recording| recording.there.lock().unwrap().clone());
    said.filter(|bytes| bytes.len() > 32).map(Conversation::new).collect()
}

fn sum(group: &Group, len: usize) -> Result<(), Error> {
    let (rank, n) = (group.rank() as i64, group.world_size() as i64);
    let mut data: Vec<i64> = (0..len as i64).map(|i| i * (rank + 1)).collect();
    group.all_reduce(&mut data, ReduceOp::Sum)?;
    assert!((0i64..).zip(&data).all(|(i, sum)| *sum == i * n * (n + 1) / 2), "{len} elements on rank {rank}");
    Ok(())
}

/// Three ranks with a secret, and strangers who have recorded other ranks with it.
fn beside_strangers(chance: &mut Chance, heard: &[Conversation]) {
    let speak = |chance: &mut Chance, addresses: &[SocketAddr]| -> Vec<TcpStream> {
        let stream = |_| {
            let (to, own) = (*chance.one_of(addresses), chance.one_of(heard));
            let bytes = chance.garble(own, heard);
            chance.say(dial(&to.to_string()), &bytes)
        };
        (0..12).filter_map(stream).collect()
    };
    let (address, older) = (free_address(), listening());
    let zero = connecting(rank(0, 3, &address));
    let mut open = speak(chance, &[address.parse().expect("an address")]);
    let others = [1, 2].map(|r| connecting(rank(r, 3, &address)));
    let ranks =
        [zero].into_iter().chain(others).map(|rank| rank.join().expect("no panic").expect("all ranks are there"));
    let (groups, over): (Vec<Group>, _) = (ranks.collect(), AtomicBool::new(false));
    thread::scope(|scope| {
        for group in &groups {
            let over = &over;
            scope.spawn(move || {
                let mut last = [0u8];
                while last == [0] {
                    [1, 3000, 100_000].iter().for_each(|len| sum(group, *len).expect("all ranks are there"));
                    last = [over.load(Ordering::Relaxed).into()];
                    group.all_reduce(&mut last, ReduceOp::Max).expect("all ranks are there");
                }
            });
        }
        let listeners = listening().into_iter().filter(|address| !older.contains(address));
        open.extend(speak(chance, &listeners.collect::<Vec<_>>()));
        over.store(true, Ordering::Relaxed);
    });
}

/// A rank without a secret, whose only peer says what rank 1 of another job said, and goes on wrongly.
#[expect(clippy::disallowed_methods, reason = "the strangers of this test dial like any program")]
fn beside_a_broken_rank(chance: &mut Chance, heard: &[Conversation]) {
    let address = free_address();
    let zero = bare(0, 2, &address).rendezvous_timeout(Duration::from_secs(1)).deadline(Duration::from_secs(2));
    let zero = thread::spawn(move || {
        let group = zero.heartbeat_timeout(Duration::from_secs(3)).connect()?;
        // The calls of the recorded job. What the other rank sends may be other elements, so no result is known.
        group.all_reduce(&mut vec![1i64; 100_000], ReduceOp::Sum)?;
        group.barrier()
    });
    let hello = heard.iter().find(|own| own.purpose() == wire::RENDEZVOUS).expect("a rank says hello");
    let mut control = dial(&address);
    control.set_read_timeout(Some(LIMIT)).expect("a connection");
    // The answer to the prologue has the number of the job, which other connections need.
    let mut answer = [0; wire::ANSWER];
    let greeted = control.write_all(&hello.bytes[..32]).and_then(|()| control.read_exact(&mut answer));
    greeted.expect("rank 0 listens, and a prologue is right");
    let mut bytes = chance.garble(hello, heard);
    let mut open = Vec::new();
    // Half of the ranks say a correct hello first, and fail later.
    if chance.below(2) == 0 {
        let end = *hello.ends.get(1).expect("a hello");
        bytes = [&hello.bytes[32..end], bytes.get(end..).unwrap_or(&[])].concat();
        let _ = control.write_all(&bytes[..end - 32]);
        bytes.drain(..end - 32);
        for data in heard.iter().filter(|own| own.purpose() == wire::DATA) {
            let mut bytes = chance.garble(data, heard);
            if let Some(session) = bytes.get_mut(8..16) {
                session.copy_from_slice(&answer[8..16]);
            }
            // Rank 0 may have failed, and may listen no more.
            let Ok(stream) = TcpStream::connect(&address) else { continue };
            open.extend(chance.say(stream, &bytes));
        }
    } else {
        bytes.drain(..32.min(bytes.len()));
    }
    open.extend(chance.say(control, &bytes));
    let _: Result<(), Error> = zero.join().expect("no panic");
}

/// Runs rounds in a process of their own, `width` at a time.
fn rounds(
    name: &str,
    width: usize,
    settings: fn(usize, usize, &str) -> Builder,
    round: fn(&mut Chance, &[Conversation]),
) {
    let count = number("BONFIRE_STRANGERS").unwrap_or(2);
    let seed = seed(SEED);
    if !is_child() {
        println!("BONFIRE_STRANGERS={count} {SEED}={seed}");
        let process = Process::start(name, &[(SEED, seed.to_string())]);
        for number in 0..count {
            let line = process.read_line_within(LIMIT);
            assert_eq!(line.as_deref(), Ok("right"), "round {number} of {name}, {SEED}={seed}");
        }
        return;
    }
    let heard = recorded(|rank, address| settings(rank, 2, address));
    // Opens what a process opens once and keeps.
    round(&mut Chance(Random(seed | 1)), &heard);
    let before = Resources::now();
    for number in 0..count {
        let cases: Vec<u64> = (0..width as u64).collect();
        in_parallel(&cases, width, |case| {
            let numbers =
                [seed, number, *case].iter().fold(1u64, |sum, n| (sum ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            round(&mut Chance(Random(numbers | 1)), &heard);
        });
        let (now, more) = Resources::settle(&before);
        assert!(more.is_empty(), "{more:?}");
        assert!(now.memory < before.memory + SLACK, "{} KiB, {} before", now.memory, before.memory);
        send_line("right");
    }
}

#[test]
fn strangers_who_know_the_protocol_do_no_harm() {
    rounds("authentication::strangers::strangers_who_know_the_protocol_do_no_harm", 1, rank, beside_strangers);
}

#[test]
fn a_rank_that_breaks_the_protocol_is_an_error_in_time() {
    rounds(
        "authentication::strangers::a_rank_that_breaks_the_protocol_is_an_error_in_time",
        8,
        bare,
        beside_a_broken_rank,
    );
}
