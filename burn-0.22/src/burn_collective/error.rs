//! Errors of a session.

use std::fmt;

/// Why a call failed. The variants are burn-collective's, apart from [`SeveralNodes`](Self::SeveralNodes).
///
/// If peers disagree, all of them get the same error, and the session remains usable. `Debug` gives the message.
#[derive(Clone, PartialEq, Eq)]
pub enum CollectiveError {
    /// The [config](super::CollectiveConfig) has no devices.
    InvalidConfig,
    /// The config asks for several nodes.
    SeveralNodes,
    /// The peer is not registered, or has finished before.
    MultipleUnregister,
    /// A peer with this id is already registered.
    MultipleRegister,
    /// The config differs from that of the first registered peer, or all of its `num_devices` peers are registered
    /// already.
    RegisterParamsMismatch,
    /// The tensors differ in shape or element type.
    AllReduceShapeMismatch,
    /// The reductions differ, or some peers called something else than all_reduce.
    AllReduceOperationMismatch,
    /// The tensors differ in shape or element type.
    ReduceShapeMismatch,
    /// The reductions differ, or some peers called broadcast.
    ReduceOperationMismatch,
    /// The roots differ.
    ReduceRootMismatch,
    /// No peer passed a tensor.
    BroadcastNoTensor,
    /// More than one peer passed a tensor.
    BroadcastMultipleTensors,
    /// The session was reset while the call waited.
    LocalServerMissing,
    /// The caller, or the root of a reduction, is not registered.
    RegisterNotFirstOperation,
    /// Any other error, as text: a deadline that passed, a tensor that cannot be read, concurrent calls of one peer.
    Other(String),
}

impl fmt::Display for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CollectiveError::InvalidConfig => "invalid config: num_devices is at least 1",
            CollectiveError::SeveralNodes => {
                "the config asks for several nodes, and a session is of threads of one process on burn 0.22; for a \
                 process that is a rank of a larger job use `Group::from_env` and `tensor::operation`"
            }
            CollectiveError::MultipleUnregister => "the peer is not registered (any more)",
            CollectiveError::MultipleRegister => "a peer with this id is registered already",
            CollectiveError::RegisterParamsMismatch => {
                "the config differs from that of the peers that registered before, or as many peers as it has devices \
                 are registered already"
            }
            CollectiveError::AllReduceShapeMismatch => "all_reduce: the peers' tensors differ in shape or element type",
            CollectiveError::AllReduceOperationMismatch => {
                "all_reduce: the peers call different reductions or operations"
            }
            CollectiveError::ReduceShapeMismatch => "reduce: the peers' tensors differ in shape or element type",
            CollectiveError::ReduceOperationMismatch => "reduce: the peers call different reductions or operations",
            CollectiveError::ReduceRootMismatch => "reduce: the peers name different roots",
            CollectiveError::BroadcastNoTensor => "broadcast: no peer passes a tensor, and exactly one must",
            CollectiveError::BroadcastMultipleTensors => "broadcast: several peers pass a tensor, and exactly one must",
            CollectiveError::LocalServerMissing => "the session was reset",
            CollectiveError::RegisterNotFirstOperation => {
                "the caller or the root is not registered: every peer calls `register` first"
            }
            CollectiveError::Other(reason) => reason,
        })
    }
}

impl fmt::Debug for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for CollectiveError {}
