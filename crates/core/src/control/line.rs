//! Control connections: what is sent on one, and the tasks that read and write it.

use std::io::ErrorKind;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc::{Sender, UnboundedReceiver, UnboundedSender};

use super::board::Board;
use super::frame;
use super::message::Message;

/// What is sent on a control connection. All but the first only in a star, see `control`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Frame {
    /// From the rank that sends it.
    Own(Message),
    /// To rank 0: for that rank, or for all.
    Relay { to: Option<u32>, message: Message },
    /// From rank 0: what that rank says.
    Relayed { from: u32, message: Message },
    /// From rank 0: that rank is lost. `ended` says that it had begun this group, and its connection was closed.
    Lost { peer: u32, reason: String, ended: bool },
    /// From rank 0: all ranks have begun this group.
    Begun,
    /// From rank 0: all ranks connect to each other.
    Meet,
    /// From rank 0: it is about to leave, once it has passed on what it was given.
    Leaves,
    /// To rank 0: it is given nothing more.
    Through,
}

/// What there is between this rank and a peer.
pub(super) enum Line {
    /// Nothing, and nothing was needed so far.
    Absent,
    /// A connection is awaited, and these are to be said on it first.
    Coming(Vec<Message>),
    Open(Writer),
    /// The peer left, was lost, or was not to be reached.
    Over,
}

pub(super) struct Writer {
    frames: UnboundedSender<Frame>,
    /// Tells the connections of this rank apart.
    pub number: usize,
}

impl Writer {
    pub fn new(frames: UnboundedSender<Frame>, number: usize) -> Writer {
        Writer { frames, number }
    }

    pub fn send(&self, frame: Frame) {
        // A connection that fails is noticed by its reader.
        let _ = self.frames.send(frame);
    }
}

/// What comes of a connection, of which number, to a peer.
pub(super) enum Event {
    Heard(usize, Frame),
    /// It ended without a farewell.
    Over(usize, String),
    /// One that was dialled is there.
    Dialled(TcpStream),
    /// None could be made. `ended` says that nobody listens where the peer did, and never was there no answer.
    Unreachable {
        reason: String,
        ended: bool,
    },
}

/// Says the first word on each of these.
pub(crate) async fn greet(connections: &mut [Option<TcpStream>]) {
    for stream in connections.iter_mut().flatten() {
        // A connection that fails is noticed by its reader.
        let _ = frame::write(stream, &Frame::Own(Message::Here)).await;
    }
}

/// Writes up to the farewell.
pub(super) async fn write(mut stream: OwnedWriteHalf, mut frames: UnboundedReceiver<Frame>) {
    while let Some(frame) = frames.recv().await {
        match frame::write(&mut stream, &frame).await {
            // What was passed on may have become too long: that is no reason to lose everybody.
            Err(e) if e.kind() == ErrorKind::InvalidInput => log::warn!("a message was not passed on: {e}"),
            // As in `Writer::send`.
            Err(_) => return,
            Ok(()) if matches!(frame, Frame::Own(Message::Farewell { .. })) => return,
            Ok(()) => {}
        }
    }
}

/// Reads up to the farewell or the end.
pub(super) async fn read(
    (peer, number): (usize, usize),
    mut stream: OwnedReadHalf,
    board: Arc<Board>,
    events: Sender<(usize, Event)>,
) {
    let reason = loop {
        let frame = frame::read::<Frame>(&mut stream).await;
        board.speaks(peer);
        match frame {
            Ok(Some(frame)) => {
                let last = matches!(frame, Frame::Own(Message::Farewell { .. }));
                // Nobody hears it any more where this rank is about to leave.
                if events.send((peer, Event::Heard(number, frame))).await.is_err() || last {
                    return;
                }
            }
            Ok(None) => break "its connection was closed".into(),
            Err(e) => break e.to_string(),
        }
    };
    let _ = events.send((peer, Event::Over(number, reason))).await;
}
