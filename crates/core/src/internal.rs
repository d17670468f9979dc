//! What the packages beside this one need of it besides its interface. Nothing here is stable: they pin the exact version.

pub mod oracle;

pub use crate::group::{Core, DEADLINE, Keepsake, zeroed};
pub use crate::random::number as random;
pub use crate::reduce::{Output, reduce_to_all};
pub use crate::sync::{Bell, ENDLESS, crowded, deadline_from_env, lock, spin};
pub use crate::types::{Parts, Ranks, hash};
#[cfg(unix)]
pub use crate::{
    auth::{Lobby, Opening, Purpose, RETRY, Refusal, answer, confirm, permit, prove},
    control::frame,
};
