//! Memory for results, kept from one operation to the next.
//!
//! The system gives fresh memory page by page, each at its first touch and zeroed: for large results that takes longer
//! than the operation itself. A training step makes results of the same sizes as the step before, which has dropped its
//! own by then.

use std::mem::MaybeUninit;
use std::sync::{Arc, LazyLock, Mutex, Weak};

use burn::tensor::Bytes;
use bytemuck::{cast_slice, cast_slice_mut};
use cubecl_common::bytes::{AllocationController, AllocationProperty};

#[cfg(feature = "flex")]
use bonfire_core::Group;
use bonfire_core::internal::lock;
use bonfire_core::{Buffer, Error};

/// Shorter ones the allocator has at hand.
const SHORTEST: usize = 1 << 20;

/// Bytes that a pool keeps at most.
const MOST: usize = 256 << 20;

static PROCESS: LazyLock<Arc<Pool>> = LazyLock::new(Arc::default);

/// So many initialised bytes, whatever they are.
pub(crate) fn bytes(operation: &str, len: usize) -> Result<Bytes, Error> {
    let block = PROCESS.take(len).map_or_else(|| Block::ordinary(operation, len), Ok)?;
    Ok(PROCESS.lend(block, len))
}

/// Memory that the ranks of a group reach where they share some: results in it need not be brought to them.
#[cfg(feature = "flex")]
#[derive(Clone, Default)]
pub(crate) struct Suited(Arc<Pool>);

#[cfg(feature = "flex")]
impl Suited {
    /// So many initialised bytes, whatever they are, in memory of the group, or where that is used up in ordinary memory:
    /// other ranks may be in the operation already.
    pub fn bytes(&self, operation: &str, group: &Group, len: usize) -> Result<Bytes, Error> {
        let new = || group.allocate(len.div_ceil(size_of::<u64>())).ok().map(Block::Suited);
        match self.0.take(len).or_else(new) {
            Some(block) => Ok(self.0.lend(block, len)),
            None => bytes(operation, len),
        }
    }
}

/// Memory of one tensor, all of it initialised.
#[cfg_attr(not(feature = "flex"), expect(dead_code, reason = "only Flex's tensors are in memory of a group"))]
enum Block {
    Ordinary(Vec<u128>),
    Suited(Buffer<u64>),
}

impl Block {
    fn ordinary(operation: &str, len: usize) -> Result<Block, Error> {
        let units = bytemuck::allocation::try_zeroed_vec(len.div_ceil(size_of::<u128>()));
        units.map(Block::Ordinary).map_err(|()| Error::broken(operation, format!("there is no memory for {len} bytes")))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Block::Ordinary(units) => cast_slice(units),
            Block::Suited(words) => cast_slice(words),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Block::Ordinary(units) => cast_slice_mut(units),
            Block::Suited(words) => cast_slice_mut(words),
        }
    }
}

/// Blocks that nobody has.
#[derive(Default)]
struct Pool(Mutex<Vec<Block>>);

impl Pool {
    /// A block of at least so many bytes, and not of many more.
    fn take(&self, len: usize) -> Option<Block> {
        let mut kept = lock(&self.0);
        let fits = |block: &Block| block.bytes().len() >= len && block.bytes().len() / 2 <= len;
        let best = (0..kept.len()).filter(|i| fits(&kept[*i])).min_by_key(|i| kept[*i].bytes().len());
        best.map(|i| kept.remove(i))
    }

    /// The block as a tensor's memory, which comes back for as long as the pool is there: a tensor may outlive it.
    fn lend(self: &Arc<Self>, block: Block, len: usize) -> Bytes {
        let lent = Lent { block: Some(block), home: Arc::downgrade(self) };
        // SAFETY: the block has as many, and all of it is initialised.
        unsafe { Bytes::from_controller(Box::new(lent), len) }
    }

    fn give(&self, block: Block) {
        let mut kept = lock(&self.0);
        kept.push(block);
        let mut bytes: usize = kept.iter().map(|block| block.bytes().len()).sum();
        // The oldest go first: nothing has wanted them for longest.
        while bytes > MOST {
            bytes -= kept.remove(0).bytes().len();
        }
    }
}

/// A block that a tensor has: there until this is dropped.
struct Lent {
    block: Option<Block>,
    home: Weak<Pool>,
}

impl AllocationController for Lent {
    fn alloc_align(&self) -> usize {
        match self.block {
            Some(Block::Ordinary(_)) => align_of::<u128>(),
            _ => align_of::<u64>(),
        }
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        let memory: &mut [u8] = self.block.as_mut().map_or(&mut [], Block::bytes_mut);
        let memory: *mut [u8] = memory;
        // SAFETY: the layout is the same, and the caller writes initialised bytes only.
        unsafe { &mut *(memory as *mut [MaybeUninit<u8>]) }
    }

    fn memory(&self) -> &[MaybeUninit<u8>] {
        let memory: &[u8] = self.block.as_ref().map_or(&[], Block::bytes);
        let memory: *const [u8] = memory;
        // SAFETY: the layout is the same, and initialised bytes may be looked at as bytes that may not be.
        unsafe { &*(memory as *const [MaybeUninit<u8>]) }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(block) = self.block.take().filter(|block| block.bytes().len() >= SHORTEST) else { return };
        if let Some(pool) = self.home.upgrade() {
            pool.give(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize) -> Bytes {
        super::bytes("test", len).unwrap()
    }

    /// One test, since the pool is one.
    #[test]
    fn blocks_are_used_again_where_they_fit_and_kept_within_bounds() {
        let mut first = bytes(3 * SHORTEST + 5);
        first.fill(7);
        let place = first.as_ptr();
        drop(first);
        assert_ne!(bytes(SHORTEST).as_ptr(), place, "much too long");
        let again = bytes(2 * SHORTEST);
        assert_eq!((again.as_ptr(), again.len()), (place, 2 * SHORTEST));
        assert!(again.iter().all(|byte| *byte == 7));
        let smaller = bytes(2 * SHORTEST);
        let smaller_place = smaller.as_ptr();
        drop((again, smaller));
        assert_eq!(bytes(2 * SHORTEST).as_ptr(), smaller_place, "the smallest that fits");

        let many: Vec<_> = (0..5).map(|_| bytes(MOST / 4)).collect();
        drop(many);
        assert!(lock(&PROCESS.0).iter().map(|block| block.bytes().len()).sum::<usize>() <= MOST);
        drop(bytes(2 * MOST));
        assert!(lock(&PROCESS.0).is_empty(), "one that is too long for the pool");
        drop(bytes(10));
        assert!(lock(&PROCESS.0).is_empty(), "a short one");
    }

    #[cfg(feature = "flex")]
    #[test]
    fn a_tensor_outlives_the_pool_that_its_memory_is_from() {
        let group = Group::threads(1).unwrap().remove(0);
        let pool = Suited::default();
        let first = pool.bytes("test", &group, SHORTEST).unwrap();
        let place = first.as_ptr();
        drop(first);
        let mut again = pool.bytes("test", &group, SHORTEST).unwrap();
        assert_eq!(again.as_ptr(), place);
        drop((pool, group));
        again.fill(7);
        assert!(again.iter().all(|byte| *byte == 7));
    }
}
