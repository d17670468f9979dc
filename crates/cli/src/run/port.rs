//! The port at which rank 0 listens, if the launcher chooses it.
//!
//! The launcher keeps sockets bound to the port until the run has ended. They do not listen. Linux gives such a port to
//! no socket that asks for any free one, so no other run and no rank's own connection can get it, and still lets a
//! socket with `SO_REUSEADDR` bind it by number and listen, as rank 0's does.
//!
//! # Why rank 0 does not inherit a listening socket
//! What stands between the launcher and rank 0, such as a shell, a profiler or Python's `subprocess`, would close the
//! descriptor, or keep it open when rank 0 has ended: its port would go on accepting connections, while the other ranks
//! recognise by a refused one that rank 0 is gone. Ranks that dial early would wait for a handshake instead of dialling
//! again, and programs without Bonfire could not listen at `MASTER_PORT`.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, ToSocketAddrs};

use bonfire_core::internal::bind_all;
use tokio::net::TcpSocket;

/// A port that no other process is given while this exists.
pub struct ReservedPort {
    number: u16,
    _sockets: Vec<TcpSocket>,
}

impl ReservedPort {
    /// Reserves a free port at all addresses of `host` that this machine has.
    pub fn of(host: &str) -> io::Result<Self> {
        let addresses: Vec<SocketAddr> = (host, 0).to_socket_addrs()?.collect();
        // The ranks do not inherit the sockets.
        let (mut sockets, in_use) = bind_all(&addresses, Ok)?;
        if let Some(address) = in_use.first() {
            return Err(io::Error::new(ErrorKind::AddrInUse, format!("{address}: each port tried is in use")));
        }
        let number = sockets.first().ok_or(ErrorKind::AddrNotAvailable)?.local_addr()?.port();
        // Other systems do not let two sockets be bound to one address.
        if cfg!(not(target_os = "linux")) {
            sockets.clear();
        }
        Ok(Self { number, _sockets: sockets })
    }

    /// Returns the number of the port.
    pub fn number(&self) -> u16 {
        self.number
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_name_that_no_address_belongs_to_is_refused() {
        // RFC 5737: no machine has it.
        assert_eq!(ReservedPort::of("192.0.2.1").err().map(|e| e.kind()), Some(ErrorKind::AddrNotAvailable));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_reserved_port_is_refused_until_rank_0_listens_and_again_when_it_has_ended() {
        let reserved: Vec<_> = (0..100).map(|_| ReservedPort::of("localhost").unwrap()).collect();
        let numbers: BTreeSet<u16> = reserved.iter().map(ReservedPort::number).collect();
        assert_eq!(numbers.len(), reserved.len());
        let address = ("127.0.0.1", reserved[0].number());
        for _ in 0..2 {
            assert_eq!(TcpStream::connect(address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
            let rank_0 = TcpListener::bind(address).unwrap();
            TcpStream::connect(address).unwrap();
            rank_0.accept().unwrap();
        }
    }
}
