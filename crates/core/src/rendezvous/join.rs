//! The rendezvous protocol: registration with rank 0, then connections between neighbours.
//!
//! # Missing ranks
//! Rank 0 sends the list of missing ranks to the registered ones when it has changed, at most once a second, and once
//! more when its own time is up. The other ranks wait a second longer. So the errors of all ranks name the missing
//! rank, whichever of them gives up first.

use std::cell::RefCell;
use std::future::pending;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, channel, unbounded_channel};
use tokio::task::yield_now;
use tokio::time::{MissedTickBehavior, interval, sleep, sleep_until, timeout_at};

use super::dial::{FIRST_PAUSE, back_off, dial};
use super::listen::{announced, bind, first_address, listen, listen_at, own_host};
use super::neighbours::{fewest_connections, is_star, neighbours};
use super::registration::{
    Answer, Hello, RegisteredRank, Registration, authenticate, common_transport, first_disconnect, hosts, machine,
    read_hello, refuse, register, report_missing,
};
use super::{Settings, TransportKind, connection_ended};
use crate::auth::{AcceptQueue, Identity, Listener, Purpose, RETRY};
use crate::control::invitation::random;
use crate::control::{ControlSetup, GroupStatus, MAX_DATA_CONNECTIONS, admit, frame};
use crate::descriptors;
use crate::sync::{ENDLESS, warn_of_wait};
use crate::types::{Error, RankList};

/// How long rank 0 keeps answering after the rendezvous has failed.
const LINGER: Duration = Duration::from_millis(500);

/// How much longer the other ranks wait than rank 0, so that they learn from it which ranks are missing.
const LEEWAY: Duration = Duration::from_secs(1);

/// Time between two reports of missing ranks, which rank 0 sends to the registered ranks when the list has changed.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// The result of the rendezvous. All but `setup` is the same on all ranks.
#[cfg_attr(
    not(all(feature = "shm", target_os = "linux")),
    allow(dead_code, reason = "only sharing memory needs it all")
)]
pub(super) struct Joined {
    pub setup: ControlSetup,
    /// The transport that follows from the requests of all ranks.
    pub kind: TransportKind,
    /// The host of each rank. Ranks with the same number may be on one host, judging by the names of their machines.
    pub hosts: Vec<usize>,
}

/// Joins the group that `settings` describe. Also returns the largest group in which all ranks are connected from the
/// start, which all ranks learn from rank 0.
pub(super) async fn join(settings: &Settings, start: Instant) -> Result<(Joined, usize), Error> {
    let deadline = tokio::time::Instant::from_std(start + settings.timeout.min(ENDLESS));
    let n = settings.world_size;
    // As many connections as ranks can make at once.
    let accept_queue = AcceptQueue::new(n.saturating_mul(MAX_DATA_CONNECTIONS));
    let waiting_for = RefCell::new(String::new());
    let joined = async {
        match settings.rank {
            0 => coordinate(settings, (start, deadline), &accept_queue, &waiting_for)
                .await
                .map(|joined| (joined, settings.full_mesh_limit)),
            _ => participate(settings, start, &accept_queue, &waiting_for).await,
        }
    };
    // A long wait is as visible as in an operation.
    let warned = async {
        sleep(settings.timeout / 10).await;
        let (rank, elapsed) = (settings.rank, start.elapsed());
        let waiting = format!("for the group to connect: {}", waiting_for.borrow());
        warn_of_wait(rank, elapsed, waiting, String::new());
        pending().await
    };
    let joined = tokio::select! {
        joined = timeout_at(deadline + LEEWAY, joined) => joined,
        never = warned => never,
    };
    joined.unwrap_or_else(|_| Err(settings.failed(start, timed_out(&waiting_for.borrow(), &accept_queue, n))))
}

/// Returns why the rendezvous has timed out.
fn timed_out(waiting_for: &str, accept_queue: &AcceptQueue, n: usize) -> String {
    let refusals = accept_queue.refusals();
    format!(
        "{waiting_for}{refusals}; start all {n} ranks with the same address and world size, or allow more time \
         (BONFIRE_RENDEZVOUS_TIMEOUT)"
    )
}

/// Runs rank 0: waits until all ranks have registered, then sends them the table of addresses.
async fn coordinate(
    settings: &Settings,
    (start, deadline): (Instant, tokio::time::Instant),
    accept_queue: &Arc<AcceptQueue>,
    waiting_for: &RefCell<String>,
) -> Result<Joined, Error> {
    let n = settings.world_size;
    let status = new_status(n)?;
    let listening = timeout_at(deadline, listen((settings, start), waiting_for)).await;
    let late = |_| Err(settings.failed(start, timed_out(&waiting_for.borrow(), accept_queue, n)));
    let (listener, announced) = listening.unwrap_or_else(late)?;
    let own = first_address(settings, start, &listener)?;
    let identity = Identity { secret: settings.secret.clone(), session: random()?, rank: 0, world_size: n };
    let listens = listens_at(&listener);
    let (registrations, mut queue) = unbounded_channel();
    let mut ranks: Vec<Option<RegisteredRank>> = (0..n).map(|_| None).collect();
    // The missing ranks of the last report.
    let (mut reported, mut ticks) = (Vec::new(), interval(REPORT_INTERVAL));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    if let Some(reason) = shortage(settings) {
        // Each rank is told when it comes, so that all end for the same reason.
        let all = refuse_latecomers(&listener, (accept_queue, &identity), (&registrations, &mut queue), &reason, n - 1);
        let _ = timeout_at(deadline, all).await;
        return Err(settings.failed(start, reason));
    }
    let mut short = false;
    while ranks.iter().skip(1).any(Option::is_none) {
        let missing: Vec<usize> = (1..n).filter(|rank| ranks[*rank].is_none()).collect();
        waiting_for.replace(format!("{} did not come; rank 0 {listens}", RankList(&missing)));
        let problem = tokio::select! {
            accepted = accept(&listener, accept_queue, &identity, &registrations) => {
                accepted.err().map(|e| (format!("rank 0 cannot accept a connection: {e}"), None))
            }
            Some(registration) = queue.recv() => {
                short |= registration.2.shortage.is_some();
                register(&mut ranks, &settings.algorithms, registration).err()
            }
            rank = first_disconnect(&ranks) => {
                let others: Vec<usize> = missing.into_iter().filter(|other| *other != rank).collect();
                let others = format!("{} had not", RankList(&others));
                Some((format!("rank {rank} closed its connection before all ranks had registered ({others})"), None))
            }
            _ = ticks.tick(), if reported != missing => {
                report_missing(&missing, &mut ranks).await;
                reported = missing;
                None
            }
            () = sleep_until(deadline) => {
                let missing = format!("{} did not come; rank 0 {listens}", RankList(&missing));
                Some((timed_out(&missing, accept_queue, n), None))
            }
        };
        if let Some((reason, offender)) = problem {
            let there: Vec<_> = ranks.into_iter().flatten().map(|rank| rank.stream).chain(offender).collect();
            // A rank that connects now would otherwise see its connection close without a reason. If a rank lacks
            // descriptors, all are told, as above.
            let (limit, others) = match short {
                true => (deadline, (n - 1).saturating_sub(there.len())),
                false => (tokio::time::Instant::now() + LINGER, usize::MAX),
            };
            refuse(there, &reason).await;
            let own = (accept_queue, &identity);
            let latecomers = refuse_latecomers(&listener, own, (&registrations, &mut queue), &reason, others);
            let _ = timeout_at(limit, latecomers).await;
            return Err(settings.failed(start, reason));
        }
    }
    let kinds = ranks.iter().map(|rank| rank.as_ref().map_or(settings.requested_transport(), |rank| rank.kind));
    let kind = match common_transport(&kinds.collect::<Vec<_>>()) {
        Ok(kind) => kind,
        Err(reason) => {
            refuse(ranks.into_iter().flatten().map(|rank| rank.stream), &reason).await;
            return Err(settings.failed(start, reason));
        }
    };
    let machine = machine(settings);
    let hosts =
        hosts(&ranks.iter().map(|rank| rank.as_ref().map_or(&machine, |rank| &rank.machine)).collect::<Vec<_>>());
    let addresses: Vec<SocketAddr> = ranks.iter().map(|rank| rank.as_ref().map_or(own, |rank| rank.address)).collect();
    let announced = [&[announced], &addresses[1..]].concat();
    let full_mesh_limit = settings.full_mesh_limit;
    let welcome = Answer::Welcome { addresses: announced, kind, hosts: hosts.clone(), full_mesh_limit };
    let mut connections = Vec::new();
    let mut registered = ranks.into_iter();
    while let Some(slot) = registered.next() {
        let mut stream = slot.map(|rank| rank.stream);
        if let Some(stream) = &mut stream
            && let Err(e) = frame::write(stream, &welcome).await
        {
            let reason = format!("the connection to rank {} ended: {e}", connections.len());
            // The others would dial again, and find no rank 0 until their time is up.
            refuse(registered.flatten().map(|rank| rank.stream), &reason).await;
            return Err(settings.failed(start, reason));
        }
        connections.push(stream);
    }
    let star = is_star(n, settings.full_mesh_limit);
    let setup = ControlSetup {
        identity,
        addresses,
        listener,
        accept_queue: accept_queue.clone(),
        connections,
        star,
        turn: Duration::ZERO,
        status,
    };
    Ok(Joined { setup, kind, hosts })
}

/// Refuses ranks that register from now on, up to so many.
async fn refuse_latecomers(
    listener: &Listener,
    (accept_queue, identity): (&Arc<AcceptQueue>, &Identity),
    (registrations, queue): (&UnboundedSender<Registration>, &mut UnboundedReceiver<Registration>),
    reason: &str,
    ranks: usize,
) {
    let mut refused = 0;
    while refused < ranks {
        tokio::select! {
            accepted = accept(listener, accept_queue, identity, registrations) => {
                if accepted.is_err() {
                    sleep(RETRY).await;
                }
            }
            Some((stream, ..)) = queue.recv() => {
                refuse([stream], reason).await;
                refused += 1;
            }
        }
    }
}

/// Returns why this rank has too few descriptors for the group, if it has too few.
fn shortage(settings: &Settings) -> Option<String> {
    let Settings { rank, world_size, full_mesh_limit, connections, .. } = *settings;
    descriptors::shortage(rank, fewest_connections(rank, world_size, full_mesh_limit, connections))
}

/// Accepts a connection. A task of its own runs the handshake, reads the hello and sends both to `registrations`. An
/// error is a lack of descriptors.
async fn accept(
    listener: &Listener,
    accept_queue: &Arc<AcceptQueue>,
    identity: &Identity,
    registrations: &UnboundedSender<Registration>,
) -> io::Result<()> {
    let (stream, address) = accept_queue.accept(|| listener.accept()).await?;
    let (registrations, identity) = (registrations.clone(), identity.clone());
    accept_queue.receive(
        address.ip().to_canonical(),
        authenticate(stream, identity),
        |(stream, prologue)| async move {
            // The receiver is gone if the rendezvous has ended.
            let _ = registrations.send(read_hello(stream, prologue).await?);
            Ok(())
        },
    );
    // Its first bytes have most likely arrived: the handshake reads them before the next connection is accepted.
    yield_now().await;
    Ok(())
}

/// Runs any other rank: registers with rank 0, then dials its lower neighbours and is dialled by the higher ones.
async fn participate(
    settings: &Settings,
    start: Instant,
    accept_queue: &Arc<AcceptQueue>,
    waiting_for: &RefCell<String>,
) -> Result<(Joined, usize), Error> {
    let (rank, n) = (settings.rank, settings.world_size);
    let machine = machine(settings);
    let mut identity = Identity { secret: settings.secret.clone(), session: 0, rank, world_size: n };
    let prologue = identity.prologue(Purpose::Rendezvous, 0, (0, 1));
    let failed = |e: io::Error| settings.failed(start, e.to_string());
    // Before rank 0 is dialled, which waits for a hello for some seconds only: a look-up of the name may take longer.
    let mut listener = match &settings.host {
        Some(host) => Some(listen_at((settings, start), host, waiting_for).await?),
        None => None,
    };
    let mut pause = FIRST_PAUSE;
    let (listener, mut zero, mut answer) = loop {
        let (mut zero, session) = dial(settings, &settings.address, prologue, waiting_for).await?;
        identity.session = session;
        let listening = match listener.take() {
            Some(listening) => listening,
            None => bind(settings, start, &own_host(settings, &zero)?).await?,
        };
        let address = announced((settings, start), &listening, &zero)?;
        let (kind, algorithms) = (settings.requested_transport(), settings.algorithms.clone());
        let hello = Hello { address, kind, algorithms, machine: machine.clone(), shortage: shortage(settings) };
        waiting_for.replace("rank 0 is there, but some other rank did not come".into());
        let answered = async {
            frame::write(&mut zero, &hello).await?;
            // The caller's limit ends this.
            frame::expect(&mut zero, Duration::MAX).await
        };
        match answered.await {
            Ok(answer) => break (listening, zero, answer),
            Err(e) if e.kind() == ErrorKind::InvalidData => return Err(settings.failed(start, connection_ended(0, e))),
            // Rank 0 answers a rank that has registered within a second. So this one has not: its hello came too late,
            // because it was stopped or its machine is overloaded, or the connection broke.
            Err(e) => {
                let reason = format!("{}, before this rank had registered", connection_ended(0, e));
                log::warn!("rank {rank} retries: {reason}");
                waiting_for.replace(reason);
                listener = Some(listening);
                back_off(&mut pause).await;
            }
        }
    };
    let to_zero = zero.peer_addr().map_err(failed)?;
    let (mut addresses, kind, hosts, full_mesh_limit) = loop {
        match answer {
            Answer::Welcome { addresses, kind, hosts, full_mesh_limit } if addresses.len() == n && hosts.len() == n => {
                break (addresses, kind, hosts, full_mesh_limit);
            }
            Answer::Welcome { .. } => return Err(settings.failed(start, "rank 0 answered with another world size")),
            Answer::Refused(reason) => return Err(settings.failed(start, reason)),
            Answer::Waiting(missing) => {
                drop(waiting_for.replace(format!("rank 0 is there, but {} did not come", RankList(&missing))));
            }
        }
        let next = frame::expect(&mut zero, Duration::MAX).await;
        answer = next.map_err(|e| settings.failed(start, connection_ended(0, e)))?;
    };
    // Rank 0 announces only its port unless an interface was configured: this rank knows the address at which it
    // reached rank 0.
    if addresses[0].ip().is_unspecified() {
        addresses[0] = to_zero;
    }
    let settings = Settings { full_mesh_limit, ..settings.clone() };
    let local = (identity, listener, accept_queue);
    let connections = connect((&settings, start), local, addresses, &hosts, Some(zero), waiting_for).await?;
    Ok((Joined { setup: connections, kind, hosts }, full_mesh_limit))
}

/// Connects a rank to its neighbours at known addresses: dials the lower ones, except for rank 0 if `zero` is
/// connected, and is dialled by the higher ones. Does not return while a neighbour is missing.
pub(super) async fn connect(
    (settings, start): (&Settings, Instant),
    (identity, listener, accept_queue): (Identity, Listener, &Arc<AcceptQueue>),
    addresses: Vec<SocketAddr>,
    hosts: &[usize],
    mut zero: Option<TcpStream>,
    waiting_for: &RefCell<String>,
) -> Result<ControlSetup, Error> {
    let status = new_status(identity.world_size)?;
    let wanted = |peer: usize| neighbours((identity.rank, peer), hosts, settings.full_mesh_limit);
    // Dials and accepts concurrently, since a rank that dials waits until its connection is accepted.
    let below = async {
        let mut below: Vec<Option<TcpStream>> = Vec::new();
        for (lower, address) in addresses.iter().enumerate().take(identity.rank) {
            below.push(match zero.take() {
                Some(zero) => Some(zero),
                None if wanted(lower) => {
                    let prologue = identity.prologue(Purpose::Control, lower, (0, 1));
                    Some(dial(settings, &address.to_string(), prologue, waiting_for).await?.0)
                }
                None => None,
            });
        }
        Ok::<_, Error>(below)
    };
    let above = async {
        let above = above(&listener, accept_queue, &identity, &status, wanted, waiting_for).await;
        let cannot = |e| settings.failed(start, format!("rank {} cannot accept a connection: {e}", identity.rank));
        above.map_err(cannot)
    };
    let (below, above) = tokio::try_join!(below, above)?;
    let connections = below.into_iter().chain([None]).chain(above).collect();
    let star = is_star(identity.world_size, settings.full_mesh_limit);
    Ok(ControlSetup {
        identity,
        addresses,
        listener,
        accept_queue: accept_queue.clone(),
        connections,
        star,
        turn: Duration::ZERO,
        status,
    })
}

/// Returns the connections of the ranks above this one, once all that are `wanted` have dialled. An error is a lack of
/// descriptors.
async fn above(
    listener: &Listener,
    accept_queue: &Arc<AcceptQueue>,
    identity: &Identity,
    status: &Arc<GroupStatus>,
    wanted: impl Fn(usize) -> bool,
    waiting_for: &RefCell<String>,
) -> io::Result<Vec<Option<TcpStream>>> {
    let (rank, n) = (identity.rank, identity.world_size);
    let mut above: Vec<Option<TcpStream>> = (rank + 1..n).map(|_| None).collect();
    let (controls, mut queue) = channel(n);
    let listens = listens_at(listener);
    loop {
        let missing = (rank + 1..).zip(&above).filter(|(peer, connection)| connection.is_none() && wanted(*peer));
        let missing: Vec<usize> = missing.map(|(peer, _)| peer).collect();
        if missing.is_empty() {
            return Ok(above);
        }
        waiting_for.replace(format!("{} did not connect to rank {rank}, which {listens}", RankList(&missing)));
        tokio::select! {
            accepted = accept_queue.accept(|| listener.accept()) => {
                admit(accept_queue, accepted?, identity, status, &controls);
                yield_now().await;
            }
            Some((peer, stream)) = queue.recv() => {
                // Lower ranks were dialled. A rank that is not wanted yet has learned that it will be: its connection
                // is kept.
                if let Some(connection) = above.get_mut(peer.wrapping_sub(rank + 1)) {
                    *connection = Some(stream);
                }
            }
        }
    }
}

/// Says where this rank listens, for errors.
fn listens_at(listener: &Listener) -> String {
    let addresses = match listener.addresses() {
        Ok(addresses) => addresses,
        Err(e) => return format!("cannot tell where it listens ({e})"),
    };
    let all: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    let everywhere =
        if addresses.iter().any(|address| address.ip().is_unspecified()) { ", all its addresses" } else { "" };
    format!("listens at {}{everywhere}", all.join(", "))
}

fn new_status(world_size: usize) -> Result<Arc<GroupStatus>, Error> {
    GroupStatus::new(world_size).map(Arc::new).map_err(|e| Error::io("creating a socket pair", e))
}
