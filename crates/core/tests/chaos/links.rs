//! Faults of connections, by a relay between one rank and rank 0.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

use crate::case::{Case, Child, SILENCE, SOON, is_lost};
use crate::orders::Orders;
use bonfire_testing::relay::between;

/// What a relay does, as bits. Nothing passes to rank 0, or from it, and nothing is closed.
const SILENT_THERE: u8 = 1;
const SILENT_BACK: u8 = 2;
/// Every byte by itself, some of them late.
const PIECES: u8 = 4;
/// All connections end at once, with a reset.
const RESET: u8 = 8;

/// All of a rank's connections to rank 0.
struct Relay {
    address: SocketAddr,
    does: Arc<AtomicU8>,
}

impl Relay {
    fn new(to: &str, does: u8) -> Relay {
        let does = Arc::new(AtomicU8::new(does));
        let kept = does.clone();
        let address = between(to.to_owned(), move |dialled, target| {
            let copies = [&dialled, &target].map(|stream| stream.try_clone().expect("another descriptor"));
            let [back, there] = copies;
            pass(dialled, there, SILENT_THERE, kept.clone());
            pass(target, back, SILENT_BACK, kept.clone());
        });
        Relay { address, does }
    }

    fn does(&self, what: u8) {
        self.does.store(what, Ordering::SeqCst);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.does(RESET);
    }
}

/// Carries bytes from one to the other, unless it does what `silent` says.
fn pass(mut from: TcpStream, mut to: TcpStream, silent: u8, does: Arc<AtomicU8>) {
    /// After so long it looks what it is to do now.
    const LOOK: Duration = Duration::from_millis(10);
    from.set_read_timeout(Some(LOOK)).expect("longer than nothing");
    to.set_nodelay(true).expect("a stream");
    let does = move || does.load(Ordering::SeqCst);
    thread::spawn(move || {
        let (mut buffer, mut number) = ([0; 4096], 0u32);
        loop {
            let most = if does() & PIECES == 0 { buffer.len() } else { 1 };
            let read = from.read(&mut buffer[..most]);
            // What was read before the silence comes after it.
            while does() & silent != 0 && does() & RESET == 0 {
                thread::sleep(LOOK);
            }
            if does() & RESET != 0 {
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
            if does() & PIECES != 0 && number.is_multiple_of(251) {
                // Being late is the fault.
                thread::sleep(Duration::from_millis(1));
            }
        }
    });
}

/// Starts a group in which `rank` reaches rank 0 by a relay.
fn start(case: &Case, orders: &Orders, rank: usize, does: u8) -> (Vec<Child>, Relay) {
    let relay = Relay::new(&orders.address, does);
    let address = |own: usize| if own == rank { relay.address.to_string() } else { orders.address.clone() };
    let orders = |rank: usize| Orders { rank, address: address(rank), ..orders.clone() };
    ((0..orders(0).world_size).map(|rank| case.child(&[], &orders(rank))).collect(), relay)
}

/// Once all are going, after a moment: somewhere in the stream.
fn soon(case: &mut Case) {
    thread::sleep(Duration::from_micros(case.below(50_000) as u64));
}

/// Two ranks that lose each other while both live: each names the other one, and a third whom it hears of first.
fn cut(case: &mut Case, does: u8, within: Duration) {
    let n = case.world_size();
    let (orders, rank) =
        (Orders { silence: SILENCE, deadline: SOON, goes_on: true, ..case.orders(n) }, 1 + case.below(n - 1));
    let (mut children, relay) = start(case, &orders, rank, 0);
    case.what = format!("between ranks 0 and {rank} of {n}");
    if case.going(&mut children) {
        soon(case);
        case.faults = 1;
        relay.does(does);
    }
    let reports = case.end(children, &[], within, false, &|_, error| is_lost(error, &[0, rank]));
    case.went_on_as_one(&reports);
    case.port_is_free(&orders.address);
}

pub fn reset(case: &mut Case) {
    cut(case, RESET, SOON);
}

pub fn half_open(case: &mut Case) {
    cut(case, SILENT_THERE | SILENT_BACK, SILENCE + SOON);
}

pub fn one_way(case: &mut Case) {
    let does = if case.below(2) == 0 { SILENT_THERE } else { SILENT_BACK };
    cut(case, does, SILENCE + SOON);
}

/// A connection over which nothing comes for a while, and then everything.
pub fn stalls(case: &mut Case) {
    let n = case.world_size();
    let folder = tempfile::tempdir().expect("a folder for a file");
    let until = folder.path().join("over");
    let (orders, rank) = (Orders { until: Some(until.clone()), ..case.orders(n) }, 1 + case.below(n - 1));
    let (mut children, relay) = start(case, &orders, rank, 0);
    let long = Duration::from_millis(500 + case.below(1000) as u64);
    case.what = format!("between ranks 0 and {rank} of {n}, for {long:?}");
    if case.going(&mut children) {
        soon(case);
        case.faults = 1;
        relay.does(SILENT_THERE | SILENT_BACK);
        thread::sleep(long);
        relay.does(0);
    }
    std::fs::write(until, "").expect("a file");
    case.end(children, &[], SOON, true, &|_, error| error.is_none());
    case.port_is_free(&orders.address);
}

/// From the first byte on every one comes by itself.
pub fn pieces(case: &mut Case) {
    let n = case.world_size();
    let (orders, rank) = (Orders { steps: 60, largest: 12, ..case.orders(n) }, 1 + case.below(n - 1));
    let (children, relay) = start(case, &orders, rank, PIECES);
    case.what = format!("between ranks 0 and {rank} of {n}");
    case.faults = 1;
    case.end(children, &[], SOON, true, &|_, error| error.is_none());
    drop(relay);
    case.port_is_free(&orders.address);
}
