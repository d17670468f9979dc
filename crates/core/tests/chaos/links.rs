//! Connection faults, injected by a relay between one rank and rank 0.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

use crate::case::{Case, Child, HEARTBEAT_TIMEOUT, SOON, is_lost};
use crate::orders::Orders;
use bonfire_testing::relay::between;

/// The mode of a relay, as bits. These two stall the bytes to rank 0, or from it, and close nothing.
const SILENT_THERE: u8 = 1;
const SILENT_BACK: u8 = 2;
/// Forwards every byte by itself, some of them late.
const SINGLE_BYTES: u8 = 4;
/// Resets all connections at once.
const RESET: u8 = 8;

/// A relay for all connections of a rank to rank 0.
struct Relay {
    address: SocketAddr,
    mode: Arc<AtomicU8>,
}

impl Relay {
    fn new(to: &str, mode: u8) -> Relay {
        let mode = Arc::new(AtomicU8::new(mode));
        let shared = mode.clone();
        let address = between(to.to_owned(), move |dialled, target| {
            let copies = [&dialled, &target].map(|stream| stream.try_clone().expect("another descriptor"));
            let [back, there] = copies;
            forward(dialled, there, SILENT_THERE, shared.clone());
            forward(target, back, SILENT_BACK, shared.clone());
        });
        Relay { address, mode }
    }

    fn set(&self, mode: u8) {
        self.mode.store(mode, Ordering::SeqCst);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.set(RESET);
    }
}

/// Forwards bytes from one stream to the other, unless the mode has the bit `silent`.
fn forward(mut from: TcpStream, mut to: TcpStream, silent: u8, mode: Arc<AtomicU8>) {
    /// The time between two checks of the mode.
    const POLL_INTERVAL: Duration = Duration::from_millis(10);
    from.set_read_timeout(Some(POLL_INTERVAL)).expect("a timeout above zero");
    to.set_nodelay(true).expect("a stream");
    let mode = move || mode.load(Ordering::SeqCst);
    thread::spawn(move || {
        let (mut buffer, mut number) = ([0; 4096], 0u32);
        loop {
            let most = if mode() & SINGLE_BYTES == 0 { buffer.len() } else { 1 };
            let read = from.read(&mut buffer[..most]);
            // Bytes that were read before the silence are forwarded after it.
            while mode() & silent != 0 && mode() & RESET == 0 {
                thread::sleep(POLL_INTERVAL);
            }
            if mode() & RESET != 0 {
                let linger = |stream| set_socket_linger(stream, Some(Duration::ZERO));
                let _ = (linger(&from), linger(&to));
                return;
            }
            match read {
                Ok(count @ 1..) if to.write_all(&buffer[..count]).is_ok() => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                _ => {
                    let _ = to.shutdown(Shutdown::Write);
                    return;
                }
            }
            number = number.wrapping_add(1);
            if mode() & SINGLE_BYTES != 0 && number.is_multiple_of(251) {
                // The delay is the injected fault.
                thread::sleep(Duration::from_millis(1));
            }
        }
    });
}

/// Starts a group in which `rank` reaches rank 0 through a relay.
fn start(case: &Case, orders: &Orders, rank: usize, mode: u8) -> (Vec<Child>, Relay) {
    let relay = Relay::new(&orders.address, mode);
    let address = |own: usize| if own == rank { relay.address.to_string() } else { orders.address.clone() };
    let orders = |rank: usize| Orders { rank, address: address(rank), ..orders.clone() };
    ((0..orders(0).world_size).map(|rank| case.child(&[], &orders(rank))).collect(), relay)
}

/// Sleeps for a random time, so that the fault that follows can hit any place of the stream.
fn random_pause(case: &mut Case) {
    thread::sleep(Duration::from_micros(case.below(50_000) as u64));
}

/// Two live ranks lose each other. Each names the other one, and a third rank names the one that it notices first.
fn cut(case: &mut Case, mode: u8, within: Duration) {
    let n = case.world_size();
    let (orders, rank) = (
        Orders { heartbeat_timeout: HEARTBEAT_TIMEOUT, deadline: SOON, continues: true, ..case.orders(n) },
        1 + case.below(n - 1),
    );
    let (mut children, relay) = start(case, &orders, rank, 0);
    case.what = format!("between ranks 0 and {rank} of {n}");
    if case.going(&mut children) {
        random_pause(case);
        case.faults = 1;
        relay.set(mode);
    }
    let reports = case.end(children, &[], within, false, &|_, error| is_lost(error, &[0, rank]));
    case.went_on_as_one(&reports);
    case.port_is_free(&orders.address);
}

pub fn reset(case: &mut Case) {
    cut(case, RESET, SOON);
}

pub fn half_open(case: &mut Case) {
    cut(case, SILENT_THERE | SILENT_BACK, HEARTBEAT_TIMEOUT + SOON);
}

pub fn one_way(case: &mut Case) {
    let mode = if case.below(2) == 0 { SILENT_THERE } else { SILENT_BACK };
    cut(case, mode, HEARTBEAT_TIMEOUT + SOON);
}

/// Connections that stall for a while and then deliver everything.
pub fn stalls(case: &mut Case) {
    let n = case.world_size();
    let folder = tempfile::tempdir().expect("a folder for a file");
    let until = folder.path().join("over");
    let (orders, rank) = (Orders { until: Some(until.clone()), ..case.orders(n) }, 1 + case.below(n - 1));
    let (mut children, relay) = start(case, &orders, rank, 0);
    let long = Duration::from_millis(500 + case.below(1000) as u64);
    case.what = format!("between ranks 0 and {rank} of {n}, for {long:?}");
    if case.going(&mut children) {
        random_pause(case);
        case.faults = 1;
        relay.set(SILENT_THERE | SILENT_BACK);
        thread::sleep(long);
        relay.set(0);
    }
    std::fs::write(until, "").expect("a file");
    case.end(children, &[], SOON, true, &|_, error| error.is_none());
    case.port_is_free(&orders.address);
}

/// Forwards every byte by itself from the start.
pub fn pieces(case: &mut Case) {
    let n = case.world_size();
    let (orders, rank) = (Orders { steps: 60, largest: 12, ..case.orders(n) }, 1 + case.below(n - 1));
    let (children, relay) = start(case, &orders, rank, SINGLE_BYTES);
    case.what = format!("between ranks 0 and {rank} of {n}");
    case.faults = 1;
    case.end(children, &[], SOON, true, &|_, error| error.is_none());
    drop(relay);
    case.port_is_free(&orders.address);
}
