//! Relays between a rank and a listener: one that records both directions, and the building blocks for others.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

/// Dials until rank 0 listens.
pub fn dial(address: &str) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(e) => assert!(start.elapsed() < super::DEADLINE, "cannot connect to {address}: {e}"),
        }
        thread::yield_now();
    }
}

/// One of a relay's connections: the bytes to the listener, and those from it.
#[derive(Clone, Default)]
pub struct Recording {
    pub there: Arc<Mutex<Vec<u8>>>,
    pub back: Arc<Mutex<Vec<u8>>>,
}

/// Starts a relay to `to` that records every connection, and returns its address.
pub fn relay(to: String) -> (SocketAddr, Arc<Mutex<Vec<Recording>>>) {
    let recordings = Arc::new(Mutex::new(Vec::new()));
    let kept = recordings.clone();
    let address = between(to, move |dialled, target| {
        let recording = Recording::default();
        kept.lock().unwrap().push(recording.clone());
        forward(dialled, target, recording);
    });
    (address, recordings)
}

/// Forwards both directions of a relay's connection until they end.
pub fn forward(dialled: TcpStream, target: TcpStream, recording: Recording) {
    copy(dialled.try_clone().unwrap(), target.try_clone().unwrap(), recording.there);
    copy(target, dialled, recording.back);
}

/// Listens at the returned address, and passes every accepted connection to `carry`, with a connection to `to`.
pub fn between(to: String, carry: impl Fn(TcpStream, TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // The thread ends with the process: no rank dials it after its own test.
    thread::spawn(move || {
        for dialled in listener.incoming() {
            carry(dialled.unwrap(), dial(&to));
        }
    });
    address
}

fn copy(mut from: TcpStream, mut to: TcpStream, record: Arc<Mutex<Vec<u8>>>) {
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            record.lock().unwrap().extend(&buffer[..count]);
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}
