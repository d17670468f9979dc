//! Messages of the control plane on a stream: a length, then the message.
//!
//! `length u32 little endian | postcard`. Postcard is not self-describing, and the length is bounded before anything is
//! allocated for it.

#![allow(missing_docs, reason = "seen by the packages beside this one only")]

use std::io;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The longest message: a table of addresses or calls of some thousand ranks.
pub const LONGEST: usize = 256 << 10;

/// The message as a frame.
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let body = postcard::to_stdvec(message).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
    bounded(body.len(), io::ErrorKind::InvalidInput)?;
    Ok([&(body.len() as u32).to_le_bytes(), &body[..]].concat())
}

/// The length of the message that follows a frame's first bytes.
pub fn body_length(head: [u8; 4]) -> io::Result<usize> {
    bounded(u32::from_le_bytes(head) as usize, io::ErrorKind::InvalidData)
}

/// The message that a frame's body is, to its last byte.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => {
            let reason = format!("a message of {} bytes with {} more after it", body.len() - rest.len(), rest.len());
            Err(io::Error::new(io::ErrorKind::InvalidData, reason))
        }
        Err(e) => Err(io::Error::new(io::ErrorKind::InvalidData, e)),
    }
}

pub async fn write(stream: &mut (impl AsyncWrite + Unpin), message: &impl Serialize) -> io::Result<()> {
    stream.write_all(&encode(message)?).await
}

/// The next message; `None` where the stream ends between two messages.
pub async fn read<T: DeserializeOwned>(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<T>> {
    let mut head = [0; 4];
    if stream.read(&mut head[..1]).await? == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut head[1..]).await?;
    let mut body = vec![0; body_length(head)?];
    stream.read_exact(&mut body).await?;
    decode(&body).map(Some)
}

/// As [`read`], where a message must come, and within `limit`.
pub async fn expect<T: DeserializeOwned>(stream: &mut (impl AsyncRead + Unpin), limit: Duration) -> io::Result<T> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("nothing came within {limit:?}"));
    let closed = || io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed");
    tokio::time::timeout(limit, read(stream)).await.map_err(late)??.ok_or_else(closed)
}

fn bounded(length: usize, kind: io::ErrorKind) -> io::Result<usize> {
    if length > LONGEST {
        return Err(io::Error::new(kind, format!("a message of {length} bytes, where {LONGEST} are allowed")));
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    #[test]
    fn messages_come_back_and_a_clean_end_is_none() {
        let mut wire = Vec::new();
        block_on(write(&mut wire, &("hello", 7u64))).unwrap();
        let mut stream = &wire[..];
        assert_eq!(block_on(read::<(String, u64)>(&mut stream)).unwrap(), Some(("hello".into(), 7)));
        assert_eq!(block_on(read::<(String, u64)>(&mut stream)).unwrap(), None);
    }

    #[test]
    fn a_cut_message_a_huge_length_and_too_long_a_message_are_errors() {
        let mut wire = Vec::new();
        block_on(write(&mut wire, &"hello")).unwrap();
        assert!(block_on(read::<String>(&mut &wire[..wire.len() - 1])).is_err());
        assert!(block_on(read::<String>(&mut &[0xff; 8][..])).is_err());
        assert!(encode(&vec![0u8; LONGEST]).is_err());
    }
}
