//! The ranks that this node starts, and the environment of each.

use std::fs::File;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::thread::available_parallelism;
use std::time::Duration;

use bonfire::Secret;
use bonfire_core::internal::StopSettings;
use zeroize::Zeroizing;

use super::address::Master;
use super::args::Args;
use super::port::ReservedPort;

/// The default grace period.
const GRACE: Duration = Duration::from_secs(10);

/// The ranks of this node, from arguments that were checked to be consistent.
pub struct Layout {
    pub local_world_size: u32,
    pub world_size: u32,
    /// The lowest rank of this node.
    pub first_rank: u32,
    master: Master,
    host: IpAddr,
    /// The signal that asks programs to stop in order.
    pub stop_signal: i32,
    /// How long ranks have to end after a signal, before they are killed.
    pub grace: Duration,
    /// Seconds that the ranks have to find each other, if they were given on the command line.
    rendezvous_timeout: Option<u32>,
    /// The port of `master`, if the launcher chose it.
    _reserved: Option<ReservedPort>,
    /// Generated for this run; None if the user's environment has a secret or none is needed.
    secret: Option<Zeroizing<String>>,
}

impl Layout {
    pub fn new(args: &Args) -> Result<Self, LayoutError> {
        let nodes = args.nodes;
        if nodes == 0 {
            return Err(LayoutError::NoNodes);
        }
        let node_rank = match args.node_rank {
            Some(node_rank) if node_rank < nodes => node_rank,
            Some(node_rank) => return Err(LayoutError::NodeRank { node_rank, nodes }),
            None if nodes > 1 => return Err(LayoutError::NoNodeRank { nodes }),
            None => 0,
        };
        let local_world_size = match args.ranks {
            Some(0) => return Err(LayoutError::NoRanks),
            Some(ranks) => ranks,
            // A machine that does not report its number of cores has at least one.
            None => available_parallelism().map_or(1, |cores| cores.get() as u32),
        };
        let world_size = nodes.checked_mul(local_world_size).ok_or(LayoutError::TooManyRanks)?;

        let (master, host) = match &args.master {
            Some(master) => (master.clone(), host_beside(master, args)?),
            None if nodes > 1 => return Err(LayoutError::NoMaster { nodes }),
            None => {
                let host = args.host.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
                (Master { host: host.to_string(), port: 0 }, host)
            }
        };
        if nodes > 1 && master.port == 0 {
            return Err(LayoutError::NoPort { nodes });
        }
        let stop = StopSettings::from_env()?;
        let grace = args.grace.map(|seconds| Duration::from_secs(seconds.into())).or(stop.grace);
        let secret = secret(nodes, host.is_loopback() && master.is_loopback())?;
        // Checks early that the address belongs to this node.
        reserve(&host.to_string())?;
        let reserved = if master.port == 0 { Some(reserve(&master.host)?) } else { None };
        let port = reserved.as_ref().map_or(master.port, ReservedPort::number);
        Ok(Self {
            secret,
            stop_signal: stop.signal.unwrap_or_default().as_raw(),
            grace: grace.unwrap_or(GRACE),
            rendezvous_timeout: args.rendezvous_timeout,
            _reserved: reserved,
            local_world_size,
            world_size,
            first_rank: node_rank * local_world_size,
            master: Master { port, ..master },
            host,
        })
    }

    /// Returns the environment variable with the generated secret, if there is one.
    pub fn secret(&self) -> Option<(&'static str, &str)> {
        self.secret.as_ref().map(|secret| ("BONFIRE_SECRET", secret.as_str()))
    }

    /// Returns the variables of the rank with local rank `local`.
    pub fn environment(&self, local: u32) -> Vec<(String, String)> {
        let Master { host, port } = &self.master;
        let mut environment = vec![
            ("BONFIRE_ADDRESS".into(), self.master.to_string()),
            ("BONFIRE_HOST".into(), self.host.to_string()),
            ("MASTER_ADDR".into(), host.clone()),
            ("MASTER_PORT".into(), port.to_string()),
        ];
        let (rank, ranks, local_ranks) = (self.first_rank + local, self.world_size, self.local_world_size);
        let pairs = [("RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_RANK", local), ("LOCAL_WORLD_SIZE", local_ranks)];
        for (name, number) in pairs {
            environment.push((name.into(), number.to_string()));
            environment.push((format!("BONFIRE_{name}"), number.to_string()));
        }
        let limit = self.rendezvous_timeout.map(|seconds| ("BONFIRE_RENDEZVOUS_TIMEOUT".into(), seconds.to_string()));
        environment.extend(limit);
        // With none, the ranks are killed before they could use it.
        let grace = Some(self.grace).filter(|grace| !grace.is_zero());
        environment.extend(grace.map(|grace| ("BONFIRE_GRACE".into(), grace.as_secs_f64().to_string())));
        environment
    }
}

/// Arguments that contradict each other or are incomplete, or a failure to set up the run.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    #[error("-n 0 starts nothing: give -n at least 1")]
    NoRanks,
    #[error("--nodes 0 starts nothing: give --nodes at least 1")]
    NoNodes,
    #[error("-n times --nodes exceeds the largest number of ranks: lower one of them")]
    TooManyRanks,
    #[error("--nodes {nodes} needs --node-rank: give this node's number, 0 to {}", nodes - 1)]
    NoNodeRank { nodes: u32 },
    #[error(
        "--node-rank {node_rank} does not exist with --nodes {nodes}: nodes count from 0, so give \
         at most {}, or raise --nodes", nodes - 1
    )]
    NodeRank { node_rank: u32, nodes: u32 },
    #[error("--nodes {nodes} needs --master: give the HOST:PORT at which rank 0 listens")]
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
    #[error(transparent)]
    Setting(#[from] bonfire::Error),
    #[error(
        "{nodes} nodes beyond loopback need a shared secret: put at least 32 random bytes into a file \
         (openssl rand -hex 32, chmod 600), copy it to every node, and set BONFIRE_SECRET_FILE to its \
         path on each"
    )]
    NoSecret { nodes: u32 },
    #[error("cannot generate the secret of this run: {0}")]
    Random(io::Error),
}

/// Generates a secret if the run is on one node and the user gave none. Ranks inherit the user's secret.
fn secret(nodes: u32, loopback: bool) -> Result<Option<Zeroizing<String>>, LayoutError> {
    match (Secret::from_env()?, nodes) {
        (Some(_), _) => Ok(None),
        (None, 1) => {
            let mut bytes = Zeroizing::new([0; Secret::MIN_BYTES]);
            let random = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes[..]));
            random.map_err(LayoutError::Random)?;
            let digits =
                |byte: &u8| [byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[digit as usize]));
            Ok(Some(Zeroizing::new(bytes.iter().flat_map(digits).collect())))
        }
        (None, _) if loopback => Ok(None),
        (None, _) => Err(LayoutError::NoSecret { nodes }),
    }
}

/// Returns the address at which this node's ranks listen, given that of rank 0.
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

fn reserve(host: &str) -> Result<ReservedPort, LayoutError> {
    ReservedPort::of(host).map_err(|source| LayoutError::Listen { host: host.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn an_ipv6_address_is_in_brackets_only_with_its_port() {
        let (master, host) = ("[::1]:29400".parse().unwrap(), Ipv6Addr::LOCALHOST.into());
        let layout = Layout {
            local_world_size: 1,
            world_size: 4,
            first_rank: 2,
            master,
            host,
            stop_signal: 15,
            grace: Duration::from_millis(2500),
            rendezvous_timeout: Some(600),
            _reserved: None,
            secret: None,
        };
        let environment: BTreeMap<_, _> = layout.environment(1).into_iter().collect();
        let found = |name: &str| environment[name].as_str();
        assert_eq!([found("BONFIRE_ADDRESS"), found("BONFIRE_HOST")], ["[::1]:29400", "::1"]);
        assert_eq!([found("MASTER_ADDR"), found("MASTER_PORT")], ["::1", "29400"]);
        assert_eq!([found("BONFIRE_RENDEZVOUS_TIMEOUT"), found("BONFIRE_GRACE")], ["600", "2.5"]);
        assert_eq!([found("BONFIRE_RANK"), found("RANK"), found("LOCAL_RANK")], ["3", "3", "1"]);
    }
}
