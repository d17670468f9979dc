//! Control messages on a stream: a length, then the message.
//!
//! `length u32 little endian | postcard`. Postcard is not self-describing, and the length is bounded before anything is
//! allocated for it.

use std::io;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// The longest control message: a table of addresses or calls of some thousand ranks.
const LONGEST: usize = 256 << 10;

pub(crate) async fn write(stream: &mut (impl AsyncWrite + Unpin), message: &impl Serialize) -> io::Result<()> {
    let invalid = |e| io::Error::new(io::ErrorKind::InvalidInput, e);
    let bytes = postcard::to_stdvec(message).map_err(invalid)?;
    if bytes.len() > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a control message of {} bytes", bytes.len())));
    }
    let mut frame = (bytes.len() as u32).to_le_bytes().to_vec();
    frame.extend(bytes);
    stream.write_all(&frame).await
}

/// The next message; `None` where the stream ends between two messages.
pub(crate) async fn read<T: DeserializeOwned>(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    if stream.read(&mut length[..1]).await? == 0 {
        return Ok(None);
    }
    stream.read_exact(&mut length[1..]).await?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a control message of {length} bytes")));
    }
    let mut bytes = vec![0; length];
    stream.read_exact(&mut bytes).await?;
    postcard::from_bytes(&bytes).map(Some).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}

/// As [`read`], where a message must come, and within `limit`.
pub(crate) async fn expect<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
    limit: Duration,
) -> io::Result<T> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, format!("nothing came within {limit:?}"));
    let closed = || io::Error::new(io::ErrorKind::UnexpectedEof, "the connection was closed");
    tokio::time::timeout(limit, read(stream)).await.map_err(late)??.ok_or_else(closed)
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
    fn a_cut_message_and_a_huge_length_are_errors() {
        let mut wire = Vec::new();
        block_on(write(&mut wire, &"hello")).unwrap();
        assert!(block_on(read::<String>(&mut &wire[..wire.len() - 1])).is_err());
        assert!(block_on(read::<String>(&mut &[0xff; 8][..])).is_err());
    }
}
