//! Numbers that nobody can guess.

use std::hash::{BuildHasher, Hasher, RandomState};

/// Another one each time. The standard library seeds its hashers from the system's random numbers.
pub fn number() -> u64 {
    RandomState::new().build_hasher().finish()
}
