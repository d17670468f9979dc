//! A star of ranks on the wire protocol of yscv's `TcpTransport`, which peers in other languages can speak.
//!
//! Rank 0, the coordinator, listens. Every other rank, a worker, has one connection: to the coordinator. Use it to talk
//! to programs that know this wire. If all ranks are Bonfire's, a [`Group`](bonfire_core::Group) is faster,
//! authenticates its ranks, has more operations and types, and reports a failure to all ranks.
//!
//! # On the wire
//! All numbers are little endian.
//!
//! | sender | when | bytes |
//! |---|---|---|
//! | a worker | once, as soon as it is connected | its rank as u32, from 1 |
//! | both | each message | the number of values as u32, then the values as f32 |
//!
//! In an `allreduce_sum` a worker sends its values and then reads as many: the sums. The coordinator reads those of all
//! workers, adds them up in the order of ranks, beginning with its own, and then sends the sums to each.
//!
//! # Security
//! **Every process that reaches the coordinator's port can take part**: nothing on this wire authenticates a peer,
//! encrypts, or protects from modification. A coordinator therefore listens on loopback only, where every user of the
//! machine can reach it, unless its caller gives another numeric address (`10.0.0.1:29500`, `0.0.0.0:29500`) or a
//! listener.
//!
//! # Failures
//! Every call ends by its deadline, 300 s unless set, and the rendezvous by its timeout, 120 s unless set. A message
//! that breaks makes its connection useless: the connection is closed, and every later call on it returns that first
//! error. An `allreduce_sum` that fails closes all connections of its rank, and so fails on the other ranks, because
//! the wire has no message for it.
//!
//! # Why it is no transport of a group
//! Messages of a group carry the call that they belong to, travel between any two ranks, have all element types, and
//! follow a handshake. This wire has room for none of that: peers that know only the wire would read anything added to
//! it as values. It shares deadlines, errors and the accept queue with groups.
//!
//! A worker learns the world size from its caller or from a sum of ones. The wire could carry it only in what old peers
//! take for values, or as TCP's urgent byte, which old peers would not see but which firewalls turn into ordinary data.
//!
//! # Differences from yscv
//! The wire is the same, and the behaviour around it differs. Connections that have not sent their rank yet do not hold
//! up others, and a worker that leaves before all have connected frees its rank. A sum allocates nothing by a peer's
//! count; it only compares the count with its own.
//!
//! | in yscv | here |
//! |---|---|
//! | a rank that is taken replaces the first one | it is rejected |
//! | an invalid rank or a port scan ends the rendezvous | it is rejected; a connection has 5 s to send its rank |
//! | waits without limit | the rendezvous and each call have a deadline, for all bytes together |
//! | one attempt to connect | dials until the timeout, also while the name does not resolve yet |
//! | allocates for any count that a peer sends | 2^28 values at most unless set, allocated as they arrive |
//! | counts longer data modulo 2^32 | rejects them |
//! | after half a message, reads the next one from its rest | closes the connection; later calls return that error |
//! | a coordinator that fails leaves its workers waiting | a failed `allreduce_sum` closes all of its connections |
//! | one lock for both directions | one for each, with a deadline |
//! | a worker reports a world size of two | the size that it was given, or the smallest possible one |

#![cfg(unix)]
#![warn(missing_docs)]

mod link;
mod message;
mod rendezvous;

use std::fmt;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bonfire_core::{Call, DType, Deadline, Error, Operation, ReduceOp};

use self::link::{Failure, Link, Turn, late};
use self::rendezvous::{Listen, Rendezvous, split};

/// The largest world size: more than a process has connections, and few enough to name the missing ones in an error.
const MOST_RANKS: usize = 1 << 16;

/// One rank of a star on the wire of yscv's `TcpTransport`: a u32 of rank after connecting, then messages of a u32
/// count and as many f32, all little endian.
///
/// **Every process that reaches the coordinator's port can take part**, since the wire has no authentication: it is on
/// loopback unless another numeric address is given. If all ranks are Bonfire's, use a [`Group`](bonfire_core::Group).
///
/// Peers are counted from 0: on the coordinator peer `i` is rank `i + 1`, and a worker's only peer is 0, the
/// coordinator. All methods may be called from several threads at once; a send and a receive do not wait for each
/// other. An error of a message, other than a rejected argument or a timeout before its first byte, closes its
/// connection, and later calls on it return the same error. An error of [`allreduce_sum`](Self::allreduce_sum) closes
/// all of this rank's connections.
///
/// ```
/// let (coordinator, worker) = bonfire_yscv::loopback_pair()?;
/// let other = std::thread::spawn(move || worker.allreduce_sum(&mut [1.0, 2.0]));
/// let mut data = [10.0, 20.0];
/// coordinator.allreduce_sum(&mut data)?;
/// assert_eq!(data, [11.0, 22.0]);
/// # other.join().unwrap()?;
/// # Ok::<(), bonfire_core::Error>(())
/// ```
pub struct TcpTransport {
    rank: usize,
    world_size: usize,
    /// The connections to the workers, in the order of ranks, or to the coordinator.
    links: Vec<Link>,
    settings: TcpTransportBuilder,
    /// Held during a sum, so that sums of two threads do not mix.
    sum_turn: Turn,
    /// The number of sums so far.
    sums: AtomicU64,
}

/// Settings of a [`TcpTransport`].
#[derive(Clone, Debug)]
pub struct TcpTransportBuilder {
    rendezvous_timeout: Duration,
    deadline: Duration,
    largest_message: usize,
}

impl Default for TcpTransportBuilder {
    fn default() -> Self {
        TcpTransportBuilder {
            rendezvous_timeout: Duration::from_secs(120),
            deadline: Duration::from_secs(300),
            largest_message: 1 << 28,
        }
    }
}

impl TcpTransportBuilder {
    /// Sets the time limit of the rendezvous: 120 s unless set.
    pub fn rendezvous_timeout(mut self, timeout: Duration) -> Self {
        self.rendezvous_timeout = timeout;
        self
    }

    /// Sets the time limit of a call, from its beginning to its last byte: 300 s unless set.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Sets the largest message, in values, that [`TcpTransport::recv`] accepts: 2^28, which are 1 GiB, unless set. The
    /// peer sends the count first; memory is only allocated as values arrive.
    pub fn largest_message(mut self, values: usize) -> Self {
        self.largest_message = values;
        self
    }

    /// Makes a coordinator with these settings: see [`TcpTransport::coordinator`].
    ///
    /// # Errors
    /// See [`TcpTransport::coordinator`].
    pub fn coordinator(self, bind_addr: &str, world_size: usize) -> Result<TcpTransport, Error> {
        let (host, port) = split("coordinator", bind_addr)?;
        self.gather(Listen::At(host, port), bind_addr.into(), world_size)
    }

    /// Makes a coordinator with these settings on the caller's listener, whose port the caller knows before workers
    /// connect: see [`TcpTransport::coordinator`].
    ///
    /// # Errors
    /// See [`TcpTransport::coordinator`]; also [`Error::Io`] if the listener has no address.
    pub fn coordinator_on(self, listener: TcpListener, world_size: usize) -> Result<TcpTransport, Error> {
        let address = listener.local_addr().map_err(|e| Error::io("coordinator", e))?.to_string();
        self.gather(Listen::On(listener), address, world_size)
    }

    fn gather(self, listen: Listen, address: String, world_size: usize) -> Result<TcpTransport, Error> {
        if !(1..=MOST_RANKS).contains(&world_size) {
            let reason = format!("a world of {world_size} ranks: give 1 to {MOST_RANKS}, the coordinator included");
            return Err(Error::argument("coordinator", reason));
        }
        let rendezvous = Rendezvous { rank: 0, address, deadline: Deadline::after(self.rendezvous_timeout) };
        let workers = rendezvous.gather(listen, world_size)?;
        let links = (1..).zip(workers).map(|(rank, stream)| Link::new(rank, stream)).collect();
        Ok(TcpTransport::new(0, world_size, links, self))
    }

    /// Makes a worker with these settings: see [`TcpTransport::worker`].
    ///
    /// # Errors
    /// See [`TcpTransport::worker`].
    pub fn worker(self, coordinator_addr: &str, rank: usize) -> Result<TcpTransport, Error> {
        // The smallest possible world size.
        self.dial(coordinator_addr, rank, rank.saturating_add(1))
    }

    /// Makes a worker with these settings that knows the world size, the coordinator included: see
    /// [`TcpTransport::worker`].
    ///
    /// # Errors
    /// See [`TcpTransport::worker`]; also [`Error::InvalidArgument`] for a rank outside the world size.
    pub fn worker_of(self, coordinator_addr: &str, rank: usize, world_size: usize) -> Result<TcpTransport, Error> {
        self.dial(coordinator_addr, rank, world_size)
    }

    fn dial(self, address: &str, rank: usize, world_size: usize) -> Result<TcpTransport, Error> {
        if rank == 0 || rank >= world_size.min(MOST_RANKS) {
            let most = world_size.clamp(2, MOST_RANKS) - 1;
            let reason = format!("rank {rank} is not a worker: workers are 1 to {most}, and 0 is the coordinator");
            return Err(Error::argument("worker", reason));
        }
        let (host, port) = split("worker", address)?;
        if port == 0 {
            return Err(Error::argument("worker", "port 0 cannot be dialled: give the coordinator's port"));
        }
        let deadline = Deadline::after(self.rendezvous_timeout);
        let stream = Rendezvous { rank, address: address.into(), deadline }.dial(&host, port)?;
        Ok(TcpTransport::new(rank, world_size, vec![Link::new(0, stream)], self))
    }
}

impl TcpTransport {
    /// Returns a builder for settings other than the defaults.
    pub fn builder() -> TcpTransportBuilder {
        TcpTransportBuilder::default()
    }

    /// Listens at `bind_addr` as rank 0, and blocks until `world_size - 1` workers have connected, for up to the
    /// [rendezvous timeout](TcpTransportBuilder::rendezvous_timeout).
    ///
    /// `bind_addr` is `host:port` or `[v6]:port`. A port alone means `127.0.0.1`, and a name must resolve to loopback.
    /// Connections that do not send the rank of a missing worker are closed and logged; they neither end the rendezvous
    /// nor hold up other connections.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a malformed address, a name that is not loopback, or a world size outside 1 to
    /// 65,536; [`Error::Rendezvous`] if listening at the address fails, or workers are missing after the timeout: it
    /// names them, and says how many connections were rejected or ended; [`Error::Io`] if the system refuses a
    /// resource.
    pub fn coordinator(bind_addr: &str, world_size: usize) -> Result<TcpTransport, Error> {
        Self::builder().coordinator(bind_addr, world_size)
    }

    /// Dials the coordinator as another rank than 0 until it answers, for up to the [rendezvous
    /// timeout](TcpTransportBuilder::rendezvous_timeout), and sends `rank`.
    ///
    /// The wire has no answer to that. A rank that is rejected, because it is taken or outside the world size, learns
    /// this from its first message, which fails.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank outside 1 to 65,535 or a malformed address, [`Error::Rendezvous`] if the
    /// coordinator did not answer in time, [`Error::Io`] if the system refuses a resource.
    pub fn worker(coordinator_addr: &str, rank: usize) -> Result<TcpTransport, Error> {
        Self::builder().worker(coordinator_addr, rank)
    }

    fn new(rank: usize, world_size: usize, links: Vec<Link>, settings: TcpTransportBuilder) -> TcpTransport {
        TcpTransport { rank, world_size, links, settings, sum_turn: Turn::default(), sums: AtomicU64::new(0) }
    }

    /// Returns this rank; 0 is the coordinator.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of ranks, on the coordinator and on a worker that [was told](TcpTransportBuilder::worker_of).
    /// The wire does not carry it, so on another worker it is the smallest possible number: its rank plus one. An
    /// [`allreduce_sum`](Self::allreduce_sum) of a single 1 on every rank returns the number itself.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Sends a message to a peer. Blocks until the system has the bytes, which does not mean that the peer has them.
    /// Two ends that send each other more than the system buffers must receive on another thread meanwhile.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown peer or more values than 32 bits can count, [`Error::Io`] if the
    /// deadline passed or the connection broke, now or earlier.
    pub fn send(&self, peer: usize, data: &[f32]) -> Result<(), Error> {
        let (count, link) = (counted("send", data)?, self.peer("send", peer)?);
        link.send(&format!("send of rank {}", self.rank), &Deadline::after(self.settings.deadline), |stream| {
            Ok(message::write(stream, count, data)?)
        })
    }

    /// Waits for a peer's next message and returns its values. If the deadline passes before its first byte, it can
    /// still be received later.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an unknown peer, [`Error::Io`] if the deadline passed, the message is [too
    /// long](TcpTransportBuilder::largest_message), or the connection broke, now or earlier.
    pub fn recv(&self, peer: usize) -> Result<Vec<f32>, Error> {
        let link = self.peer("recv", peer)?;
        link.receive(&format!("recv of rank {}", self.rank), &Deadline::after(self.settings.deadline), |stream| {
            Ok(message::read(stream, self.settings.largest_message)?)
        })
    }

    /// Replaces `data` on every rank by the sums over all ranks, which are bit-identical on all ranks: the coordinator
    /// adds in the order of ranks. All ranks must call it, with the same length. A rank alone keeps its data.
    ///
    /// After an error `data` is unchanged, and this rank's connections are closed, unless an argument was rejected or
    /// another thread's sum took too long. A rank may have its sums before another fails: then its next call fails.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more values than 32 bits can count, [`Error::Mismatch`] if this rank has seen
    /// another length on another rank, [`Error::Io`] if the deadline passed or a connection broke, now or earlier.
    pub fn allreduce_sum(&self, data: &mut [f32]) -> Result<(), Error> {
        let count = counted("allreduce_sum", data)?;
        if self.links.is_empty() {
            return Ok(());
        }
        let operation = format!("allreduce_sum(f32 x {count}) of rank {}", self.rank);
        let deadline = Deadline::after(self.settings.deadline);
        let _turn = self.sum_turn.take(&deadline).ok_or_else(|| late(&operation, &deadline))?;
        let sequence = self.sums.fetch_add(1, Ordering::Relaxed);
        let sums = self.sum(data, (&operation, count, sequence), &deadline).inspect_err(|error| {
            // Other ranks may still wait for data that this rank will not send.
            self.links.iter().for_each(|link| drop(link.close(error.clone())));
        })?;
        data.copy_from_slice(&sums);
        Ok(())
    }

    /// Exchanges the values and returns the sums.
    ///
    /// Workers send all their values before they read, and the coordinator reads from all workers before it sends, so
    /// ranks that call this cannot deadlock. The coordinator reads one worker after the other, because it adds in rank
    /// order.
    fn sum(
        &self,
        data: &[f32],
        (operation, count, sequence): (&str, u32, u64),
        deadline: &Deadline,
    ) -> Result<Vec<f32>, Error> {
        let mut sums = data.to_vec();
        // If a connection is known to be broken, the sum fails before this rank waits for any other rank.
        self.links.iter().try_for_each(|link| link.sound().map(drop))?;
        let send = |link: &Link, data: &[f32]| {
            link.send(operation, deadline, |stream| Ok(message::write(stream, count, data)?))
        };
        if self.rank != 0 {
            send(&self.links[0], data)?;
        }
        for (peer, link) in self.links.iter().enumerate() {
            link.receive(operation, deadline, |stream| {
                let theirs = message::read_count(stream)?;
                if theirs != data.len() {
                    return Err(Failure::Known(self.mismatch(sequence, data.len(), (peer, theirs))));
                }
                // The coordinator sends a worker the sums.
                let take = if self.rank == 0 { message::add } else { message::fill };
                Ok(take(stream, &mut sums)?)
            })?;
        }
        if self.rank == 0 {
            self.links.iter().try_for_each(|link| send(link, &sums))?;
        }
        Ok(sums)
    }

    fn mismatch(&self, sequence: u64, ours: usize, (peer, theirs): (usize, usize)) -> Error {
        let call = |count| Call::new(Operation::AllReduce, DType::F32, count).reducing(ReduceOp::Sum);
        let peer = if self.rank == 0 { peer + 1 } else { 0 };
        let mut calls = vec![(self.rank, call(ours)), (peer, call(theirs))];
        calls.sort_by_key(|(rank, _)| *rank);
        Error::Mismatch { sequence, calls, note: String::new() }
    }

    fn peer(&self, operation: &str, peer: usize) -> Result<&Link, Error> {
        self.links.get(peer).ok_or_else(|| {
            let (rank, peers) = (self.rank, self.links.len());
            let reason = format!("rank {rank} has {peers} peers, counted from 0, and no peer {peer}");
            Error::argument(operation, reason)
        })
    }
}

impl fmt::Debug for TcpTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpTransport")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .finish_non_exhaustive()
    }
}

/// Returns a coordinator and its worker in one process, on a free loopback port: for tests.
///
/// # Errors
/// [`Error::Io`] if there is no free port; otherwise see [`TcpTransport::coordinator`] and [`TcpTransport::worker`].
pub fn loopback_pair() -> Result<(TcpTransport, TcpTransport), Error> {
    let wrong = |e| Error::io("loopback_pair", e);
    let listener = TcpListener::bind("127.0.0.1:0").map_err(wrong)?;
    let address = listener.local_addr().map_err(wrong)?.to_string();
    // A worker can connect before the coordinator accepts: the listener exists already.
    let worker = TcpTransport::builder().worker_of(&address, 1, 2)?;
    Ok((TcpTransport::builder().coordinator_on(listener, 2)?, worker))
}

fn counted(operation: &str, data: &[f32]) -> Result<u32, Error> {
    message::counted(data.len()).ok_or_else(|| {
        let reason = format!("{} values, and a message can count {} at most: send parts", data.len(), u32::MAX);
        Error::argument(operation, reason)
    })
}
