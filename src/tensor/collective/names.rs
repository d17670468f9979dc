//! Who takes part, and where.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

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

/// Where a node or the orchestrator is: `host:port`, with or without a scheme (`ws://`, `http://`) and a path, which are
/// ignored. IPv6 addresses stand in brackets. A node's address may lack the port.
///
/// ```
/// let address: bonfire::Address = "ws://10.0.0.7:3000".parse()?;
/// assert_eq!(address.to_string(), "ws://10.0.0.7:3000");
/// assert!("ws://:3000".parse::<bonfire::Address>().is_err());
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Address {
    text: String,
}

impl Address {
    /// The host, without brackets, and the port if there is one.
    pub(super) fn parts(&self) -> Result<(String, Option<u16>), String> {
        let text = self.text.trim();
        let rest = text.split_once("://").map_or(text, |(_scheme, rest)| rest);
        let place = rest.split('/').next().unwrap_or(rest);
        let (host, port) = match place.strip_prefix('[') {
            Some(v6) => {
                let (host, after) = v6.split_once(']').ok_or_else(|| self.malformed("a bracket is not closed"))?;
                (host, after.strip_prefix(':').or((!after.is_empty()).then_some(after)))
            }
            None => match place.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (place, None),
            },
        };
        if host.is_empty() || host.contains(char::is_whitespace) {
            return Err(self.malformed("there is no host"));
        }
        let port = match port {
            Some(digits) => Some(digits.parse().map_err(|_| self.malformed("the port is no number up to 65535"))?),
            None => None,
        };
        Ok((host.to_string(), port))
    }

    fn malformed(&self, reason: &str) -> String {
        format!("malformed address {:?}: {reason}; write host:port or [v6]:port", self.text)
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let address = Address { text: text.to_string() };
        address.parts()?;
        Ok(address)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
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
            assert_eq!(text.parse::<Address>().unwrap().parts(), Ok((host.to_string(), port)), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_an_address_is_refused() {
        for text in ["", " ", "ws://", ":3000", "host:", "host:port", "host:65536", "::1", "[::1", "[::1]x", "a b:1"] {
            let refusal = text.parse::<Address>().unwrap_err();
            assert!(refusal.contains(&format!("{text:?}")), "{refusal}");
        }
    }
}
