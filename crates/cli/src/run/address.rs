//! Addresses on the command line.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::str::FromStr;

/// Where rank 0 listens.
#[derive(Clone, Debug, PartialEq)]
pub struct Master {
    /// A name or an address, without brackets.
    pub host: String,
    pub port: u16,
}

impl Master {
    pub fn address(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }

    /// Does not resolve names: they may resolve differently on each node.
    pub fn is_loopback(&self) -> bool {
        match self.address() {
            Some(address) => address.is_loopback(),
            None => self.host.eq_ignore_ascii_case("localhost"),
        }
    }
}

impl FromStr for Master {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let (host, port) = text.rsplit_once(':').ok_or(AddressError::NotHostPort)?;
        let port = port.parse().map_err(|_| AddressError::NotHostPort)?;
        if host.contains('%') {
            return Err(AddressError::Zone);
        }
        let bracketed = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
        let valid = match bracketed {
            Some(address) => address.parse::<Ipv6Addr>().is_ok(),
            None => is_name(host),
        };
        if !valid {
            return Err(AddressError::NotHostPort);
        }
        let host = bracketed.unwrap_or(host).to_owned();
        let master = Self { host, port };
        if master.address().is_some_and(|a| a.is_unspecified()) {
            return Err(AddressError::Unspecified);
        }
        Ok(master)
    }
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// Parses the value of `--host`.
pub fn parse_host(text: &str) -> Result<IpAddr, AddressError> {
    if text.contains('%') {
        return Err(AddressError::Zone);
    }
    let host: IpAddr = text.parse().map_err(|_| AddressError::NotAddress)?;
    if host.is_unspecified() {
        return Err(AddressError::Unspecified);
    }
    Ok(host)
}

/// A malformed value of `--master` or `--host`; clap names the flag and the value.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum AddressError {
    #[error("write HOST:PORT, such as 10.0.0.1:29400 or [fd00::1]:29400")]
    NotHostPort,
    #[error("give an IP address without a port, such as 10.0.0.2 or fd00::2")]
    NotAddress,
    #[error("an address with a zone (%) is valid on one host only: give one that all hosts can reach")]
    Zone,
    #[error("this address stands for all interfaces: give one that the other ranks can connect to")]
    Unspecified,
}

fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    !text.is_empty() && text.bytes().all(allowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_addresses() {
        for text in ["10.0.0.1:29400", "node-0.local:1", "[::1]:29400", "h:0"] {
            let master: Master = text.parse().unwrap();
            assert_eq!(master.to_string(), text);
        }
        let master: Master = "[::1]:29400".parse().unwrap();
        assert_eq!(master.host, "::1");
    }

    #[test]
    fn refuses_malformed_addresses() {
        let malformed = [
            "",
            "host",
            "host:",
            ":29400",
            "host:65536",
            "host:x",
            "::1:29400",
            "[::1]",
            "[h]:1",
            "[::1:29400",
            "a b:1",
            "http://h:1",
        ];
        for text in malformed {
            let error = text.parse::<Master>().unwrap_err();
            assert_eq!(error, AddressError::NotHostPort, "{text:?}");
        }
        for text in ["0.0.0.0:1", "[::]:1"] {
            let error = text.parse::<Master>().unwrap_err();
            assert_eq!(error, AddressError::Unspecified, "{text:?}");
        }
        assert_eq!("[fe80::1%eth0]:1".parse::<Master>(), Err(AddressError::Zone));
        assert_eq!(parse_host("fe80::1%eth0"), Err(AddressError::Zone));
        assert_eq!(parse_host("localhost"), Err(AddressError::NotAddress));
        assert_eq!(parse_host("0.0.0.0"), Err(AddressError::Unspecified));
    }

    #[test]
    fn knows_loopback() {
        for (text, loopback) in [
            ("127.0.0.2:1", true),
            ("[::1]:1", true),
            ("LocalHost:1", true),
            ("localhost.example:1", false),
            ("10.0.0.1:1", false),
        ] {
            let master: Master = text.parse().unwrap();
            assert_eq!(master.is_loopback(), loopback, "{text}");
        }
    }
}
