//! The orchestrator, with which nodes register: assigns their ids and sends each the addresses of all. Tensors do not
//! pass through it.

use std::env::VarError;
use std::io::{self, ErrorKind};
use std::sync::{Arc, Mutex};

use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::error::GlobalCollectiveError;
use super::messages::{Answer, PROTOCOL, Registration};
use super::names::NodeId;
use super::nodes::RENDEZVOUS;
use bonfire_core::internal::{
    AcceptQueue, Prologue, Purpose, RETRY, accept_handshake, confirm, frame, lock, require_secret,
};
use bonfire_core::{Error, Secret};

/// The most nodes that may register at the same time. Bounds the queue of connections without a complete handshake.
const NODES: usize = 1024;

/// Runs the orchestrator of sessions over several nodes on this port, until Ctrl-C.
///
/// It listens on loopback. To use another address of this machine, set `BONFIRE_HOST` in its environment; the
/// orchestrator and all nodes then need the same secret, in `BONFIRE_SECRET_FILE` or `BONFIRE_SECRET` (see
/// [`Secret::from_env`]). It needs a tokio runtime with I/O and time enabled.
///
/// Once as many nodes have registered as their configs say, the orchestrator numbers them by their lowest [`PeerId`].
/// It is then ready for the next session. If the configs of nodes contradict each other, it refuses all of these nodes.
///
/// # Errors
/// If it cannot listen, it logs an error and returns at once.
///
/// ```no_run
/// # async fn example() {
/// bonfire::start_global_orchestrator(3000).await;
/// # }
/// ```
///
/// [`PeerId`]: crate::PeerId
pub async fn start_global_orchestrator(port: u16) {
    let host = match std::env::var("BONFIRE_HOST") {
        Ok(host) if !host.is_empty() => host,
        Err(VarError::NotUnicode(host)) => {
            log::error!("the orchestrator cannot listen: BONFIRE_HOST is {host:?}, which is not UTF-8");
            return;
        }
        _ => "127.0.0.1".into(),
    };
    let (listener, secret) = match listen(&host, port).await {
        Ok(listening) => listening,
        Err(error) => {
            log::error!("the orchestrator cannot listen on {host}:{port}: {error}");
            return;
        }
    };
    log::info!("orchestrator on {host}:{port}");
    tokio::select! {
        () = serve(listener, secret) => {}
        interrupted = tokio::signal::ctrl_c() => match interrupted {
            Ok(()) => log::info!("orchestrator interrupted"),
            Err(error) => log::error!("the orchestrator cannot wait for Ctrl-C: {error}"),
        },
    }
}

/// Listens, if that is permitted with the environment's secret. Returns the secret too.
async fn listen(host: &str, port: u16) -> Result<(TcpListener, Option<Secret>), Error> {
    let failed = |e: io::Error| Error::io("listening", e);
    let secret = Secret::from_env()?;
    let addresses: Vec<_> = lookup_host((host, port)).await.map_err(failed)?.collect();
    require_secret(secret.as_ref(), &addresses)?;
    Ok((TcpListener::bind(&addresses[..]).await.map_err(failed)?, secret))
}

async fn serve(listener: TcpListener, secret: Option<Secret>) {
    let session = Arc::new(Mutex::new(PendingSession::default()));
    let accept_queue = AcceptQueue::new(NODES);
    let (authenticated, mut queue) = unbounded_channel();
    // Dropping it when the orchestrator ends aborts the tasks.
    let mut nodes = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((mut stream, address)) => {
                    let (authenticated, secret) = (authenticated.clone(), secret.clone());
                    let handshake = async move {
                        let fits = |prologue: &Prologue| match prologue.purpose {
                            Purpose::Registration => Ok(()),
                            purpose => Err(format!("it is a connection for {purpose:?}, and this is an orchestrator")),
                        };
                        accept_handshake(&mut stream, secret.as_ref(), 0, fits).await?;
                        Ok(stream)
                    };
                    accept_queue.receive(address.ip().to_canonical(), handshake, move |mut stream| async move {
                        confirm(&mut stream).await?;
                        // Fails only if the orchestrator has ended meanwhile.
                        let _ = authenticated.send((stream, address));
                        Ok(())
                    });
                }
                Err(error) => {
                    log::error!("orchestrator: {error}");
                    tokio::time::sleep(RETRY).await;
                }
            },
            Some((stream, address)) = queue.recv() => {
                let session = session.clone();
                nodes.spawn(async move {
                    if let Err(error) = serve_node(stream, &session).await {
                        log::warn!("orchestrator, {address}: {error}");
                    }
                });
            }
        }
        while nodes.try_join_next().is_some() {}
    }
}

/// Serves one node: receives its registration and sends the answer.
async fn serve_node(mut stream: TcpStream, session: &Mutex<PendingSession>) -> Result<(), GlobalCollectiveError> {
    let timed_out = |_| GlobalCollectiveError::Server(format!("no registration within {RENDEZVOUS:?}"));
    let answer = match timeout(RENDEZVOUS, receive(&mut stream)).await.map_err(timed_out)? {
        Ok(registration) if registration.protocol == PROTOCOL => {
            let (ticket, answer) = lock(session).register(registration);
            let answer = tokio::select! {
                answer = answer => answer.ok(),
                // A waiting node sends nothing, so a completed read means that its connection ended.
                _ = stream.read_u8() => None,
                () = tokio::time::sleep(RENDEZVOUS) => {
                    let reason = format!("too few nodes registered within {RENDEZVOUS:?}");
                    Some(Answer::Refused(GlobalCollectiveError::Server(reason)))
                }
            };
            lock(session).unregister(ticket);
            match answer {
                Some(answer) => answer,
                None => return Err(GlobalCollectiveError::Server("the node disconnected".into())),
            }
        }
        Ok(_) => Answer::Refused(GlobalCollectiveError::InvalidMessage),
        Err(error) => Answer::Refused(error),
    };
    match timeout(RENDEZVOUS, frame::write(&mut stream, &answer)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(connection_error(error)),
        Err(_) => Err(GlobalCollectiveError::Server("the node does not read its answer".into())),
    }
}

async fn receive(stream: &mut TcpStream) -> Result<Registration, GlobalCollectiveError> {
    let disconnected = || GlobalCollectiveError::Server("the node disconnected".into());
    frame::read(stream).await.map_err(connection_error)?.ok_or_else(disconnected)
}

fn connection_error(error: io::Error) -> GlobalCollectiveError {
    match error.kind() {
        ErrorKind::InvalidData => GlobalCollectiveError::InvalidMessage,
        _ => GlobalCollectiveError::Server(error.to_string()),
    }
}

/// The registrations for the next session.
#[derive(Default)]
struct PendingSession {
    tickets: u64,
    waiting: Vec<WaitingNode>,
}

struct WaitingNode {
    ticket: u64,
    registration: Registration,
    answer: oneshot::Sender<Answer>,
}

impl PendingSession {
    /// Adds a node. Answers all waiting nodes if that completes the session or shows a contradiction.
    fn register(&mut self, registration: Registration) -> (u64, oneshot::Receiver<Answer>) {
        let (answer, receiver) = oneshot::channel();
        self.tickets += 1;
        self.waiting.push(WaitingNode { ticket: self.tickets, registration, answer });
        self.waiting.sort_by(|a, b| sort_key(&a.registration).cmp(&sort_key(&b.registration)));
        let registrations: Vec<&Registration> = self.waiting.iter().map(|node| &node.registration).collect();
        if let Some(outcome) = outcome(&registrations) {
            let answers = self.waiting.drain(..).enumerate().map(|(id, node)| {
                let start = |nodes| Answer::Start { node: NodeId::from(id), nodes };
                (node.answer, outcome.clone().map_or_else(Answer::Refused, start))
            });
            for (node, answer) in answers {
                // Fails only if the node has disconnected.
                let _ = node.send(answer);
            }
        }
        (self.tickets, receiver)
    }

    fn unregister(&mut self, ticket: u64) {
        self.waiting.retain(|node| node.ticket != ticket);
    }
}

/// The order of ids. It depends on the configs, not on the order of arrival.
fn sort_key(registration: &Registration) -> (u32, &str, u16) {
    (registration.lowest_peer, &registration.host, registration.port)
}

/// Returns the hosts and data ports of all nodes once all have registered, or an error if registrations contradict each
/// other. Returns `None` while nodes are missing.
fn outcome(registrations: &[&Registration]) -> Option<Result<Vec<(String, u16)>, GlobalCollectiveError>> {
    let (first, others) = registrations.split_first()?;
    if others.iter().any(|other| (other.num_nodes, other.strategies) != (first.num_nodes, first.strategies)) {
        return Some(Err(GlobalCollectiveError::RegisterParamsMismatch));
    }
    let address = |registration: &Registration| (registration.host.clone(), registration.port);
    let mut addresses: Vec<_> = registrations.iter().map(|registration| address(registration)).collect();
    addresses.sort();
    if addresses.windows(2).any(|pair| pair[0] == pair[1]) {
        return Some(Err(GlobalCollectiveError::DoubleRegister));
    }
    let nodes = || registrations.iter().map(|node| (node.host.clone(), node.data_port)).collect();
    (registrations.len() as u64 == u64::from(first.num_nodes)).then(|| Ok(nodes()))
}
