//! The exchange by which ranks find each other.

use std::cell::RefCell;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::task::yield_now;
use tokio::time::{MissedTickBehavior, interval, sleep, sleep_until, timeout, timeout_at};

use super::guests::{
    Answer, Arrival, Guest, Hello, departure, hosts, introduction, name, proof, refuse, seat, together,
};
use super::neighbours::{is_star, neighbours};
use super::reach::{bind, dial, listen, own_host};
use super::{Medium, Settings, gone};
use crate::auth::{Lobby, Member, Purpose, RETRY};
use crate::control::invitation::random;
use crate::control::{Board, MOST, Mesh, admit, frame};
use crate::sync::ENDLESS;
use crate::types::{Error, Ranks};

/// How long rank 0 still answers after the rendezvous has failed.
const LATE: Duration = Duration::from_millis(500);

/// How much longer the others wait than rank 0, so that they hear from it who is missing.
const LEEWAY: Duration = Duration::from_secs(1);

/// How often rank 0 tells its guests who is missing, where that changes.
const TELL: Duration = Duration::from_secs(1);

/// What came of it, the same on all ranks but for the mesh.
#[cfg_attr(
    not(all(feature = "shm", target_os = "linux")),
    allow(dead_code, reason = "only sharing memory needs it all")
)]
pub(super) struct Joined {
    pub mesh: Mesh,
    /// What all ranks together want to carry the operations.
    pub medium: Medium,
    /// By rank: ranks with the same number may be on one host, by what they say of their machines.
    pub hosts: Vec<usize>,
}

/// Joins the group that `settings` describe. Gives also the most ranks of which all are connected from the start, as all
/// ranks have it from rank 0.
pub(super) async fn join(settings: &Settings, start: Instant) -> Result<(Joined, usize), Error> {
    let late = tokio::time::Instant::from_std(start + settings.timeout.min(ENDLESS));
    let n = settings.world_size;
    // As many connections of ranks as there can be at once.
    let lobby = Lobby::new(n.saturating_mul(MOST));
    let waiting_for = RefCell::new(String::new());
    let joined = async {
        match settings.rank {
            0 => host(settings, (start, late), &lobby, &waiting_for).await.map(|joined| (joined, settings.mesh)),
            _ => attend(settings, start, &lobby, &waiting_for).await,
        }
    };
    match timeout_at(late + LEEWAY, joined).await {
        Ok(result) => result,
        Err(_) => Err(settings.failed(start, overdue(&waiting_for.borrow(), &lobby, n))),
    }
}

/// Why the rendezvous fails where the time is up.
fn overdue(waiting_for: &str, lobby: &Lobby, n: usize) -> String {
    let turned_away = lobby.turned_away();
    format!("{waiting_for}{turned_away}; start all {n} ranks with the same address and world size, or allow more time")
}

/// Rank 0: waits for everybody, then tells everybody who they are.
async fn host(
    settings: &Settings,
    (start, late): (Instant, tokio::time::Instant),
    lobby: &Arc<Lobby>,
    waiting_for: &RefCell<String>,
) -> Result<Joined, Error> {
    let n = settings.world_size;
    let board = board(n)?;
    let (listener, told) = listen((settings, start), waiting_for).await?;
    let own = listener.local_addr().map_err(|e| settings.failed(start, e.to_string()))?;
    let member = Member { secret: settings.secret.clone(), session: random()?, rank: 0, world_size: n };
    let (arrivals, mut queue) = unbounded_channel();
    let mut guests: Vec<Option<Guest>> = (0..n).map(|_| None).collect();
    // Whom the guests know to be missing.
    let (mut named, mut tell) = (Vec::new(), interval(TELL));
    tell.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut refused = String::new();
    while guests.iter().skip(1).any(Option::is_none) {
        let missing: Vec<usize> = (1..n).filter(|rank| guests[*rank].is_none()).collect();
        let problem = tokio::select! {
            accepted = accept(&listener, lobby, &member, &arrivals) => {
                if let Err(e) = accepted {
                    refused = format!(" (cannot accept connections: {e}; see ulimit -n)");
                }
                None
            }
            Some(arrival) = queue.recv() => seat(&mut guests, &settings.algorithms, arrival).err(),
            rank = departure(&guests) => {
                let others: Vec<usize> = missing.into_iter().filter(|other| *other != rank).collect();
                let others = format!("{} had not", Ranks(&others));
                Some((format!("rank {rank} closed its connection before all ranks had come ({others})"), None))
            }
            _ = tell.tick(), if named != missing => {
                name(&missing, &mut guests).await;
                named = missing;
                None
            }
            () = sleep_until(late) => {
                let missing = format!("{} did not come{refused}", Ranks(&missing));
                Some((overdue(&missing, lobby, n), None))
            }
        };
        if let Some((reason, offender)) = problem {
            refuse(guests.into_iter().flatten().map(|guest| guest.stream).chain(offender), &reason).await;
            // Ranks that are on their way would see a connection that ends, and no reason.
            let latecomers = async {
                loop {
                    tokio::select! {
                        _ = accept(&listener, lobby, &member, &arrivals) => {}
                        Some((stream, ..)) = queue.recv() => refuse([stream], &reason).await,
                    }
                }
            };
            let _: Result<(), _> = timeout(LATE, latecomers).await;
            return Err(settings.failed(start, reason));
        }
    }
    let mediums = guests.iter().map(|guest| guest.as_ref().map_or(settings.wanted(), |guest| guest.medium));
    let medium = match together(&mediums.collect::<Vec<_>>()) {
        Ok(medium) => medium,
        Err(reason) => {
            refuse(guests.into_iter().flatten().map(|guest| guest.stream), &reason).await;
            return Err(settings.failed(start, reason));
        }
    };
    let machine = machine(settings);
    let hosts = hosts(&guests.iter().map(|guest| guest.as_ref().map_or(&machine, |g| &g.machine)).collect::<Vec<_>>());
    let addresses: Vec<SocketAddr> =
        guests.iter().map(|guest| guest.as_ref().map_or(own, |guest| guest.address)).collect();
    let told = [&[told], &addresses[1..]].concat();
    let mut connections = Vec::new();
    for (rank, guest) in guests.into_iter().enumerate() {
        let Some(Guest { mut stream, .. }) = guest else {
            connections.push(None);
            continue;
        };
        let (addresses, hosts) = (told.clone(), hosts.clone());
        let welcome = Answer::Welcome { addresses, medium, hosts, mesh: settings.mesh };
        frame::write(&mut stream, &welcome)
            .await
            .map_err(|e| settings.failed(start, format!("rank {rank} went away: {e}")))?;
        connections.push(Some(stream));
    }
    let star = is_star(n, settings.mesh);
    let mesh = Mesh { member, addresses, listener, lobby: lobby.clone(), connections, star, board };
    Ok(Joined { mesh, medium, hosts })
}

/// Takes a connection, and lets it say who it is.
async fn accept(
    listener: &TcpListener,
    lobby: &Arc<Lobby>,
    member: &Member,
    arrivals: &UnboundedSender<Arrival>,
) -> io::Result<()> {
    let (stream, address) = match listener.accept().await {
        Ok(accepted) => accepted,
        Err(e) => {
            sleep(RETRY).await;
            return Err(e);
        }
    };
    let (arrivals, member) = (arrivals.clone(), member.clone());
    lobby.receive(address, proof(stream, member), |(stream, opening)| async move {
        // Nobody hears it where the rendezvous has ended meanwhile.
        let _ = arrivals.send(introduction(stream, opening).await?);
        Ok(())
    });
    // Its first bytes are there already, most likely: they are looked at before the next connection is.
    yield_now().await;
    Ok(())
}

/// What this rank says of its machine. Only a hint: who is on one host is who can have the same memory.
fn machine(settings: &Settings) -> String {
    settings.machine.clone().unwrap_or_else(this_machine)
}

/// A name for everything that processes must have in common to hand memory to each other: the running system, the
/// network namespace, in which unix sockets have their names, and the user. What the system does not tell is left out;
/// then ranks on two machines may have the same name, and find out when they try.
fn this_machine() -> String {
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let (boot, name) = (read("/proc/sys/kernel/random/boot_id"), read("/proc/sys/kernel/hostname"));
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {} {} {}", boot.trim(), name.trim(), network.display(), rustix::process::geteuid().as_raw())
}

/// Any other rank: dials rank 0, then its neighbours below, and is dialled by those above.
async fn attend(
    settings: &Settings,
    start: Instant,
    lobby: &Arc<Lobby>,
    waiting_for: &RefCell<String>,
) -> Result<(Joined, usize), Error> {
    let (rank, n) = (settings.rank, settings.world_size);
    let machine = machine(settings);
    let mut member = Member { secret: settings.secret.clone(), session: 0, rank, world_size: n };
    let opening = member.opening(Purpose::Rendezvous, 0, (0, 1));
    let (mut zero, session) = dial((settings, start), &settings.address, opening, waiting_for).await?;
    member.session = session;
    let to_zero = zero.peer_addr().map_err(|e| settings.failed(start, e.to_string()))?;
    let listener = bind(settings, start, &own_host(settings, &zero)?).await?;
    let mut own = listener.local_addr().map_err(|e| settings.failed(start, e.to_string()))?;
    if own.ip().is_unspecified() {
        // Listening everywhere: the peers are told the address that rank 0 is reached from.
        own.set_ip(zero.local_addr().map_err(|e| settings.failed(start, e.to_string()))?.ip());
    }
    let lost = |e: io::Error| settings.failed(start, gone(0, e));
    let hello = Hello { address: own, medium: settings.wanted(), algorithms: settings.algorithms.clone(), machine };
    frame::write(&mut zero, &hello).await.map_err(lost)?;
    waiting_for.replace("rank 0 is there, but some other rank did not come".into());
    let (mut addresses, medium, hosts, mesh) = loop {
        // The caller's limit ends this.
        match frame::expect(&mut zero, Duration::MAX).await.map_err(lost)? {
            Answer::Welcome { addresses, medium, hosts, mesh } if addresses.len() == n && hosts.len() == n => {
                break (addresses, medium, hosts, mesh);
            }
            Answer::Welcome { .. } => return Err(settings.failed(start, "rank 0 answered with another world size")),
            Answer::Refused(reason) => return Err(settings.failed(start, reason)),
            Answer::Waiting(missing) => {
                drop(waiting_for.replace(format!("rank 0 is there, but {} did not come", Ranks(&missing))));
            }
        }
    };
    // Rank 0 may listen everywhere, and knows less well than its guests where it is reached: unless an interface was chosen.
    if addresses[0].ip().is_unspecified() {
        addresses[0] = to_zero;
    }
    let settings = Settings { mesh, ..settings.clone() };
    let door = (member, listener, lobby);
    let connections = connect((&settings, start), door, addresses, &hosts, Some(zero), waiting_for).await?;
    Ok((Joined { mesh: connections, medium, hosts }, mesh))
}

/// Connects a rank to its neighbours, whose addresses are known: it dials those below it, but for rank 0 where there is a
/// connection already, and is dialled by those above. Does not end by itself where they do not come.
pub(super) async fn connect(
    (settings, start): (&Settings, Instant),
    (member, listener, lobby): (Member, TcpListener, &Arc<Lobby>),
    addresses: Vec<SocketAddr>,
    hosts: &[usize],
    mut zero: Option<TcpStream>,
    waiting_for: &RefCell<String>,
) -> Result<Mesh, Error> {
    let board = board(member.world_size)?;
    let wanted = |peer: usize| neighbours((member.rank, peer), hosts, settings.mesh);
    // At the same time, since a rank that dials waits until it is heard.
    let below = async {
        let mut below: Vec<Option<TcpStream>> = Vec::new();
        for (lower, address) in addresses.iter().enumerate().take(member.rank) {
            below.push(match zero.take() {
                Some(zero) => Some(zero),
                None if wanted(lower) => {
                    let opening = member.opening(Purpose::Control, lower, (0, 1));
                    Some(dial((settings, start), &address.to_string(), opening, waiting_for).await?.0)
                }
                None => None,
            });
        }
        Ok::<_, Error>(below)
    };
    let above = async { Ok(above(&listener, lobby, &member, &board, wanted, waiting_for).await) };
    let (below, above) = tokio::try_join!(below, above)?;
    let connections = below.into_iter().chain([None]).chain(above).collect();
    let star = is_star(member.world_size, settings.mesh);
    Ok(Mesh { member, addresses, listener, lobby: lobby.clone(), connections, star, board })
}

/// The connections of the ranks above this one, once all that are `wanted` have dialled.
async fn above(
    listener: &TcpListener,
    lobby: &Arc<Lobby>,
    member: &Member,
    board: &Arc<Board>,
    wanted: impl Fn(usize) -> bool,
    waiting_for: &RefCell<String>,
) -> Vec<Option<TcpStream>> {
    let (rank, n) = (member.rank, member.world_size);
    let mut above: Vec<Option<TcpStream>> = (rank + 1..n).map(|_| None).collect();
    let (controls, mut queue) = unbounded_channel();
    loop {
        let missing = (rank + 1..).zip(&above).filter(|(peer, connection)| connection.is_none() && wanted(*peer));
        let missing: Vec<usize> = missing.map(|(peer, _)| peer).collect();
        if missing.is_empty() {
            return above;
        }
        let own = listener.local_addr().map_or_else(|e| e.to_string(), |own| own.to_string());
        waiting_for.replace(format!("{} did not connect to rank {rank} at {own}", Ranks(&missing)));
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, address)) = accepted else {
                    sleep(RETRY).await;
                    continue;
                };
                admit(lobby, (stream, address), member, board, &controls);
                yield_now().await;
            }
            Some((peer, stream)) = queue.recv() => {
                // Those below this rank were dialled. One that is not wanted yet has learned already that it will be.
                if let Some(connection) = above.get_mut(peer.wrapping_sub(rank + 1)) {
                    *connection = Some(stream);
                }
            }
        }
    }
}

fn board(world_size: usize) -> Result<Arc<Board>, Error> {
    Board::new(world_size).map(Arc::new).map_err(|e| Error::io("creating a socket pair", e))
}
