//! Who takes part, and where.

use std::fmt;

use burn_communication::Address;
use serde::{Deserialize, Serialize};

use super::error::CollectiveError;

/// A participant of collective operations: usually a thread with a device of its own. Unique within the session, and
/// over all nodes: a reduction with a root needs that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PeerId(pub u32);

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerId({})", self.0)
    }
}

/// A process of a session that spans several, numbered from 0 by the orchestrator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(u32);

impl NodeId {
    /// The node's rank in the group of nodes.
    pub(super) fn rank(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeId({})", self.0)
    }
}

macro_rules! from_numbers {
    ($id:ident: $($number:ty),*) => {$(
        impl From<$number> for $id {
            /// Numbers beyond 32 bits are cut off, negative ones wrap.
            fn from(number: $number) -> Self {
                $id(number as u32)
            }
        }
    )*};
}

from_numbers!(PeerId: u32, i32, usize);
from_numbers!(NodeId: u32, i32, usize);

/// The host, without brackets, and the port if there is one, of an address: `host:port`, with or without a scheme
/// (`ws://`, `http://`) and a path, which are ignored. IPv6 addresses stand in brackets.
pub(super) fn parts(address: &Address) -> Result<(String, Option<u16>), CollectiveError> {
    let text = address.to_string();
    let malformed = |reason: &str| {
        log::error!("malformed address {text:?}: {reason}; write host:port or [v6]:port");
        CollectiveError::InvalidConfig
    };
    let rest = text.trim();
    let rest = rest.split_once("://").map_or(rest, |(_scheme, rest)| rest);
    let place = rest.split('/').next().unwrap_or(rest);
    let (host, port) = match place.strip_prefix('[') {
        Some(v6) => {
            let (host, after) = v6.split_once(']').ok_or_else(|| malformed("a bracket is not closed"))?;
            (host, after.strip_prefix(':').or((!after.is_empty()).then_some(after)))
        }
        None => match place.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        },
    };
    if host.is_empty() || host.contains(char::is_whitespace) {
        return Err(malformed("there is no host"));
    }
    let port = match port {
        Some(digits) => Some(digits.parse().map_err(|_| malformed("the port is no number up to 65535"))?),
        None => None,
    };
    Ok((host.to_string(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemes_paths_and_ports_are_optional() {
        for (text, host, port) in [
            ("ws://localhost:3000", "localhost", Some(3000)),
            ("http://10.0.0.1:80/data", "10.0.0.1", Some(80)),
            ("node-7:1", "node-7", Some(1)),
            ("127.0.0.1:65535", "127.0.0.1", Some(65535)),
            ("node-7", "node-7", None),
            ("ws://[::1]:9", "::1", Some(9)),
            ("[fe80::2]", "fe80::2", None),
        ] {
            assert_eq!(parts(&text.parse().unwrap()), Ok((host.to_string(), port)), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_an_address_is_refused() {
        for text in ["", " ", "ws://", ":3000", "host:", "host:port", "host:65536", "::1", "[::1", "[::1]x", "a b:1"] {
            assert_eq!(parts(&text.parse().unwrap()), Err(CollectiveError::InvalidConfig), "{text}");
        }
    }
}
