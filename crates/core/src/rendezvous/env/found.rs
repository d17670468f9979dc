//! What a launcher says of a rank and of where rank 0 listens.

use super::variables::{Place, Variables};
use crate::rendezvous::source::is_loopback;
use crate::types::{Error, hash};

/// What a launcher says.
pub(super) struct Found {
    /// The launcher, and its name for the job.
    pub by: String,
    pub place: Place,
    /// Whether the ranks are on several hosts, where it says so.
    pub several: Option<bool>,
    /// Where rank 0 listens, or why that is not known.
    pub address: Result<Address, String>,
}

/// Where rank 0 listens.
pub(super) struct Address {
    pub text: String,
    /// What chose it.
    pub chosen: String,
}

/// A part of an address, and the variables that it is from.
pub(super) type Named<T> = (T, &'static str);

/// Rank 0's host and port, as far as they are said.
type Master = (Option<Named<String>>, Option<Named<u16>>);

/// The ports that jobs without one of their own get: above those that Linux gives to connections by itself.
const PORTS: u16 = 61440;

/// The port of a job with this number, the same on all its ranks and most likely another one in other jobs.
pub(super) fn port_of(job: u64) -> u16 {
    PORTS + (job % u64::from(u16::MAX - PORTS + 1)) as u16
}

/// A number for a job with this name, whichever program asks.
pub(super) fn number_of(name: &str) -> u64 {
    hash(name.bytes())
}

impl Address {
    /// An address of these parts. Where all ranks are on one host it is loopback, whatever the host's name is: no other host
    /// needs to reach it, and no secret is needed. `or` is another remedy than the address.
    pub fn of((by, several): (&str, Option<bool>), (host, port): Master, or: &str) -> Result<Address, String> {
        let host =
            if several == Some(false) { Some(("127.0.0.1".into(), "the ranks being on one host")) } else { host };
        match (host, port) {
            (Some((host, named)), Some((port, numbered))) => {
                let text = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
                if several == Some(true) && is_loopback(&text) {
                    return Err(format!(
                        "{named} is {host}, which every host is for itself, and by {by} the ranks are on several: unset it, or \
                         set BONFIRE_ADDRESS to rank 0's HOST:PORT on all ranks"
                    ));
                }
                Ok(Address { text, chosen: format!("host {host} comes from {named}, port {port} from {numbered}") })
            }
            (host, _) => {
                let part = if host.is_some() { "at which port rank 0 listens" } else { "where rank 0 listens" };
                Err(format!(
                    "BONFIRE_ADDRESS is not set, and {by} does not say {part}: set it to rank 0's HOST:PORT on all ranks{or}"
                ))
            }
        }
    }
}

/// The address that PyTorch's programs go by, which many a script sets besides its launcher.
pub(super) fn master(variables: &Variables) -> Result<Master, Error> {
    Ok((variables.host("MASTER_ADDR")?, variables.port("MASTER_PORT")?))
}
