//! Which ranks this node starts and what each is told in its environment.

use std::io;
#[cfg(unix)]
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};
use std::str::FromStr;
use std::thread::available_parallelism;

use zeroize::Zeroizing;

use super::Args;

/// The ranks of this node, checked to be consistent.
#[cfg_attr(not(unix), allow(dead_code))]
pub struct Layout {
    pub local_world_size: u32,
    pub world_size: u32,
    /// The lowest rank of this node.
    pub first_rank: u32,
    master: Master,
    host: IpAddr,
    /// What the ranks are given besides the launcher's own environment.
    secret: Option<Zeroizing<String>>,
}

impl Layout {
    pub fn new(args: &Args) -> Result<Self, LayoutError> {
        let nodes = args.nodes;
        if nodes == 0 {
            return Err(LayoutError::NoNodes);
        }
        let node_rank = match args.node_rank {
            Some(node_rank) if node_rank >= nodes => {
                return Err(LayoutError::NodeRank { node_rank, nodes });
            }
            Some(node_rank) => node_rank,
            None if nodes > 1 => return Err(LayoutError::NoNodeRank { nodes }),
            None => 0,
        };
        let local_world_size = match args.ranks {
            Some(0) => return Err(LayoutError::NoRanks),
            Some(ranks) => ranks,
            // A machine that does not tell its number of cores still has one.
            None => available_parallelism().map_or(1, |cores| cores.get() as u32),
        };
        let world_size = nodes.checked_mul(local_world_size).ok_or(LayoutError::TooManyRanks)?;

        let (master, host) = match &args.master {
            Some(master) => (master.clone(), host_beside(master, args)?),
            None if nodes > 1 => return Err(LayoutError::NoMaster { nodes }),
            None => {
                let host = args.host.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
                let name = host.to_string();
                (Master { host: name, port: 0 }, host)
            }
        };
        if nodes > 1 && master.port == 0 {
            return Err(LayoutError::NoPort { nodes });
        }
        let secret = secret(nodes, host.is_loopback() && master.is_loopback())?;
        // Also shows early that the address is this node's own.
        let free = free_port(&host.to_string())?;
        let port = match master.port {
            0 if master.host == host.to_string() => free,
            0 => free_port(&master.host)?,
            port => port,
        };
        Ok(Self {
            secret,
            local_world_size,
            world_size,
            first_rank: node_rank * local_world_size,
            master: Master { port, ..master },
            host,
        })
    }

    /// The fresh secret of a run that is on this node only.
    #[cfg(unix)]
    pub fn secret(&self) -> Option<(&'static str, &str)> {
        self.secret.as_ref().map(|secret| ("BONFIRE_SECRET", secret.as_str()))
    }

    /// What the `local`th rank of this node finds in its environment.
    #[cfg(unix)]
    pub fn environment(&self, local: u32) -> [(&'static str, String); 12] {
        let rank = (self.first_rank + local).to_string();
        let local = local.to_string();
        let world_size = self.world_size.to_string();
        let local_world_size = self.local_world_size.to_string();
        [
            ("BONFIRE_RANK", rank.clone()),
            ("BONFIRE_WORLD_SIZE", world_size.clone()),
            ("BONFIRE_LOCAL_RANK", local.clone()),
            ("BONFIRE_LOCAL_WORLD_SIZE", local_world_size.clone()),
            ("BONFIRE_ADDRESS", self.master.to_string()),
            ("BONFIRE_HOST", self.host.to_string()),
            ("RANK", rank),
            ("WORLD_SIZE", world_size),
            ("LOCAL_RANK", local),
            ("LOCAL_WORLD_SIZE", local_world_size),
            ("MASTER_ADDR", self.master.host.clone()),
            ("MASTER_PORT", self.master.port.to_string()),
        ]
    }
}

/// Where rank 0 listens.
#[derive(Clone, Debug, PartialEq)]
pub struct Master {
    /// A name or an address, without brackets.
    host: String,
    port: u16,
}

impl Master {
    fn address(&self) -> Option<IpAddr> {
        self.host.parse().ok()
    }

    /// Names are not looked up: what one means may differ from node to node.
    fn is_loopback(&self) -> bool {
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

impl std::fmt::Display for Master {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// Reads the value of `--host`.
pub fn parse_host(text: &str) -> Result<IpAddr, AddressError> {
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
    #[error("this address names no machine: give one that the other ranks can connect to")]
    Unspecified,
}

/// Arguments that contradict each other or lack a part.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    #[error("-n 0 starts nothing: give -n at least 1")]
    NoRanks,
    #[error("--nodes 0 is no run: give --nodes at least 1")]
    NoNodes,
    #[error("-n times --nodes is more ranks than can be numbered: lower one of them")]
    TooManyRanks,
    #[error("--nodes {nodes} needs --node-rank: give this node's number, 0 to {}", nodes - 1)]
    NoNodeRank { nodes: u32 },
    #[error(
        "--node-rank {node_rank} does not exist with --nodes {nodes}: nodes count from 0, so give \
         at most {}, or raise --nodes", nodes - 1
    )]
    NodeRank { node_rank: u32, nodes: u32 },
    #[error("--nodes {nodes} needs --master: give the HOST:PORT at which rank 0 is to listen")]
    NoMaster { nodes: u32 },
    #[error("--master has port 0, but all {nodes} nodes must know the port: choose a free one of node 0")]
    NoPort { nodes: u32 },
    #[error(
        "--master {master} is not loopback, so --host is needed: give the address of this node's \
         interface on which its ranks may listen"
    )]
    NoHost { master: Master },
    #[error(
        "--master {master} and --host {host} cannot reach each other, as one of them is loopback: \
         use loopback for both or for neither"
    )]
    Unreachable { master: Master, host: IpAddr },
    #[error("cannot listen on {host}: {source}; give --host an address of this node")]
    Listen { host: String, source: io::Error },
    #[cfg(unix)]
    #[error(transparent)]
    Secret(#[from] bonfire::Error),
    #[error(
        "{nodes} nodes beyond loopback need a secret that all of them share: put at least 32 random \
         bytes into a file (openssl rand -hex 32, chmod 600), copy it to every node, and give each \
         its path in BONFIRE_SECRET_FILE"
    )]
    NoSecret { nodes: u32 },
    #[error("no random numbers for the secret of this run: {0}")]
    Random(io::Error),
}

/// A fresh secret where the run is on one node and the user gave none. Ranks inherit the user's.
#[cfg(unix)]
fn secret(nodes: u32, loopback: bool) -> Result<Option<Zeroizing<String>>, LayoutError> {
    match (bonfire::Secret::from_env()?, nodes) {
        (Some(_), _) => Ok(None),
        (None, 1) => {
            let mut bytes = Zeroizing::new([0; bonfire::Secret::LEAST]);
            let random = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes[..]));
            random.map_err(LayoutError::Random)?;
            let digits =
                |byte: &u8| [byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[digit as usize]));
            Ok(Some(Zeroizing::new(bytes.iter().flat_map(digits).collect())))
        }
        (None, _) if loopback => Ok(None),
        (None, _) => Err(LayoutError::NoSecret { nodes }),
    }
}

/// Elsewhere nothing is started.
#[cfg(not(unix))]
fn secret(nodes: u32, loopback: bool) -> Result<Option<Zeroizing<String>>, LayoutError> {
    if nodes > 1 && !loopback { Err(LayoutError::NoSecret { nodes }) } else { Ok(None) }
}

/// The address this node's ranks listen on, given where rank 0 does.
fn host_beside(master: &Master, args: &Args) -> Result<IpAddr, LayoutError> {
    let Some(host) = args.host else {
        return match master.address() {
            _ if !master.is_loopback() => Err(LayoutError::NoHost { master: master.clone() }),
            Some(IpAddr::V6(_)) => Ok(IpAddr::V6(Ipv6Addr::LOCALHOST)),
            _ => Ok(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        };
    };
    if args.nodes > 1 && host.is_loopback() != master.is_loopback() {
        return Err(LayoutError::Unreachable { master: master.clone(), host });
    }
    Ok(host)
}

/// A port of `host` that was free a moment ago. Somebody may take it before rank 0 does; then rank
/// 0 fails and says so, and the next run gets another port.
fn free_port(host: &str) -> Result<u16, LayoutError> {
    TcpListener::bind((host, 0))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(|source| LayoutError::Listen { host: host.to_owned(), source })
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
