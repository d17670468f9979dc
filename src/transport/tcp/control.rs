//! The control thread: one connection to every peer, and the listener for data connections.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::beat::{self, Silence};
use super::board::Board;
use super::link::MOST;
use super::word::{News, Word};
use crate::auth::{self, Lobby, Member, Opening, Purpose, RETRY};
use crate::error::{Error, Site};
use crate::transport::invitation::Invitation;
use crate::transport::{Fault, frame};

/// What the rendezvous hands over.
pub(crate) struct Mesh {
    pub member: Member,
    pub addresses: Vec<SocketAddr>,
    pub listener: TcpListener,
    /// Who has not proved yet who it is.
    pub lobby: Arc<Lobby>,
    /// By rank; none to oneself.
    pub connections: Vec<Option<TcpStream>>,
    pub board: Arc<Board>,
}

/// From the threads that run operations to the control thread.
pub(crate) enum Outgoing {
    /// This rank stalls at this call and asks all peers for theirs.
    Calling(Site),
    /// This rank's call, to a peer that asked before it was made.
    Called(usize, Site),
    /// This rank failed, having completed so many collectives.
    Failed(Error, u64),
    /// To a member of a subgroup to be.
    Invites(usize, Invitation),
    /// To all peers, of going on without those that are lost.
    Word(Word),
    /// This rank leaves, in order or because its thread panics; the control thread ends.
    Farewell { panicked: bool },
}

impl Outgoing {
    /// What is said, and to whom if not to all peers.
    pub fn message(self) -> (Message, Option<usize>) {
        match self {
            Outgoing::Calling(site) => (Message::Calling(site), None),
            Outgoing::Called(peer, site) => (Message::Called(site), Some(peer)),
            Outgoing::Failed(error, completed) => (Message::Failed(error, completed), None),
            Outgoing::Invites(peer, invitation) => (Message::Invites(invitation), Some(peer)),
            Outgoing::Word(word) => (Message::Word(word), None),
            Outgoing::Farewell { panicked } => (Message::Farewell { panicked }, None),
        }
    }
}

/// Between control threads.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Nothing but a word: this rank is there.
    Here,
    Calling(Site),
    Called(Site),
    Failed(Error, u64),
    Word(Word),
    Invites(Invitation),
    Farewell {
        panicked: bool,
    },
}

/// Who a word of going on is from, or of whom the news are.
pub(crate) type Heard = (usize, News);

/// How long a leaving rank may take to get its farewell out.
const PATIENCE: Duration = Duration::from_secs(1);

/// Serves until the farewell.
pub(super) async fn run(
    mesh: Mesh,
    silence: Silence,
    mut outgoing: UnboundedReceiver<Outgoing>,
    news: UnboundedSender<Heard>,
) {
    let board = mesh.board;
    tokio::spawn(accept(mesh.listener, mesh.lobby, mesh.member, board.clone()));
    let mut writers: Vec<Option<UnboundedSender<Message>>> = Vec::new();
    let mut writing = tokio::task::JoinSet::new();
    for (peer, stream) in mesh.connections.into_iter().enumerate() {
        let Some(stream) = stream else {
            writers.push(None);
            continue;
        };
        let (reader, writer) = stream.into_split();
        let (messages, queue) = unbounded_channel();
        let (board, answers, news) = (board.clone(), messages.clone(), news.clone());
        tokio::spawn(async move {
            let last = read(peer, reader, &board, &answers, &news).await;
            // Nobody hears it any more where the rank is about to leave.
            let _ = news.send((peer, last));
        });
        writing.spawn(write(writer, queue));
        writers.push(Some(messages));
    }
    tokio::spawn(beat::run(board, writers.clone(), silence, news));
    while let Some(outgoing) = outgoing.recv().await {
        let (message, only) = outgoing.message();
        for (peer, writer) in writers.iter().enumerate() {
            if let Some(writer) = writer.as_ref().filter(|_| only.is_none_or(|only| only == peer)) {
                let _ = writer.send(message.clone());
            }
        }
        if matches!(message, Message::Farewell { .. }) {
            break;
        }
    }
    // Writers end with the farewell; one whose peer does not read is given up.
    let _ = tokio::time::timeout(PATIENCE, async { while writing.join_next().await.is_some() {} }).await;
}

async fn write(mut stream: OwnedWriteHalf, mut queue: UnboundedReceiver<Message>) {
    while let Some(message) = queue.recv().await {
        // A connection that fails is noticed by its reader.
        if frame::write(&mut stream, &message).await.is_err() || matches!(message, Message::Farewell { .. }) {
            return;
        }
    }
}

/// Reads until the peer is gone; gives how it went.
async fn read(
    peer: usize,
    mut stream: OwnedReadHalf,
    board: &Board,
    answers: &UnboundedSender<Message>,
    news: &UnboundedSender<Heard>,
) -> News {
    let mut spoke = false;
    // A rank that has not begun this group may have gone on in another, and ended there.
    let closed = |spoke| if spoke { News::Closed } else { News::Silent };
    loop {
        let message = frame::read::<Message>(&mut stream).await;
        board.speaks(peer);
        match message {
            Ok(Some(Message::Word(word))) => {
                board.moves(peer);
                let _ = news.send((peer, News::Said(word)));
            }
            Ok(Some(message)) => {
                let farewell = matches!(message, Message::Farewell { .. });
                if let Some(answer) = hear(board, peer, message) {
                    let _ = answers.send(answer);
                }
                if farewell {
                    return News::Left;
                }
            }
            Ok(None) => {
                board.lost(peer, "its connection was closed".into());
                return closed(spoke);
            }
            Err(e) => {
                board.lost(peer, e.to_string());
                return closed(spoke);
            }
        }
        spoke = true;
    }
}

/// Puts on the board what `peer` says, but for words of going on; gives the answer, if there is one.
pub(crate) fn hear(board: &Board, peer: usize, message: Message) -> Option<Message> {
    match message {
        Message::Calling(site) => return board.hear(peer, site, true).map(Message::Called),
        Message::Called(site) => drop(board.hear(peer, site, false)),
        Message::Failed(error, completed) => board.fail(Fault::Failed(error), completed),
        Message::Invites(invitation) => board.invited(peer, invitation),
        Message::Farewell { panicked: true } => drop(board.lost(peer, "its thread panicked".into())),
        Message::Farewell { panicked: false } => board.left(peer),
        Message::Here | Message::Word(_) => {}
    }
    None
}

/// Takes data connections from ranks of this session; everybody else is turned away.
async fn accept(listener: TcpListener, lobby: Arc<Lobby>, member: Member, board: Arc<Board>) {
    loop {
        match listener.accept().await {
            Ok((stream, address)) => {
                admit(&lobby, (stream, address), &member, &board, None);
                // Its first bytes are there already, most likely: they are looked at before the next connection is.
                tokio::task::yield_now().await;
            }
            // Out of descriptors, most likely: try again when some may be free.
            Err(e) => {
                log::warn!("cannot accept a data connection: {e}");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// Lets a connection prove who it is; then hands one for data to the threads that run operations, and a control connection
/// to `controls`.
pub(crate) fn admit(
    lobby: &Arc<Lobby>,
    (mut stream, address): (TcpStream, SocketAddr),
    member: &Member,
    board: &Arc<Board>,
    controls: Option<&UnboundedSender<(usize, TcpStream)>>,
) {
    let (member, board, controls) = (member.clone(), board.clone(), controls.cloned());
    let wanted = controls.is_some();
    let proof = async move {
        let fits = |opening: &Opening| {
            member.expects(opening)?;
            match opening.purpose {
                Purpose::Control if wanted => Ok(()),
                Purpose::Data if opening.number < opening.of && usize::from(opening.of) <= MOST => Ok(()),
                purpose => Err(format!("a connection for {purpose:?} does not belong here")),
            }
        };
        let opening = auth::answer(&mut stream, member.secret.as_ref(), member.session, fits).await?;
        Ok((stream, opening))
    };
    lobby.receive(address, proof, move |(mut stream, opening)| async move {
        // Who dialled waits for this. A farewell that follows it is read after the connection is on the board.
        auth::confirm(&mut stream).await?;
        let rank = opening.from as usize;
        if opening.purpose == Purpose::Data {
            return Ok(board.gather(rank, opening.number.into(), opening.of.into(), stream.into_std()?)?);
        }
        if let Some(controls) = controls {
            // The rendezvous may have ended meanwhile, and then it has its connection from this rank.
            let _ = controls.send((rank, stream));
        }
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::{Call, Operation};
    use crate::dtype::{DType, ReduceOp};
    use crate::transport::invitation::Door;
    use crate::transport::tcp::word::Standing;

    #[test]
    fn fuzz_messages() {
        let (operation, reduction, root) = (Operation::Reduce, Some(ReduceOp::Sum), Some(1));
        let call = Call { operation, dtype: DType::F32, count: 1000, reduction, root, sizes: Some(7) };
        let site = Site { call, sequence: 300 };
        let elapsed = Duration::from_millis(1500);
        let errors = [
            Error::argument("broadcast", "no"),
            Error::Config("no".into()),
            Error::Rendezvous { rank: 1, address: "10.0.0.1:29500".into(), reason: "late".into(), elapsed },
            Error::Mismatch { sequence: 300, calls: vec![(0, call), (1, Call { count: 1001, ..call })] },
            Error::Timeout { site, rank: 1, missing: vec![0, 2], elapsed },
            Error::PeerLost { site, peer: 2, address: Some("10.0.0.1:1".into()), reason: "gone".into(), elapsed },
            Error::Left { site, rank: 3 },
            Error::io("listening", "no"),
        ];
        let mut messages = errors.map(|error| Message::Failed(error, 7)).to_vec();
        let standing = Standing { members: [0, 2, 300].into(), gone: [1].into() };
        let proposes = Word::Proposes(standing.clone(), Door { port: 29500, key: u64::MAX });
        messages.extend([proposes, Word::Formed(standing.clone()), Word::Agreed(standing)].map(Message::Word));
        let door = Door { port: 1, key: 7 };
        messages.push(Message::Invites(Invitation { members: vec![300, 0, 2], door }));
        messages.extend([Message::Here, Message::Calling(site), Message::Called(site)]);
        messages.extend([false, true].map(|panicked| Message::Farewell { panicked }));
        frame::fuzz("control", &messages);
    }
}
