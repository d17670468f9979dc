//! Dialling: a rank tries all addresses of its peer, until one of them proves that it is the peer.
//!
//! Until then nothing is final. At rank 0's address may be a server of another kind, a rank of an earlier job that has
//! not ended yet, one of another release or with another secret, or no process at all; a name may not resolve, or lead
//! to a machine that is about to be replaced; and a refusal is not authenticated, so a stranger can send any. All of it
//! is a reason to dial again, counted for the error of a rank whose time is up. Answers that are not the peer's are
//! logged, each kind once.
//!
//! The addresses are tried side by side, as in RFC 8305: they alternate between IPv6 and IPv4, and each begins a moment
//! after the one before, or at once if that one has failed. The first that completes the handshake wins.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::panic::resume_unwind;
use std::time::Duration;

use tokio::net::{TcpStream, lookup_host};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::Settings;
use super::source::is_loopback;
use crate::auth::{self, Prologue, Purpose, Refusal, Secret, Seen, Tally, require_secret};
use crate::types::Error;

/// Time limit of one attempt to connect: the system itself would retry at ever longer intervals.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How much later than the one before the next address is dialled, as RFC 8305 recommends.
const STAGGER: Duration = Duration::from_millis(250);

/// The first pause between two attempts.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// The longest pause between two attempts.
const LAST_PAUSE: Duration = Duration::from_millis(500);

/// Dials until a peer at one of the addresses completes the handshake; returns the connection and the job's session.
/// The caller limits the time.
///
/// # Errors
/// [`Error::Config`] if the address needs a secret and this rank has none.
pub(super) async fn dial(
    settings: &Settings,
    address: &str,
    prologue: Prologue,
    waiting_for: &RefCell<String>,
) -> Result<(TcpStream, u64), Error> {
    let remedy = match prologue.purpose {
        // No other address leads to a rank of this host.
        _ if is_loopback(address) => "",
        Purpose::Rendezvous => {
            "; BONFIRE_ADDRESS gives another address of rank 0, and BONFIRE_IFACE on rank 0 makes it listen at all"
        }
        _ => "; BONFIRE_HOST or BONFIRE_IFACE on that rank makes it announce another address",
    };
    let names = [format!("rank {}", settings.rank), format!("rank {}", prologue.to)];
    Dialler::new(settings.secret.as_ref(), names, address, prologue, remedy).dial(waiting_for).await
}

/// What is dialled, and what has answered so far.
pub struct Dialler<'a> {
    secret: Option<&'a Secret>,
    /// What dials, and what is dialled, for the log and for errors.
    names: [String; 2],
    address: &'a str,
    prologue: Prologue,
    remedy: &'static str,
    tally: Tally,
    /// The last answer that was not the peer's.
    refusal: Option<Refusal>,
}

/// Why an attempt has not led to the peer.
enum Missed {
    /// No process has answered.
    Unanswered(String),
    /// A process has answered that is not the peer, or not yet.
    Refused(Refusal),
}

impl<'a> Dialler<'a> {
    /// `names`: what dials, and what is dialled. `address`: its host and port. `remedy` ends the reason if nothing
    /// answers there.
    pub fn new(
        secret: Option<&'a Secret>,
        names: [String; 2],
        address: &'a str,
        prologue: Prologue,
        remedy: &'static str,
    ) -> Dialler<'a> {
        Dialler { secret, names, address, prologue, remedy, tally: Tally::default(), refusal: None }
    }

    /// Dials until a peer at one of the addresses completes the handshake; returns the connection and the session
    /// number that the peer has sent. The caller limits the time. Keeps in `waiting_for` what was tried in vain.
    ///
    /// # Errors
    /// [`Error::Config`] if an address needs a secret and there is none.
    pub async fn dial(&mut self, waiting_for: &RefCell<String>) -> Result<(TcpStream, u64), Error> {
        let (address, prologue) = (self.address, self.prologue);
        waiting_for.replace(format!("{} has not answered at {address}", self.names[1]));
        // At most one for each address. Dropping them closes their connections.
        let mut attempts = JoinSet::new();
        let (mut dialled, mut queue): (Vec<SocketAddr>, VecDeque<SocketAddr>) = Default::default();
        let mut looking_up = Some(Box::pin(resolve(address)));
        // When the next address is dialled or, if all are, when the name is looked up again.
        let (mut next, mut pause) = (Instant::now(), FIRST_PAUSE);
        loop {
            tokio::select! {
                found = async { looking_up.as_mut()?.await.into() }, if looking_up.is_some() => {
                    looking_up = None;
                    next = Instant::now();
                    match found {
                        Some(Ok(found)) => {
                            require_secret(self.secret, &found)?;
                            let is_new = |target: &SocketAddr| !dialled.contains(target);
                            queue = alternating(&found).into_iter().filter(is_new).collect();
                        }
                        Some(Err(reason)) => self.note(&address, Missed::Unanswered(reason)),
                        None => {}
                    }
                    if queue.is_empty() {
                        next += pause;
                        pause = doubled(pause);
                    }
                }
                Some(ended) = attempts.join_next() => {
                    let (target, result) = ended.unwrap_or_else(|e| resume_unwind(e.into_panic()));
                    match result {
                        Ok(connected) => return Ok(connected),
                        Err(missed) => self.note(&target, missed),
                    }
                    dialled.retain(|other| *other != target);
                    if !queue.is_empty() {
                        next = Instant::now();
                    }
                }
                () = sleep_until(next), if looking_up.is_none() => match queue.pop_front() {
                    Some(target) => {
                        let secret = self.secret.cloned();
                        attempts.spawn(async move { (target, attempt(target, secret, prologue).await) });
                        dialled.push(target);
                        next = Instant::now() + if queue.is_empty() { pause } else { STAGGER };
                        if queue.is_empty() {
                            pause = doubled(pause);
                        }
                    }
                    None => looking_up = Some(Box::pin(resolve(address))),
                }
            }
            if !self.tally.is_empty() {
                waiting_for.replace(self.reason());
            }
        }
    }

    /// Returns the last answer that was not the peer's, if anything has answered.
    pub fn refusal(&self) -> Option<&Refusal> {
        self.refusal.as_ref()
    }

    /// Counts an attempt, and logs answers that are not the peer's: the user may have to end what answers there.
    fn note(&mut self, target: &impl std::fmt::Display, missed: Missed) {
        let (outcome, refusal) = match missed {
            Missed::Unanswered(reason) => (reason, None),
            Missed::Refused(Refusal::Io(e)) => {
                (format!("it does not complete the handshake ({e})"), Some(Refusal::Io(e)))
            }
            Missed::Refused(refusal) => (refusal.to_string(), Some(refusal)),
        };
        let answered = refusal.is_some();
        if self.tally.add(target, &outcome, answered) == Seen::First && answered {
            let ([who, whom], address) = (&self.names, self.address);
            log::warn!("{who} retries: {whom} cannot be reached at {address} yet; {target} answers: {outcome}");
        }
        self.refusal = refusal.or(self.refusal.take());
    }

    /// Returns what was tried in vain.
    fn reason(&self) -> String {
        let Dialler { names: [_, whom], address, remedy, tally, .. } = self;
        if tally.is_telling() {
            return format!("{whom} cannot be reached at {address}: tried {tally}");
        }
        format!("nobody answers at {address}: tried {tally}{remedy}")
    }
}

/// Dials an address once.
async fn attempt(target: SocketAddr, secret: Option<Secret>, prologue: Prologue) -> Result<(TcpStream, u64), Missed> {
    let opened = match timeout(CONNECT_TIMEOUT, auth::open(secret.as_ref(), &[target])).await {
        Ok(Ok(opened)) => opened,
        Ok(Err(forbidden)) => Err(io::Error::other(forbidden)),
        Err(_) => Err(io::Error::new(ErrorKind::TimedOut, format!("no answer within {CONNECT_TIMEOUT:?}"))),
    };
    let mut stream = opened.map_err(|e| Missed::Unanswered(e.to_string()))?;
    match auth::dial(&mut stream, secret.as_ref(), prologue).await {
        Ok(session) => Ok((stream, session)),
        Err(refusal) => Err(Missed::Refused(refusal)),
    }
}

/// Sleeps before the next attempt, and doubles the pause up to half a second.
pub(super) async fn back_off(pause: &mut Duration) {
    sleep(*pause).await;
    *pause = doubled(*pause);
}

fn doubled(pause: Duration) -> Duration {
    (pause * 2).min(LAST_PAUSE)
}

/// Returns the addresses of a name, which may have none yet.
pub(super) async fn resolve(address: &str) -> Result<Vec<SocketAddr>, String> {
    match lookup_host(address).await {
        Ok(addresses) => Ok(addresses.collect()),
        Err(e) => Err(format!("the name in {address} does not resolve ({e})")),
    }
}

/// Orders addresses so that the families take turns, beginning with that of the first, each address once.
fn alternating(addresses: &[SocketAddr]) -> Vec<SocketAddr> {
    let first_family = addresses.first().is_some_and(SocketAddr::is_ipv6);
    let of = |family| addresses.iter().copied().filter(move |address| address.is_ipv6() == family);
    let (mut one, mut other, mut ordered) = (of(first_family), of(!first_family), Vec::new());
    loop {
        let next: Vec<_> = one.next().into_iter().chain(other.next()).collect();
        if next.is_empty() {
            return ordered;
        }
        next.into_iter().for_each(|address| {
            if !ordered.contains(&address) {
                ordered.push(address);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_take_turns() {
        let addresses =
            |texts: &[&str]| texts.iter().map(|text| format!("{text}:1").parse().unwrap()).collect::<Vec<SocketAddr>>();
        for (given, ordered) in [
            (&[][..], &[][..]),
            (&["1.0.0.1", "1.0.0.2", "1.0.0.1"], &["1.0.0.1", "1.0.0.2"]),
            (&["[::2]", "[::3]", "1.0.0.1", "1.0.0.2"], &["[::2]", "1.0.0.1", "[::3]", "1.0.0.2"]),
            (&["1.0.0.1", "1.0.0.2", "1.0.0.3", "[::2]"], &["1.0.0.1", "[::2]", "1.0.0.2", "1.0.0.3"]),
        ] {
            assert_eq!(alternating(&addresses(given)), addresses(ordered));
        }
    }
}
