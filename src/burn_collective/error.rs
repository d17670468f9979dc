//! What can go wrong in a session.

use serde::{Deserialize, Serialize};

use super::names::NodeId;

/// Why a call of the tensor API failed. The variants are burn-collective's.
///
/// Where peers disagree, all of them get the same error, and the session goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum CollectiveError {
    /// The [config](crate::CollectiveConfig) can never work: it has some of the settings for several nodes and lacks
    /// others, or has no devices or nodes, or an address is malformed.
    #[error(
        "invalid config: num_nodes, global_address, node_address and data_service_port belong together, counts are at \
         least 1, and addresses are host:port"
    )]
    InvalidConfig,
    /// The peer is not registered, or has finished before.
    #[error("the peer is not registered (any more)")]
    MultipleUnregister,
    /// A peer with this id is registered.
    #[error("a peer with this id is registered already")]
    MultipleRegister,
    /// The config differs from that of the first peer that registered, or all of its devices are there already.
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
    /// Not returned: a broadcast's root is the peer that brings the tensor.
    #[error("broadcast: the peers name different roots")]
    BroadcastRootMismatch,
    /// Nobody brought a tensor.
    #[error("broadcast: no peer brings a tensor, and exactly one must")]
    BroadcastNoTensor,
    /// More than one peer brought a tensor.
    #[error("broadcast: several peers bring a tensor, and exactly one must")]
    BroadcastMultipleTensors,
    /// The session was reset while the call waited.
    #[error("the session was reset")]
    LocalServerMissing,
    /// The caller, or the root of a reduction, is not registered.
    #[error("the caller or the root is not registered: every peer calls `register` first")]
    RegisterNotFirstOperation,
    /// What happened between the nodes.
    #[error("between nodes: {0}")]
    Global(#[from] GlobalCollectiveError),
    /// Anything else, in words: a deadline that passed, a tensor that cannot be read, two calls of one peer at a time.
    #[error("{0}")]
    Other(String),
}

/// What went wrong between nodes. The variants are burn-collective's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
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
    /// The nodes disagree about their number or their strategies. All that wait get this.
    #[error("the nodes registered with different num_nodes or global strategies")]
    RegisterParamsMismatch,
    /// Two nodes have the same address. All that wait get this.
    #[error("two nodes registered with the same node address")]
    DoubleRegister,
    /// Not returned: peers on all nodes get the same error as peers on one.
    #[error("the nodes call different operations")]
    AllReduceParamsMismatch,
    /// Not returned.
    #[error("the first message was no registration")]
    FirstMsgNotInit,
    /// A message that is none of this protocol, for instance from another version.
    #[error("the message is none of this version's orchestrator protocol")]
    InvalidMessage,
    /// A node sent something else than what was expected.
    #[error("a node sent something that is not understood")]
    PeerSentIncoherentTensor,
    /// The node died, its connection broke, or it finished before the others. The session cannot go on.
    #[error("{0} is gone: its process ended or its connection broke")]
    PeerLost(NodeId),
    /// Anything else, in words.
    #[error("{0}")]
    Server(String),
    /// The orchestrator's answer makes no sense.
    #[error("the orchestrator's answer is not understood; is something else listening there, or another version?")]
    WrongOrchestratorResponse,
    /// Nothing listens where the orchestrator should be.
    #[error("the orchestrator cannot be reached; is it running, and is global_address right?")]
    OrchestratorUnreachable,
}
