//! Data connections.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::board::Board;
use super::watch::Watch;
use crate::call::Tag;
use crate::sync::YIELDING;
use crate::transport::Fault;

/// A connection whose both directions are driven by one thread at a time.
pub(crate) struct Link {
    stream: TcpStream,
}

const HEADER: usize = Tag::BYTES + 8;

impl Link {
    pub fn new(stream: TcpStream) -> std::io::Result<Link> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Link { stream })
    }
}

/// A message on its way out.
pub(super) struct Outbound<'a> {
    header: [u8; HEADER],
    payload: &'a [u8],
    sent: usize,
}

/// A message that is expected.
pub(super) struct Incoming<'a> {
    expected: [u8; HEADER],
    header: [u8; HEADER],
    payload: &'a mut [u8],
    received: usize,
}

impl<'a> Outbound<'a> {
    pub fn new(tag: &Tag, payload: &'a [u8]) -> Self {
        Outbound { header: header(tag, payload.len()), payload, sent: 0 }
    }

    fn done(&self) -> bool {
        self.sent == HEADER + self.payload.len()
    }

    fn advance(&mut self, link: &Link) -> std::io::Result<usize> {
        let moved = if self.sent < HEADER {
            let slices = [IoSlice::new(&self.header[self.sent..]), IoSlice::new(self.payload)];
            (&link.stream).write_vectored(&slices)?
        } else {
            (&link.stream).write(&self.payload[self.sent - HEADER..])?
        };
        self.sent += moved;
        Ok(moved)
    }
}

impl<'a> Incoming<'a> {
    pub fn new(tag: &Tag, payload: &'a mut [u8]) -> Self {
        Incoming { expected: header(tag, payload.len()), header: [0; HEADER], payload, received: 0 }
    }

    fn done(&self) -> bool {
        self.received == HEADER + self.payload.len()
    }

    /// Where the header is complete and not the expected one, what it says instead.
    fn foreign(&self) -> Option<Tag> {
        if self.received < HEADER || self.header == self.expected {
            return None;
        }
        let mut tag = [0; Tag::BYTES];
        tag.copy_from_slice(&self.header[..Tag::BYTES]);
        Tag::from_bytes(&tag).or_else(|| {
            tag.copy_from_slice(&self.expected[..Tag::BYTES]);
            Tag::from_bytes(&tag)
        })
    }

    fn advance(&mut self, link: &Link) -> std::io::Result<usize> {
        let moved = if self.received < HEADER {
            let (header, payload) = (&mut self.header[self.received..], &mut *self.payload);
            (&link.stream).read_vectored(&mut [IoSliceMut::new(header), IoSliceMut::new(payload)])?
        } else {
            (&link.stream).read(&mut self.payload[self.received - HEADER..])?
        };
        self.received += moved;
        Ok(moved)
    }
}

fn header(tag: &Tag, length: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..Tag::BYTES].copy_from_slice(&tag.to_bytes());
    header[Tag::BYTES..].copy_from_slice(&(length as u64).to_le_bytes());
    header
}

type Out<'a, 'b> = (usize, &'a Arc<Link>, &'a mut Outbound<'b>);
type In<'a, 'b> = (usize, &'a Arc<Link>, &'a mut Incoming<'b>);

/// Moves both messages to their ends.
pub(super) fn drive(
    mut out: Option<Out<'_, '_>>,
    mut incoming: Option<In<'_, '_>>,
    watch: &mut Watch<'_>,
) -> Result<(), Fault> {
    let mut idle: Option<Instant> = None;
    loop {
        let mut moved = false;
        if let Some((peer, link, message)) = &mut out
            && !message.done()
        {
            moved |= advanced(message.advance(link), *peer, watch.board())?;
        }
        if let Some((peer, link, message)) = &mut incoming
            && !message.done()
        {
            moved |= advanced(message.advance(link), *peer, watch.board())?;
            if let Some(tag) = message.foreign() {
                return Err(watch.unexpected(*peer, tag));
            }
        }
        let sending = out.as_ref().filter(|(_, _, message)| !message.done()).map(|(peer, link, _)| (*peer, *link));
        let receiving =
            incoming.as_ref().filter(|(_, _, message)| !message.done()).map(|(peer, link, _)| (*peer, *link));
        let waiting_for = match (&receiving, &sending) {
            (Some((peer, _)), _) | (None, Some((peer, _))) => *peer,
            (None, None) => return Ok(()),
        };
        if moved {
            idle = None;
            continue;
        }
        if idle.get_or_insert_with(Instant::now).elapsed() < YIELDING {
            std::thread::yield_now();
            continue;
        }
        let sockets = (sending.map(|(_, link)| link), receiving.map(|(_, link)| link));
        if !ready(sockets, watch) {
            watch.tick(waiting_for)?;
        }
    }
}

/// Whether bytes moved; an end or an error of the connection becomes what the control connection knows of the peer.
fn advanced(result: std::io::Result<usize>, peer: usize, board: &Board) -> Result<bool, Fault> {
    match result {
        Ok(0) => Err(departure(peer, "its connection was closed", board)),
        Ok(_) => Ok(true),
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
        Err(e) => Err(departure(peer, &e.to_string(), board)),
    }
}

/// A data connection ended. Whether the peer left or died, or which failure made it close, is known by the control
/// connection, a moment later.
pub(super) fn departure(peer: usize, reason: &str, board: &Board) -> Fault {
    const MOMENT: Duration = Duration::from_secs(2);
    board.sleep(Instant::now() + MOMENT, || board.absence(peer).is_some());
    board.absence(peer).unwrap_or_else(|| Fault::Lost { peer, reason: reason.to_owned() })
}

/// Waits for the byte by which `peer` says that it has taken over a connection that this rank opened. From then on
/// nothing that is sent on it can be overtaken by this rank's farewell.
pub(super) fn taken(peer: usize, link: &Arc<Link>, watch: &mut Watch<'_>) -> Result<(), Fault> {
    while !advanced((&link.stream).read(&mut [0]), peer, watch.board())? {
        if !ready((None, Some(link)), watch) {
            watch.tick(peer)?;
        }
    }
    Ok(())
}

/// Sleeps until a socket is ready or the group failed; false where neither happened within the watch's pause.
fn ready<'a>((sending, receiving): (Option<&'a Arc<Link>>, Option<&'a Arc<Link>>), watch: &'a Watch<'_>) -> bool {
    let flags = if watch.deaf() { PollFlags::empty() } else { PollFlags::IN };
    let wake = PollFd::from_borrowed_fd(watch.board().wake(), flags);
    let socket = |link: Option<&'a Arc<Link>>, flags| {
        link.map(|link| PollFd::from_borrowed_fd(link.stream.as_fd(), flags)).unwrap_or_else(|| wake.clone())
    };
    let mut fds = [wake.clone(), socket(sending, PollFlags::OUT), socket(receiving, PollFlags::IN)];
    let pause = Timespec { tv_sec: 0, tv_nsec: watch.pause().as_nanos().min(999_999_999) as _ };
    let woken = poll(&mut fds, Some(&pause)).map(|n| n > 0 && fds[0].revents().is_empty());
    // An interrupted poll counts as nothing ready.
    woken.unwrap_or(false)
}

/// Ends the connections so that what was sent still arrives: a socket that is closed with unread bytes in it throws away
/// what it has not delivered. So the sending side is closed first, and what still comes is read and dropped until the
/// peer closes too, for at most `linger` in all.
pub(super) fn close(links: &[Arc<Link>], linger: Duration) {
    let until = Instant::now() + linger;
    for link in links {
        let _ = link.stream.shutdown(Shutdown::Write);
    }
    let mut sink = vec![0; 64 << 10];
    for link in links {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || link.stream.set_nonblocking(false).is_err() {
            return;
        }
        let _ = link.stream.set_read_timeout(Some(left));
        while Instant::now() < until && matches!((&link.stream).read(&mut sink), Ok(n) if n > 0) {}
    }
}
