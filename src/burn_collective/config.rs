//! How a session is set up.

use std::fmt;

use serde::{Deserialize, Serialize};

use burn_communication::Address;

use super::address::parts;
use super::error::CollectiveError;

/// Settings of a session, the same for all peers of a node; given to [`register`](crate::register).
///
/// With settings for several nodes (all four of `num_nodes`, `global_address`, `node_address` and `data_service_port`,
/// or none), the peers of all nodes take part in every operation.
///
/// The strategies are burn-collective's. Threads reduce in shared memory, every thread its share, so the local ones
/// change nothing. Between nodes, [`AllReduceStrategy::Ring`], the default, leaves the choice to the group, which takes
/// a ring for large tensors and fewer messages for small ones; `Tree` takes a binomial tree and `Centralized` the
/// direct exchange, whatever the size. The other two global strategies change nothing.
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

/// Setters of the settings that these fields hold, as they are or as `Some`.
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
        /// The number of peers on this node: 1 unless set.
        with_num_devices(num_devices: usize);
        /// How peers of a node all-reduce.
        with_local_all_reduce_strategy(local_all_reduce_strategy: AllReduceStrategy);
        /// How peers of a node reduce.
        with_local_reduce_strategy(local_reduce_strategy: ReduceStrategy);
        /// How peers of a node broadcast.
        with_local_broadcast_strategy(local_broadcast_strategy: BroadcastStrategy);
        /// The number of nodes.
        with_num_nodes(num_nodes: u32);
        /// Where the orchestrator is, with its port; see
        /// [`start_global_orchestrator`](crate::start_global_orchestrator).
        with_global_address(global_address: Address);
        /// Where the other nodes reach this one. Each node has its own.
        with_node_address(node_address: Address);
        /// The port on which this node meets the others, if it turns out to be node 0.
        with_data_service_port(data_service_port: u16);
        /// How nodes all-reduce.
        with_global_all_reduce_strategy(global_all_reduce_strategy: AllReduceStrategy);
        /// How nodes reduce.
        with_global_reduce_strategy(global_reduce_strategy: ReduceStrategy);
        /// How nodes broadcast.
        with_global_broadcast_strategy(global_broadcast_strategy: BroadcastStrategy);
    }

    /// Whether the settings for several nodes are all there or all absent.
    pub fn is_valid(&self) -> bool {
        let settings = [
            self.num_nodes.is_some(),
            self.global_address.is_some(),
            self.node_address.is_some(),
            self.data_service_port.is_some(),
        ];
        settings.iter().all(|set| *set == settings[0])
    }

    /// The settings for several nodes, if there are any, and whether the config can work.
    pub(super) fn global(&self) -> Result<Option<Global>, CollectiveError> {
        if !self.is_valid() || self.num_devices == 0 || self.num_nodes == Some(0) {
            return Err(CollectiveError::InvalidConfig);
        }
        let (Some(num_nodes), Some(orchestrator), Some(node), Some(data_service_port)) =
            (self.num_nodes, &self.global_address, &self.node_address, self.data_service_port)
        else {
            return Ok(None);
        };
        let (orchestrator, orchestrator_port) = parts(orchestrator)?;
        let (host, port) = parts(node)?;
        Ok(Some(Global {
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

/// How an all-reduce runs. All have the same result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AllReduceStrategy {
    /// Through one participant.
    Centralized,
    /// Along a tree of this arity.
    Tree(u32),
    /// Around a ring.
    Ring,
}

/// How a reduction to a root runs. All have the same result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReduceStrategy {
    /// Through one participant.
    Centralized,
    /// Along a tree of this arity.
    Tree(u32),
}

/// How a broadcast runs. All have the same result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BroadcastStrategy {
    /// From one participant to each other.
    Centralized,
    /// Along a tree of this arity.
    Tree(u32),
}

/// What a node of several needs to know.
pub(super) struct Global {
    pub num_nodes: u32,
    /// The orchestrator's host and port.
    pub orchestrator: (String, u16),
    /// Where the other nodes reach this one, and the port that tells it from others on its host.
    pub host: String,
    pub port: u16,
    pub data_service_port: u16,
    pub strategies: Strategies,
}

/// The global strategies, on which all nodes must agree.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Strategies {
    pub all_reduce: Option<AllReduceStrategy>,
    pub reduce: Option<ReduceStrategy>,
    pub broadcast: Option<BroadcastStrategy>,
}
