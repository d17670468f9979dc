//! In which order blocks are gathered and their gradients are sent.
//!
//! All ranks must start the same operations in the same order. What a rank starts is a function of the blocks that its
//! passes use and of the step before, and never of time. So ranks that run the same model agree without a message, and
//! ranks that use different blocks make different calls, which their group reports.

use super::ROOT;

/// What a step has learned for the next one. It is the same on all ranks.
#[derive(Clone, Default)]
pub(super) struct History {
    /// The blocks in the order in which the forward pass gathered them.
    pub forward: Vec<usize>,
    /// By block, whether a rank's backward pass needed its values in the last step. Empty before the first step.
    pub needed: Vec<bool>,
    /// By block, whether all ranks had all its gradients. Empty before the first step.
    pub complete: Vec<bool>,
}

impl History {
    /// Whether a forward pass has gathered what the one before did, so far.
    pub fn is_repeated_by(&self, forward: &[usize]) -> bool {
        self.forward.starts_with(forward)
    }

    /// Returns the block that the forward pass gathers after these, if it repeats the one before.
    pub fn next(&self, forward: &[usize]) -> Option<usize> {
        self.forward.get(forward.len()).copied().filter(|_| self.is_repeated_by(forward))
    }

    /// Returns the blocks that the backward pass will gather, in the order in which it will need them: the reverse of
    /// the order in which the forward pass used them last. Where it did not need a block before, it will not now.
    pub fn backward(&self, forward: &[usize]) -> Vec<usize> {
        let needed = |block: &usize| *block != ROOT && self.needed.get(*block).copied().unwrap_or(true);
        distinct(forward.iter().rev().copied()).into_iter().filter(needed).collect()
    }

    /// Returns the blocks of a step in the order in which their gradients are sent. A gradient is complete where the
    /// backward pass leaves the first use of a block. Blocks that were incomplete on a rank come last, because the
    /// blocks behind them would wait for the end of the pass.
    pub fn gradients(&self, forward: &[usize]) -> Vec<usize> {
        let mut blocks = distinct(forward.iter().copied());
        blocks.reverse();
        blocks.sort_by_key(|block| !self.complete.get(*block).copied().unwrap_or(true));
        blocks
    }
}

/// Returns the blocks without repetitions, in the order in which they come first.
fn distinct(blocks: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut seen = Vec::new();
    for block in blocks {
        if !seen.contains(&block) {
            seen.push(block);
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_block_is_known_while_the_forward_pass_repeats_itself() {
        let history = History { forward: vec![0, 2, 1, 2], ..Default::default() };
        assert_eq!(history.next(&[]), Some(0));
        assert_eq!(history.next(&[0, 2]), Some(1));
        assert_eq!(history.next(&[0, 2, 1, 2]), None);
        assert_eq!(history.next(&[0, 1]), None);
        assert_eq!(History::default().next(&[]), None);
    }

    #[test]
    fn a_backward_pass_needs_blocks_by_their_last_use_and_completes_them_by_their_first() {
        let first = History::default();
        assert_eq!(first.backward(&[0, 2, 1, 2, 3]), [3, 2, 1]);
        assert_eq!(first.gradients(&[0, 2, 1, 2, 3]), [3, 1, 2, 0]);
        let later = History {
            needed: vec![false, false, true, true],
            complete: vec![true, true, false, true],
            ..Default::default()
        };
        assert_eq!(later.backward(&[0, 2, 1, 2, 3]), [3, 2]);
        assert_eq!(later.gradients(&[0, 2, 1, 2, 3]), [3, 1, 0, 2]);
    }
}
