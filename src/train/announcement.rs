//! What each rank announces to all others around a step: some words, and one bit for each parameter.

use bytemuck::cast_slice_mut;

use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Group, Operation, Work};

/// Returns memory for the announcements of all ranks, which contains this rank's: `words`, then the bits of `exists`.
pub(super) fn announcements(group: &Group, words: &[u64], exists: &[bool]) -> Vec<u64> {
    let width = words.len() + exists.len().div_ceil(64);
    let mut all = vec![0; width * group.world_size()];
    let own = &mut all[group.rank() * width..][..width];
    own[..words.len()].copy_from_slice(words);
    for (position, exists) in exists.iter().enumerate() {
        own[words.len() + position / 64] |= u64::from(*exists) << (position % 64);
    }
    all
}

/// Sets in `exists` what the bits of an announcement say. They follow its words.
pub(super) fn merge(bits: &[u64], exists: &mut [bool]) {
    for (position, exists) in exists.iter_mut().enumerate() {
        *exists |= bits[position / 64] >> (position % 64) & 1 == 1;
    }
}

/// The request for the exchange, in which errors name `function`.
pub(super) fn request(function: &str) -> Request<'static> {
    Request::new(Operation::AllGather, DType::U64).part_of(function)
}

/// Starts the exchange of all ranks' announcements.
#[track_caller]
pub(super) fn start(group: &Group, function: &str, all: Vec<u64>) -> Result<Work<Vec<u64>>, Error> {
    group.start_operation(request(function), all.len(), all, |all| Ok(cast_slice_mut(all)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_bits_come_back() {
        let group = Group::threads(1).unwrap().remove(0);
        let exists: Vec<bool> = (0..130).map(|position| position % 3 == 0 || position == 64).collect();
        let all = announcements(&group, &[7, 8], &exists);
        assert_eq!((all.len(), &all[..2]), (5, &[7, 8][..]));
        let mut merged = vec![false; 130];
        merged[1] = true;
        merge(&all[2..], &mut merged);
        assert!(merged[1]);
        merged[1] = false;
        assert_eq!(merged, exists);
    }
}
