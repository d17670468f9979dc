//! What a launcher says about this rank and about rank 0's address.

use super::variables::{RankAndSize, Variables};
use crate::rendezvous::source::is_loopback;
use crate::types::{Error, hash};

/// A detected launcher and what it says.
pub(super) struct Detected {
    /// The launcher and its name for the job.
    pub by: String,
    pub ranks: RankAndSize,
    /// Whether the ranks are on several hosts, if the launcher says so.
    pub several: Option<bool>,
    /// Where rank 0 listens, or why that is unknown.
    pub address: Result<Address, String>,
}

/// Where rank 0 listens.
pub(super) struct Address {
    pub text: String,
    /// Which variables it comes from, as a clause of an error message.
    pub chosen: String,
}

/// A part of an address and the variables that it comes from.
pub(super) type Named<T> = (T, &'static str);

/// Rank 0's host and port, as far as they are known.
type Master = (Option<Named<String>>, Option<Named<u16>>);

/// The first port for jobs that do not set one: above Linux's default range of ephemeral ports.
const FIRST_PORT: u16 = 61440;

/// Returns the port of the job with this number: the same on all its ranks, most likely not that of another job.
pub(super) fn port_of(job: u64) -> u16 {
    FIRST_PORT + (job % u64::from(u16::MAX - FIRST_PORT + 1)) as u16
}

/// Returns a number for a job name. It is the same in every program.
pub(super) fn number_of(name: &str) -> u64 {
    hash(name.bytes())
}

impl Address {
    /// Returns the address made of these parts. It is loopback if all ranks are on one host, whatever the host's name:
    /// no other host needs to reach it, and no secret is needed. `or` names a remedy besides setting the address.
    pub fn of((by, several): (&str, Option<bool>), (host, port): Master, or: &str) -> Result<Address, String> {
        let host =
            if several == Some(false) { Some(("127.0.0.1".into(), "the ranks being on one host")) } else { host };
        match (host, port) {
            (Some((host, named)), Some((port, numbered))) => {
                let text = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
                if several == Some(true) && is_loopback(&text) {
                    return Err(format!(
                        "{named} is {host}, which is loopback, and by {by} the ranks are on several hosts: unset it, \
                         or set BONFIRE_ADDRESS to rank 0's HOST:PORT on all ranks"
                    ));
                }
                Ok(Address { text, chosen: format!("host {host} comes from {named}, port {port} from {numbered}") })
            }
            (host, _) => {
                let part = if host.is_some() { "at which port rank 0 listens" } else { "where rank 0 listens" };
                Err(format!(
                    "BONFIRE_ADDRESS is not set, and nothing of {by} says {part}: set it to rank 0's HOST:PORT on all \
                     ranks{or}"
                ))
            }
        }
    }
}

/// Returns the address from PyTorch's variables, which many scripts set in addition to their launcher's.
pub(super) fn master(variables: &Variables) -> Result<Master, Error> {
    Ok((variables.host("MASTER_ADDR")?, variables.port("MASTER_PORT")?))
}
