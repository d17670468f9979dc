//! How the coordinator and its workers find each other.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

use crate::auth::{Lobby, RETRY, Refusal};
use crate::sync::{Deadline, Mutex, lock};
use crate::types::{Error, Ranks};

/// How long one attempt to connect may take: the system itself would try again ever more rarely.
const SYN: Duration = Duration::from_secs(5);

/// Where a coordinator listens.
pub(super) enum Place {
    At(String, u16),
    /// The caller chose it.
    Open(TcpListener),
}

/// Host and port of an address. A port alone is one of loopback.
pub(super) fn split(operation: &str, address: &str) -> Result<(String, u16), Error> {
    let (host, port) = address.rsplit_once(':').unwrap_or(("", address));
    let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).filter(|host| !host.is_empty());
    match (inner, port.parse()) {
        (Some(v6), Ok(port)) => Ok((v6.into(), port)),
        (None, Ok(port)) if host.is_empty() => Ok(("127.0.0.1".into(), port)),
        (None, Ok(port)) if !host.contains([':', '[', ']']) => Ok((host.into(), port)),
        _ => Err(Error::argument(
            operation,
            format!("the address '{address}' is malformed: give host:port, [v6]:port, or a port of loopback alone"),
        )),
    }
}

/// Who looks for whom, for how long.
pub(super) struct Rendezvous {
    pub rank: usize,
    pub address: String,
    pub deadline: Deadline,
}

impl Rendezvous {
    /// The coordinator's side: the connections to all workers, in the order of ranks.
    pub fn gather(&self, place: Place, world_size: usize) -> Result<Vec<TcpStream>, Error> {
        let (seats, lobby, mut came) = (Seats::default(), Lobby::new(world_size), 0);
        let gathered = self.run(async {
            let listener = self.listen(place).await?;
            while !seats.full(world_size) {
                tokio::select! {
                    accepted = listener.accept() => {
                        came += usize::from(accepted.is_ok());
                        seats.receive(accepted, world_size, &lobby).await;
                    }
                    () = seats.changed.notified() => {}
                }
            }
            Ok(())
        })?;
        let workers = std::mem::take(&mut *lock(&seats.workers));
        if gathered.is_some() {
            return workers.into_values().map(|stream| self.ready(stream)).collect();
        }
        let there = |rank: &usize| workers.get(rank).is_some_and(|stream| !gone(stream));
        let missing: Vec<usize> = (1..world_size).filter(|rank| !there(rank)).collect();
        let others = came - (world_size - 1 - missing.len());
        let last = lobby.turned_away();
        Err(self.failed(format!(
            "{} did not come, and {others} connections were turned away or left{last}; start each rank from 1 to {} once, \
             with this address, or allow more time (TcpTransportBuilder::rendezvous_timeout)",
            Ranks(&missing),
            world_size - 1
        )))
    }

    /// A worker's side: dials until somebody answers, and says its rank.
    pub fn dial(&self, host: &str, port: u16) -> Result<TcpStream, Error> {
        let waiting_for = RefCell::new("it was not dialled in so short a time".to_owned());
        let dialled = self.run(async {
            let mut pause = Duration::from_millis(10);
            loop {
                match timeout(SYN, connect(host, port, self.rank)).await {
                    Ok(Ok(stream)) => return Ok(stream),
                    Ok(Err(e)) => waiting_for.replace(format!("nobody answers there ({e})")),
                    Err(_) => waiting_for.replace("nothing answers there".into()),
                };
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(500));
            }
        })?;
        match dialled {
            Some(stream) => self.ready(stream),
            None => Err(self.failed(format!(
                "{}; start the coordinator with this address, or allow more time (TcpTransportBuilder::rendezvous_timeout)",
                waiting_for.borrow()
            ))),
        }
    }

    /// Runs what takes no longer than it may; `None` where it would.
    fn run<T>(&self, act: impl Future<Output = Result<T, Error>>) -> Result<Option<T>, Error> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| Error::io("starting a runtime for the rendezvous", e))?;
        let result = runtime.block_on(async { timeout(self.deadline.remaining(), act).await });
        // Nobody waits for a name service that is still asked. Connections that said nothing are closed.
        runtime.shutdown_background();
        result.map_or(Ok(None), |result| result.map(Some))
    }

    async fn listen(&self, place: Place) -> Result<tokio::net::TcpListener, Error> {
        let listener = match place {
            Place::Open(listener) => {
                listener.set_nonblocking(true).and_then(|()| tokio::net::TcpListener::from_std(listener))
            }
            Place::At(host, port) => match tokio::net::lookup_host((&host[..], port)).await {
                Ok(addresses) => tokio::net::TcpListener::bind(&permitted(&host, addresses.collect())?[..]).await,
                Err(e) => Err(e),
            },
        };
        listener.map_err(|e| {
            let remedy = match e.kind() {
                io::ErrorKind::AddrInUse => "; end what still listens there or choose another port",
                io::ErrorKind::AddrNotAvailable => "; give an address that this machine has",
                _ => "",
            };
            self.failed(format!("cannot listen there: {e}{remedy}"))
        })
    }

    /// A connection as operations want it.
    fn ready(&self, stream: TcpStream) -> Result<TcpStream, Error> {
        // The count of a message must not wait for an answer to the message before.
        let ready = stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true));
        ready.map_err(|e| self.failed(format!("a connection broke: {e}")))?;
        Ok(stream)
    }

    fn failed(&self, reason: String) -> Error {
        let Rendezvous { rank, address, deadline } = self;
        Error::Rendezvous { rank: *rank, address: address.clone(), reason, elapsed: deadline.elapsed() }
    }
}

/// A name may lead anywhere, so beyond loopback only an address in figures is listened at.
fn permitted(host: &str, addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, Error> {
    let open = addresses.iter().map(SocketAddr::ip).find(|ip| !ip.to_canonical().is_loopback());
    let Some(ip) = open.filter(|_| host.parse::<IpAddr>().is_err()) else { return Ok(addresses) };
    Err(Error::argument(
        "coordinator",
        format!(
            "'{host}' is {ip}, which is not loopback: anybody who reaches it can take part; where that is wanted give the \
             address itself"
        ),
    ))
}

async fn connect(host: &str, port: u16, rank: usize) -> io::Result<TcpStream> {
    let mut stream = tokio::net::TcpStream::connect((host, port)).await?;
    // The system may have given the dialling socket the very port that it dials, if nobody listens there: then the two
    // ends are one.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    // The caller checked that it fits.
    stream.write_all(&(rank as u32).to_le_bytes()).await?;
    stream.into_std()
}

/// The workers that have come.
#[derive(Clone, Default)]
struct Seats {
    workers: Arc<Mutex<BTreeMap<usize, TcpStream>>>,
    changed: Arc<Notify>,
}

impl Seats {
    /// Lets a connection say its rank, while others come.
    async fn receive(
        &self,
        accepted: io::Result<(tokio::net::TcpStream, SocketAddr)>,
        world_size: usize,
        lobby: &Arc<Lobby>,
    ) {
        let Ok((stream, address)) = accepted else { return sleep(RETRY).await };
        let seats = self.clone();
        lobby.receive(
            address,
            announcement(stream, world_size),
            |(rank, stream)| async move { seats.seat(rank, stream) },
        );
        // Its rank is there already, most likely: it is looked at before the next connection is.
        yield_now().await;
    }

    fn seat(&self, rank: usize, stream: TcpStream) -> Result<(), Refusal> {
        let mut workers = lock(&self.workers);
        if workers.get(&rank).is_some_and(|other| !gone(other)) {
            return Err(Refusal::Misplaced(format!("it says that it is rank {rank}, which is there already")));
        }
        workers.insert(rank, stream);
        self.changed.notify_one();
        Ok(())
    }

    /// Whether all are there, and none of them has left meanwhile.
    fn full(&self, world_size: usize) -> bool {
        let mut workers = lock(&self.workers);
        if workers.len() == world_size - 1 {
            workers.retain(|_, stream| !gone(stream));
        }
        workers.len() == world_size - 1
    }
}

/// What a worker says first.
async fn announcement(mut stream: tokio::net::TcpStream, world_size: usize) -> Result<(usize, TcpStream), Refusal> {
    let rank = stream.read_u32_le().await? as usize;
    if rank == 0 || rank >= world_size {
        let workers = format!("and workers are 1 to {}", world_size - 1);
        return Err(Refusal::Misplaced(format!("it says that it is rank {rank}, {workers}")));
    }
    Ok((rank, stream.into_std()?))
}

/// Whether the other end has closed a connection that does not block. One that has sent something is there.
fn gone(stream: &TcpStream) -> bool {
    match stream.peek(&mut [0]) {
        Ok(bytes) => bytes == 0,
        Err(e) => e.kind() != io::ErrorKind::WouldBlock,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_loopback_s() {
        for (address, host, port) in [
            ("0", "127.0.0.1", 0),
            (":29500", "127.0.0.1", 29500),
            ("29500", "127.0.0.1", 29500),
            ("localhost:1", "localhost", 1),
            ("[::1]:2", "::1", 2),
            ("10.0.0.1:65535", "10.0.0.1", 65535),
            ("0.0.0.0:3", "0.0.0.0", 3),
        ] {
            assert_eq!(split("worker", address).unwrap(), (host.to_owned(), port), "{address}");
        }
        for address in ["", ":", "localhost", "127.0.0.1", "::1:29500", "[]:1", "[::1]", "[::1:2", "::1]:2", "x:65536"]
        {
            let error = split("worker", address).unwrap_err();
            assert!(matches!(&error, Error::InvalidArgument { .. }), "{address}: {error}");
        }
    }

    #[test]
    fn beyond_loopback_only_addresses_in_figures_are_listened_at() {
        let address = |ip: &str| vec![SocketAddr::new(ip.parse().unwrap(), 1)];
        for (host, ip) in [("localhost", "127.0.0.1"), ("localhost", "::1"), ("192.0.2.1", "192.0.2.1"), ("::", "::")] {
            assert_eq!(permitted(host, address(ip)).unwrap(), address(ip));
        }
        for ip in ["192.0.2.1", "0.0.0.0", "::", "fe80::1"] {
            assert!(permitted("somewhere", address(ip)).unwrap_err().to_string().contains("anybody"), "{ip}");
        }
    }
}
