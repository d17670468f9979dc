//! The exchange by which ranks find each other.

use std::future::poll_fn;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::io::ReadBuf;
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::time::{sleep, timeout, timeout_at};

use super::{Medium, Settings, gone};
use crate::error::{Error, Ranks};
use crate::transport::frame;
use crate::transport::tcp::{Board, Greeting, Mesh, admit};

/// "BNFR" and the version of what follows: a stranger does not know it.
const MAGIC: u64 = 0x424e_4652_0000_0003;

/// How long a connection may take to say who it is.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long rank 0 still answers after the rendezvous has failed.
const LATE: Duration = Duration::from_millis(500);

/// When to try again where the system could not accept a connection: out of descriptors, most likely.
const RETRY: Duration = Duration::from_millis(100);

/// From a rank to rank 0.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Hello {
    magic: u64,
    rank: usize,
    world_size: usize,
    /// Where the rank listens.
    address: SocketAddr,
    /// What it wants to carry the operations.
    medium: Medium,
    /// Which algorithms it will choose.
    algorithms: String,
    /// Which machine it is on.
    machine: String,
}

/// Rank 0's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Answer {
    Welcome {
        session: u64,
        addresses: Vec<SocketAddr>,
        /// What all ranks together want.
        medium: Medium,
        /// By rank; see [`Joined`].
        hosts: Vec<usize>,
    },
    Refused(String),
}

/// A rank that has come to rank 0.
struct Guest {
    stream: TcpStream,
    address: SocketAddr,
    medium: Medium,
    machine: String,
}

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

/// Joins the group that `settings` describe.
pub(super) async fn join(settings: &Settings, start: Instant) -> Result<Joined, Error> {
    // A limit beyond what the clock can say is none: ten years are as good.
    const ENDLESS: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    let late = tokio::time::Instant::from_std(start + settings.timeout.min(ENDLESS));
    let mut waiting_for = String::new();
    let joined = async {
        match settings.rank {
            0 => host(settings, start, &mut waiting_for).await,
            _ => attend(settings, start, &mut waiting_for).await,
        }
    };
    match timeout_at(late, joined).await {
        Ok(result) => result,
        Err(_) => Err(settings.failed(
            start,
            format!(
                "{waiting_for}; start all {} ranks with the same address and world size, or allow more time",
                settings.world_size
            ),
        )),
    }
}

/// Rank 0: waits for everybody, then tells everybody who they are.
async fn host(settings: &Settings, start: Instant, waiting_for: &mut String) -> Result<Joined, Error> {
    let n = settings.world_size;
    let board = board(n)?;
    let listener = bind(settings, start, &settings.address).await?;
    let own = listener.local_addr().map_err(|e| settings.failed(start, e.to_string()))?;
    let (hellos, mut queue) = unbounded_channel();
    let mut guests: Vec<Option<Guest>> = (0..n).map(|_| None).collect();
    while guests.iter().skip(1).any(Option::is_none) {
        let missing: Vec<usize> = (1..n).filter(|rank| guests[*rank].is_none()).collect();
        *waiting_for = format!("{} did not come", Ranks(&missing));
        let problem = tokio::select! {
            () = accept(&listener, &hellos) => None,
            Some((stream, hello)) = queue.recv() => seat(&mut guests, &settings.algorithms, stream, hello).err(),
            rank = departure(&guests) => {
                Some((format!("rank {rank} closed its connection before all ranks had come"), None))
            }
        };
        if let Some((reason, offender)) = problem {
            refuse(guests.into_iter().flatten().map(|guest| guest.stream).chain(offender), &reason).await;
            // Ranks that are on their way would see a connection that ends, and no reason.
            let latecomers = async {
                loop {
                    tokio::select! {
                        () = accept(&listener, &hellos) => {}
                        Some((stream, _)) = queue.recv() => refuse([stream], &reason).await,
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
    let mut random = RandomState::new().build_hasher();
    random.write_u128(start.elapsed().as_nanos());
    let session = random.finish();
    let addresses: Vec<SocketAddr> =
        guests.iter().map(|guest| guest.as_ref().map_or(own, |guest| guest.address)).collect();
    let mut connections = Vec::new();
    for (rank, guest) in guests.into_iter().enumerate() {
        let Some(Guest { mut stream, .. }) = guest else {
            connections.push(None);
            continue;
        };
        let welcome = Answer::Welcome { session, addresses: addresses.clone(), medium, hosts: hosts.clone() };
        frame::write(&mut stream, &welcome)
            .await
            .map_err(|e| settings.failed(start, format!("rank {rank} went away: {e}")))?;
        connections.push(Some(stream));
    }
    Ok(Joined { mesh: Mesh { rank: 0, session, addresses, listener, connections, board }, medium, hosts })
}

/// Takes a connection, and lets it say who it is.
async fn accept(listener: &TcpListener, hellos: &UnboundedSender<(TcpStream, Hello)>) {
    let Ok((stream, address)) = listener.accept().await else {
        return sleep(RETRY).await;
    };
    let hellos = hellos.clone();
    tokio::spawn(async move {
        if let Some(hello) = introduction(stream, address).await {
            let _ = hellos.send(hello);
        }
    });
}

/// Tells these why the rendezvous fails.
async fn refuse(guests: impl IntoIterator<Item = TcpStream>, reason: &str) {
    for mut guest in guests {
        let _ = frame::write(&mut guest, &Answer::Refused(reason.to_owned())).await;
    }
}

/// What all ranks together want, from what each wants: TCP if any does, shared memory only if some insist.
fn together(mediums: &[Medium]) -> Result<Medium, String> {
    let first = |medium| mediums.iter().position(|other| *other == medium);
    match (first(Medium::Tcp), first(Medium::Shm)) {
        (Some(tcp), Some(shm)) => Err(format!(
            "rank {shm} insists on shared memory and rank {tcp} on TCP: give all the same BONFIRE_TRANSPORT or \
             Builder::transport (a rank without the feature `shm` uses TCP)"
        )),
        (Some(_), None) => Ok(Medium::Tcp),
        (None, Some(_)) => Ok(Medium::Shm),
        (None, None) => Ok(Medium::Auto),
    }
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

/// Numbers the machines by the first rank on each.
fn hosts(machines: &[&String]) -> Vec<usize> {
    let first = |rank: usize| machines.iter().position(|other| *other == machines[rank]).unwrap_or(rank);
    (0..machines.len()).map(first).collect()
}

/// Any other rank: dials rank 0, then the ranks below, and is dialled by those above.
async fn attend(settings: &Settings, start: Instant, waiting_for: &mut String) -> Result<Joined, Error> {
    let (rank, n) = (settings.rank, settings.world_size);
    let board = board(n)?;
    let machine = machine(settings);
    let mut zero = dial(&settings.address, waiting_for).await;
    let to_zero = zero.peer_addr().map_err(|e| settings.failed(start, e.to_string()))?;
    let listener = bind(settings, start, &own_host(settings, to_zero.ip())?).await?;
    let mut own = listener.local_addr().map_err(|e| settings.failed(start, e.to_string()))?;
    if own.ip().is_unspecified() {
        // Listening everywhere: the peers are told the address that rank 0 is reached from.
        own.set_ip(zero.local_addr().map_err(|e| settings.failed(start, e.to_string()))?.ip());
    }
    let lost = |e: io::Error| settings.failed(start, gone(0, e));
    let hello = Hello {
        magic: MAGIC,
        rank,
        world_size: n,
        address: own,
        medium: settings.wanted(),
        algorithms: settings.algorithms.clone(),
        machine,
    };
    frame::write(&mut zero, &hello).await.map_err(lost)?;
    *waiting_for = "rank 0 is there, but some other rank did not come".into();
    let (session, mut addresses, medium, hosts) =
        match frame::expect(&mut zero, settings.timeout).await.map_err(lost)? {
            Answer::Welcome { session, addresses, medium, hosts } if addresses.len() == n && hosts.len() == n => {
                (session, addresses, medium, hosts)
            }
            Answer::Welcome { .. } => return Err(settings.failed(start, "rank 0 answered with another world size")),
            Answer::Refused(reason) => return Err(settings.failed(start, reason)),
        };
    // Rank 0 may listen everywhere, and knows less well than its guests where it is reached.
    addresses[0] = to_zero;
    let mut connections: Vec<Option<TcpStream>> = (0..n).map(|_| None).collect();
    connections[0] = Some(zero);
    for lower in 1..rank {
        let mut stream = dial(&addresses[lower].to_string(), waiting_for).await;
        let lost = |e| settings.failed(start, format!("rank {lower} at {} went away: {e}", addresses[lower]));
        frame::write(&mut stream, &Greeting::Control { session, rank }).await.map_err(lost)?;
        connections[lower] = Some(stream);
    }
    let (controls, mut queue) = unbounded_channel();
    while connections.iter().enumerate().any(|(peer, c)| peer != rank && c.is_none()) {
        let missing: Vec<usize> = (0..n).filter(|peer| *peer != rank && connections[*peer].is_none()).collect();
        *waiting_for = format!("{} did not connect to rank {rank} at {own}", Ranks(&missing));
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, address)) = accepted else {
                    sleep(RETRY).await;
                    continue;
                };
                let (controls, board) = (controls.clone(), board.clone());
                tokio::spawn(async move {
                    if let Err(e) = admit(stream, session, &board, Some(&controls)).await {
                        log::warn!("turned away a connection from {address}: {e}");
                    }
                });
            }
            Some((peer, stream)) = queue.recv() => connections[peer] = Some(stream),
        }
    }
    Ok(Joined { mesh: Mesh { rank, session, addresses, listener, connections, board }, medium, hosts })
}

fn board(world_size: usize) -> Result<Arc<Board>, Error> {
    Board::new(world_size).map(Arc::new).map_err(|e| Error::io("creating a socket pair", e))
}

/// What a connection says about itself; `None` for strangers.
async fn introduction(mut stream: TcpStream, address: SocketAddr) -> Option<(TcpStream, Hello)> {
    match frame::expect::<Hello>(&mut stream, PATIENCE).await {
        Ok(hello) if hello.magic == MAGIC => Some((stream, hello)),
        Ok(_) => {
            log::warn!("turned away a connection from {address}: it speaks another protocol or version");
            None
        }
        Err(e) => {
            log::warn!("turned away a connection from {address}: {e}");
            None
        }
    }
}

/// Gives a guest its seat, or says why the whole rendezvous fails, and to whom else that must be told.
fn seat(
    guests: &mut [Option<Guest>],
    algorithms: &str,
    stream: TcpStream,
    hello: Hello,
) -> Result<(), (String, Option<TcpStream>)> {
    let (rank, n) = (hello.rank, guests.len());
    if hello.world_size != n {
        let reason = format!(
            "rank {rank} was started with a world size of {}, rank 0 with {n}: give all the same",
            hello.world_size
        );
        return Err((reason, Some(stream)));
    }
    // Ranks that run different plans would wait for each other.
    if hello.algorithms != algorithms {
        let reason = format!(
            "rank {rank} has the algorithms '{}', rank 0 '{algorithms}': give all the same BONFIRE_ALGORITHMS or \
             Builder::algorithms",
            hello.algorithms
        );
        return Err((reason, Some(stream)));
    }
    match guests.get_mut(rank) {
        Some(seat @ None) if rank != 0 => {
            *seat = Some(Guest { stream, address: hello.address, medium: hello.medium, machine: hello.machine });
            Ok(())
        }
        _ => Err((format!("two processes were started as rank {rank}: give each its own"), Some(stream))),
    }
}

/// The first guest that closes its connection.
async fn departure(guests: &[Option<Guest>]) -> usize {
    poll_fn(|context| {
        for (rank, guest) in guests.iter().enumerate() {
            let Some(Guest { stream, .. }) = guest else { continue };
            // A guest sends nothing after its hello, so anything to read is an end or an error.
            if stream.poll_peek(context, &mut ReadBuf::new(&mut [0])).is_ready() {
                return Poll::Ready(rank);
            }
        }
        Poll::Pending
    })
    .await
}

/// Dials until somebody answers; the caller's time-out ends it. Names may not resolve and ports may not listen yet.
async fn dial(address: &str, waiting_for: &mut String) -> TcpStream {
    let mut pause = Duration::from_millis(10);
    loop {
        match TcpStream::connect(address).await {
            Ok(stream) => {
                let _ = stream.set_nodelay(true);
                return stream;
            }
            Err(e) => *waiting_for = format!("nobody answers at {address} ({e})"),
        }
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Where a rank other than 0 listens: on loopback if rank 0 is there, else only where it was told to.
fn own_host(settings: &Settings, zero: IpAddr) -> Result<String, Error> {
    let bracketed = |host: &str| if host.contains(':') { format!("[{host}]:0") } else { format!("{host}:0") };
    match &settings.host {
        Some(host) => Ok(bracketed(host.trim_matches(['[', ']']))),
        None if zero.is_loopback() => Ok(bracketed(&zero.to_string())),
        None => Err(Error::Config(format!(
            "rank {} must know the address of its own machine that the other ranks reach it by: set BONFIRE_HOST or \
             Builder::host (connections are not authenticated yet, so only loopback is used unasked)",
            settings.rank
        ))),
    }
}

async fn bind(settings: &Settings, start: Instant, address: &str) -> Result<TcpListener, Error> {
    let addresses: Vec<SocketAddr> = lookup_host(address)
        .await
        .map_err(|e| settings.failed(start, format!("{address} is no address of this machine: {e}")))?
        .collect();
    TcpListener::bind(&addresses[..]).await.map_err(|e| {
        let remedy = match e.kind() {
            io::ErrorKind::AddrInUse => "; end the job that still listens there or choose another port",
            io::ErrorKind::AddrNotAvailable => "; give an address that this machine has",
            _ => "",
        };
        settings.failed(start, format!("cannot listen at {address}: {e}{remedy}"))
    })
}
