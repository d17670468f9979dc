//! Settings of tests, in environment variables.

use std::env;
use std::time::SystemTime;

/// Returns the number in a variable, if it is set.
///
/// # Panics
/// If it is no whole number.
pub fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is '{text}': give a whole number")))
}

/// Returns the seed in a variable, which repeats a run, or one from the clock.
///
/// # Panics
/// If it is no whole number.
pub fn seed(variable: &str) -> u64 {
    let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |now| now.as_micros() as u64);
    number(variable).unwrap_or_else(now)
}
