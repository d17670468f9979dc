//! What connections begin with, byte by byte, for tests that play a rank or a stranger.

/// The protocol's version.
pub const VERSION: u16 = 8;

/// What an opening says a connection is for.
pub const RENDEZVOUS: u8 = 1;
pub const CONTROL: u8 = 2;
pub const DATA: u8 = 3;
pub const REGISTRATION: u8 = 5;

/// How long the answer to an opening without a secret is, with the byte by which the connection is taken.
pub const ANSWER: usize = 17;

/// What a connection says first: whether it has a secret, for what it is, from which rank to which of how many, in which
/// job.
pub fn opening(version: u16, secret: bool, purpose: u8, [from, to, world_size]: [u32; 3], session: u64) -> Vec<u8> {
    let mut bytes = b"BNFR".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend([u8::from(secret), purpose]);
    bytes.extend(session.to_le_bytes());
    [from, to, world_size].iter().for_each(|number| bytes.extend(number.to_le_bytes()));
    bytes.extend([0, 1, 0, 0]);
    bytes
}

/// What a rank says to rank 0 after that: where it listens, what it wants to carry the operations (anything), its
/// algorithms, its machine.
pub fn hello() -> Vec<u8> {
    let own: std::net::SocketAddr = "127.0.0.1:1".parse().expect("an address");
    let body = postcard::to_stdvec(&(own, 0u8, "default", "machine")).expect("plain data");
    [(body.len() as u32).to_le_bytes().to_vec(), body].concat()
}
