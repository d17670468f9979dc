//! What belongs to the operation whose turn it is.

use std::collections::HashMap;
use std::sync::Arc;

use crate::plan::{self, Algorithm, Plan};
use crate::reduce::Scratch;
use crate::types::Operation;

/// One for each group and rank: operations of a rank run one after the other.
pub(super) struct Lane {
    /// Collective operations so far.
    pub sequence: u64,
    /// Messages so far, to and from each rank.
    sent: Vec<u64>,
    received: Vec<u64>,
    pub plans: Plans,
    /// Memory that is grown once and kept.
    pub scratch: [Scratch; 3],
}

impl Lane {
    pub fn new(world_size: usize) -> Lane {
        Lane {
            sequence: 0,
            sent: vec![0; world_size],
            received: vec![0; world_size],
            plans: Plans::default(),
            scratch: Default::default(),
        }
    }

    /// The number of an operation that begins: collectives are counted in the group, messages in the order of their pair.
    /// `message` is the other rank and whether this one sends.
    #[inline]
    pub fn number(&mut self, operation: Operation, message: Option<(usize, bool)>) -> u64 {
        let counter = match (operation, message) {
            (Operation::Send, Some((to, true))) => &mut self.sent[to],
            (Operation::Send, Some((from, false))) => &mut self.received[from],
            // Between two ranks they come in order.
            (_, Some(_)) => return 0,
            (_, None) => &mut self.sequence,
        };
        *counter += 1;
        *counter - 1
    }
}

/// This rank's plans so far, by operation, algorithm, number of ranks and root. They do not depend on the length, so there
/// are few.
#[derive(Default)]
pub(super) struct Plans(HashMap<(Operation, Algorithm, usize, usize), Arc<Plan>>);

impl Plans {
    /// The plan of `rank`, which is the same in all groups of so many ranks.
    pub fn plan(
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
