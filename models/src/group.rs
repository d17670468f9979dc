//! Of groups, the recorder.

pub(crate) mod recorder;
pub(crate) mod trace;
