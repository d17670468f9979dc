//! Draws from the random generator of a process, which its ranks share.

use std::sync::Mutex;

use bonfire_core::internal::{ByteOperations, Request, hash, lock};
use bonfire_core::{DType, Error, Group, Operation};

use super::all_or_none;

/// Returns what `draw` returns after `reseed(seed)`, which seeds the process's generator: the same on every rank, for
/// any number of ranks, whether they are threads or processes. Afterwards the generator is seeded with `seed` and the
/// rank. All ranks call it with the same seed. `draw` must not run operations of the group.
///
/// The ranks of a process draw one after the other. No rank of the group draws anything else meanwhile.
///
/// # Errors
/// The error of `draw` on all ranks if it fails on one. Otherwise the errors of [`Group::barrier`].
#[track_caller]
pub fn seeded<T>(
    group: &Group,
    seed: u64,
    reseed: impl Fn(u64),
    draw: impl FnOnce() -> Result<T, Error>,
) -> Result<T, Error> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    // From here on no rank draws anything else.
    group.operate(Request::new(Operation::Barrier, DType::U8).part_of("seeded"), None, &mut [])?;
    let drawn = {
        let _turn = lock(&GENERATOR);
        reseed(seed);
        let drawn = draw();
        let own = [seed, group.rank() as u64].into_iter().flat_map(u64::to_le_bytes);
        reseed(hash(own));
        drawn
    };
    all_or_none(group, drawn)
}
