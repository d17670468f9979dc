//! Data connections to one peer, and the loop that moves messages on them.
//!
//! # Why one connection is the default
//! On loopback four connections are 10 to 25 % slower at 256 KiB to 16 MiB: each byte costs the same, and there are
//! four times as many system calls. Where the network limits single flows, four are up to 3.8 times as fast at 1 MiB
//! and less at 4 MiB (`docs/measurements/tcp.md`), since every chunk waits for its slowest stripe.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::stalled::explained;
use crate::auth::keep_open;
use crate::control::{MAX_DATA_CONNECTIONS, Watch};
use crate::sync::{YIELD_TIME, yield_now};
use crate::types::{Fault, Site, partition};

/// The data connections to one peer. One thread at a time drives both directions. A large message is cut into one
/// stripe per connection; a small one takes the first connection.
pub(crate) struct Link {
    streams: Vec<TcpStream>,
}

/// Bytes below which a stripe is not worth its system calls.
const STRIPE: usize = 64 << 10;

const HEADER: usize = Site::BYTES + 8;

impl Link {
    /// Creates a link of 1 to [`MAX_DATA_CONNECTIONS`] connections, in the order that both sides use.
    pub fn new(streams: Vec<TcpStream>, heartbeat_timeout: Duration) -> std::io::Result<Link> {
        for stream in &streams {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            keep_open(stream, heartbeat_timeout)?;
        }
        Ok(Link { streams })
    }

    /// The number of connections that share a message of `bytes` bytes. Both sides compute the same.
    fn stripes(&self, bytes: usize) -> usize {
        (bytes / STRIPE).clamp(1, self.streams.len())
    }
}

/// The stripes of one message that are not done yet. Each is a message of its own on its connection.
struct Stripes<M>([Option<M>; MAX_DATA_CONNECTIONS]);

impl<M> Stripes<M> {
    fn none() -> Self {
        Stripes([const { None }; MAX_DATA_CONNECTIONS])
    }
}

/// An outgoing message, or a stripe of one.
struct Outbound<'a> {
    header: [u8; HEADER],
    payload: &'a [u8],
    sent: usize,
}

/// An expected message, or a stripe of one.
struct Inbound<'a> {
    expected: [u8; HEADER],
    header: [u8; HEADER],
    payload: &'a mut [u8],
    received: usize,
}

impl<'a> Outbound<'a> {
    fn new(tag: &Site, payload: &'a [u8]) -> Self {
        Outbound { header: header(tag, payload.len()), payload, sent: 0 }
    }

    fn done(&self) -> bool {
        self.sent == HEADER + self.payload.len()
    }

    fn advance(&mut self, mut stream: &TcpStream) -> std::io::Result<usize> {
        let moved = if self.sent < HEADER {
            let slices = [IoSlice::new(&self.header[self.sent..]), IoSlice::new(self.payload)];
            stream.write_vectored(&slices)?
        } else {
            stream.write(&self.payload[self.sent - HEADER..])?
        };
        self.sent += moved;
        Ok(moved)
    }
}

impl<'a> Inbound<'a> {
    fn new(tag: &Site, payload: &'a mut [u8]) -> Self {
        Inbound { expected: header(tag, payload.len()), header: [0; HEADER], payload, received: 0 }
    }

    fn done(&self) -> bool {
        self.received == HEADER + self.payload.len()
    }

    /// The tag in a complete header that is not the expected one. The expected tag if that one is invalid.
    fn mismatch(&self) -> Option<Site> {
        if self.received < HEADER || self.header == self.expected {
            return None;
        }
        let mut tag = [0; Site::BYTES];
        tag.copy_from_slice(&self.header[..Site::BYTES]);
        Site::from_bytes(&tag).or_else(|| {
            tag.copy_from_slice(&self.expected[..Site::BYTES]);
            Site::from_bytes(&tag)
        })
    }

    fn advance(&mut self, mut stream: &TcpStream) -> std::io::Result<usize> {
        let moved = if self.received < HEADER {
            let (header, payload) = (&mut self.header[self.received..], &mut *self.payload);
            stream.read_vectored(&mut [IoSliceMut::new(header), IoSliceMut::new(payload)])?
        } else {
            stream.read(&mut self.payload[self.received - HEADER..])?
        };
        self.received += moved;
        Ok(moved)
    }
}

fn header(tag: &Site, length: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..Site::BYTES].copy_from_slice(&tag.to_bytes());
    header[Site::BYTES..].copy_from_slice(&(length as u64).to_le_bytes());
    header
}

/// A message to a peer: its rank, its link and the payload.
pub(super) type Out<'a> = (usize, &'a Link, &'a [u8]);
pub(super) type In<'a> = (usize, &'a Link, &'a mut [u8]);

impl<'a> Stripes<Outbound<'a>> {
    fn of(tag: &Site, link: &Link, payload: &'a [u8]) -> Self {
        let (mut stripes, n) = (Self::none(), link.stripes(payload.len()));
        for (i, stripe) in stripes.0.iter_mut().take(n).enumerate() {
            *stripe = Some(Outbound::new(tag, &payload[partition(payload.len(), n, i)]));
        }
        stripes
    }
}

impl<'a> Stripes<Inbound<'a>> {
    fn of(tag: &Site, link: &Link, mut payload: &'a mut [u8]) -> Self {
        let (mut stripes, n, len) = (Self::none(), link.stripes(payload.len()), payload.len());
        for (i, stripe) in stripes.0.iter_mut().take(n).enumerate() {
            let (head, rest) = payload.split_at_mut(partition(len, n, i).len());
            *stripe = Some(Inbound::new(tag, head));
            payload = rest;
        }
        stripes
    }
}

/// Sends and receives messages until both are complete.
pub(super) fn drive(
    tag: &Site,
    outgoing: Option<Out<'_>>,
    incoming: Option<In<'_>>,
    watch: &mut Watch<'_>,
) -> Result<(), Fault> {
    let to = outgoing.as_ref().map(|(peer, link, _)| (*peer, &link.streams[..]));
    let mut idle = None;
    move_all(tag, outgoing, incoming, &mut idle, watch).map_err(|fault| explained(fault, idle, to, watch))
}

/// As [`drive`]. Keeps in `idle` since when no byte was moved.
fn move_all(
    tag: &Site,
    outgoing: Option<Out<'_>>,
    incoming: Option<In<'_>>,
    idle: &mut Option<Instant>,
    watch: &mut Watch<'_>,
) -> Result<(), Fault> {
    let mut out = outgoing.map(|(peer, link, payload)| (peer, link, Stripes::<Outbound<'_>>::of(tag, link, payload)));
    let mut into = incoming.map(|(peer, link, payload)| (peer, link, Stripes::<Inbound<'_>>::of(tag, link, payload)));
    loop {
        let mut moved = false;
        // A stripe that is complete is dropped.
        if let Some((peer, link, stripes)) = &mut out {
            for (stream, stripe) in link.streams.iter().zip(&mut stripes.0) {
                let Some(message) = stripe else { continue };
                moved |= moved_bytes(message.advance(stream), *peer, watch)?;
                if message.done() {
                    *stripe = None;
                }
            }
        }
        if let Some((peer, link, stripes)) = &mut into {
            for (stream, stripe) in link.streams.iter().zip(&mut stripes.0) {
                let Some(message) = stripe else { continue };
                if moved_bytes(message.advance(stream), *peer, watch)? {
                    // Data that saturate the network may delay the heartbeats on the control connection.
                    watch.status().record_activity(*peer);
                    moved = true;
                }
                if let Some(tag) = message.mismatch() {
                    return Err(watch.unexpected(*peer, tag));
                }
                if message.done() {
                    *stripe = None;
                }
            }
        }
        out.take_if(|(_, _, stripes)| stripes.0.iter().all(Option::is_none));
        into.take_if(|(_, _, stripes)| stripes.0.iter().all(Option::is_none));
        let waiting_for = match (&into, &out) {
            (Some((peer, ..)), _) | (None, Some((peer, ..))) => *peer,
            (None, None) => return Ok(()),
        };
        if moved {
            *idle = None;
            watch.check(waiting_for)?;
            continue;
        }
        if idle.get_or_insert_with(Instant::now).elapsed() < YIELD_TIME && yield_now() {
            continue;
        }
        let sending = out.iter().flat_map(|(_, link, stripes)| pending(link, stripes, PollFlags::OUT));
        let receiving = into.iter().flat_map(|(_, link, stripes)| pending(link, stripes, PollFlags::IN));
        if wait_ready(sending.chain(receiving), watch) {
            watch.check(waiting_for)?;
        } else {
            watch.tick_connected(waiting_for)?;
        }
    }
}

/// The connections whose stripes are not complete.
fn pending<'a, M>(
    link: &'a Link,
    stripes: &'a Stripes<M>,
    flags: PollFlags,
) -> impl Iterator<Item = (&'a TcpStream, PollFlags)> {
    let unfinished = link.streams.iter().zip(&stripes.0).filter(|(_, stripe)| stripe.is_some());
    unfinished.map(move |(stream, _)| (stream, flags))
}

/// Returns whether bytes were moved. If the connection ended or failed, returns why: see [`disconnected`].
fn moved_bytes(result: std::io::Result<usize>, peer: usize, watch: &Watch<'_>) -> Result<bool, Fault> {
    match result {
        Ok(0) => Err(disconnected(peer, "it was closed", watch)),
        Ok(_) => Ok(true),
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(false),
        Err(e) => Err(disconnected(peer, &e.to_string(), watch)),
    }
}

/// The longest wait for the control connection to tell why a data connection ended.
const MOMENT: Duration = Duration::from_secs(5);

/// The fault of an operation whose data connection to `peer` ended. The control connection tells a moment later whether
/// the peer left, died, or closed because of a failure. If it tells nothing, only the connection broke: the peer may
/// be well, and is not reported as lost.
pub(super) fn disconnected(peer: usize, reason: &str, watch: &Watch<'_>) -> Fault {
    let status = watch.status();
    watch.meet();
    status.sleep(Instant::now() + MOMENT.min(watch.remaining()), || watch.absence(peer).is_some());
    watch.absence(peer).unwrap_or_else(|| watch.disconnected(peer, reason))
}

/// Sleeps until one of at most `2 * MAX_DATA_CONNECTIONS` sockets is ready, the group fails, or the watch's pause is
/// over. Returns `true` only in the first case.
pub(super) fn wait_ready<'a>(sockets: impl Iterator<Item = (&'a TcpStream, PollFlags)>, watch: &'a Watch<'_>) -> bool {
    let flags = if watch.deaf() { PollFlags::empty() } else { PollFlags::IN };
    let wake = PollFd::from_borrowed_fd(watch.status().wake(), flags);
    let mut fds: [PollFd<'_>; 1 + 2 * MAX_DATA_CONNECTIONS] = std::array::from_fn(|_| wake.clone());
    let mut used = 1;
    for (fd, (stream, flags)) in fds[1..].iter_mut().zip(sockets) {
        *fd = PollFd::from_borrowed_fd(stream.as_fd(), flags);
        used += 1;
    }
    // A signal must not count as a pause without progress: a profiler sends hundreds per second.
    let end = Instant::now() + watch.pause();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: 0, tv_nsec: left.as_nanos().min(999_999_999) as _ };
        match poll(&mut fds[..used], Some(&left)) {
            Err(Errno::INTR) => {}
            woken => return woken.is_ok_and(|n| n > 0 && fds[0].revents().is_empty()),
        }
    }
}

/// Closes the connections so that what was sent still arrives: a socket that is closed with unread bytes in it discards
/// what it has not delivered. So this closes the sending side first, and then reads and drops incoming bytes until the
/// peer closes too, for at most `linger` in all.
pub(super) fn close(links: &[Arc<Link>], linger: Duration) {
    let until = Instant::now() + linger;
    let streams = || links.iter().flat_map(|link| &link.streams);
    for stream in streams() {
        let _ = stream.shutdown(Shutdown::Write);
    }
    let mut sink = vec![0; 64 << 10];
    for mut stream in streams() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || stream.set_nonblocking(false).is_err() {
            return;
        }
        let _ = stream.set_read_timeout(Some(left));
        while Instant::now() < until && matches!(stream.read(&mut sink), Ok(n) if n > 0) {}
    }
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use super::*;
    use crate::control::GroupStatus;
    use crate::sync::Deadline;
    use crate::types::{Call, DType, Error, Fingerprint, Operation, ReduceOp};

    fn tag() -> Site {
        let (operation, reduction, root) = (Operation::Reduce, Some(ReduceOp::Max), Some(1));
        let call =
            Call { operation, dtype: DType::F16, count: 1000, reduction, root, sizes: Fingerprint::from_word(0x1234) };
        Site { sequence: 300, call }
    }

    /// Returns the fault of a message on a connection that the peer's end has closed, and the time it took.
    fn fault(status: &GroupStatus, limit: Duration) -> (Fault, Duration) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = crate::auth::open_blocking(None, &listener.local_addr().unwrap(), MOMENT).unwrap().unwrap();
        drop(listener.accept().unwrap());
        let link = Link::new(vec![stream], MOMENT).unwrap();
        let (tag, deadline) = (tag(), Deadline::after(limit));
        let (control, _outgoing) = tokio::sync::mpsc::unbounded_channel();
        let mut watch = Watch::new(0, status, &control, &tag, &deadline);
        let fault = drive(&tag, None, Some((1, &link, &mut [0; 8])), &mut watch).unwrap_err();
        (fault, deadline.elapsed())
    }

    #[test]
    fn a_broken_connection_is_no_lost_rank_and_is_reported_by_the_deadline() {
        let status = GroupStatus::new(2).unwrap();
        let (fault, elapsed) = fault(&status, Duration::from_millis(50));
        assert!(matches!(&fault, Fault::Failed(Error::Disconnected { rank: 0, peer: 1, .. })), "{fault:?}");
        assert!(elapsed < MOMENT, "{elapsed:?}");
    }

    #[test]
    fn a_connection_broken_by_the_end_of_its_peer_is_a_lost_rank() {
        let status = GroupStatus::new(2).unwrap();
        status.mark_lost(1, "it died".into());
        assert_eq!(fault(&status, MOMENT).0, Fault::Lost { peer: 1, reason: "it died".into() });
    }

    /// Bytes arrive faster than the deadline is looked at between two of them.
    #[test]
    fn a_message_that_never_pauses_ends_at_the_deadline() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = crate::auth::open_blocking(None, &listener.local_addr().unwrap(), MOMENT).unwrap().unwrap();
        let (mut peer, mut payload, tag) = (listener.accept().unwrap().0, vec![0; 256 << 20], tag());
        let header = header(&tag, payload.len());
        let sender = std::thread::spawn(move || {
            // Until the other end is closed.
            let sent = peer.write_all(&header);
            sent.and_then(|()| (0..4096).try_for_each(|_| peer.write_all(&[0; 64 << 10]))).is_err()
        });
        let (status, deadline) = (GroupStatus::new(2).unwrap(), Deadline::after(Duration::from_millis(1)));
        let (control, _outgoing) = tokio::sync::mpsc::unbounded_channel();
        let mut watch = Watch::new(0, &status, &control, &tag, &deadline);
        let link = Link::new(vec![stream], MOMENT).unwrap();
        let result = drive(&tag, None, Some((1, &link, &mut payload)), &mut watch);
        assert_eq!(result, Err(Fault::Timeout { missing: vec![1] }));
        drop(link);
        assert!(sender.join().unwrap(), "all was sent");
    }

    #[test]
    fn a_connection_that_ends_at_the_deadline_is_no_cause_if_ranks_are_missing() {
        let status = GroupStatus::new(3).unwrap();
        let fault = || {
            let (tag, deadline) = (tag(), Deadline::after(Duration::from_millis(20)));
            let (control, _outgoing) = tokio::sync::mpsc::unbounded_channel();
            let mut watch = Watch::new(0, &status, &control, &tag, &deadline);
            // It has asked the others for their calls. The deadline may have passed already, on a busy machine.
            let _ = watch.tick(1);
            disconnected(1, "it was closed", &watch)
        };
        status.record_call(1, tag(), false);
        assert_eq!(fault(), Fault::Timeout { missing: vec![2] });
        status.record_call(2, tag(), false);
        assert!(matches!(fault(), Fault::Failed(Error::Disconnected { peer: 1, .. })));
    }

    /// The socket becomes readable at the deadline, for example because the peer's deadline passed a moment before.
    #[test]
    fn bytes_that_arrive_at_the_deadline_do_not_make_their_sender_the_missing_rank() {
        let status = GroupStatus::new(3).unwrap();
        let (tag, deadline) = (tag(), Deadline::after(Duration::ZERO));
        let (control, _outgoing) = tokio::sync::mpsc::unbounded_channel();
        let mut watch = Watch::new(0, &status, &control, &tag, &deadline);
        status.record_call(1, tag, false);
        let missing_2 = Err(Fault::Timeout { missing: vec![2] });
        assert_eq!(watch.tick(1), missing_2, "it has asked the others for their calls");
        assert_eq!(watch.check(1), missing_2);
    }

    #[test]
    fn fuzz_headers() {
        let tag = tag();
        let Site { call, .. } = tag;
        let plain = Call { operation: Operation::AllToAll, reduction: None, root: None, ..call };
        let seeds = [tag, Site { call: plain, ..tag }].map(|tag| header(&tag, 2000).to_vec());
        bonfire_testing::fuzz::fuzz("header", seeds, |bytes| {
            let header: [u8; HEADER] = std::array::from_fn(|i| bytes.get(i).copied().unwrap_or(0));
            let mut payload = [0; 2000];
            let mut incoming = Inbound::new(&tag, &mut payload);
            (incoming.header, incoming.received) = (header, HEADER);
            let theirs = Site::from_bytes(header[..Site::BYTES].try_into().unwrap());
            match incoming.mismatch() {
                None => assert!(theirs == Some(tag) && header[Site::BYTES..] == 2000u64.to_le_bytes()),
                // A header that no call encodes is reported as the expected one.
                mismatch => assert_eq!(mismatch, theirs.or(Some(tag))),
            }
            theirs.is_some_and(|theirs| {
                assert_eq!(theirs.to_bytes(), header[..Site::BYTES]);
                true
            })
        });
    }
}
