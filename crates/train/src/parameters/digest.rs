//! Digests by which the ranks compare their parameters.
//!
//! # Cost
//! A digest reads the parameters once, about as fast as memory is read, and each rank adds one word to a message that
//! it sends anyway. An exchange of gradients moves each element several times. Every 64th step, a digest adds less than
//! one percent to the exchange, so it has no setting. On the host a small model is compared more often, for a few
//! microseconds per step. On devices it is not: reading parameters waits until the device has done all that is queued.

use bonfire_core::internal::RankList;
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
    const LANES: usize = 4;
    const ODD: [u64; LANES] =
        [0x9e37_79b1_85eb_ca87, 0xc2b2_ae3d_27d4_eb4f, 0x1656_67b1_9e37_79f9, 0x85eb_ca77_c2b2_ae63];
    // A bijection of the lane for each word, and of the word for each lane.
    let step = |lane: u64, word: u64, odd: u64| (lane ^ word).wrapping_mul(odd).rotate_left(29);
    let mut lanes = ODD;
    // Independent lanes, because each step waits for the multiplication of the one before.
    let (blocks, rest) = bytes.as_chunks::<{ 8 * LANES }>();
    for block in blocks {
        let words = block.as_chunks::<8>().0;
        for (lane, (word, odd)) in lanes.iter_mut().zip(words.iter().zip(ODD)) {
            *lane = step(*lane, u64::from_le_bytes(*word), odd);
        }
    }
    let (words, rest) = rest.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let words = words.iter().chain([&last]).map(|word| u64::from_le_bytes(*word));
    let all = words.chain([bytes.len() as u64]).chain(lanes);
    all.fold(0, |hash, word| step(hash ^ hash >> 32, word, ODD[0])).max(NOTHING + 1)
}

/// Compares digests of all ranks. Returns a text that is the same on all ranks and names the first place that differs;
/// `None` if they are equal. `name` describes a place.
#[track_caller]
pub(crate) fn difference(
    group: &Group,
    own: &[u64],
    steps: u64,
    name: impl Fn(usize) -> String,
) -> Result<Option<String>, Error> {
    let mut all = own.repeat(group.world_size());
    group.all_gather_into(own, &mut all)?;
    let differs = |rank: usize, place: usize| all[rank * own.len() + place] != all[place];
    let ranks = 0..group.world_size();
    let Some(place) = (0..own.len()).find(|&place| ranks.clone().any(|rank| differs(rank, place))) else {
        return Ok(None);
    };
    let others: Vec<usize> = ranks.filter(|&rank| differs(rank, place)).collect();
    let (what, verb) = (name(place), if others.len() == 1 { "differs" } else { "differ" });
    Ok(Some(format!(
        "after {steps} step{}, {what} of {} {verb} from rank 0's, and comes first among those that do; all ranks must \
         train the model that `DataParallel::new` returned, with the gradients that the last step returned, and with \
         the same optimizer, optimizer state and learning rate",
        if steps == 1 { "" } else { "s" },
        RankList(&others)
    )))
}

/// Compares digests of all ranks.
///
/// # Errors
/// [`Error::InvalidArgument`] on all ranks if they differ: it names the first place that does, which `name` describes.
/// Otherwise those of [`Group::all_gather`].
#[track_caller]
pub fn compare(
    group: &Group,
    operation: &str,
    own: &[u64],
    steps: u64,
    name: impl Fn(usize) -> String,
) -> Result<(), Error> {
    difference(group, own, steps, name)?.map_or(Ok(()), |reason| Err(Error::argument(operation, reason)))
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
            bytes.push(0);
            assert_ne!(digest(&bytes), before, "a zero after {len} bytes");
        }
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
