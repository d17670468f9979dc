//! A job that is started while something else still answers at rank 0's address: the job before it, with the same
//! secret or another one, or a server that knows nothing of Bonfire.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use bonfire_core::{Builder, Error, Group, Secret, TransportKind};
use bonfire_testing::{DEADLINE, assert_connected, free_address, logged, wire};

/// The rendezvous timeout of ranks that cannot connect.
const SOON: Duration = Duration::from_secs(1);

/// What is at rank 0's address.
#[derive(Clone, Copy, Debug)]
enum Before {
    /// A job with this secret.
    Job(Option<u8>),
    /// A server that says this to each connection, and then reads what it is sent.
    Server(&'static [u8]),
    /// A server that closes each connection.
    Closes,
    /// A rank of another release.
    Release(u16),
}

/// Each with what a rank of a job with secret 1 says about it.
const CASES: [(Before, &str); 9] = [
    (Before::Job(Some(1)), "it expects another job, rank or world size"),
    (Before::Job(Some(2)), "it has another secret"),
    (Before::Job(None), "it has no secret, and this rank has one"),
    (Before::Server(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n"), "it does not speak Bonfire's protocol"),
    (Before::Server(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"), "it does not speak Bonfire's protocol"),
    // Eight bytes that look like those of a rank.
    (Before::Server(b"BNFA\x00\x00\x05\x00"), "it speaks version 0 of Bonfire's protocol"),
    (Before::Server(&[0xff; 64]), "it does not speak Bonfire's protocol"),
    (Before::Closes, "it does not complete the handshake"),
    (Before::Release(wire::VERSION + 1), "of Bonfire's protocol, and this rank version"),
];

/// What runs at an address. Dropping it ends it.
struct Running {
    address: String,
    /// Connections that a server has served.
    count: Arc<AtomicUsize>,
    groups: Vec<Group>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    fn start(before: Before, address: &str) -> Running {
        let (count, over): (Arc<AtomicUsize>, Arc<AtomicBool>) = Default::default();
        if let Before::Job(seed) = before {
            let ranks = (0..2).map(|rank| start(builder(address, 2, seed).rank(rank).rendezvous_timeout(DEADLINE)));
            let ranks: Vec<_> = ranks.collect();
            let groups = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect();
            return Running { address: address.into(), count, groups, over, thread: None };
        }
        let listener = TcpListener::bind(address).unwrap();
        let (counted, ends) = (count.clone(), over.clone());
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if ends.load(Ordering::SeqCst) {
                    break;
                }
                serve(before, &mut stream.unwrap());
                counted.fetch_add(1, Ordering::SeqCst);
            }
        });
        Running { address: address.into(), count, groups: Vec::new(), over, thread: Some(thread) }
    }

    /// Waits until so many connections have been served. A job does not say how many it has refused.
    fn served(&self, count: usize) {
        while self.thread.is_some() && self.count.load(Ordering::SeqCst) < count {
            thread::yield_now();
        }
    }
}

impl Drop for Running {
    #[expect(clippy::disallowed_methods, reason = "it wakes a server of this test")]
    fn drop(&mut self) {
        self.groups.clear();
        self.over.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = TcpStream::connect(&self.address);
            thread.join().unwrap();
        }
    }
}

fn serve(before: Before, stream: &mut TcpStream) {
    let release = |version: u16| [&b"BNFA"[..], &version.to_le_bytes(), &[5, 0]].concat();
    let _ = match before {
        Before::Server(words) => stream.write_all(words),
        Before::Release(version) => stream.write_all(&release(version)),
        Before::Closes | Before::Job(_) => stream.shutdown(Shutdown::Write),
    };
    // Until the rank has closed the connection: unread bytes would reset it, and the rank would not read the words.
    let _ = stream.read_to_end(&mut Vec::new());
}

fn builder(address: &str, ranks: usize, seed: Option<u8>) -> Builder {
    let builder = Group::builder().world_size(ranks).address(address).deadline(DEADLINE).transport(TransportKind::Tcp);
    match seed {
        Some(seed) => builder.secret(Secret::new([seed; 32]).unwrap()),
        None => builder,
    }
}

fn start(builder: Builder) -> JoinHandle<Result<Group, Error>> {
    thread::spawn(move || builder.connect())
}

/// Starts the ranks of the job after it.
fn start_job(address: &str, limit: Duration) -> Vec<JoinHandle<Result<Group, Error>>> {
    let builder = builder(address, 3, Some(1)).rendezvous_timeout(limit);
    (0..3).map(|rank| start(builder.clone().rank(rank))).collect()
}

#[test]
fn nothing_that_answers_at_rank_0s_address_is_final_before_a_proof() {
    logged::record();
    for (before, says) in CASES {
        // It goes away, and the ranks connect.
        let address = free_address();
        let running = Running::start(before, &address);
        logged::clear();
        let ranks = start_job(&address, DEADLINE);
        logged::wait_for(&["rank 0 retries", &address]);
        for rank in ["rank 1 retries", "rank 2 retries"] {
            logged::wait_for(&[rank, &address, says]);
        }
        running.served(10);
        drop(running);
        assert_connected(ranks.into_iter().map(|rank| rank.join().unwrap()).collect());
        for rank in 1..3 {
            let lines = logged::lines();
            let warned =
                lines.iter().filter(|line| line.contains(&format!("rank {rank} retries")) && line.contains(says));
            assert_eq!(warned.count(), 1, "{before:?}: {lines:#?}");
        }

        // It stays, and the errors name it when the time is up, and not before.
        let address = free_address();
        let _running = Running::start(before, &address);
        for (rank, result) in start_job(&address, SOON).into_iter().map(|rank| rank.join().unwrap()).enumerate() {
            let Err(Error::Rendezvous { reason, elapsed, .. }) = result else { panic!("{before:?}: {result:?}") };
            assert!(elapsed >= SOON && elapsed < DEADLINE, "{before:?}, rank {rank}, after {elapsed:?}: {reason}");
            let tried = format!("tried {address} (");
            assert!(reason.contains(&tried), "{before:?}, rank {rank}: {reason}");
            match rank {
                0 => {
                    assert!(
                        reason.contains("Address already in use") && reason.contains("end the job that still listens"),
                        "{reason}"
                    )
                }
                _ => {
                    assert!(reason.contains(says), "{reason}")
                }
            }
        }
    }
}
