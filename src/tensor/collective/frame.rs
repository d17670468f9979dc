//! What nodes and the orchestrator say to each other: one frame there, one back. A frame is its length as four bytes,
//! little-endian, and a message in postcard's encoding.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::config::Strategies;
use super::error::GlobalCollectiveError;
use super::names::NodeId;

/// No message is longer.
pub(super) const LIMIT: usize = 64 << 10;

/// Changes with the messages.
pub(super) const PROTOCOL: u32 = 0xB0F1_0001;

/// A node's wish to take part.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Registration {
    /// First, so that it is understood whatever follows.
    pub protocol: u32,
    pub host: String,
    /// The node address's own port, if it has one: with the host it tells nodes apart.
    pub port: u16,
    /// Where the node meets the others if it becomes node 0.
    pub data_port: u16,
    pub num_nodes: u32,
    pub lowest_peer: u32,
    pub strategies: Strategies,
}

/// The orchestrator's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Answer {
    /// All nodes are there: who the receiver is, and where all are, by id.
    Start {
        node: NodeId,
        nodes: Vec<(String, u16)>,
    },
    Refused(GlobalCollectiveError),
}

/// The message as a frame.
pub(super) fn encode(message: &impl Serialize) -> Result<Vec<u8>, GlobalCollectiveError> {
    let body = postcard::to_stdvec(message).map_err(|error| GlobalCollectiveError::Server(error.to_string()))?;
    let length = length(body.len() as u64)?;
    Ok([&(length as u32).to_le_bytes(), &body[..]].concat())
}

/// The length in a frame's first bytes.
pub(super) fn body_length(head: [u8; 4]) -> Result<usize, GlobalCollectiveError> {
    length(u32::from_le_bytes(head).into())
}

/// The message in a frame's body.
pub(super) fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, GlobalCollectiveError> {
    postcard::from_bytes(body).map_err(|_| GlobalCollectiveError::InvalidMessage)
}

fn length(bytes: u64) -> Result<usize, GlobalCollectiveError> {
    if bytes > LIMIT as u64 { Err(GlobalCollectiveError::InvalidMessage) } else { Ok(bytes as usize) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_and_long_or_broken_ones_are_refused() {
        let answer = Answer::Start { node: NodeId::from(1u32), nodes: vec![("host".into(), 7); 2] };
        let frame = encode(&answer).unwrap();
        let (head, body) = frame.split_first_chunk().unwrap();
        assert_eq!(body_length(*head), Ok(body.len()));
        assert_eq!(decode::<Answer>(body), Ok(answer));
        for cut in 0..body.len() {
            assert_eq!(decode::<Answer>(&body[..cut]), Err(GlobalCollectiveError::InvalidMessage));
        }
        assert_eq!(encode(&vec![0u8; LIMIT]), Err(GlobalCollectiveError::InvalidMessage));
        assert_eq!(body_length(*b"GET "), Err(GlobalCollectiveError::InvalidMessage));
    }
}
