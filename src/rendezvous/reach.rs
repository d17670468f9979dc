//! Addresses: where a rank listens, and how it dials until somebody answers.

use std::cell::RefCell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::time::{sleep, timeout};

use super::Settings;
use crate::auth::{self, Opening, Refusal, permit};
use crate::error::Error;

/// How long one attempt may take: the system itself would try again ever more rarely.
const SYN: Duration = Duration::from_secs(5);

/// Dials until the other end has proved who it is, which gives also the number of its job; the caller's time-out ends it.
/// Names may not resolve and ports may not listen yet, and a listener that strangers crowd closes connections.
pub(super) async fn dial(
    (settings, start): (&Settings, Instant),
    address: &str,
    opening: Opening,
    waiting_for: &RefCell<String>,
) -> Result<(TcpStream, u64), Error> {
    let mut pause = Duration::from_millis(10);
    loop {
        let reason = match connect(settings, address).await? {
            Ok(mut stream) => match auth::dial(&mut stream, settings.secret.as_ref(), opening).await {
                Ok(session) => return Ok((stream, session)),
                Err(Refusal::Io(e)) => format!("somebody answers at {address} and does not prove who it is ({e})"),
                Err(refusal) => {
                    let reason = format!("rank {} cannot be reached at {address}: {refusal}", opening.to);
                    return Err(settings.failed(start, reason));
                }
            },
            Err(e) => format!("nobody answers at {address} ({e})"),
        };
        waiting_for.replace(reason);
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Connects where that is allowed.
async fn connect(settings: &Settings, address: &str) -> Result<io::Result<TcpStream>, Error> {
    let addresses: Vec<SocketAddr> = match lookup_host(address).await {
        Ok(addresses) => addresses.collect(),
        Err(e) => return Ok(Err(e)),
    };
    permit(settings.secret.as_ref(), &addresses)?;
    let connected = timeout(SYN, TcpStream::connect(&addresses[..])).await;
    let connected = connected.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer so far")));
    Ok(connected.inspect(|stream| drop(stream.set_nodelay(true))))
}

/// Where a rank other than 0 listens: on loopback if rank 0 is there, else only where it was told to.
pub(super) fn own_host(settings: &Settings, zero: IpAddr) -> Result<String, Error> {
    let bracketed = |host: &str| if host.contains(':') { format!("[{host}]:0") } else { format!("{host}:0") };
    match &settings.host {
        Some(host) => Ok(bracketed(host.trim_matches(['[', ']']))),
        None if zero.is_loopback() => Ok(bracketed(&zero.to_string())),
        None => Err(Error::Config(format!(
            "rank {} must know the address of its own machine that the other ranks reach it by: set BONFIRE_HOST or \
             Builder::host (only loopback is listened at unasked)",
            settings.rank
        ))),
    }
}

/// Listens, where that is allowed.
pub(super) async fn bind(settings: &Settings, start: Instant, address: &str) -> Result<TcpListener, Error> {
    let addresses: Vec<SocketAddr> = lookup_host(address)
        .await
        .map_err(|e| settings.failed(start, format!("{address} is no address of this machine: {e}")))?
        .collect();
    permit(settings.secret.as_ref(), &addresses)?;
    TcpListener::bind(&addresses[..]).await.map_err(|e| {
        let remedy = match e.kind() {
            io::ErrorKind::AddrInUse => "; end the job that still listens there or choose another port",
            io::ErrorKind::AddrNotAvailable => "; give an address that this machine has",
            _ => "",
        };
        settings.failed(start, format!("cannot listen at {address}: {e}{remedy}"))
    })
}
