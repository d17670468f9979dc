//! The rendezvous of a coordinator and its workers.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bonfire_core::internal::{self, AcceptQueue, OwnRuntime, RankList, Refusal, lock};
use bonfire_core::{Deadline, Error};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::{sleep, timeout};

/// Time limit of one attempt to connect: the system itself would retry at ever longer intervals.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Where a coordinator listens.
pub(super) enum Listen {
    At(String, u16),
    /// The caller's listener.
    On(TcpListener),
}

/// Returns host and port of an address. A port alone means loopback.
pub(super) fn split(operation: &str, address: &str) -> Result<(String, u16), Error> {
    let (host, port) = address.rsplit_once(':').unwrap_or(("", address));
    let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).filter(|host| !host.is_empty());
    match (inner, port.parse()) {
        (Some(v6), Ok(port)) => Ok((v6.into(), port)),
        (None, Ok(port)) if host.is_empty() => Ok(("127.0.0.1".into(), port)),
        (None, Ok(port)) if !host.contains([':', '[', ']']) => Ok((host.into(), port)),
        _ => Err(Error::argument(
            operation,
            format!("the address '{address}' is malformed: give host:port, [v6]:port, or only a port on loopback"),
        )),
    }
}

/// A rank's search for the coordinator at `address`, or for its workers.
pub(super) struct Rendezvous {
    pub rank: usize,
    pub address: String,
    pub deadline: Deadline,
}

impl Rendezvous {
    /// Runs the coordinator: returns the connections to all workers, in the order of ranks.
    pub fn gather(&self, source: Listen, world_size: usize) -> Result<Vec<TcpStream>, Error> {
        let (registered, accept_queue, mut accepted_count) = (Workers::default(), AcceptQueue::new(world_size), 0);
        let gathered = self.run(|| async {
            let listener = self.listen(source).await?;
            while !registered.full(world_size) {
                tokio::select! {
                    accepted = accept_queue.accept(|| listener.accept()) => {
                        let accepted = accepted.map_err(|e| self.failed(format!("cannot accept a connection: {e}")))?;
                        accepted_count += 1;
                        registered.receive(accepted, world_size, &accept_queue).await;
                    }
                    () = registered.changed.notified() => {}
                }
            }
            Ok(())
        })?;
        let workers = std::mem::take(&mut *lock(&registered.workers));
        if gathered.is_some() {
            return workers.into_values().map(|stream| self.ready(stream)).collect();
        }
        let there = |rank: &usize| workers.get(rank).is_some_and(|stream| !is_closed(stream));
        let missing: Vec<usize> = (1..world_size).filter(|rank| !there(rank)).collect();
        let others = accepted_count - (world_size - 1 - missing.len());
        let refusals = accept_queue.refusals();
        Err(self.failed(format!(
            "{} did not come, and {others} connections were turned away or left{refusals}; start each rank from 1 to \
             {} once, with this address, or allow more time (TcpTransportBuilder::rendezvous_timeout)",
            RankList(&missing),
            world_size - 1
        )))
    }

    /// Runs a worker: dials until the coordinator answers, and sends the rank.
    pub fn dial(&self, host: &str, port: u16) -> Result<TcpStream, Error> {
        let waiting_for = Mutex::new("the time is too short to dial".to_owned());
        let dialled = self.run(|| async {
            let mut pause = Duration::from_millis(10);
            loop {
                let reason = match timeout(CONNECT_TIMEOUT, connect(host, port, self.rank)).await {
                    Ok(Ok(stream)) => return Ok(stream),
                    Ok(Err(e)) => format!("nobody answers there ({e})"),
                    Err(_) => "nothing answers there".into(),
                };
                *lock(&waiting_for) = reason;
                sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(500));
            }
        })?;
        match dialled {
            Some(stream) => self.ready(stream),
            None => Err(self.failed(format!(
                "{}; start the coordinator with this address, or allow more time \
                 (TcpTransportBuilder::rendezvous_timeout)",
                *lock(&waiting_for)
            ))),
        }
    }

    /// Runs `act` until the deadline. `None` if the deadline passes first.
    fn run<T: Send, F: Future<Output = Result<T, Error>>>(
        &self,
        act: impl FnOnce() -> F + Send,
    ) -> Result<Option<T>, Error> {
        // Dropping it closes connections that have sent nothing.
        let result = OwnRuntime::new()?.run(|| timeout(self.deadline.remaining(), act()))?;
        result.map_or(Ok(None), |result| result.map(Some))
    }

    async fn listen(&self, source: Listen) -> Result<tokio::net::TcpListener, Error> {
        let listener = match source {
            Listen::On(listener) => {
                listener.set_nonblocking(true).and_then(|()| tokio::net::TcpListener::from_std(listener))
            }
            Listen::At(host, port) => match tokio::net::lookup_host((&host[..], port)).await {
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

    /// Makes a connection blocking, without Nagle's algorithm.
    fn ready(&self, stream: TcpStream) -> Result<TcpStream, Error> {
        // The count of a message must not wait for the acknowledgement of the message before.
        let ready = stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true));
        ready.map_err(|e| self.failed(format!("a connection broke: {e}")))?;
        Ok(stream)
    }

    fn failed(&self, reason: String) -> Error {
        let Rendezvous { rank, address, deadline } = self;
        Error::Rendezvous { rank: *rank, address: address.clone(), reason, elapsed: deadline.elapsed() }
    }
}

/// Rejects a name that resolves beyond loopback: it may lead anywhere, so this needs a numeric address.
fn permitted(host: &str, addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, Error> {
    let open = addresses.iter().map(SocketAddr::ip).find(|ip| !ip.to_canonical().is_loopback());
    let Some(ip) = open.filter(|_| host.parse::<IpAddr>().is_err()) else { return Ok(addresses) };
    Err(Error::argument(
        "coordinator",
        format!(
            "'{host}' is {ip}, which is not loopback: every process that reaches it can take part; if that is intended \
             give the numeric address"
        ),
    ))
}

async fn connect(host: &str, port: u16, rank: usize) -> io::Result<TcpStream> {
    let addresses: Vec<SocketAddr> = tokio::net::lookup_host((host, port)).await?.collect();
    let mut stream = internal::connect(&addresses).await?;
    // The caller has checked that the rank fits.
    stream.write_all(&(rank as u32).to_le_bytes()).await?;
    stream.into_std()
}

/// The workers that have connected.
#[derive(Clone, Default)]
struct Workers {
    workers: Arc<Mutex<BTreeMap<usize, TcpStream>>>,
    changed: Arc<Notify>,
}

impl Workers {
    /// Reads the rank of a new connection in the background.
    async fn receive(
        &self,
        (stream, address): (tokio::net::TcpStream, SocketAddr),
        world_size: usize,
        accept_queue: &Arc<AcceptQueue>,
    ) {
        let registered = self.clone();
        accept_queue.receive(address.ip(), read_rank(stream, world_size), |(rank, stream)| async move {
            registered.insert(rank, stream)
        });
        // Its rank has most likely arrived: it is read before the next connection is accepted.
        yield_now().await;
    }

    fn insert(&self, rank: usize, stream: TcpStream) -> Result<(), Refusal> {
        let mut workers = lock(&self.workers);
        if workers.get(&rank).is_some_and(|other| !is_closed(other)) {
            return Err(Refusal::Misplaced(format!("it says that it is rank {rank}, which is there already")));
        }
        workers.insert(rank, stream);
        self.changed.notify_one();
        Ok(())
    }

    /// Whether all workers are connected and none of them has closed its connection since.
    fn full(&self, world_size: usize) -> bool {
        let mut workers = lock(&self.workers);
        if workers.len() == world_size - 1 {
            workers.retain(|_, stream| !is_closed(stream));
        }
        workers.len() == world_size - 1
    }
}

/// Reads a worker's first message.
async fn read_rank(mut stream: tokio::net::TcpStream, world_size: usize) -> Result<(usize, TcpStream), Refusal> {
    let rank = stream.read_u32_le().await? as usize;
    if rank == 0 || rank >= world_size {
        let workers = format!("and workers are 1 to {}", world_size - 1);
        return Err(Refusal::Misplaced(format!("it says that it is rank {rank}, {workers}")));
    }
    Ok((rank, stream.into_std()?))
}

/// Whether the peer has closed a non-blocking connection. A peer that has sent something counts as connected.
fn is_closed(stream: &TcpStream) -> bool {
    match stream.peek(&mut [0]) {
        Ok(bytes) => bytes == 0,
        Err(e) => e.kind() != io::ErrorKind::WouldBlock,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_means_loopback() {
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
    fn beyond_loopback_an_address_must_be_numeric() {
        let address = |ip: &str| vec![SocketAddr::new(ip.parse().unwrap(), 1)];
        for (host, ip) in [("localhost", "127.0.0.1"), ("localhost", "::1"), ("192.0.2.1", "192.0.2.1"), ("::", "::")] {
            assert_eq!(permitted(host, address(ip)).unwrap(), address(ip));
        }
        for ip in ["192.0.2.1", "0.0.0.0", "::", "fe80::1"] {
            assert!(permitted("somewhere", address(ip)).unwrap_err().to_string().contains("every process"), "{ip}");
        }
    }
}
