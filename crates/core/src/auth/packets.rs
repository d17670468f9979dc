//! The largest packets, which both ends of a data connection send each other before they use it.
//!
//! A network can lose all packets above a size: a part of it has a smaller MTU than the interfaces of the hosts, and a
//! firewall drops the messages that would say so. Whatever is small passes, such as the rendezvous, heartbeats and
//! short operations, and longer operations hang. So each end sends as many bytes as its interface's MTU, in which at
//! least one packet of the largest size goes, and the connection counts once both ends have received the other's.
//!
//! | from | bytes | |
//! |---|---|---|
//! | dialler | 2 + n | n, and so many zeros |
//! | listener | 2 + m | m, and so many zeros |
//! | dialler | 1 | only if m is not 0: they have arrived |
//!
//! This follows a handshake with a secret. Without one, ranks are on one host, and there is no network between them.
//! Between addresses of loopback n and m are 0.

use std::fmt;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::prologue::Refusal;

/// How long the packets may take to arrive. The system repeats a lost packet five times meanwhile, and may have found
/// a smaller size that passes (`net.ipv4.tcp_mtu_probing`).
pub const PACKETS_TIMEOUT: Duration = Duration::from_secs(10);

/// What the dialler sends when the listener's packets have arrived.
const ARRIVED: [u8; 1] = [2];

/// The size of packets where the system does not say how large they can be: that of Ethernet.
const USUAL: u16 = 1500;

/// Bytes read at a time.
const CHUNK: usize = 4096;

/// Returns the size in bytes of the largest packet that the system sends on this connection to `peer`: the interface's
/// MTU, or less if the network has said so. 0 where no network is in between.
pub fn largest_packet(stream: impl AsFd, peer: IpAddr) -> u16 {
    let peer = peer.to_canonical();
    if peer.is_loopback() {
        return 0;
    }
    mtu(stream, peer).map_or(USUAL, |mtu| mtu.try_into().unwrap_or(u16::MAX))
}

#[cfg(target_os = "linux")]
fn mtu(stream: impl AsFd, peer: IpAddr) -> Option<u32> {
    use rustix::net::sockopt::{ip_mtu, ipv6_mtu};
    if peer.is_ipv4() { ip_mtu(stream) } else { ipv6_mtu(stream) }.ok()
}

#[cfg(not(target_os = "linux"))]
fn mtu(_: impl AsFd, _: IpAddr) -> Option<u32> {
    None
}

/// Returns how many bytes were sent on this connection whose arrival the other end's system has not acknowledged; 0
/// where this system does not say. Bytes that wait because the other end does not read are not among them.
pub fn unacknowledged(stream: impl AsFd) -> u64 {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        let count = |request: libc::Ioctl| {
            let mut bytes: libc::c_int = 0;
            // SAFETY: the descriptor is open, and both requests write one integer.
            let result = unsafe { libc::ioctl(stream.as_fd().as_raw_fd(), request, &mut bytes) };
            if result == 0 { u64::try_from(bytes).unwrap_or(0) } else { 0 }
        };
        /// `SIOCOUTQNSD` of `linux/sockios.h`: bytes that have not been sent yet.
        const NOT_SENT: libc::Ioctl = 0x894B;
        // `TIOCOUTQ` is `SIOCOUTQ`: those and the sent ones that were not acknowledged.
        count(libc::TIOCOUTQ).saturating_sub(count(NOT_SENT))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = stream;
        0
    }
}

/// The dialler's side, blocking: sends packets of `largest` bytes, and receives the listener's. `write` and `read` must
/// transfer all bytes of their argument.
pub fn exchange_packets_blocking<E>(
    largest: u16,
    mut write: impl FnMut(&[u8]) -> Result<(), E>,
    mut read: impl FnMut(&mut [u8]) -> Result<(), E>,
) -> Result<(), E> {
    write(&message(largest))?;
    let mut length = [0; 2];
    read(&mut length)?;
    let (theirs, mut sink) = (usize::from(u16::from_le_bytes(length)), [0; CHUNK]);
    for start in (0..theirs).step_by(CHUNK) {
        read(&mut sink[..CHUNK.min(theirs - start)])?;
    }
    if theirs > 0 { write(&ARRIVED) } else { Ok(()) }
}

/// The listener's side: receives the dialler's packets, sends packets of `largest` bytes, and waits until they have
/// arrived. The caller limits the time.
pub async fn exchange_packets(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), largest: u16) -> Result<(), Refusal> {
    let (mut theirs, mut sink) = (usize::from(stream.read_u16_le().await?), [0; CHUNK]);
    while theirs > 0 {
        let some = CHUNK.min(theirs);
        stream.read_exact(&mut sink[..some]).await?;
        theirs -= some;
    }
    stream.write_all(&message(largest)).await?;
    if largest == 0 || [stream.read_u8().await?] == ARRIVED { Ok(()) } else { Err(Refusal::Stranger) }
}

fn message(largest: u16) -> Vec<u8> {
    let mut message = largest.to_le_bytes().to_vec();
    message.resize(message.len() + usize::from(largest), 0);
    message
}

/// The connections between this rank and a peer on which the largest packets were lost, since the last on which they
/// arrived.
#[derive(Clone, Copy, Debug, Default)]
pub struct LostPackets {
    connections: u32,
    /// Since when another connection waits for packets.
    waits: Option<Instant>,
    /// On the last of all: the size of this rank's packets, and its address.
    largest: u16,
    own: Option<IpAddr>,
}

impl LostPackets {
    /// How many connections in a row must lose their largest packets: any may break while its packets are in flight.
    const ENOUGH: u32 = 2;

    /// How long packets may take that are not lost. The system has repeated them twice then.
    const MOMENT: Duration = Duration::from_secs(1);

    /// A connection begins to wait for packets. `own`: this rank's address. `largest`: the size of its packets.
    pub fn begin(&mut self, largest: u16, own: Option<IpAddr>) {
        *self = LostPackets { waits: Some(Instant::now()), largest, own, ..*self };
    }

    /// The connection that has waited ends. `lost`: this rank's packets were not acknowledged.
    pub fn end(&mut self, lost: bool) {
        *self = LostPackets { connections: self.connections + u32::from(lost), waits: None, ..*self };
    }

    /// Whether packets were lost, as far as is known at the deadline. `active`: the peer answers other messages, so
    /// packets that do not come are not late because it is stopped.
    pub fn is_likely(&self, active: bool) -> bool {
        self.connections > 0 || active && self.waits.is_some_and(|since| since.elapsed() >= LostPackets::MOMENT)
    }

    /// Whether enough packets were lost for the operation to fail.
    pub fn is_certain(&self) -> bool {
        self.connections >= LostPackets::ENOUGH
    }
}

/// What is lost, and what to do, for errors.
impl fmt::Display for LostPackets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LostPackets { largest, own, .. } = *self;
        let of = own.and_then(interface).map_or(String::new(), |name| format!(" of {name}"));
        write!(
            f,
            "small packets pass, and those of {largest} bytes, the MTU{of}, are lost: a part of the network has a \
             smaller MTU and does not say so; {}",
            smaller_mtu(own)
        )
    }
}

/// Says what to do if the network loses all packets above a size.
pub fn smaller_mtu(own: Option<IpAddr>) -> String {
    let name = own.and_then(interface).unwrap_or_else(|| "INTERFACE".into());
    format!(
        "give the interfaces of both hosts the smallest MTU on the way (ip link set dev {name} mtu BYTES; ping -M do \
         -s BYTES finds it), let the ICMP messages pass that tell it, or use other interfaces (BONFIRE_IFACE)"
    )
}

/// Returns the name of the interface with this address.
fn interface(own: IpAddr) -> Option<String> {
    let own = own.to_canonical();
    if_addrs::get_if_addrs().ok()?.into_iter().find(|interface| interface.ip() == own).map(|interface| interface.name)
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use std::io::{Read, Write};
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::thread;

    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn both_ends_receive_packets_of_the_others_size() {
        for (dials, listens) in [(0, 0), (1500, 0), (0, 1500), (1, CHUNK as u16), (u16::MAX, 9000), (1500, u16::MAX)] {
            let (mut one, two) = UnixStream::pair().unwrap();
            let dialling = thread::spawn(move || {
                let mut other = one.try_clone().unwrap();
                let (write, read) = (|bytes: &[u8]| one.write_all(bytes), |bytes: &mut [u8]| other.read_exact(bytes));
                exchange_packets_blocking(dials, write, read)
            });
            two.set_nonblocking(true).unwrap();
            block_on(async {
                let mut two = tokio::net::UnixStream::from_std(two).unwrap();
                exchange_packets(&mut two, listens).await.unwrap();
                // Nothing is left.
                assert_eq!(two.read(&mut [0]).await.unwrap(), 0);
            });
            dialling.join().unwrap().unwrap();
        }
    }

    /// The input is everything that a dialler sends.
    #[test]
    fn fuzz_packets() {
        let seeds = [message(0), [message(3), ARRIVED.to_vec()].concat(), [message(5000), ARRIVED.to_vec()].concat()];
        bonfire_testing::fuzz::fuzz("packets", seeds, |bytes| {
            let length = bytes.first_chunk().map(|length| usize::from(u16::from_le_bytes(*length)));
            for largest in [0, 7] {
                let mut stream = tokio::io::join(bytes, Vec::new());
                let result = block_on(exchange_packets(&mut stream, largest));
                let (rest, sent) = stream.into_inner();
                let all = length.filter(|length| bytes.len() >= 2 + length);
                assert!(all.is_some() || sent.is_empty(), "what it sends follows the dialler's packets");
                let told = all.and_then(|length| bytes.get(2 + length));
                let right = all.is_some() && (largest == 0 || told == Some(&ARRIVED[0]));
                assert_eq!(result.is_ok(), right);
                assert!(
                    !right
                        || sent == message(largest)
                            && bytes.len() - rest.len() == 2 + length.unwrap() + usize::from(largest > 0)
                );
            }
            length.is_some_and(|length| bytes.len() >= 2 + length)
        });
    }

    #[test]
    fn no_packets_are_sent_on_loopback_and_what_the_peer_does_not_read_is_acknowledged_all_the_same() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        #[expect(clippy::disallowed_methods, reason = "a test on loopback")]
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert_eq!(largest_packet(&stream, Ipv4Addr::LOCALHOST.into()), 0);
        assert_eq!(largest_packet(&stream, Ipv4Addr::LOCALHOST.to_ipv6_mapped().into()), 0);
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 1 << 16]).is_ok() {}
        // The system of the other end acknowledges what it has room for, at once or soon.
        while unacknowledged(&stream) > 0 {
            thread::yield_now();
        }
    }

    #[test]
    fn the_size_is_that_of_the_interface() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        #[expect(clippy::disallowed_methods, reason = "a test on loopback")]
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        // As if it were not loopback.
        let largest = largest_packet(&stream, Ipv4Addr::new(192, 0, 2, 1).into());
        if let Ok(mtu) = std::fs::read_to_string("/sys/class/net/lo/mtu") {
            let mtu: u32 = mtu.trim().parse().unwrap();
            assert_eq!(largest, u16::try_from(mtu).unwrap_or(u16::MAX));
        }
        let mut lost = LostPackets::default();
        lost.begin(1500, Some(Ipv4Addr::LOCALHOST.into()));
        assert!(!lost.is_likely(true), "they may be on their way");
        let before = LostPackets { waits: Instant::now().checked_sub(LostPackets::MOMENT), ..lost };
        assert!(before.is_likely(true) && !before.is_likely(false));
        lost.end(false);
        assert!(!lost.is_likely(true));
        lost.end(true);
        assert!(lost.is_likely(false) && !lost.is_certain());
        let text = lost.to_string();
        assert!(text.contains("those of 1500 bytes, the MTU of lo, are lost") && text.contains("dev lo mtu"), "{text}");
    }
}
