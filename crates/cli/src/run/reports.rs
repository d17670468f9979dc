//! The launcher's end of the sockets on which ranks report failures and long waits: see `report` in bonfire-core.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use bonfire_core::internal::{LAUNCHER, Report};
use rustix::fs::fstat;
use rustix::io::{FdFlags, fcntl_setfd};
use tokio::io::Interest;
use tokio::net;

/// How long a rank that fails waits for a launcher that reads nothing, because it was stopped.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// More bytes than a report has.
const LONGEST: usize = 16 * 1024;

pub struct Reports {
    /// Read directly: the runtime does not know yet of a report that arrived a moment ago.
    socket: UnixDatagram,
    /// The same socket, to wait for reports.
    notice: net::UnixDatagram,
    /// The other end, which the ranks inherit.
    ranks: UnixDatagram,
    inode: u64,
}

impl Reports {
    pub fn new() -> io::Result<Self> {
        let (own, ranks) = UnixDatagram::pair()?;
        own.set_nonblocking(true)?;
        ranks.set_write_timeout(Some(WRITE_TIMEOUT))?;
        // The launcher starts no other processes than the ranks.
        fcntl_setfd(&ranks, FdFlags::empty())?;
        let inode = fstat(&ranks)?.st_ino as u64;
        let notice = net::UnixDatagram::from_std(own.try_clone()?)?;
        Ok(Self { socket: own, notice, ranks, inode })
    }

    /// Returns the environment variable by which the rank with local rank `local` finds the socket.
    pub fn variable(&self, local: u32) -> (&'static str, String) {
        (LAUNCHER, format!("{}:{}:{local}", self.ranks.as_raw_fd(), self.inode))
    }

    /// Waits until reports may have arrived. Then take them all: there is no second notice of the same report.
    pub async fn arrived(&self) -> io::Result<()> {
        self.notice.readable().await?;
        // The runtime's way to say that the notice was seen.
        let _: io::Result<()> = self.notice.try_io(Interest::READABLE, || Err(io::ErrorKind::WouldBlock.into()));
        Ok(())
    }

    /// Takes the next report that has arrived.
    pub fn next(&self) -> Option<Report> {
        let mut bytes = [0; LONGEST];
        loop {
            let length = self.socket.recv(&mut bytes).ok()?;
            match serde_json::from_slice(&bytes[..length]) {
                Ok(report) => return Some(report),
                Err(error) => log::warn!("ignored a report that is none: {error}"),
            }
        }
    }
}
