//! State that one operation at a time uses: sequence numbers, plans and scratch memory.

use std::collections::HashMap;
use std::sync::Arc;

use crate::plan::{self, Algorithm, Plan};
use crate::reduce::Scratch;
use crate::types::Operation;

/// The state of one rank in one group that operations use in turn. A rank runs one operation at a time, so there is
/// one.
pub(super) struct Workspace {
    /// Collectives so far.
    pub sequence: u64,
    /// Messages so far, to and from each rank.
    sent: Vec<u64>,
    received: Vec<u64>,
    pub plans: PlanCache,
    /// Scratch buffers, which grow on demand and never shrink.
    pub scratch: [Scratch; 3],
}

impl Workspace {
    pub fn new(world_size: usize) -> Workspace {
        Workspace {
            sequence: 0,
            sent: vec![0; world_size],
            received: vec![0; world_size],
            plans: PlanCache::default(),
            scratch: Default::default(),
        }
    }

    /// Returns the number of an operation that begins. Collectives are numbered in the group, messages in the order of
    /// their pair. `message` is the peer and whether this rank sends.
    #[inline]
    pub fn number(&mut self, operation: Operation, message: Option<(usize, bool)>) -> u64 {
        let counter = match (operation, message) {
            (Operation::Send, Some((to, true))) => &mut self.sent[to],
            (Operation::Send, Some((from, false))) => &mut self.received[from],
            // These need no number: between two ranks they arrive in order.
            (_, Some(_)) => return 0,
            (_, None) => &mut self.sequence,
        };
        *counter += 1;
        *counter - 1
    }
}

/// This rank's plans, by operation, algorithm, number of ranks and root. Plans do not depend on the length, so there
/// are few.
#[derive(Default)]
pub(super) struct PlanCache(HashMap<(Operation, Algorithm, usize, usize), Arc<Plan>>);

impl PlanCache {
    /// Returns the plan of `rank`, which is the same in all groups of `world_size` ranks.
    pub fn get(
        &mut self,
        operation: Operation,
        algorithm: Algorithm,
        rank: usize,
        world_size: usize,
        root: usize,
    ) -> Arc<Plan> {
        let make = || Arc::new(plan::plan(operation, algorithm, rank, world_size, root));
        self.0.entry((operation, algorithm, world_size, root)).or_insert_with(make).clone()
    }
}
