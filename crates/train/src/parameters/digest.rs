//! Digests by which the ranks compare their parameters.
//!
//! Steps, `verify` and checkpoints compare by the same means: the digest of every byte that a rank has, against those
//! of the ranks that have the same. Where a model is in parts, these are the ranks with the same part.
//!
//! # Cost
//! A digest reads the parameters once, about as fast as memory is read, and each rank adds two words to a message that
//! it sends anyway. An exchange of gradients moves each element several times. Every 64th step, a digest adds less than
//! one percent to the exchange, so it has no setting. On the host a small model is compared more often, for a few
//! microseconds per step: first attempts are small and short, and their mistakes must not wait for a 64th step that
//! never comes. On devices it is not: reading parameters waits until the device has done all that is queued. The digest
//! of ResNet-50's 102 MB takes 6 ms, the exchange of its gradients 24 to 39 ms; that of 64 KiB takes 4 µs.
//!
//! A save reads all that a rank has, not only the share that the rank writes, and sends the names and digests: 50 to
//! 100 bytes for each tensor.

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use bonfire_core::internal::{AgreedOperations, RankList};
use bonfire_core::{Error, Group};

/// The most steps from one comparison to the next.
const LONGEST_INTERVAL: u64 = 64;

/// Bytes of parameters per step of the interval: those of a small model are compared in every step.
const BYTES_PER_STEP: u64 = 64 << 10;

/// Whether the ranks compare their parameters after this many steps: so many bytes of them, or on the devices of all
/// ranks. Always before the first two: a model that is not the one that was distributed differs before the first step,
/// and different optimizers or learning rates show after it.
pub(crate) fn comparison_is_due(steps: u64, bytes: usize, on_devices: bool) -> bool {
    let bytes = if on_devices { u64::MAX } else { bytes as u64 };
    steps <= 1 || steps.is_multiple_of(bytes.div_ceil(BYTES_PER_STEP).clamp(1, LONGEST_INTERVAL))
}

/// The digest of what a rank does not have.
pub const NOTHING: u64 = 0;

/// Returns the digest of the bytes, which is the same in every build, and never [`NOTHING`]. Bytes that differ in one
/// word of 8 have different digests; otherwise, digests are equal with a probability of 2^-64. It is no protection
/// against forgery.
pub fn digest(bytes: &[u8]) -> u64 {
    let mut digest = Digest::default();
    digest.add(bytes);
    digest.finish()
}

/// Lanes that do not wait for each other: each step waits for the multiplication of the one before.
const LANES: usize = 4;

const BLOCK: usize = 8 * LANES;

const ODD: [u64; LANES] = [0x9e37_79b1_85eb_ca87, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0x85eb_ca77_c2b2_ae63];

/// A bijection of the lane for each word, and of the word for each lane.
fn step(lane: u64, word: u64, odd: u64) -> u64 {
    (lane ^ word).wrapping_mul(odd).rotate_left(29)
}

/// The [`digest`] of bytes that come in pieces. It does not depend on where they are cut.
pub(crate) struct Digest {
    lanes: [u64; LANES],
    len: u64,
    /// The bytes that fill no block yet.
    rest: [u8; BLOCK],
}

impl Default for Digest {
    fn default() -> Digest {
        Digest { lanes: ODD, len: 0, rest: [0; BLOCK] }
    }
}

impl Digest {
    /// Adds the next bytes.
    pub fn add(&mut self, mut bytes: &[u8]) {
        let filled = (self.len % BLOCK as u64) as usize;
        self.len += bytes.len() as u64;
        if filled > 0 {
            let (first, after) = bytes.split_at(bytes.len().min(BLOCK - filled));
            self.rest[filled..][..first.len()].copy_from_slice(first);
            if filled + first.len() < BLOCK {
                return;
            }
            add_block(&mut self.lanes, &self.rest);
            bytes = after;
        }
        let (blocks, rest) = bytes.as_chunks();
        // A copy, which stays in registers.
        let mut lanes = self.lanes;
        blocks.iter().for_each(|block| add_block(&mut lanes, block));
        self.lanes = lanes;
        self.rest[..rest.len()].copy_from_slice(rest);
    }

    /// Returns the digest of all bytes.
    pub fn finish(self) -> u64 {
        let (words, rest) = self.rest[..(self.len % BLOCK as u64) as usize].as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        let words = words.iter().chain([&last]).map(|word| u64::from_le_bytes(*word));
        let all = words.chain([self.len]).chain(self.lanes);
        all.fold(0, |hash, word| step(hash ^ hash >> 32, word, ODD[0])).max(NOTHING + 1)
    }
}

fn add_block(lanes: &mut [u64; LANES], block: &[u8; BLOCK]) {
    let words = block.as_chunks::<8>().0;
    for (lane, (word, odd)) in lanes.iter_mut().zip(words.iter().zip(ODD)) {
        *lane = step(*lane, u64::from_le_bytes(*word), odd);
    }
}

/// The digest of something that several ranks have, and all of them alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Digested {
    /// What it is, as errors call it.
    pub what: String,
    /// Which part of it, where ranks have different ones. Only equal parts are compared.
    pub part: u64,
    /// Its digest.
    pub digest: u64,
}

impl Digested {
    /// Digests with their names, of one part of each thing. Part 0 also stands for the whole.
    pub fn named(part: u64, names: impl IntoIterator<Item = String>, digests: &[u64]) -> Vec<Digested> {
        names.into_iter().zip(digests).map(|(what, &digest)| Digested { what, part, digest }).collect()
    }
}

/// What differs between ranks that should have the same.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Difference {
    /// What it is.
    pub what: String,
    /// The lowest rank that has it, or this part of it.
    pub first: usize,
    /// The ranks that have another.
    pub others: Vec<usize>,
}

impl Difference {
    /// Finds the first difference in the lists of all ranks: the one that comes first in a rank's list.
    pub fn of(lists: &[Vec<Digested>]) -> Option<Difference> {
        let mut firsts: HashMap<(&str, u64), (usize, u64)> = HashMap::new();
        let mut found: Option<(usize, &Digested)> = None;
        for (rank, list) in lists.iter().enumerate() {
            for (place, one) in list.iter().enumerate() {
                let (_, digest) = *firsts.entry((&one.what, one.part)).or_insert((rank, one.digest));
                if digest != one.digest && found.is_none_or(|(before, _)| place < before) {
                    found = Some((place, one));
                }
            }
        }
        let (_, Digested { what, part, .. }) = found?;
        let (first, digest) = firsts[&(what.as_str(), *part)];
        let differs = |one: &Digested| one.what == *what && one.part == *part && one.digest != digest;
        let others = (0..lists.len()).filter(|rank| lists[*rank].iter().any(differs)).collect();
        Some(Difference { what: what.clone(), first, others })
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { what, first, others } = self;
        let verb = if others.len() == 1 { "differs" } else { "differ" };
        write!(f, "{what} of {} {verb} from rank {first}'s", RankList(others))
    }
}

/// Compares digests of all ranks. Returns a text that is the same on all ranks and names the first thing that differs;
/// `None` if they are equal.
#[track_caller]
pub(crate) fn difference(group: &Group, own: Vec<Digested>, steps: u64) -> Result<Option<String>, Error> {
    let difference = Difference::of(&group.all_gather_results(Ok(own))?);
    Ok(difference.map(|difference| {
        format!(
            "after {steps} step{}, {difference}, and comes first among those that do; all ranks must train the model \
             that `DataParallel::new` or `FullyShardedParallel::new` returned, with the gradients that the last step \
             returned, and with the same optimizer, optimizer state and learning rate",
            if steps == 1 { "" } else { "s" },
        )
    }))
}

/// Compares digests of all ranks.
///
/// # Errors
/// [`Error::InvalidArgument`] on all ranks if they differ: it names the first thing that does, and the ranks. Otherwise
/// those of [`Group::all_gather`].
#[track_caller]
pub fn compare(group: &Group, operation: &str, own: Vec<Digested>, steps: u64) -> Result<(), Error> {
    difference(group, own, steps)?.map_or(Ok(()), |reason| Err(Error::argument(operation, reason)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_depends_on_every_bit_and_on_the_length() {
        for len in [0, 1, 7, 8, 9, 31, 32, 33, 40, 64, 71, 100] {
            let mut bytes: Vec<u8> = (0..len as u8).collect();
            let before = digest(&bytes);
            assert_ne!(before, NOTHING);
            for bit in 0..8 * len {
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert_ne!(digest(&bytes), before, "bit {bit} of {len} bytes");
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            for cut in 0..=len {
                let mut pieces = Digest::default();
                [&bytes[..cut], &bytes[cut..cut], &bytes[cut..]].into_iter().for_each(|piece| pieces.add(piece));
                assert_eq!(pieces.finish(), before, "{len} bytes, cut at {cut}");
            }
            bytes.push(0);
            assert_ne!(digest(&bytes), before, "a zero after {len} bytes");
        }
    }

    #[test]
    fn only_equal_parts_are_compared_and_the_first_in_a_ranks_order_is_named() {
        let list = |digests: &[(&str, u64, u64)]| -> Vec<Digested> {
            let digested = |&(what, part, digest): &(&str, u64, u64)| Digested { what: what.into(), part, digest };
            digests.iter().map(digested).collect()
        };
        let parts = |a: [u64; 4], b: [u64; 4]| -> Vec<Vec<Digested>> {
            (0..4).map(|rank| list(&[("`a`", rank as u64 % 2, a[rank]), ("`b`", rank as u64 % 2, b[rank])])).collect()
        };
        assert_eq!(Difference::of(&parts([1, 2, 1, 2], [3, 4, 3, 4])), None);
        let found = Difference::of(&parts([1, 2, 1, 2], [3, 4, 3, 5])).unwrap();
        assert_eq!(found.to_string(), "`b` of rank 3 differs from rank 1's");
        let found = Difference::of(&parts([1, 2, 9, 2], [3, 4, 3, 5])).unwrap();
        assert_eq!(found.to_string(), "`a` of rank 2 differs from rank 0's");
        // What only some ranks have.
        let lists = [list(&[("x", 0, 1)]), list(&[("y", 0, 2)]), list(&[("y", 0, 2), ("x", 0, 7)])];
        assert_eq!(Difference::of(&lists).unwrap().to_string(), "x of rank 2 differs from rank 0's");
        let many: Vec<_> = [1, 2, 1, 2].iter().map(|digest| list(&[("x", 0, *digest)])).collect();
        assert_eq!(Difference::of(&many).unwrap().others, [1, 3]);
    }

    #[test]
    fn the_first_steps_and_every_64th_are_compared_and_more_of_a_small_model() {
        let due = |bytes: usize| (0..200).filter(|&steps| comparison_is_due(steps, bytes, false)).collect::<Vec<u64>>();
        assert_eq!(due(4 << 20), [0, 1, 64, 128, 192]);
        let on_devices = (0..200).filter(|&steps| comparison_is_due(steps, 0, true)).collect::<Vec<u64>>();
        assert_eq!(on_devices, due(4 << 20));
        assert_eq!(due(3 << 20)[..4], [0, 1, 48, 96]);
        for bytes in [0, 1, 64 << 10] {
            assert_eq!(due(bytes).len(), 200);
        }
        assert_eq!(due((64 << 10) + 1)[..4], [0, 1, 2, 4]);
    }
}
