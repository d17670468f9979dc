//! The first bytes of connections, for tests that act as a rank or a stranger.

/// The protocol version.
pub const VERSION: u16 = 13;

/// Where a prologue says the byte order of its rank's data, and what it says for that of this processor.
pub const BYTE_ORDER: usize = 30;
const OWN_ORDER: u8 = if cfg!(target_endian = "little") { 1 } else { 2 };

/// The purpose of a connection, as encoded in its prologue.
pub const RENDEZVOUS: u8 = 1;
pub const CONTROL: u8 = 2;
pub const DATA: u8 = 3;
pub const REGISTRATION: u8 = 5;

/// Length of the answer to a prologue without a secret, including the byte that confirms the connection.
pub const ANSWER: usize = 17;

/// Returns the first message on a connection: whether it has a secret, its purpose, from which rank to which of how
/// many, in which job.
pub fn prologue(version: u16, secret: bool, purpose: u8, [from, to, world_size]: [u32; 3], session: u64) -> Vec<u8> {
    let mut bytes = b"BNFR".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend([u8::from(secret), purpose]);
    bytes.extend(session.to_le_bytes());
    [from, to, world_size].iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    bytes.extend([0, 1, OWN_ORDER, 0]);
    bytes
}

/// Returns a rank's next message to rank 0: where it listens, the transport that it asks for (any), its algorithms, its
/// machine, and that it lacks nothing.
pub fn hello() -> Vec<u8> {
    let own: std::net::SocketAddr = "127.0.0.1:1".parse().expect("an address");
    let body = postcard::to_stdvec(&(own, 0u8, "default", "machine", None::<String>)).expect("plain data");
    [(body.len() as u32).to_le_bytes().to_vec(), body].concat()
}
