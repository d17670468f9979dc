//! Groups whose ranks are threads: how they connect, which connections they accept and refuse, and how they fail.
//!
//! One program instead of eight: most of these tests wait for a deadline, and now wait at the same time.

mod arguments;
mod asynchronous;
mod authentication;
mod failure;
mod mismatch;
mod rendezvous;
mod started;
mod subgroups;
mod values;
mod whereabouts;
