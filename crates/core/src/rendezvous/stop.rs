//! How a job is asked to stop: by which signal, and how long it may take.

use std::fmt;
use std::time::Duration;

use crate::sync::{from_env, seconds_from_env};
use crate::types::Error;

const SIGNAL_VARIABLE: &str = "BONFIRE_STOP_SIGNAL";
const GRACE_VARIABLE: &str = "BONFIRE_GRACE";

/// The signal that asks a training to stop in order; see [`Builder::stop_signal`](crate::Builder::stop_signal). Its
/// text is the value of `BONFIRE_STOP_SIGNAL`, such as `USR1`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopSignal {
    /// SIGTERM, which Kubernetes, systemd, and Slurm at a time limit send before they kill a process.
    #[default]
    Term,
    /// SIGUSR1, which Slurm sends before the time limit with `--signal=USR1@120`, and mpirun forwards.
    Usr1,
    /// SIGUSR2.
    Usr2,
}

impl StopSignal {
    /// All variants.
    pub const ALL: [StopSignal; 3] = [StopSignal::Term, StopSignal::Usr1, StopSignal::Usr2];

    /// Returns its number on this system.
    pub fn as_raw(self) -> i32 {
        match self {
            StopSignal::Term => libc::SIGTERM,
            StopSignal::Usr1 => libc::SIGUSR1,
            StopSignal::Usr2 => libc::SIGUSR2,
        }
    }
}

/// The spelling of `BONFIRE_STOP_SIGNAL`.
impl fmt::Display for StopSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            StopSignal::Term => "TERM",
            StopSignal::Usr1 => "USR1",
            StopSignal::Usr2 => "USR2",
        })
    }
}

/// What the environment or code has set. The rest is as it was for this process.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StopSettings {
    /// Which signal asks the program to stop.
    pub signal: Option<StopSignal>,
    /// How long a process that was asked to stop may take until all ranks have agreed to.
    pub grace: Option<Duration>,
}

impl StopSettings {
    /// Reads the environment.
    pub fn from_env() -> Result<StopSettings, Error> {
        from_env(|variable| StopSettings::read(variable))
    }

    /// Reads the environment through `variable`, which looks up one variable.
    pub(super) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<StopSettings, Error> {
        let signal = variable(SIGNAL_VARIABLE).map(|text| signal(&text)).transpose()?;
        Ok(StopSettings { signal, grace: seconds_from_env(variable, GRACE_VARIABLE)? })
    }
}

/// Slurm, Docker and `kill` take names with and without SIG.
fn signal(text: &str) -> Result<StopSignal, Error> {
    let name = text.trim();
    let name = name.strip_prefix("SIG").unwrap_or(name);
    let signal = StopSignal::ALL.into_iter().find(|signal| signal.to_string() == name);
    signal.ok_or_else(|| Error::Config(format!("{SIGNAL_VARIABLE} is '{text}': give TERM, USR1 or USR2")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(signal: Option<&str>, grace: Option<&str>) -> Result<StopSettings, String> {
        let variable = |name: &str| if name == SIGNAL_VARIABLE { signal } else { grace }.map(str::to_owned);
        StopSettings::read(variable).map_err(|error| error.to_string())
    }

    #[test]
    fn a_signal_has_its_name_with_and_without_sig() {
        assert_eq!(read(None, None), Ok(StopSettings::default()));
        for signal in StopSignal::ALL {
            for text in [signal.to_string(), format!("SIG{signal}"), format!(" {signal} ")] {
                assert_eq!(read(Some(&text), None).unwrap().signal, Some(signal), "{text}");
            }
        }
    }

    #[test]
    fn a_malformed_value_is_an_error_that_says_what_is_possible() {
        for text in ["KILL", "INT", "usr1", "10", ""] {
            let error = read(Some(text), None).unwrap_err();
            assert_eq!(error, format!("invalid settings: BONFIRE_STOP_SIGNAL is '{text}': give TERM, USR1 or USR2"));
        }
        let error = read(None, Some("soon")).unwrap_err();
        assert_eq!(error, "invalid settings: BONFIRE_GRACE is 'soon': give a positive number of seconds");
    }
}
