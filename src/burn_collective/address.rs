//! Parsing of the addresses of nodes and of the orchestrator.

use burn_communication::Address;

use super::error::CollectiveError;

/// Splits an address `host:port` into the host, without brackets, and the port, if there is one. A scheme (`ws://`,
/// `http://`) and a path are ignored. IPv6 addresses must be in brackets.
pub(super) fn parse(address: &Address) -> Result<(String, Option<u16>), CollectiveError> {
    let text = address.to_string();
    let malformed = |reason: &str| {
        log::error!("malformed address {text:?}: {reason}; write host:port or [v6]:port");
        CollectiveError::InvalidConfig
    };
    let rest = text.trim();
    let rest = rest.split_once("://").map_or(rest, |(_scheme, rest)| rest);
    let authority = rest.split('/').next().unwrap_or(rest);
    let (host, port) = match authority.strip_prefix('[') {
        Some(v6) => {
            let (host, after) = v6.split_once(']').ok_or_else(|| malformed("a bracket is not closed"))?;
            (host, after.strip_prefix(':').or((!after.is_empty()).then_some(after)))
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    if host.is_empty() || host.contains(char::is_whitespace) {
        return Err(malformed("there is no host"));
    }
    let port = match port {
        Some(digits) => Some(digits.parse().map_err(|_| malformed("the port is not a number up to 65535"))?),
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
            assert_eq!(parse(&text.parse().unwrap()), Ok((host.to_string(), port)), "{text}");
        }
    }

    #[test]
    fn malformed_addresses_are_refused() {
        for text in ["", " ", "ws://", ":3000", "host:", "host:port", "host:65536", "::1", "[::1", "[::1]x", "a b:1"] {
            assert_eq!(parse(&text.parse().unwrap()), Err(CollectiveError::InvalidConfig), "{text}");
        }
    }
}
