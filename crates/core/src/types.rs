//! Types that all levels share: element types and reductions, calls, errors, and the partition of a buffer among ranks.

mod call;
mod dtype;
mod error;
mod fault;
mod panic;
mod partition;
mod ranges;
mod ranks;
mod shape;
mod warning;
mod whereabouts;

pub(crate) use self::call::Fingerprint;
pub use self::call::{Call, Operation, Site, function, hash};
pub use self::dtype::{DType, Element, ReduceOp};
pub use self::error::{Cause, Error, ShrinkError};
pub use self::fault::Fault;
pub use self::panic::panic_message;
pub use self::partition::Parts;
#[cfg(all(feature = "shm", target_os = "linux"))]
pub(crate) use self::partition::part_start;
pub use self::partition::partition;
pub use self::ranges::{Ranges, Rows};
pub use self::ranks::RankList;
pub use self::warning::warn;
pub(crate) use self::whereabouts::asked;
pub use self::whereabouts::{Locate, Places, ProgramCall, Whereabouts};
