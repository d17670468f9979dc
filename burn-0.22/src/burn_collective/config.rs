//! Peers, and the configuration of a session.

use std::fmt;

use super::error::CollectiveError;

/// The id of a peer, a participant of collective operations: usually a thread with a device of its own. It is unique in
/// the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u32);

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerId({})", self.0)
    }
}

macro_rules! from_numbers {
    ($($number:ty),*) => {$(
        impl From<$number> for PeerId {
            /// Truncates numbers to 32 bits; negative ones wrap.
            fn from(number: $number) -> Self {
                PeerId(number as u32)
            }
        }
    )*};
}

from_numbers!(u32, i32, usize);

/// The address of a node or of an orchestrator.
pub type Address = String;

/// The configuration of a session, the same for all peers. Pass it to [`register`](super::register).
///
/// It has burn-collective's settings. Strategies have no effect: threads reduce in shared memory, each a share.
/// [`register`](super::register) refuses a config with any of `num_nodes`, `global_address`, `node_address` and
/// `data_service_port`, which are for several nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveConfig {
    pub(super) num_devices: usize,
    local_all_reduce_strategy: AllReduceStrategy,
    local_reduce_strategy: ReduceStrategy,
    local_broadcast_strategy: BroadcastStrategy,
    num_nodes: Option<u32>,
    global_address: Option<Address>,
    node_address: Option<Address>,
    data_service_port: Option<u16>,
    global_all_reduce_strategy: Option<AllReduceStrategy>,
    global_reduce_strategy: Option<ReduceStrategy>,
    global_broadcast_strategy: Option<BroadcastStrategy>,
}

/// Defines setters of fields of the given types, or of `Option`s of them.
macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident($field:ident: $type:ty);)*) => {$(
        $(#[$doc])*
        pub fn $name(mut self, $field: $type) -> Self {
            self.$field = $field.into();
            self
        }
    )*};
}

impl CollectiveConfig {
    setters! {
        /// Sets the number of peers. Default: 1
        with_num_devices(num_devices: usize);
        /// Sets the all-reduce strategy within a node. It has no effect.
        with_local_all_reduce_strategy(local_all_reduce_strategy: AllReduceStrategy);
        /// Sets the reduce strategy within a node. It has no effect.
        with_local_reduce_strategy(local_reduce_strategy: ReduceStrategy);
        /// Sets the broadcast strategy within a node. It has no effect.
        with_local_broadcast_strategy(local_broadcast_strategy: BroadcastStrategy);
        /// Sets the number of nodes, which [`register`](super::register) refuses.
        with_num_nodes(num_nodes: u32);
        /// Sets the address of an orchestrator, which [`register`](super::register) refuses.
        with_global_address(global_address: Address);
        /// Sets the address of this node, which [`register`](super::register) refuses.
        with_node_address(node_address: Address);
        /// Sets the port of this node, which [`register`](super::register) refuses.
        with_data_service_port(data_service_port: u16);
        /// Sets the all-reduce strategy between nodes. It has no effect.
        with_global_all_reduce_strategy(global_all_reduce_strategy: AllReduceStrategy);
        /// Sets the reduce strategy between nodes. It has no effect.
        with_global_reduce_strategy(global_reduce_strategy: ReduceStrategy);
        /// Sets the broadcast strategy between nodes. It has no effect.
        with_global_broadcast_strategy(global_broadcast_strategy: BroadcastStrategy);
    }

    /// Whether [`register`](super::register) takes this config.
    pub fn is_valid(&self) -> bool {
        self.check().is_ok()
    }

    /// Fails for a config that cannot work here.
    pub(super) fn check(&self) -> Result<(), CollectiveError> {
        let addresses = self.global_address.is_some() || self.node_address.is_some();
        match self.num_devices {
            _ if addresses || self.num_nodes.is_some() || self.data_service_port.is_some() => {
                Err(CollectiveError::SeveralNodes)
            }
            0 => Err(CollectiveError::InvalidConfig),
            _ => Ok(()),
        }
    }
}

impl Default for CollectiveConfig {
    fn default() -> Self {
        CollectiveConfig {
            num_devices: 1,
            local_all_reduce_strategy: AllReduceStrategy::Tree(2),
            local_reduce_strategy: ReduceStrategy::Tree(2),
            local_broadcast_strategy: BroadcastStrategy::Tree(2),
            num_nodes: None,
            global_address: None,
            node_address: None,
            data_service_port: None,
            global_all_reduce_strategy: Some(AllReduceStrategy::Ring),
            global_reduce_strategy: Some(ReduceStrategy::Tree(2)),
            global_broadcast_strategy: Some(BroadcastStrategy::Tree(2)),
        }
    }
}

/// How an all-reduce runs. It has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AllReduceStrategy {
    /// Through one participant.
    Centralized,
    /// Along a tree of this arity.
    Tree(u32),
    /// Around a ring.
    Ring,
}

/// How a reduction to a root runs. It has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceStrategy {
    /// Through one participant.
    Centralized,
    /// Along a tree of this arity.
    Tree(u32),
}

/// How a broadcast runs. It has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BroadcastStrategy {
    /// From one participant directly to each of the others.
    Centralized,
    /// Along a tree of this arity.
    Tree(u32),
}
