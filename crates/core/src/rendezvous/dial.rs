//! Listening and dialling: at which address a rank listens, and how it dials until the peer answers.

use std::cell::RefCell;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::time::{sleep, timeout};

use super::{Settings, interface};
use crate::auth::{self, Prologue, Purpose, Refusal, require_secret};
use crate::types::Error;

/// Time limit of one attempt to connect: the system itself would retry at ever longer intervals.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The first pause between two attempts.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// Backlog of connections that wait to be accepted: all ranks may connect at once.
const BACKLOG: u32 = 1024;

/// Dials until the handshake succeeds; returns the connection and the job's session. The caller limits the time. The
/// name may not resolve yet, the peer may not listen yet, a listener flooded by strangers closes connections, and a
/// rank of an earlier job may still listen at rank 0's address.
pub(super) async fn dial(
    (settings, start): (&Settings, Instant),
    address: &str,
    prologue: Prologue,
    waiting_for: &RefCell<String>,
) -> Result<(TcpStream, u64), Error> {
    let mut pause = FIRST_PAUSE;
    waiting_for.replace(format!("rank {} has not answered at {address}", prologue.to));
    loop {
        let reason = match connect(settings, address).await? {
            Ok(mut stream) => match auth::dial(&mut stream, settings.secret.as_ref(), prologue).await {
                Ok(session) => return Ok((stream, session)),
                Err(Refusal::Io(e)) => format!("{address} answers but does not complete the handshake ({e})"),
                Err(refusal) => {
                    let reason = format!("rank {} cannot be reached at {address}: {refusal}", prologue.to);
                    // A rank of an earlier job, which has not ended yet.
                    let earlier = prologue.purpose == Purpose::Rendezvous && matches!(refusal, Refusal::Misplaced(_));
                    if !earlier {
                        return Err(settings.failed(start, reason));
                    }
                    if *waiting_for.borrow() != reason {
                        log::warn!("rank {} retries: {reason}", settings.rank);
                    }
                    reason
                }
            },
            Err(reason) => reason,
        };
        waiting_for.replace(reason);
        back_off(&mut pause).await;
    }
}

/// Sleeps before the next attempt, and doubles the pause up to half a second.
pub(super) async fn back_off(pause: &mut Duration) {
    sleep(*pause).await;
    *pause = (*pause * 2).min(Duration::from_millis(500));
}

/// Connects, or returns why no process answers yet. Addresses that need a secret are an error without one.
async fn connect(settings: &Settings, address: &str) -> Result<Result<TcpStream, String>, Error> {
    let addresses = match resolve(address).await {
        Ok(addresses) => addresses,
        Err(reason) => return Ok(Err(reason)),
    };
    let connected = timeout(CONNECT_TIMEOUT, auth::open(settings.secret.as_ref(), &addresses)).await;
    let late = |_| Ok(Err(io::Error::new(io::ErrorKind::TimedOut, "no answer so far")));
    Ok(connected.unwrap_or_else(late)?.map_err(|e| format!("nobody answers at {address} ({e})")))
}

/// Returns the addresses of a name, which may have none yet.
async fn resolve(address: &str) -> Result<Vec<SocketAddr>, String> {
    match lookup_host(address).await {
        Ok(addresses) => Ok(addresses.collect()),
        Err(e) => Err(format!("the name in {address} does not resolve ({e})")),
    }
}

/// Returns rank 0's listener and the address that it announces. The announced address holds only the port unless an
/// interface was configured, since the other ranks know better at which address they reach rank 0.
pub(super) async fn listen(
    (settings, start): (&Settings, Instant),
    waiting_for: &RefCell<String>,
) -> Result<(TcpListener, SocketAddr), Error> {
    let chosen = if settings.spans_hosts() { interface::chosen(settings)? } else { None };
    let mut pause = FIRST_PAUSE;
    let listener = loop {
        let bound = match resolve(&settings.address).await {
            // Rank 0's name may resolve to loopback on its own host and not on the others. A configured interface need
            // not be the one that the name resolves to.
            Ok(addresses)
                if settings.spans_hosts()
                    && (chosen.is_some() || addresses.iter().any(|address| address.ip().is_loopback())) =>
            {
                Ok(listen_everywhere(settings, addresses.first().map_or(0, SocketAddr::port))?)
            }
            Ok(addresses) => Ok(bind_to(settings, &addresses).await?),
            Err(reason) => Err(reason),
        };
        let reason = match bound {
            Ok(Ok(listener)) => break listener,
            // An earlier job may listen there until it has ended.
            Ok(Err(e)) if e.kind() == io::ErrorKind::AddrInUse => cannot_listen(&settings.address, &e),
            // The name may still resolve to another machine, which this one replaces.
            Ok(Err(e)) if e.kind() == io::ErrorKind::AddrNotAvailable && is_name(&settings.address) => {
                cannot_listen(&settings.address, &e)
            }
            Ok(Err(e)) => return Err(settings.failed(start, cannot_listen_at_own_address(settings, &e))),
            Err(reason) => reason,
        };
        if pause == FIRST_PAUSE {
            log::warn!("rank 0 retries: {reason}");
        }
        waiting_for.replace(match &settings.source.address {
            Some(chosen) => format!("{reason}; {chosen}, and BONFIRE_ADDRESS overrides both"),
            None => reason,
        });
        back_off(&mut pause).await;
    };
    let mut announced = listener.local_addr().map_err(|e| settings.failed(start, e.to_string()))?;
    announced.set_ip(chosen.unwrap_or(Ipv4Addr::UNSPECIFIED.into()));
    waiting_for.take();
    Ok((listener, announced))
}

/// Listens at all addresses of this machine, of both families if it has both.
fn listen_everywhere(settings: &Settings, port: u16) -> Result<io::Result<TcpListener>, Error> {
    require_secret(settings.secret.as_ref(), &[(Ipv6Addr::UNSPECIFIED, port).into()])?;
    let listen = |socket: TcpSocket, address: SocketAddr| {
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    let both = || {
        let socket = TcpSocket::new_v6()?;
        rustix::net::sockopt::set_ipv6_v6only(&socket, false)?;
        listen(socket, (Ipv6Addr::UNSPECIFIED, port).into())
    };
    Ok(match both() {
        Err(e) if e.kind() != io::ErrorKind::AddrInUse => {
            TcpSocket::new_v4().and_then(|socket| listen(socket, (Ipv4Addr::UNSPECIFIED, port).into()))
        }
        listener => listener,
    })
}

/// Listens at the configured address `host` of a rank other than 0. Its name may not resolve yet.
pub(super) async fn listen_at(
    (settings, start): (&Settings, Instant),
    host: &str,
    waiting_for: &RefCell<String>,
) -> Result<TcpListener, Error> {
    let address = any_port(host.trim_matches(['[', ']']));
    let mut pause = FIRST_PAUSE;
    loop {
        let reason = match resolve(&address).await {
            Ok(addresses) => {
                let listener = bind_to(settings, &addresses).await?;
                return listener.map_err(|e| settings.failed(start, cannot_listen(&address, &e)));
            }
            Err(reason) => reason,
        };
        if pause == FIRST_PAUSE {
            log::warn!("rank {} retries: {reason}", settings.rank);
        }
        waiting_for.replace(format!("{reason}; BONFIRE_HOST or Builder::host gives it"));
        back_off(&mut pause).await;
    }
}

fn any_port(host: &str) -> String {
    if host.contains(':') { format!("[{host}]:0") } else { format!("{host}:0") }
}

/// Returns the address at which a rank other than 0 listens, if none is configured. `zero` is its connection to rank 0.
pub(super) fn own_host(settings: &Settings, zero: &TcpStream) -> Result<String, Error> {
    let own = zero.local_addr().map_err(|e| Error::io("connect", e))?.ip().to_canonical();
    if !settings.spans_hosts() {
        return Ok(any_port(&own.to_string()));
    }
    let own = match interface::chosen(settings)? {
        Some(chosen) => chosen,
        // Rank 0 is on this host, and its name resolves to loopback here.
        None if own.is_loopback() => match interface::any(settings) {
            // Without an interface no rank can be on another host, unless the launcher says so.
            Err(_) if settings.source.several.is_none() => own,
            found => found?,
        },
        None => own,
    };
    Ok(any_port(&own.to_string()))
}

/// Listens at an address. Addresses that need a secret are an error without one.
pub(super) async fn bind(settings: &Settings, start: Instant, address: &str) -> Result<TcpListener, Error> {
    let addresses = resolve(address).await.map_err(|reason| settings.failed(start, reason))?;
    let listener = bind_to(settings, &addresses).await?;
    listener.map_err(|e| settings.failed(start, cannot_listen(address, &e)))
}

async fn bind_to(settings: &Settings, addresses: &[SocketAddr]) -> Result<io::Result<TcpListener>, Error> {
    require_secret(settings.secret.as_ref(), addresses)?;
    // An error for an address that this machine has is more useful than "address not available" for another one.
    let mut error: Option<io::Error> = None;
    for address in addresses {
        match TcpListener::bind(address).await {
            Ok(listener) => return Ok(Ok(listener)),
            Err(e) if error.as_ref().is_none_or(|e| e.kind() == io::ErrorKind::AddrNotAvailable) => error = Some(e),
            Err(_) => {}
        }
    }
    Ok(Err(error.unwrap_or_else(|| io::ErrorKind::AddrNotAvailable.into())))
}

/// Returns why rank 0 cannot listen at the address that all ranks know.
fn cannot_listen_at_own_address(settings: &Settings, e: &io::Error) -> String {
    let reason = cannot_listen(&settings.address, e);
    match &settings.source.address {
        Some(chosen) => format!("{reason} ({chosen}): BONFIRE_ADDRESS=HOST:PORT on all ranks overrides both"),
        None => reason,
    }
}

fn cannot_listen(address: &str, e: &io::Error) -> String {
    let remedy = match e.kind() {
        io::ErrorKind::AddrInUse => "; end the job that still listens there or choose another port",
        io::ErrorKind::AddrNotAvailable => "; give an address that this machine has",
        _ => "",
    };
    format!("cannot listen at {address}: {e}{remedy}")
}

/// Whether the host part has to be looked up.
fn is_name(address: &str) -> bool {
    address.parse::<SocketAddr>().is_err()
}
