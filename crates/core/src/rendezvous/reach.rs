//! Addresses: where a rank listens, and how it dials until somebody answers.

use std::cell::RefCell;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpSocket, TcpStream, lookup_host};
use tokio::time::{sleep, timeout};

use super::{Settings, interface};
use crate::auth::{self, Opening, Refusal, permit};
use crate::types::Error;

/// How long one attempt may take: the system itself would try again ever more rarely.
const SYN: Duration = Duration::from_secs(5);

/// The first pause between two tries.
const PAUSE: Duration = Duration::from_millis(10);

/// Connections that may wait to be accepted: all ranks may come at once.
const BACKLOG: u32 = 1024;

/// Dials until the other end has proved who it is, which gives also the number of its job; the caller's time-out ends it.
/// Names may not resolve and ports may not listen yet, and a listener that strangers crowd closes connections.
pub(super) async fn dial(
    (settings, start): (&Settings, Instant),
    address: &str,
    opening: Opening,
    waiting_for: &RefCell<String>,
) -> Result<(TcpStream, u64), Error> {
    let mut pause = PAUSE;
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
            Err(reason) => reason,
        };
        waiting_for.replace(reason);
        rest(&mut pause).await;
    }
}

/// Waits before another try, longer each time.
async fn rest(pause: &mut Duration) {
    sleep(*pause).await;
    *pause = (*pause * 2).min(Duration::from_millis(500));
}

/// Connects where that is allowed, or says why nobody is there yet.
async fn connect(settings: &Settings, address: &str) -> Result<Result<TcpStream, String>, Error> {
    let addresses = match resolve(address).await {
        Ok(addresses) => addresses,
        Err(reason) => return Ok(Err(reason)),
    };
    permit(settings.secret.as_ref(), &addresses)?;
    let connected = timeout(SYN, TcpStream::connect(&addresses[..])).await;
    let connected = connected.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer so far")));
    let connected = connected.inspect(|stream| drop(stream.set_nodelay(true)));
    Ok(connected.map_err(|e| format!("nobody answers at {address} ({e})")))
}

/// The addresses behind a name, which may have none yet.
async fn resolve(address: &str) -> Result<Vec<SocketAddr>, String> {
    match lookup_host(address).await {
        Ok(addresses) => Ok(addresses.collect()),
        Err(e) => Err(format!("the name in {address} does not resolve ({e})")),
    }
}

/// Where rank 0 listens, and where it tells the others that it does: nothing but the port, unless an interface was chosen,
/// since they know better where they reach it.
pub(super) async fn listen(
    (settings, start): (&Settings, Instant),
    waiting_for: &RefCell<String>,
) -> Result<(TcpListener, SocketAddr), Error> {
    let chosen = if settings.spans_hosts() { interface::chosen(settings)? } else { None };
    let mut pause = PAUSE;
    let listener = loop {
        let reason = match resolve(&settings.address).await {
            // Its own name may mean loopback on its host, and not on the others. And an interface that was chosen need not
            // be the one with the name.
            Ok(addresses)
                if settings.spans_hosts()
                    && (chosen.is_some() || addresses.iter().any(|address| address.ip().is_loopback())) =>
            {
                break everywhere(settings, start, addresses.first().map_or(0, SocketAddr::port))?;
            }
            Ok(addresses) => match bind_to(settings, &addresses).await? {
                Ok(listener) => break listener,
                // The name may still be that of another machine, where this one took its place.
                Err(e) if e.kind() == io::ErrorKind::AddrNotAvailable && is_name(&settings.address) => {
                    cannot_listen(&settings.address, &e)
                }
                Err(e) => return Err(settings.failed(start, own_address(settings, &e))),
            },
            Err(reason) => reason,
        };
        if pause == PAUSE {
            log::warn!("rank 0 tries again: {reason}");
        }
        waiting_for.replace(match &settings.source.address {
            Some(chosen) => format!("{reason}; {chosen}, and BONFIRE_ADDRESS overrides both"),
            None => reason,
        });
        rest(&mut pause).await;
    };
    let mut told = listener.local_addr().map_err(|e| settings.failed(start, e.to_string()))?;
    told.set_ip(chosen.unwrap_or(Ipv4Addr::UNSPECIFIED.into()));
    waiting_for.take();
    Ok((listener, told))
}

/// Listens at every address of this machine, of both families where it has both.
fn everywhere(settings: &Settings, start: Instant, port: u16) -> Result<TcpListener, Error> {
    permit(settings.secret.as_ref(), &[(Ipv6Addr::UNSPECIFIED, port).into()])?;
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
    let listener = match both() {
        Err(e) if e.kind() != io::ErrorKind::AddrInUse => {
            TcpSocket::new_v4().and_then(|socket| listen(socket, (Ipv4Addr::UNSPECIFIED, port).into()))
        }
        listener => listener,
    };
    listener.map_err(|e| settings.failed(start, own_address(settings, &e)))
}

/// Where a rank other than 0 listens, which has reached rank 0 by this connection.
pub(super) fn own_host(settings: &Settings, zero: &TcpStream) -> Result<String, Error> {
    let bracketed = |host: &str| if host.contains(':') { format!("[{host}]:0") } else { format!("{host}:0") };
    if let Some(host) = &settings.host {
        return Ok(bracketed(host.trim_matches(['[', ']'])));
    }
    let own = zero.local_addr().map_err(|e| Error::io("connect", e))?.ip().to_canonical();
    if !settings.spans_hosts() {
        return Ok(bracketed(&own.to_string()));
    }
    let own = match interface::chosen(settings)? {
        Some(chosen) => chosen,
        // Rank 0 is on this host, and was reached by a name that means loopback here.
        None if own.is_loopback() => match interface::any(settings) {
            // Then nobody else can be on another, unless somebody knows better.
            Err(_) if settings.source.several.is_none() => own,
            found => found?,
        },
        None => own,
    };
    Ok(bracketed(&own.to_string()))
}

/// Listens, where that is allowed.
pub(super) async fn bind(settings: &Settings, start: Instant, address: &str) -> Result<TcpListener, Error> {
    let addresses = resolve(address).await.map_err(|reason| settings.failed(start, reason))?;
    let listener = bind_to(settings, &addresses).await?;
    listener.map_err(|e| settings.failed(start, cannot_listen(address, &e)))
}

async fn bind_to(settings: &Settings, addresses: &[SocketAddr]) -> Result<io::Result<TcpListener>, Error> {
    permit(settings.secret.as_ref(), addresses)?;
    // Why it cannot be where the machine has the address says more than that it has another one not.
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

/// Why rank 0 cannot listen at the address that all ranks know.
fn own_address(settings: &Settings, e: &io::Error) -> String {
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

/// Whether what is before the port has to be looked up.
fn is_name(address: &str) -> bool {
    address.parse::<SocketAddr>().is_err()
}
