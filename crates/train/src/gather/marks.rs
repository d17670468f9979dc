//! Marks of blocks in a model, for adapters whose models are walked by visitors and mappers: how these learn of a
//! block, and when its run ends.

use std::cell::{Cell, RefCell};

/// What visitors and mappers are told before the parameters of a block, as the type of a container that they enter and
/// leave at once. So the paths of parameters are those of the module without the mark.
pub const BEGIN: &str = "bonfire::ShardedBlock {";

/// The same behind the parameters of a block.
pub const END: &str = "bonfire::ShardedBlock }";

thread_local! {
    /// Whether the mapper has made parameters of the last block that are gathered at their first use.
    static GATHERS: Cell<bool> = const { Cell::new(false) };
    /// The runs of blocks on this thread, outermost first.
    static RUNS: RefCell<Vec<Ends>> = const { RefCell::new(Vec::new()) };
}

/// What is to be done when a run ends.
type Ends = Vec<Box<dyn FnOnce()>>;

/// Tells a block that the mapper, which enters this container, has made its parameters so that they are gathered at
/// their first use. Mappers have no other way to change what is no parameter.
pub fn gather_at_use(container: &str) {
    if container == END {
        GATHERS.set(true);
    }
}

/// Whether [`gather_at_use`] was called for the block that was just mapped.
pub fn gathers_at_use() -> bool {
    GATHERS.take()
}

/// A run of a block, until it is dropped.
#[must_use = "the run ends where it is dropped"]
pub struct Run(());

impl Run {
    /// Begins a run on this thread.
    pub fn begin() -> Run {
        RUNS.with_borrow_mut(|runs| runs.push(Vec::new()));
        Run(())
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let ended = RUNS.with_borrow_mut(Vec::pop);
        ended.into_iter().flatten().for_each(|end| end());
    }
}

/// Calls `end` when the innermost run of a block on this thread ends. Without a run it is dropped.
pub fn at_end_of_run(end: impl FnOnce() + 'static) {
    RUNS.with_borrow_mut(|runs| {
        if let Some(run) = runs.last_mut() {
            run.push(Box::new(end));
        }
    });
}

/// Follows a visitor or mapper through the blocks of a model.
#[derive(Default)]
pub struct BlockPath {
    /// The blocks that contain the place, outermost first.
    open: Vec<usize>,
    /// The blocks so far.
    count: usize,
}

impl BlockPath {
    /// Takes note of a container that is entered.
    pub fn enter(&mut self, container: &str) {
        if container == BEGIN {
            self.count += 1;
            self.open.push(self.count);
        } else if container == END {
            self.open.pop();
        }
    }

    /// Returns the number of the innermost block, counted from 1. 0 outside of blocks.
    pub fn block(&self) -> usize {
        self.open.last().copied().unwrap_or(0)
    }
}
