//! A control connection: its frames, its state, and the tasks that read and write it.

use std::io::ErrorKind;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc::{Sender, UnboundedReceiver, UnboundedSender};

use super::calls::Calls;
use super::frame;
use super::message::Message;
use super::status::GroupStatus;

/// A frame on a control connection. All variants but the first occur only in a star. See `plane`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Frame {
    /// A message of the sending rank itself.
    Own(Message),
    /// To rank 0: an invitation, or a question where a rank is, or the answer, to relay to rank `to`; or a failure to
    /// relay to all ranks.
    Relay { to: Option<u32>, message: Message },
    /// From rank 0: a relayed message of rank `from`. Rank 0 fills in the rank on whose connection the message arrived.
    /// From any other rank this frame is an error, so no rank can speak for another one.
    Relayed { from: u32, message: Message },
    /// From rank 0: rank `peer` is lost. `ended`: its connection was closed, and it cannot go on in another group.
    Lost { peer: u32, reason: String, ended: bool },
    /// From rank 0: all ranks have begun this group.
    Begun,
    /// From rank 0: all ranks are to connect to each other.
    Meet,
    /// From rank 0: it leaves once it has relayed all messages that it was given.
    Leaves,
    /// To rank 0: the sender gives it nothing more to relay.
    Through,
    /// From rank 0: the calls of these ranks, for a rank that asked.
    Calls(Calls),
}

/// The state of the control connection to a peer.
pub(super) enum Connection {
    /// There is no connection, and none was needed so far.
    Absent,
    /// A connection is expected. These messages are sent on it first.
    Pending(Vec<Message>),
    Open(Writer),
    /// The peer left, was lost, or could not be reached.
    Closed,
}

/// Queues frames for the write task of a connection.
pub(super) struct Writer {
    frames: UnboundedSender<Frame>,
    /// Number of the connection, unique on this rank.
    pub number: usize,
}

impl Writer {
    pub fn new(frames: UnboundedSender<Frame>, number: usize) -> Writer {
        Writer { frames, number }
    }

    pub fn send(&self, frame: Frame) {
        // The reader notices a connection that fails.
        let _ = self.frames.send(frame);
    }
}

/// An event of a control connection. The first two carry the number of the connection.
pub(super) enum Event {
    Received(usize, Frame),
    /// The connection ended without a goodbye.
    Closed(usize, String),
    /// A dialled connection was established.
    Dialled(TcpStream),
    /// No connection could be made. `ended`: no process listens at the peer's address, and no attempt went unanswered.
    Unreachable {
        reason: String,
        ended: bool,
    },
}

/// Sends a message on each of these connections, on which nothing is served yet.
pub(crate) async fn send_first(connections: &mut [Option<TcpStream>], message: Message) {
    let frame = Frame::Own(message);
    for stream in connections.iter_mut().flatten() {
        // The reader notices a connection that fails.
        let _ = frame::write(stream, &frame).await;
    }
}

/// Write task: writes frames up to the goodbye.
pub(super) async fn write(mut stream: OwnedWriteHalf, mut frames: UnboundedReceiver<Frame>) {
    while let Some(frame) = frames.recv().await {
        match frame::write(&mut stream, &frame).await {
            // A relayed message may have become too long. That is no reason to drop the connection.
            Err(e) if e.kind() == ErrorKind::InvalidInput => log::warn!("dropped a control message: {e}"),
            // The reader notices it, as in `Writer::send`.
            Err(_) => return,
            Ok(()) if matches!(frame, Frame::Own(Message::Goodbye(_))) => return,
            Ok(()) => {}
        }
    }
}

/// Read task: reads frames up to the goodbye or the end of the connection.
pub(super) async fn read(
    (peer, number): (usize, usize),
    mut stream: OwnedReadHalf,
    status: Arc<GroupStatus>,
    events: Sender<(usize, Event)>,
) {
    let reason = loop {
        let frame = frame::read::<Frame>(&mut stream).await;
        status.record_activity(peer);
        match frame {
            Ok(Some(frame)) => {
                let last = matches!(frame, Frame::Own(Message::Goodbye(_)));
                // The receiver is gone if this rank is about to leave.
                if events.send((peer, Event::Received(number, frame))).await.is_err() || last {
                    return;
                }
            }
            Ok(None) => break "its connection was closed".into(),
            Err(e) => break e.to_string(),
        }
    };
    let _ = events.send((peer, Event::Closed(number, reason))).await;
}
