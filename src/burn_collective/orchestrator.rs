//! Where nodes register: gives each an id, and all of them the addresses of all. No tensor passes through it.

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
use bonfire_core::internal::{Lobby, Opening, Purpose, RETRY, answer, confirm, frame, lock, permit};
use bonfire_core::{Error, Secret};

/// Nodes that may register at once.
const NODES: usize = 1024;

/// Runs the orchestrator of sessions that span several nodes, on this port, until Ctrl-C.
///
/// It listens on loopback. `BONFIRE_HOST` in its environment names another address of this machine, for which it needs the
/// secret that all nodes have, in `BONFIRE_SECRET_FILE` or `BONFIRE_SECRET` (see [`Secret::from_env`]). It needs a tokio
/// runtime with I/O and time enabled.
///
/// Once as many nodes have registered as their configs say, they are numbered by their lowest [`PeerId`], and the
/// orchestrator is ready for the next session. Nodes that contradict each other are all refused.
///
/// # Errors
/// Where it cannot listen it returns at once, and an error in the log says why.
///
/// ```no_run
/// # async fn example() {
/// bonfire::start_global_orchestrator(3000).await;
/// # }
/// ```
///
/// [`PeerId`]: crate::PeerId
pub async fn start_global_orchestrator(port: u16) {
    let host = std::env::var("BONFIRE_HOST").ok().filter(|host| !host.is_empty()).unwrap_or("127.0.0.1".into());
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

/// Listens, where that is allowed with the secret that the environment gives.
async fn listen(host: &str, port: u16) -> Result<(TcpListener, Option<Secret>), Error> {
    let failed = |e: io::Error| Error::io("listening", e);
    let secret = Secret::from_env()?;
    let addresses: Vec<_> = lookup_host((host, port)).await.map_err(failed)?.collect();
    permit(secret.as_ref(), &addresses)?;
    Ok((TcpListener::bind(&addresses[..]).await.map_err(failed)?, secret))
}

async fn serve(listener: TcpListener, secret: Option<Secret>) {
    let round = Arc::new(Mutex::new(Round::default()));
    let lobby = Lobby::new(NODES);
    let (known, mut queue) = unbounded_channel();
    // Dropped, and the tasks with it, when the orchestrator ends.
    let mut nodes = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((mut stream, address)) => {
                    let (known, secret) = (known.clone(), secret.clone());
                    let proof = async move {
                        let fits = |opening: &Opening| match opening.purpose {
                            Purpose::Registration => Ok(()),
                            purpose => Err(format!("it is a connection for {purpose:?}, and this is an orchestrator")),
                        };
                        answer(&mut stream, secret.as_ref(), 0, fits).await?;
                        Ok(stream)
                    };
                    lobby.receive(address, proof, move |mut stream| async move {
                        confirm(&mut stream).await?;
                        // Nobody hears it where the orchestrator has ended meanwhile.
                        let _ = known.send((stream, address));
                        Ok(())
                    });
                }
                Err(error) => {
                    log::error!("orchestrator: {error}");
                    tokio::time::sleep(RETRY).await;
                }
            },
            Some((stream, address)) = queue.recv() => {
                let round = round.clone();
                nodes.spawn(async move {
                    if let Err(error) = attend(stream, &round).await {
                        log::warn!("orchestrator, {address}: {error}");
                    }
                });
            }
        }
        while nodes.try_join_next().is_some() {}
    }
}

/// One node: its registration in, its answer out.
async fn attend(mut stream: TcpStream, round: &Mutex<Round>) -> Result<(), GlobalCollectiveError> {
    let late = |_| GlobalCollectiveError::Server(format!("no registration within {RENDEZVOUS:?}"));
    let answer = match timeout(RENDEZVOUS, receive(&mut stream)).await.map_err(late)? {
        Ok(registration) if registration.protocol == PROTOCOL => {
            let (ticket, answer) = lock(round).enter(registration);
            let answer = tokio::select! {
                answer = answer => answer.ok(),
                // A node that waits sends nothing: this is its end.
                _ = stream.read_u8() => None,
                () = tokio::time::sleep(RENDEZVOUS) => {
                    let reason = format!("too few nodes registered within {RENDEZVOUS:?}");
                    Some(Answer::Refused(GlobalCollectiveError::Server(reason)))
                }
            };
            lock(round).leave(ticket);
            match answer {
                Some(answer) => answer,
                None => return Err(GlobalCollectiveError::Server("the node went away".into())),
            }
        }
        Ok(_) => Answer::Refused(GlobalCollectiveError::InvalidMessage),
        Err(error) => Answer::Refused(error),
    };
    match timeout(RENDEZVOUS, frame::write(&mut stream, &answer)).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(broken(error)),
        Err(_) => Err(GlobalCollectiveError::Server("the node does not read its answer".into())),
    }
}

async fn receive(stream: &mut TcpStream) -> Result<Registration, GlobalCollectiveError> {
    let gone = || GlobalCollectiveError::Server("the node went away".into());
    frame::read(stream).await.map_err(broken)?.ok_or_else(gone)
}

fn broken(error: io::Error) -> GlobalCollectiveError {
    match error.kind() {
        ErrorKind::InvalidData => GlobalCollectiveError::InvalidMessage,
        _ => GlobalCollectiveError::Server(error.to_string()),
    }
}

/// The nodes of the session that is coming together.
#[derive(Default)]
struct Round {
    tickets: u64,
    waiting: Vec<Waiting>,
}

struct Waiting {
    ticket: u64,
    registration: Registration,
    answer: oneshot::Sender<Answer>,
}

impl Round {
    /// Adds a node, and answers all if that settles the round.
    fn enter(&mut self, registration: Registration) -> (u64, oneshot::Receiver<Answer>) {
        let (answer, receiver) = oneshot::channel();
        self.tickets += 1;
        self.waiting.push(Waiting { ticket: self.tickets, registration, answer });
        self.waiting.sort_by(|a, b| place(&a.registration).cmp(&place(&b.registration)));
        let registrations: Vec<&Registration> = self.waiting.iter().map(|node| &node.registration).collect();
        if let Some(settled) = settle(&registrations) {
            let answers = self.waiting.drain(..).enumerate().map(|(id, node)| {
                let start = |nodes| Answer::Start { node: NodeId::from(id), nodes };
                (node.answer, settled.clone().map_or_else(Answer::Refused, start))
            });
            for (node, answer) in answers {
                // A node that is gone needs no answer.
                let _ = node.send(answer);
            }
        }
        (self.tickets, receiver)
    }

    fn leave(&mut self, ticket: u64) {
        self.waiting.retain(|node| node.ticket != ticket);
    }
}

/// The order of ids: by what a config says, not by arrival.
fn place(registration: &Registration) -> (u32, &str, u16) {
    (registration.lowest_peer, &registration.host, registration.port)
}

/// Where all nodes are, once all have registered; or what speaks against it.
fn settle(registrations: &[&Registration]) -> Option<Result<Vec<(String, u16)>, GlobalCollectiveError>> {
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
