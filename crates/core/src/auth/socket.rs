//! TCP connections between ranks: opened only here, so that no address is dialled unchecked, and kept open here.
//!
//! `clippy.toml` disallows the functions that open connections everywhere else in this package.
#![expect(clippy::disallowed_methods, reason = "the one place that opens connections")]

use std::io::{self, ErrorKind};
use std::net::{self, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl};
use tokio::net::TcpStream;

use super::require_secret;
use super::secret::Secret;
use crate::types::Error;

/// How long a connection may be idle before the system probes it: less than the idle timeouts of firewalls, NAT
/// gateways and load balancers, of which a minute is the shortest in use.
const IDLE: Duration = Duration::from_secs(30);

/// How many probes in a row must be unanswered.
const PROBES: u32 = 6;

/// The shortest time between two probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);

/// The longest one that Linux accepts.
const LONGEST_INTERVAL: Duration = Duration::from_secs(i16::MAX as u64);

/// Connects to the first of `addresses` that answers, without Nagle's algorithm. The caller limits the time.
///
/// # Errors
/// The outer error if, without a secret, one of the addresses is beyond loopback: nothing is dialled then.
pub async fn open(secret: Option<&Secret>, addresses: &[SocketAddr]) -> Result<io::Result<TcpStream>, Error> {
    require_secret(secret, addresses)?;
    Ok(connect(addresses).await)
}

/// As [`open`], to one address, blocking and for at most `limit`, which is not zero.
pub fn open_blocking(
    secret: Option<&Secret>,
    address: &SocketAddr,
    limit: Duration,
) -> Result<io::Result<net::TcpStream>, Error> {
    require_secret(secret, std::slice::from_ref(address))?;
    let connect = || {
        let stream = net::TcpStream::connect_timeout(address, limit)?;
        check_ends(stream.local_addr()?, stream.peer_addr()?)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    Ok(uninterrupted(connect))
}

/// Connects as `open` does, where connections need no secret by their nature.
pub async fn connect(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let stream = loop {
        match TcpStream::connect(addresses).await {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            stream => break stream?,
        }
    };
    check_ends(stream.local_addr()?, stream.peer_addr()?)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Repeats `call` while a signal interrupts it.
pub fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Whether a connection was accepted and dropped before it could be used, as a process that is just ending does: its
/// machine accepts connections until the port is closed, and then resets them.
pub fn was_dropped(error: &io::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected)
}

/// Refuses a connection from a socket to itself. If no process listens at a port of the system's ephemeral range, the
/// system may give the dialling socket the very port that it dials.
fn check_ends(own: SocketAddr, peer: SocketAddr) -> io::Result<()> {
    if own == peer { Err(ErrorKind::ConnectionRefused.into()) } else { Ok(()) }
}

/// Keeps an idle connection known to the firewalls and NAT gateways on its way, and detects when one of them has
/// forgotten it. The heartbeat timeout passes before a connection breaks for lack of answers, so that a peer whose
/// machine is gone is declared lost by its heartbeats.
///
/// # Why no `TCP_USER_TIMEOUT`
/// It also ends connections whose peer answers but does not read. A rank that evaluates or saves leaves the messages of
/// its peers unread for as long as their deadline allows, and would be cut off. A receiver's probes find the same dead
/// connections, and leave those alone.
pub fn keep_open(stream: impl AsFd, heartbeat_timeout: Duration) -> io::Result<()> {
    let interval = (heartbeat_timeout / (PROBES / 2)).clamp(PROBE_INTERVAL, LONGEST_INTERVAL);
    set_tcp_keepidle(&stream, IDLE)?;
    set_tcp_keepintvl(&stream, interval)?;
    set_tcp_keepcnt(&stream, PROBES)?;
    Ok(set_socket_keepalive(&stream, true)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::{socket_keepalive, tcp_keepcnt, tcp_keepidle, tcp_keepintvl, tcp_nodelay};

    /// An address that no machine has (RFC 5737).
    const ELSEWHERE: SocketAddr = SocketAddr::new(net::IpAddr::V4(net::Ipv4Addr::new(192, 0, 2, 1)), 29500);

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn only_loopback_is_dialled_without_a_secret() {
        let loopback = net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        for addresses in [&[ELSEWHERE][..], &[loopback, ELSEWHERE]] {
            assert!(matches!(block_on(open(None, addresses)), Err(Error::Config(_))));
        }
        assert!(matches!(open_blocking(None, &ELSEWHERE, Duration::MAX), Err(Error::Config(_))));
    }

    #[test]
    fn connections_have_no_delay() {
        let listener = net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let blocking = open_blocking(None, &address, Duration::from_secs(60)).unwrap().unwrap();
        assert!(tcp_nodelay(&blocking).unwrap());
        block_on(async { assert!(tcp_nodelay(open(None, &[address]).await.unwrap().unwrap()).unwrap()) });
    }

    #[test]
    fn a_socket_does_not_connect_to_itself() {
        // The system may choose the dialled port for the dialling socket; this test chooses it.
        let port = net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        block_on(async {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(port).unwrap();
            let stream = socket.connect(port).await.unwrap();
            let refused = check_ends(stream.local_addr().unwrap(), stream.peer_addr().unwrap()).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        });
    }

    #[test]
    fn interrupted_calls_are_repeated() {
        let mut calls = 0;
        let result = uninterrupted(|| {
            calls += 1;
            if calls < 3 { Err(ErrorKind::Interrupted.into()) } else { Ok(calls) }
        });
        assert_eq!(result.unwrap(), 3);
        let error = uninterrupted(|| Err::<(), _>(ErrorKind::OutOfMemory.into())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    }

    #[test]
    fn idle_connections_are_probed_for_longer_than_the_heartbeat_timeout() {
        let listener = net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = open_blocking(None, &listener.local_addr().unwrap(), Duration::from_secs(60)).unwrap().unwrap();
        for seconds in [3, 5, 120, 3600, u64::MAX] {
            let heartbeat_timeout = Duration::from_secs(seconds);
            keep_open(&stream, heartbeat_timeout).unwrap();
            assert!(socket_keepalive(&stream).unwrap());
            assert!(tcp_keepidle(&stream).unwrap() < Duration::from_secs(60));
            let longest = tcp_keepintvl(&stream).unwrap() * tcp_keepcnt(&stream).unwrap();
            assert!(
                longest >= Duration::from_secs(60) && longest > heartbeat_timeout.min(LONGEST_INTERVAL),
                "{heartbeat_timeout:?}"
            );
        }
    }
}
