//! The sockets at which a rank listens.

use std::future::poll_fn;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use tokio::net::{TcpListener, TcpSocket, TcpStream};

/// Backlog of connections that wait to be accepted: all ranks may connect at once.
const BACKLOG: u32 = 1024;

/// How often a free port is looked for that several addresses have in common.
const TRIES: u32 = 16;

/// One or more sockets, all at the same port.
pub struct Listener {
    /// Not empty.
    sockets: Vec<TcpListener>,
    /// Which socket is asked first, so that a flood at one of them does not keep the ranks at another one waiting.
    next: AtomicUsize,
}

impl Listener {
    /// Listens at all of `addresses` that this machine has and where no other socket listens. Also returns the
    /// machine's addresses that are in use. See [`bind_all`] for the port and for errors.
    pub fn bind(addresses: &[SocketAddr]) -> io::Result<(Listener, Vec<SocketAddr>)> {
        let (sockets, in_use) = bind_all(addresses, |socket| socket.listen(BACKLOG))?;
        Ok((Listener { sockets, next: AtomicUsize::new(0) }, in_use))
    }

    /// Accepts the next connection at any of the addresses. Cancel safe.
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        // Only a hint, which needs no order.
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        poll_fn(|context| {
            for number in 0..self.sockets.len() {
                let socket = &self.sockets[first.wrapping_add(number) % self.sockets.len()];
                let accepted = socket.poll_accept(context);
                if accepted.is_ready() {
                    return accepted;
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Returns the addresses, in the order in which they were given.
    pub fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        self.sockets.iter().map(TcpListener::local_addr).collect()
    }

    /// Returns handles that keep the port in use.
    pub fn keep(&self) -> io::Result<Vec<OwnedFd>> {
        self.sockets.iter().map(|socket| socket.as_fd().try_clone_to_owned()).collect()
    }
}

/// Binds a socket at each of `addresses` that this machine has and that is not in use, all at one port, and returns
/// what `open` makes of them: at least one. Port 0 stands for a port that is free at all of the addresses. Also returns
/// the machine's addresses that are in use.
///
/// # Errors
/// If no address is left: what is wrong with each. The kind is that of the first error, if possible other than that
/// this machine has no such address.
pub fn bind_all<T>(
    addresses: &[SocketAddr],
    open: impl Fn(TcpSocket) -> io::Result<T>,
) -> io::Result<(Vec<T>, Vec<SocketAddr>)> {
    let mut tries = 0;
    loop {
        let bound = bind_once(addresses, &open)?;
        tries += 1;
        if bound.1.is_empty() || tries == TRIES || addresses.iter().any(|address| address.port() != 0) {
            return Ok(bound);
        }
    }
}

fn bind_once<T>(
    addresses: &[SocketAddr],
    open: impl Fn(TcpSocket) -> io::Result<T>,
) -> io::Result<(Vec<T>, Vec<SocketAddr>)> {
    let (mut sockets, mut failed, mut port) = (Vec::new(), Vec::new(), 0);
    for (number, address) in addresses.iter().enumerate() {
        if addresses[..number].contains(address) {
            continue;
        }
        let mut address = *address;
        if address.port() == 0 {
            address.set_port(port);
        }
        let bound = bind(address).and_then(|socket| Ok((socket.local_addr()?.port(), open(socket)?)));
        match bound {
            Ok((bound, socket)) => {
                port = bound;
                sockets.push(socket);
            }
            Err(e) => failed.push((address, e)),
        }
    }
    if sockets.is_empty() {
        return Err(all_failed(failed));
    }
    failed.retain(|(_, e)| e.kind() == ErrorKind::AddrInUse);
    Ok((sockets, failed.into_iter().map(|(address, _)| address).collect()))
}

/// Returns the error of addresses that all failed. That of a single one is left as it is.
fn all_failed(mut failed: Vec<(SocketAddr, io::Error)>) -> io::Error {
    if failed.len() == 1
        && let Some((_, only)) = failed.pop()
    {
        return only;
    }
    let mut kinds = failed.iter().map(|(_, e)| e.kind());
    let kind = kinds.find(|kind| *kind != ErrorKind::AddrNotAvailable).unwrap_or(ErrorKind::AddrNotAvailable);
    let all: Vec<String> = failed.iter().map(|(address, e)| format!("{address}: {e}")).collect();
    io::Error::new(kind, all.join(", "))
}

/// Binds a socket at one address. That of all addresses of IPv6 covers IPv4 too.
fn bind(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if address.is_ipv6() {
        rustix::net::sockopt::set_ipv6_v6only(&socket, !address.ip().is_unspecified())?;
    }
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the strangers of this test dial like any program")]
    fn connections_are_accepted_at_all_addresses() {
        block_on(async {
            let both = [address("127.0.0.1:0"), address("127.0.0.2:0"), address("127.0.0.1:0")];
            let (listener, in_use) = Listener::bind(&both).unwrap();
            let own = listener.addresses().unwrap();
            assert_eq!((own.len(), own[0].port(), in_use), (2, own[1].port(), vec![]));
            // A connection that waits at one address does not keep those at the other one waiting.
            let _first = [std::net::TcpStream::connect(own[0]).unwrap(), std::net::TcpStream::connect(own[0]).unwrap()];
            let second = std::net::TcpStream::connect(own[1]).unwrap();
            let accepted = [listener.accept().await.unwrap().1, listener.accept().await.unwrap().1];
            assert!(accepted.contains(&second.local_addr().unwrap()), "{accepted:?}");
        });
    }

    #[test]
    fn addresses_that_are_in_use_or_of_other_machines_are_left_out() {
        block_on(async {
            let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
            let _taken = std::net::TcpListener::bind(taken).unwrap();
            let free = SocketAddr::new(address("127.0.0.2:0").ip(), taken.port());
            let elsewhere = SocketAddr::new(address("192.0.2.1:0").ip(), taken.port());
            let (listener, in_use) = Listener::bind(&[elsewhere, taken, free]).unwrap();
            assert_eq!((listener.addresses().unwrap(), in_use), (vec![free], vec![taken]));
            let kind = |addresses: &[SocketAddr]| Listener::bind(addresses).err().unwrap().kind();
            assert_eq!(kind(&[elsewhere, taken]), ErrorKind::AddrInUse);
            let both = Listener::bind(&[elsewhere, taken]).err().unwrap().to_string();
            assert!(both.contains(&format!("{elsewhere}: ")) && both.contains(&format!("{taken}: ")), "{both}");
            assert_eq!(kind(&[elsewhere]), ErrorKind::AddrNotAvailable);
            assert_eq!(kind(&[]), ErrorKind::AddrNotAvailable);
        });
    }
}
