//! A node's connection to the other nodes: registration with the orchestrator, and operations of the group of nodes.

use std::io::ErrorKind;
use std::time::Duration;

use burn::tensor::TensorData;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{sleep, timeout};

use super::claim::{self, ClaimResult, merge};
use super::config::{AllReduceStrategy, MultiNode};
use super::data;
use super::error::{CollectiveError, GlobalCollectiveError};
use super::messages::{Answer, PROTOCOL, Registration};
use super::names::{NodeId, PeerId};
use bonfire_core::internal::{OwnRuntime, Prologue, Purpose, RETRY, Refusal, dial, frame, open};
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
        let first =
            if first.contains(':') { format!("[{first}]:{first_port}") } else { format!("{first}:{first_port}") };
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

/// Connects to the orchestrator, which may start later than the nodes, and authenticates.
async fn connect_orchestrator(
    orchestrator: &(String, u16),
    num_nodes: u32,
    secret: Option<&Secret>,
    deadline: &Deadline,
) -> Result<TcpStream, GlobalCollectiveError> {
    let (host, port) = orchestrator;
    // Nodes have no ids yet.
    let (session, from, to, number, of) = (0, 0, 0, 0, 1);
    let prologue = Prologue { purpose: Purpose::Registration, session, from, to, world_size: num_nodes, number, of };
    loop {
        let attempt = async {
            let addresses = match lookup_host((host.as_str(), *port)).await {
                Ok(addresses) => Vec::from_iter(addresses),
                Err(error) => return Ok(Err(Refusal::Io(error))),
            };
            match open(secret, &addresses).await? {
                Ok(mut stream) => Ok(dial(&mut stream, secret, prologue).await.map(|_| stream)),
                Err(error) => Ok(Err(Refusal::Io(error))),
            }
        };
        let timed_out = |_| Ok(Err(Refusal::Io(ErrorKind::TimedOut.into())));
        let attempt = timeout(deadline.remaining(), attempt).await.unwrap_or_else(timed_out);
        match attempt.map_err(|error: Error| GlobalCollectiveError::Server(error.to_string()))? {
            Ok(stream) => return Ok(stream),
            Err(Refusal::Io(error)) if deadline.passed() => {
                log::error!("orchestrator at {host}:{port}: {error} after {:.1?}", deadline.elapsed());
                return Err(GlobalCollectiveError::OrchestratorUnreachable);
            }
            Err(Refusal::Io(_)) => sleep(RETRY.min(deadline.remaining())).await,
            Err(Refusal::Stranger) => return Err(GlobalCollectiveError::WrongOrchestratorResponse),
            Err(refusal) => return Err(connection_error(orchestrator, &refusal)),
        }
    }
}

fn connection_error((host, port): &(String, u16), why: &dyn std::error::Error) -> GlobalCollectiveError {
    GlobalCollectiveError::Server(format!("the connection to the orchestrator at {host}:{port} broke: {why}"))
}
