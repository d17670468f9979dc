//! One node among several: how it finds the others, and what it does with them.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use burn::tensor::TensorData;

use super::claim::{self, Claimed, merge};
use super::config::{AllReduceStrategy, Global};
use super::data;
use super::error::{CollectiveError, GlobalCollectiveError};
use super::messages::{Answer, PROTOCOL, Registration};
use super::names::{NodeId, PeerId, parts};
use bonfire_core::internal::{Opening, Purpose, Refusal, frame, permit, prove};
use bonfire_core::{Algorithm, Deadline, Error, Group, ReduceOp, Secret};

/// How long nodes may take to find each other.
pub(super) const RENDEZVOUS: Duration = Duration::from_secs(120);

/// A node's claim takes this much of the agreement. Shapes of some fifty dimensions fit.
const CLAIM: usize = 512;

/// This process among the nodes. Its rank is its id.
pub(super) struct Node {
    group: Group,
}

impl Node {
    /// Registers with the orchestrator and connects to the other nodes. Blocks until all are there. Either step takes
    /// at most `limit`, and at most [`RENDEZVOUS`].
    pub fn connect(global: &Global, peers: &[PeerId], limit: Duration) -> Result<Node, CollectiveError> {
        let (host, port) = parts(&global.node_address)?;
        let (orchestrator, orchestrator_port) = parts(&global.global_address)?;
        let orchestrator = (orchestrator, orchestrator_port.ok_or(CollectiveError::InvalidConfig)?);
        let registration = Registration {
            protocol: PROTOCOL,
            host: host.clone(),
            port: port.unwrap_or(global.data_service_port),
            data_port: global.data_service_port,
            num_nodes: global.num_nodes,
            lowest_peer: peers.iter().map(|peer| peer.0).min().unwrap_or(0),
            strategies: global.strategies,
        };
        let rendezvous = limit.min(RENDEZVOUS);
        let refused = |error: Error| GlobalCollectiveError::Server(error.to_string());
        let secret = Secret::from_env().map_err(refused)?;
        let (id, nodes) = register(&orchestrator, &registration, secret.as_ref(), &Deadline::after(rendezvous))?;
        let algorithm = match global.strategies.all_reduce {
            Some(AllReduceStrategy::Centralized) => Some(Algorithm::Direct),
            Some(AllReduceStrategy::Tree(_)) => Some(Algorithm::Tree),
            Some(AllReduceStrategy::Ring) | None => None,
        };
        let (first, first_port) = nodes.first().ok_or(GlobalCollectiveError::WrongOrchestratorResponse)?;
        let first =
            if first.contains(':') { format!("[{first}]:{first_port}") } else { format!("{first}:{first_port}") };
        let builder = Group::builder().rank(id.rank()).world_size(nodes.len()).address(first).host(host);
        let builder = builder.deadline(limit).rendezvous_timeout(rendezvous);
        let builder = algorithm.into_iter().fold(builder, |builder, algorithm| builder.algorithms(algorithm));
        let builder = secret.into_iter().fold(builder, |builder, secret| builder.secret(secret));
        let group = builder.connect().map_err(refused)?;
        Ok(Node { group })
    }

    /// Merges the claims of all nodes. Here and everywhere the same comes out, unless the network fails.
    pub fn merge(&self, ours: Claimed) -> Claimed {
        let too_long =
            || CollectiveError::Other(format!("a shape or an error does not fit the {CLAIM} bytes of a claim"));
        let nodes = self.group.world_size();
        let mut all = vec![0; nodes * CLAIM];
        let own = &mut all[self.group.rank() * CLAIM..][..CLAIM];
        if postcard::to_slice(&ours, own).is_err() {
            // The replacement is shorter.
            postcard::to_slice::<Claimed>(&Err(too_long()), own).map_err(|_| too_long())?;
        }
        self.group.all_gather(&mut all).map_err(|error| self.lost(error))?;
        merge(all.chunks(CLAIM).map(claim::read))
    }

    pub fn all_reduce(&self, data: &mut TensorData, op: ReduceOp) -> Result<(), CollectiveError> {
        data::all_reduce(&self.group, data, op).map_err(|error| self.lost(error))
    }

    pub fn reduce(&self, data: &mut TensorData, op: ReduceOp, root: usize) -> Result<(), CollectiveError> {
        data::reduce(&self.group, data, op, root).map_err(|error| self.lost(error))
    }

    pub fn broadcast(&self, data: &mut TensorData, root: usize) -> Result<(), CollectiveError> {
        self.group.broadcast::<u8>(&mut data.bytes, root).map_err(|error| self.lost(error))
    }

    fn lost(&self, error: Error) -> CollectiveError {
        log::error!("node {}: {error}", self.group.rank());
        CollectiveError::Global(match error {
            Error::PeerLost { peer: rank, .. } | Error::Left { rank, .. } => {
                GlobalCollectiveError::PeerLost(NodeId::from(rank))
            }
            error => GlobalCollectiveError::Server(error.to_string()),
        })
    }
}

/// This node's id and where all nodes are.
fn register(
    orchestrator: &(String, u16),
    registration: &Registration,
    secret: Option<&Secret>,
    deadline: &Deadline,
) -> Result<(NodeId, Vec<(String, u16)>), GlobalCollectiveError> {
    let frame = frame::encode(registration).map_err(|error| GlobalCollectiveError::Server(error.to_string()))?;
    let mut stream = reach(orchestrator, secret, deadline)?;
    let broken = |error: std::io::Error| {
        let (host, port) = orchestrator;
        GlobalCollectiveError::Server(match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => format!(
                "the orchestrator at {host}:{port} has not answered within {:.1?}: fewer than {} nodes have registered",
                deadline.elapsed(),
                registration.num_nodes
            ),
            _ => format!("the connection to the orchestrator at {host}:{port} broke: {error}"),
        })
    };
    stream.set_write_timeout(Some(wait(deadline))).map_err(broken)?;
    // Nodes have no number yet.
    let (session, from, to, number, of) = (0, 0, 0, 0, 1);
    let world_size = registration.num_nodes;
    let opening = Opening { purpose: Purpose::Registration, session, from, to, world_size, number, of };
    let proved = prove::<Refusal>(
        secret,
        opening,
        |bytes| Ok((&stream).write_all(bytes)?),
        |bytes| Ok(read(&mut &stream, bytes, deadline)?),
    );
    proved.map_err(|refusal| match refusal {
        Refusal::Io(error) => broken(error),
        Refusal::Stranger => GlobalCollectiveError::WrongOrchestratorResponse,
        refusal => broken(std::io::Error::other(refusal.to_string())),
    })?;
    stream.write_all(&frame).map_err(broken)?;
    let mut head = [0; 4];
    read(&mut &stream, &mut head, deadline).map_err(broken)?;
    let wrong = |_: std::io::Error| GlobalCollectiveError::WrongOrchestratorResponse;
    let mut body = vec![0; frame::body_length(head).map_err(wrong)?];
    read(&mut &stream, &mut body, deadline).map_err(broken)?;
    match frame::decode(&body).map_err(wrong)? {
        Answer::Start { node, nodes } if node.rank() < nodes.len() => Ok((node, nodes)),
        Answer::Start { .. } => Err(GlobalCollectiveError::WrongOrchestratorResponse),
        Answer::Refused(error) => Err(error),
    }
}

/// Connects to the orchestrator, which may start later than the nodes.
fn reach(
    orchestrator: &(String, u16),
    secret: Option<&Secret>,
    deadline: &Deadline,
) -> Result<TcpStream, GlobalCollectiveError> {
    const RETRY: Duration = Duration::from_millis(100);
    let (host, port) = orchestrator;
    loop {
        let addresses = (host.as_str(), *port).to_socket_addrs().map(|addresses| addresses.collect::<Vec<_>>());
        permit(secret, addresses.as_deref().unwrap_or_default())
            .map_err(|error| GlobalCollectiveError::Server(error.to_string()))?;
        let attempt = addresses.and_then(|addresses| {
            let mut addresses = addresses.into_iter();
            let connected = addresses.find_map(|address| TcpStream::connect_timeout(&address, wait(deadline)).ok());
            connected.ok_or(ErrorKind::ConnectionRefused.into())
        });
        match attempt {
            Ok(stream) => return Ok(stream),
            Err(error) if deadline.passed() => {
                log::error!("orchestrator at {host}:{port}: {error} after {:.1?}", deadline.elapsed());
                return Err(GlobalCollectiveError::OrchestratorUnreachable);
            }
            Err(_) => std::thread::sleep(RETRY.min(deadline.remaining())),
        }
    }
}

/// Reads all of `bytes` by the deadline, however slowly they drip.
fn read(stream: &mut &TcpStream, bytes: &mut [u8], deadline: &Deadline) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        stream.set_read_timeout(Some(wait(deadline)))?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) if deadline.passed() => return Err(ErrorKind::TimedOut.into()),
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The time that is left, as sockets take it: never zero.
fn wait(deadline: &Deadline) -> Duration {
    deadline.remaining().max(Duration::from_millis(1))
}
