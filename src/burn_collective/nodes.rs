//! A node's connection to the other nodes: registration with the orchestrator, and operations of the group of nodes.

use std::cell::RefCell;
use std::io::ErrorKind;
use std::time::Duration;

use burn::tensor::TensorData;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::claim::{self, ClaimResult, merge};
use super::config::{AllReduceStrategy, MultiNode};
use super::data;
use super::error::{CollectiveError, GlobalCollectiveError};
use super::messages::{Answer, PROTOCOL, Registration};
use super::names::{NodeId, PeerId};
use bonfire_core::internal::{Dialler, OwnRuntime, Prologue, Purpose, Refusal, frame};
use bonfire_core::{Algorithm, Deadline, Error, Group, ReduceOp, Secret};

/// The timeout for nodes to register and to connect.
pub(super) const RENDEZVOUS: Duration = Duration::from_secs(120);

/// Bytes of a node's claim in the all-gather of claims. Shapes of about fifty dimensions fit.
const CLAIM: usize = 512;

/// This process as a rank of the group of nodes. Its rank is its id.
pub(super) struct Node {
    group: Group,
}

impl Node {
    /// Registers with the orchestrator and connects to the other nodes. Blocks until all are connected. Each of the two
    /// steps takes at most `limit` and at most [`RENDEZVOUS`].
    pub fn connect(config: &MultiNode, peers: &[PeerId], limit: Duration) -> Result<Node, CollectiveError> {
        let host = &config.host;
        let registration = Registration {
            protocol: PROTOCOL,
            host: host.clone(),
            port: config.port,
            data_port: config.data_service_port,
            num_nodes: config.num_nodes,
            lowest_peer: peers.iter().map(|peer| peer.0).min().unwrap_or(0),
            strategies: config.strategies,
        };
        let rendezvous = limit.min(RENDEZVOUS);
        let refused = |error: Error| GlobalCollectiveError::Server(error.to_string());
        let secret = Secret::from_env().map_err(refused)?;
        let deadline = Deadline::after(rendezvous);
        let registered = OwnRuntime::new().and_then(|runtime| {
            runtime.run(|| register(&config.orchestrator, &registration, secret.as_ref(), &deadline))
        });
        let (id, nodes) = registered.map_err(refused)??;
        let algorithm = match config.strategies.all_reduce {
            Some(AllReduceStrategy::Centralized) => Some(Algorithm::Direct),
            Some(AllReduceStrategy::Tree(_)) => Some(Algorithm::Tree),
            Some(AllReduceStrategy::Ring) | None => None,
        };
        let (first, first_port) = nodes.first().ok_or(GlobalCollectiveError::WrongOrchestratorResponse)?;
        let first = address(first, *first_port);
        let builder = Group::builder().rank(id.rank()).world_size(nodes.len()).address(first).host(host.clone());
        let builder = builder.deadline(limit).rendezvous_timeout(rendezvous);
        let builder = algorithm.into_iter().fold(builder, |builder, algorithm| builder.algorithms(algorithm));
        let builder = secret.into_iter().fold(builder, |builder, secret| builder.secret(secret));
        let group = builder.connect().map_err(refused)?;
        Ok(Node { group })
    }

    /// Merges the claims of all nodes. All nodes get the same result, unless the network fails.
    pub fn merge(&self, ours: ClaimResult) -> ClaimResult {
        let too_long =
            || CollectiveError::Other(format!("a shape or an error does not fit the {CLAIM} bytes of a claim"));
        let nodes = self.group.world_size();
        let mut all = vec![0; nodes * CLAIM];
        let own = &mut all[self.group.rank() * CLAIM..][..CLAIM];
        if postcard::to_slice(&ours, own).is_err() {
            // The replacement is shorter and fits.
            postcard::to_slice::<ClaimResult>(&Err(too_long()), own).map_err(|_| too_long())?;
        }
        self.group.all_gather(&mut all).map_err(|error| self.node_error(error))?;
        merge(all.chunks(CLAIM).map(claim::read))
    }

    pub fn all_reduce(&self, data: &mut TensorData, op: ReduceOp) -> Result<(), CollectiveError> {
        data::all_reduce(&self.group, data, op).map_err(|error| self.node_error(error))
    }

    pub fn reduce(&self, data: &mut TensorData, op: ReduceOp, root: usize) -> Result<(), CollectiveError> {
        data::reduce(&self.group, data, op, root).map_err(|error| self.node_error(error))
    }

    pub fn broadcast(&self, data: &mut TensorData, root: usize) -> Result<(), CollectiveError> {
        self.group.broadcast::<u8>(&mut data.bytes, root).map_err(|error| self.node_error(error))
    }

    fn node_error(&self, error: Error) -> CollectiveError {
        log::error!("node {}: {error}", self.group.rank());
        CollectiveError::Global(match error {
            Error::PeerLost { peer: rank, .. } | Error::Left { rank, .. } => {
                GlobalCollectiveError::PeerLost(NodeId::from(rank))
            }
            error => GlobalCollectiveError::Server(error.to_string()),
        })
    }
}

/// Registers with the orchestrator. Returns this node's id, and the hosts and data ports of all nodes.
async fn register(
    orchestrator: &(String, u16),
    registration: &Registration,
    secret: Option<&Secret>,
    deadline: &Deadline,
) -> Result<(NodeId, Vec<(String, u16)>), GlobalCollectiveError> {
    let ((host, port), num_nodes) = (orchestrator, registration.num_nodes);
    let mut stream = connect_orchestrator(orchestrator, num_nodes, secret, deadline).await?;
    let answer = match frame::write(&mut stream, registration).await {
        Ok(()) => frame::expect(&mut stream, deadline.remaining()).await,
        Err(error) => Err(error),
    };
    match answer {
        Ok(Answer::Start { node, nodes }) if node.rank() < nodes.len() => Ok((node, nodes)),
        Ok(Answer::Refused(error)) => Err(error),
        Ok(Answer::Start { .. }) => Err(GlobalCollectiveError::WrongOrchestratorResponse),
        Err(error) => Err(match error.kind() {
            ErrorKind::InvalidData => GlobalCollectiveError::WrongOrchestratorResponse,
            ErrorKind::TimedOut => GlobalCollectiveError::Server(format!(
                "the orchestrator at {host}:{port} has not answered within {:.1?}: fewer than {num_nodes} nodes have \
                 registered",
                deadline.elapsed()
            )),
            _ => connection_error(orchestrator, &error),
        }),
    }
}

/// Connects to the orchestrator, which may start later than the nodes, and authenticates. Until it has, nothing that
/// answers at the orchestrator's address is final.
async fn connect_orchestrator(
    (host, port): &(String, u16),
    num_nodes: u32,
    secret: Option<&Secret>,
    deadline: &Deadline,
) -> Result<TcpStream, GlobalCollectiveError> {
    // Nodes have no ids yet.
    let (session, from, to, number, of) = (0, 0, 0, 0, 1);
    let prologue = Prologue { purpose: Purpose::Registration, session, from, to, world_size: num_nodes, number, of };
    let (address, names) = (address(host, *port), ["this node".to_owned(), "the orchestrator".to_owned()]);
    let waiting_for = RefCell::new(String::new());
    let mut dialler = Dialler::new(secret, names, &address, prologue, "");
    match timeout(deadline.remaining(), dialler.dial(&waiting_for)).await {
        Ok(Ok((stream, _))) => return Ok(stream),
        Ok(Err(error)) => return Err(GlobalCollectiveError::Server(error.to_string())),
        Err(_) => {}
    }
    let reason = format!("{} after {:.1?}", waiting_for.take(), deadline.elapsed());
    match dialler.refusal() {
        None | Some(Refusal::Io(_)) => {
            log::error!("{reason}");
            Err(GlobalCollectiveError::OrchestratorUnreachable)
        }
        Some(Refusal::Stranger) => {
            log::error!("{reason}");
            Err(GlobalCollectiveError::WrongOrchestratorResponse)
        }
        Some(_) => Err(GlobalCollectiveError::Server(reason)),
    }
}

/// Returns host and port as one text.
fn address(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn connection_error((host, port): &(String, u16), why: &dyn std::error::Error) -> GlobalCollectiveError {
    GlobalCollectiveError::Server(format!("the connection to the orchestrator at {host}:{port} broke: {why}"))
}
