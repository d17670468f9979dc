//! Listening: at which addresses a rank listens.

use std::cell::RefCell;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Instant;

use tokio::net::TcpStream;

use super::dial::{FIRST_PAUSE, back_off, resolve};
use super::{Settings, interface};
use crate::auth::{Listener, Seen, Tally, require_secret};
use crate::types::Error;

/// Returns rank 0's listener and the address that it announces. The announced address holds only the port unless an
/// interface was configured, since the other ranks know better at which address they reach rank 0.
pub(super) async fn listen(
    (settings, start): (&Settings, Instant),
    waiting_for: &RefCell<String>,
) -> Result<(Listener, SocketAddr), Error> {
    let chosen = if settings.spans_hosts() { interface::chosen(settings)? } else { None };
    let (mut pause, mut tried) = (FIRST_PAUSE, Tally::default());
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
            Ok(addresses) => Ok(bind_to(settings, &addresses)?),
            Err(reason) => Err(reason),
        };
        let (reason, remedy) = match bound {
            Ok(Ok(listener)) => break listener,
            // An earlier job may listen there until it has ended. Or the name may still resolve to another machine,
            // which this one replaces.
            Ok(Err(e))
                if e.kind() == io::ErrorKind::AddrInUse
                    || e.kind() == io::ErrorKind::AddrNotAvailable && is_name(&settings.address) =>
            {
                (e.to_string(), remedy(e.kind()))
            }
            Ok(Err(e)) => return Err(settings.failed(start, cannot_listen_at_own_address(settings, &e))),
            Err(reason) => (reason, ""),
        };
        let address = &settings.address;
        if tried.add(address, &reason, true) == Seen::First {
            log::warn!("rank 0 retries: cannot listen at {address}: {reason}{remedy}");
        }
        let reason = format!("cannot listen at {address}: tried {tried}{remedy}");
        waiting_for.replace(match &settings.source.address {
            Some(chosen) => format!("{reason}; {chosen}, and BONFIRE_ADDRESS overrides both"),
            None => reason,
        });
        back_off(&mut pause).await;
    };
    let mut announced = first_address(settings, start, &listener)?;
    announced.set_ip(chosen.unwrap_or(Ipv4Addr::UNSPECIFIED.into()));
    waiting_for.take();
    Ok((listener, announced))
}

/// Listens at all addresses of this machine, of both families if it has both.
fn listen_everywhere(settings: &Settings, port: u16) -> Result<io::Result<Listener>, Error> {
    let both = (Ipv6Addr::UNSPECIFIED, port).into();
    Ok(match bind_to(settings, &[both])? {
        Err(e) if e.kind() != io::ErrorKind::AddrInUse => bind_to(settings, &[(Ipv4Addr::UNSPECIFIED, port).into()])?,
        listener => listener,
    })
}

/// Listens at the configured address `host` of a rank other than 0. Its name may not resolve yet.
pub(super) async fn listen_at(
    (settings, start): (&Settings, Instant),
    host: &str,
    waiting_for: &RefCell<String>,
) -> Result<Listener, Error> {
    let address = any_port(host.trim_matches(['[', ']']));
    let mut pause = FIRST_PAUSE;
    loop {
        let reason = match resolve(&address).await {
            Ok(addresses) => {
                return bind_to(settings, &addresses)?.map_err(|e| settings.failed(start, cannot_listen(&address, &e)));
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

/// Returns the address that a rank other than 0 announces: the one from which it reaches rank 0, if it listens there,
/// and otherwise the first one at which it listens.
pub(super) fn announced(
    (settings, start): (&Settings, Instant),
    listener: &Listener,
    zero: &TcpStream,
) -> Result<SocketAddr, Error> {
    let first = first_address(settings, start, listener)?;
    let to_zero = zero.local_addr().map_err(|e| settings.failed(start, e.to_string()))?.ip();
    let all = listener.addresses().map_err(|e| settings.failed(start, e.to_string()))?;
    // A rank that listens at all addresses of its machine listens at this one too.
    let listens_there = all.iter().any(|own| own.ip() == to_zero || own.ip().is_unspecified());
    Ok(if listens_there { SocketAddr::new(to_zero, first.port()) } else { first })
}

/// Listens at an address. Addresses that need a secret are an error without one.
pub(super) async fn bind(settings: &Settings, start: Instant, address: &str) -> Result<Listener, Error> {
    let addresses = resolve(address).await.map_err(|reason| settings.failed(start, reason))?;
    bind_to(settings, &addresses)?.map_err(|e| settings.failed(start, cannot_listen(address, &e)))
}

/// Listens at all of these addresses that are this machine's own. Addresses that need a secret are an error without
/// one.
pub(super) fn bind_to(settings: &Settings, addresses: &[SocketAddr]) -> Result<io::Result<Listener>, Error> {
    require_secret(settings.secret.as_ref(), addresses)?;
    Ok(Listener::bind(addresses).map(|(listener, in_use)| {
        for address in in_use {
            log::warn!("rank {} does not listen at {address}, which is in use: only at others", settings.rank);
        }
        listener
    }))
}

/// Returns the first address at which a rank listens.
pub(super) fn first_address(settings: &Settings, start: Instant, listener: &Listener) -> Result<SocketAddr, Error> {
    let addresses = listener.addresses().map_err(|e| settings.failed(start, e.to_string()))?;
    addresses.first().copied().ok_or_else(|| settings.failed(start, "this rank listens at no address"))
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
    format!("cannot listen at {address}: {e}{}", remedy(e.kind()))
}

fn remedy(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::AddrInUse => "; end the job that still listens there or choose another port",
        io::ErrorKind::AddrNotAvailable => "; give an address that this machine has",
        _ => "",
    }
}

/// Whether the host part has to be looked up.
fn is_name(address: &str) -> bool {
    address.parse::<SocketAddr>().is_err()
}
