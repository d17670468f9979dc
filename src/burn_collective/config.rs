//! Configuration of a session.

use std::fmt;

use serde::{Deserialize, Serialize};

use burn_communication::Address;

use super::address::parse;
use super::error::CollectiveError;

/// The configuration of a session, the same for all peers of a node. Pass it to [`register`](crate::register).
///
/// A session over several nodes needs all four of `num_nodes`, `global_address`, `node_address` and
/// `data_service_port`; a session on one node has none of them. The peers of all nodes take part in every operation.
///
/// The strategies are burn-collective's. The local ones have no effect: threads reduce in shared memory, each a share.
/// Between nodes, the default [`AllReduceStrategy::Ring`] leaves the choice to the group, which uses a ring for large
/// tensors and fewer messages for small ones. `Tree` uses a binomial tree and `Centralized` the direct exchange, for
/// every size. The other two global strategies have no effect.
///
/// ```
/// use bonfire::CollectiveConfig;
///
/// let config = CollectiveConfig::default().with_num_devices(2);
/// assert!(config.is_valid());
/// assert!(!config.with_num_nodes(2).is_valid());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
        /// Sets the number of peers on this node. Default: 1
        with_num_devices(num_devices: usize);
        /// Sets the all-reduce strategy within a node. It has no effect.
        with_local_all_reduce_strategy(local_all_reduce_strategy: AllReduceStrategy);
        /// Sets the reduce strategy within a node. It has no effect.
        with_local_reduce_strategy(local_reduce_strategy: ReduceStrategy);
        /// Sets the broadcast strategy within a node. It has no effect.
        with_local_broadcast_strategy(local_broadcast_strategy: BroadcastStrategy);
        /// Sets the number of nodes. Default: none, for a session on one node.
        with_num_nodes(num_nodes: u32);
        /// Sets the address of the orchestrator, including its port; see
        /// [`start_global_orchestrator`](crate::start_global_orchestrator). Default: none
        with_global_address(global_address: Address);
        /// Sets the address at which the other nodes reach this one. Each node has its own. Its port only tells nodes
        /// on one host apart; without one, the data service port does. Default: none
        with_node_address(node_address: Address);
        /// Sets the port on which this node accepts the others if it becomes node 0. Default: none
        with_data_service_port(data_service_port: u16);
        /// Sets the all-reduce strategy between nodes, the same on all of them. Default:
        /// [`Ring`](AllReduceStrategy::Ring), which leaves the choice to the group
        with_global_all_reduce_strategy(global_all_reduce_strategy: AllReduceStrategy);
        /// Sets the reduce strategy between nodes. It has no effect.
        with_global_reduce_strategy(global_reduce_strategy: ReduceStrategy);
        /// Sets the broadcast strategy between nodes. It has no effect.
        with_global_broadcast_strategy(global_broadcast_strategy: BroadcastStrategy);
    }

    /// Whether the settings for several nodes are all present or all absent. [`register`](crate::register) also
    /// requires counts above 0 and well-formed addresses.
    pub fn is_valid(&self) -> bool {
        let settings = [
            self.num_nodes.is_some(),
            self.global_address.is_some(),
            self.node_address.is_some(),
            self.data_service_port.is_some(),
        ];
        settings.iter().all(|set| *set == settings[0])
    }

    /// Checks the config and returns the settings for several nodes, if it has them.
    pub(super) fn multi_node(&self) -> Result<Option<MultiNode>, CollectiveError> {
        if !self.is_valid() || self.num_devices == 0 || self.num_nodes == Some(0) {
            return Err(CollectiveError::InvalidConfig);
        }
        let (Some(num_nodes), Some(orchestrator), Some(node), Some(data_service_port)) =
            (self.num_nodes, &self.global_address, &self.node_address, self.data_service_port)
        else {
            return Ok(None);
        };
        let (orchestrator, orchestrator_port) = parse(orchestrator)?;
        let (host, port) = parse(node)?;
        Ok(Some(MultiNode {
            num_nodes,
            orchestrator: (orchestrator, orchestrator_port.ok_or(CollectiveError::InvalidConfig)?),
            host,
            port: port.unwrap_or(data_service_port),
            data_service_port,
            strategies: Strategies {
                all_reduce: self.global_all_reduce_strategy,
                reduce: self.global_reduce_strategy,
                broadcast: self.global_broadcast_strategy,
            },
        }))
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

impl fmt::Display for CollectiveConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} devices (all_reduce {:?}, reduce {:?}, broadcast {:?})",
            self.num_devices, self.local_all_reduce_strategy, self.local_reduce_strategy, self.local_broadcast_strategy
        )?;
        if let Some(num_nodes) = self.num_nodes {
            write!(f, " on each of {num_nodes} nodes")?;
        }
        if let Some(address) = &self.global_address {
            write!(f, ", orchestrator at {address}")?;
        }
        if let Some(address) = &self.node_address {
            write!(f, ", this node at {address}")?;
        }
        if let Some(port) = self.data_service_port {
            write!(f, ", data on port {port}")?;
        }
        Ok(())
    }
}

/// How an all-reduce runs. [`CollectiveConfig`] says which strategies have an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AllReduceStrategy {
    /// Through one participant.
    Centralized,
    /// Along a tree of this arity.
    Tree(u32),
    /// Around a ring.
    Ring,
}

/// How a reduction to a root runs. It has no effect: see [`CollectiveConfig`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReduceStrategy {
    /// Through one participant.
    Centralized,
    /// Along a tree of this arity.
    Tree(u32),
}

/// How a broadcast runs. It has no effect: see [`CollectiveConfig`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BroadcastStrategy {
    /// From one participant directly to each of the others.
    Centralized,
    /// Along a tree of this arity.
    Tree(u32),
}

/// The settings for several nodes.
pub(super) struct MultiNode {
    pub num_nodes: u32,
    /// The orchestrator's host and port.
    pub orchestrator: (String, u16),
    /// The host at which the other nodes reach this one.
    pub host: String,
    /// A port that distinguishes this node from others on its host.
    pub port: u16,
    pub data_service_port: u16,
    pub strategies: Strategies,
}

/// The global strategies. They must be the same on all nodes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Strategies {
    pub all_reduce: Option<AllReduceStrategy>,
    pub reduce: Option<ReduceStrategy>,
    pub broadcast: Option<BroadcastStrategy>,
}
