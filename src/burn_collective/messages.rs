//! Messages between nodes and the orchestrator: a node sends one frame and receives one.

use serde::{Deserialize, Serialize};

use super::config::Strategies;
use super::error::GlobalCollectiveError;
use super::names::NodeId;

/// The protocol version. It changes with the messages.
pub(super) const PROTOCOL: u32 = 0xB0F1_0001;

/// A node's registration for a session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Registration {
    /// The first field, so that it can be decoded whatever follows.
    pub protocol: u32,
    pub host: String,
    /// The port of the node address, or the data port if it has none. Host and port identify a node.
    pub port: u16,
    /// The port on which the node accepts the others if it becomes node 0.
    pub data_port: u16,
    pub num_nodes: u32,
    pub lowest_peer: u32,
    pub strategies: Strategies,
}

/// The orchestrator's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Answer {
    /// All nodes have registered: the receiver's id, and the hosts and data ports of all nodes, by id.
    Start {
        node: NodeId,
        nodes: Vec<(String, u16)>,
    },
    Refused(GlobalCollectiveError),
}

#[cfg(test)]
mod tests {
    use super::super::config::{AllReduceStrategy, BroadcastStrategy, ReduceStrategy};
    use super::*;

    #[test]
    fn fuzz_registrations() {
        let strategies = Strategies {
            all_reduce: Some(AllReduceStrategy::Tree(2)),
            reduce: Some(ReduceStrategy::Centralized),
            broadcast: Some(BroadcastStrategy::Tree(3)),
        };
        let (host, port, data_port) = ("node-7".to_owned(), 3000, 3001);
        let registration =
            Registration { protocol: PROTOCOL, host, port, data_port, num_nodes: 2, lowest_peer: 4, strategies };
        bonfire_testing::fuzz::fuzz_frames("registration", &[registration]);
    }

    #[test]
    fn fuzz_answers() {
        let nodes = vec![("node-7".to_owned(), 3001), ("::1".to_owned(), 3002)];
        let refusals = [GlobalCollectiveError::DoubleRegister, GlobalCollectiveError::Server("late".into())];
        let mut answers = refusals.map(Answer::Refused).to_vec();
        answers.push(Answer::Start { node: NodeId::from(1usize), nodes });
        bonfire_testing::fuzz::fuzz_frames("orchestrator", &answers);
    }
}
