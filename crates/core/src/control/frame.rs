//! Framing of control messages on a stream: a length, then the message.
//!
//! `length u32 little endian | postcard`. Postcard is not self-describing. The length is bounded before anything is
//! allocated for it.

#![allow(missing_docs, reason = "used by the sibling packages only")]

use std::io;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Maximum length of a message in bytes: enough for the addresses or calls of some thousand ranks.
pub const LONGEST: usize = 256 << 10;

/// Bytes of the length before a message.
pub const HEAD: usize = 4;

/// Encodes a message as a frame.
pub fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let body = postcard::to_stdvec(message).map_err(|e| io::Error::new(io::ErrorKind::InvalidInput, e))?;
    bounded(body.len(), io::ErrorKind::InvalidInput)?;
    Ok([&(body.len() as u32).to_le_bytes(), &body[..]].concat())
}

/// Decodes the length of the message from the first bytes of a frame.
pub fn body_length(head: [u8; HEAD]) -> io::Result<usize> {
    bounded(u32::from_le_bytes(head) as usize, io::ErrorKind::InvalidData)
}

/// Decodes a message from the body of a frame. The message must fill the body.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> io::Result<T> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => {
            let reason = format!("a message of {} bytes, followed by {} more", body.len() - rest.len(), rest.len());
            Err(io::Error::new(io::ErrorKind::InvalidData, reason))
        }
        Err(e) => Err(io::Error::new(io::ErrorKind::InvalidData, e)),
    }
}

/// Writes a message as a frame.
pub async fn write(stream: &mut (impl AsyncWrite + Unpin), message: &impl Serialize) -> io::Result<()> {
    stream.write_all(&encode(message)?).await
}

/// Reads the next message. Returns `None` if the stream ends between two messages.
pub async fn read<T: DeserializeOwned>(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<T>> {
    let mut head = [0; HEAD];
    if stream.read(&mut head[..1]).await? == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut head[1..]).await?;
    let mut body = vec![0; body_length(head)?];
    stream.read_exact(&mut body).await?;
    decode(&body).map(Some)
}

/// Reads a message that must arrive within `limit`. The end of the stream is an error.
pub async fn expect<T: DeserializeOwned>(stream: &mut (impl AsyncRead + Unpin), limit: Duration) -> io::Result<T> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("no message within {limit:?}"));
    let closed = || io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed");
    tokio::time::timeout(limit, read(stream)).await.map_err(late)??.ok_or_else(closed)
}

fn bounded(length: usize, kind: io::ErrorKind) -> io::Result<usize> {
    if length > LONGEST {
        return Err(io::Error::new(kind, format!("a message of {length} bytes exceeds the limit of {LONGEST}")));
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
    fn messages_round_trip_and_a_clean_end_is_none() {
        let mut wire = Vec::new();
        block_on(write(&mut wire, &("hello", 7u64))).unwrap();
        let mut stream = &wire[..];
        assert_eq!(block_on(read::<(String, u64)>(&mut stream)).unwrap(), Some(("hello".into(), 7)));
        assert_eq!(block_on(read::<(String, u64)>(&mut stream)).unwrap(), None);
    }

    #[test]
    fn truncated_and_oversized_messages_are_errors() {
        let mut wire = Vec::new();
        block_on(write(&mut wire, &"hello")).unwrap();
        assert!(block_on(read::<String>(&mut &wire[..wire.len() - 1])).is_err());
        assert!(block_on(read::<String>(&mut &[0xff; 8][..])).is_err());
        assert!(encode(&vec![0u8; LONGEST]).is_err());
    }
}
