//! Errors that end the program.

use std::fmt::Display;

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_keeps_its_message() {
        let failure = Failure::with(2)("no such file: give another");
        assert_eq!((failure.status, failure.to_string().as_str()), (2, "no such file: give another"));
    }
}
