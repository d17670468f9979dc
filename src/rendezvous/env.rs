//! Settings from the environment.

use std::time::Duration;

use super::{Medium, Settings};
use crate::error::Error;
use crate::wait::{deadline_from_env, seconds_from_env};

/// What the environment says about a group.
#[derive(Debug)]
pub(crate) struct Environment {
    pub settings: Settings,
    pub deadline: Option<Duration>,
    /// As it stands there: this module does not know algorithms.
    pub algorithms: Option<String>,
}

/// Reads `BONFIRE_*` through `variable`.
pub(crate) fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Environment, Error> {
    let medium = medium(&variable)?;
    let (rank, world_size) = match medium.is_mpi() {
        // MPI says it.
        true => (0, 1),
        false => (number(&variable, "BONFIRE_RANK")?, number(&variable, "BONFIRE_WORLD_SIZE")?),
    };
    let address = variable("BONFIRE_ADDRESS");
    if address.is_none() && world_size > 1 {
        return Err(missing("BONFIRE_ADDRESS"));
    }
    let settings = Settings {
        rank,
        world_size,
        address: address.unwrap_or_default(),
        host: variable("BONFIRE_HOST").filter(|host| !host.is_empty()),
        medium,
        ..Settings::default()
    };
    let connections = match variable("BONFIRE_TCP_CONNECTIONS") {
        Some(_) => number(&variable, "BONFIRE_TCP_CONNECTIONS")?,
        None => settings.connections,
    };
    let silence = seconds_from_env(&variable, "BONFIRE_SILENCE")?.unwrap_or(settings.silence);
    let settings = Settings { connections, silence, ..settings };
    let algorithms = variable("BONFIRE_ALGORITHMS");
    Ok(Environment { settings, deadline: deadline_from_env(&variable)?, algorithms })
}

fn medium(variable: &impl Fn(&str) -> Option<String>) -> Result<Medium, Error> {
    let Some(text) = variable("BONFIRE_TRANSPORT") else { return Ok(Medium::Auto) };
    let medium = Medium::ALL.into_iter().find(|medium| medium.to_string() == text.trim());
    medium.ok_or_else(|| {
        Error::Config(format!("BONFIRE_TRANSPORT is '{text}': give auto, tcp, shm, mpi or mpi-blocking"))
    })
}

fn number(variable: &impl Fn(&str) -> Option<String>, name: &str) -> Result<usize, Error> {
    let text = variable(name).ok_or_else(|| missing(name))?;
    let wrong = |_| Error::Config(format!("{name} is '{text}': give a whole number"));
    text.trim().parse().map_err(wrong)
}

fn missing(name: &str) -> Error {
    Error::Config(format!(
        "{name} is not set: start the program with `bonfire run -n RANKS -- PROGRAM`, or describe the group with \
         Group::builder()"
    ))
}
