//! Errors of a session.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::names::NodeId;

/// Why a call failed. The variants are burn-collective's.
///
/// If peers disagree, all of them get the same error, and the session remains usable. `Debug` gives the message.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum CollectiveError {
    /// The [config](crate::CollectiveConfig) cannot work: it has only some of the settings for several nodes, its
    /// number of devices or nodes is 0, or an address is malformed.
    #[error(
        "invalid config: num_nodes, global_address, node_address and data_service_port belong together, counts are at \
         least 1, and addresses are host:port"
    )]
    InvalidConfig,
    /// The peer is not registered, or has finished before.
    #[error("the peer is not registered (any more)")]
    MultipleUnregister,
    /// A peer with this id is already registered.
    #[error("a peer with this id is registered already")]
    MultipleRegister,
    /// The config differs from that of the first registered peer, or all of its `num_devices` peers are registered
    /// already.
    #[error(
        "the config differs from that of the peers that registered before, or as many peers as it has devices are \
         registered already"
    )]
    RegisterParamsMismatch,
    /// The tensors differ in shape or element type, or the sets of gradients differ.
    #[error(
        "all_reduce: the peers' tensors differ in shape or element type, or they have gradients of other parameters"
    )]
    AllReduceShapeMismatch,
    /// The reductions differ, or some peers called something else than all_reduce.
    #[error("all_reduce: the peers call different reductions or operations")]
    AllReduceOperationMismatch,
    /// The tensors differ in shape or element type.
    #[error("reduce: the peers' tensors differ in shape or element type")]
    ReduceShapeMismatch,
    /// The reductions differ, or some peers called broadcast.
    #[error("reduce: the peers call different reductions or operations")]
    ReduceOperationMismatch,
    /// The roots differ, or the root's id is registered on several nodes.
    #[error("reduce: the peers name different roots, or the root's id is not unique over the nodes")]
    ReduceRootMismatch,
    /// Not returned: a broadcast's root is the peer that passes the tensor.
    #[error("broadcast: the peers name different roots")]
    BroadcastRootMismatch,
    /// No peer passed a tensor.
    #[error("broadcast: no peer passes a tensor, and exactly one must")]
    BroadcastNoTensor,
    /// More than one peer passed a tensor.
    #[error("broadcast: several peers pass a tensor, and exactly one must")]
    BroadcastMultipleTensors,
    /// The session was reset while the call waited.
    #[error("the session was reset")]
    LocalServerMissing,
    /// The caller, or the root of a reduction, is not registered.
    #[error("the caller or the root is not registered: every peer calls `register` first")]
    RegisterNotFirstOperation,
    /// An error between nodes.
    #[error("between nodes: {0}")]
    Global(#[from] GlobalCollectiveError),
    /// Any other error, as text: a deadline that passed, a tensor that cannot be read, concurrent calls of one peer.
    #[error("{0}")]
    Other(String),
}

/// An error between nodes. The variants are burn-collective's.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum GlobalCollectiveError {
    /// Not returned: an operation before registration is [`CollectiveError::RegisterNotFirstOperation`].
    #[error("all_reduce before registration")]
    AllReduceBeforeRegister,
    /// Not returned: the ring works for every size.
    #[error("the tensor is too small for a ring")]
    RingReduceImpossible,
    /// Not returned: a node leaves with its last peer.
    #[error("the node is not registered")]
    NotRegisteredOnFinish,
    /// Not returned: a node leaves with its last peer.
    #[error("the node is still registering")]
    PendingRegisterOnFinish,
    /// The nodes disagree about their number or their strategies. All waiting nodes get this error.
    #[error("the nodes registered with different num_nodes or global strategies")]
    RegisterParamsMismatch,
    /// Two nodes have the same address. All waiting nodes get this error.
    #[error("two nodes registered with the same node address")]
    DoubleRegister,
    /// Not returned: peers on all nodes get the same error as peers on one.
    #[error("the nodes call different operations")]
    AllReduceParamsMismatch,
    /// Not returned.
    #[error("the first message was no registration")]
    FirstMsgNotInit,
    /// A message does not belong to this protocol; for instance, it is from another version.
    #[error("the message does not belong to this version of the orchestrator protocol")]
    InvalidMessage,
    /// A node sent a message that could not be decoded.
    #[error("a node sent a message that cannot be decoded")]
    PeerSentIncoherentTensor,
    /// The node died, its connection broke, or it finished before the others. The session is no longer usable.
    #[error("{0} is gone: its process ended or its connection broke")]
    PeerLost(NodeId),
    /// Any other error, as text.
    #[error("{0}")]
    Server(String),
    /// The orchestrator's answer could not be decoded or is inconsistent.
    #[error("the orchestrator's answer is not understood; is another program or version listening at global_address?")]
    WrongOrchestratorResponse,
    /// The orchestrator cannot be reached at its address.
    #[error("the orchestrator cannot be reached; is it running, and is global_address right?")]
    OrchestratorUnreachable,
}

impl fmt::Debug for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Debug for GlobalCollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
