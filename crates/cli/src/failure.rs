//! Errors that end the program.

use std::fmt::Display;
use std::io::{self, Write};

/// An error message for the user, with the exit status.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct Failure {
    pub status: u8,
    reason: String,
}

impl Failure {
    /// Returns a function that converts errors into failures with this status.
    pub fn with<E: Display>(status: u8) -> impl Fn(E) -> Failure {
        move |error| Failure { status, reason: error.to_string() }
    }
}

/// Prints to standard output and flushes it.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    let printed = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    printed.map_err(|error| Failure::with(1)(format!("cannot print: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_its_message() {
        let failure = Failure::with(2)("no such file: give another");
        assert_eq!((failure.status, failure.to_string().as_str()), (2, "no such file: give another"));
    }
}
