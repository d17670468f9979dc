//! A pool of memory blocks for results, reused from one operation to the next.
//!
//! The system maps fresh memory page by page at the first access and zeroes each page. For large results this takes
//! longer than the operation itself. A training step allocates results of the same sizes as the previous step, which
//! has dropped its own by then.

use std::io;
use std::mem::MaybeUninit;
use std::sync::{Arc, LazyLock, Mutex, Weak};

use burn::tensor::Bytes;
use bytemuck::{cast_slice, cast_slice_mut};
use cubecl_common::bytes::{AllocationController, AllocationProperty};

#[cfg(feature = "flex")]
use bonfire_core::Group;
use bonfire_core::internal::lock;
use bonfire_core::{Buffer, Error};

/// Shorter blocks are not pooled: the allocator has them at hand.
const MIN_BLOCK: usize = 1 << 20;

/// The most bytes that a pool keeps.
const MAX_POOLED: usize = 256 << 20;

/// The pool of the process, for ordinary memory.
static PROCESS: LazyLock<Arc<Pool>> = LazyLock::new(Arc::default);

/// Returns `len` initialised bytes of unspecified value.
pub(crate) fn bytes(operation: &str, len: usize) -> Result<Bytes, Error> {
    let block = PROCESS.take(len).map_or_else(|| Block::ordinary(operation, len), Ok)?;
    Ok(PROCESS.wrap(block, len))
}

/// A pool of memory from [`Group::allocate`]. Ranks that share memory access results in it without a copy. Blocks are
/// reused because the group clears what it allocates, which takes as long as the operation.
#[cfg(feature = "flex")]
#[derive(Clone, Default)]
pub(crate) struct GroupPool(Arc<Pool>);

#[cfg(feature = "flex")]
impl GroupPool {
    /// Returns `len` initialised bytes of unspecified value in memory of the group. Falls back to ordinary memory when
    /// the group has none left instead of failing, because other ranks may have begun the operation already.
    pub fn bytes(&self, operation: &str, group: &Group, len: usize) -> Result<Bytes, Error> {
        let new = || group.allocate(len.div_ceil(size_of::<u64>())).ok().map(Block::Group);
        match self.0.take(len).or_else(new) {
            Some(block) => Ok(self.0.wrap(block, len)),
            None => bytes(operation, len),
        }
    }
}

/// Memory for one tensor, fully initialised.
#[cfg_attr(not(feature = "flex"), expect(dead_code, reason = "only tensors of Flex are in memory of a group"))]
enum Block {
    Ordinary(Vec<u128>),
    Group(Buffer<u64>),
}

impl Block {
    fn ordinary(operation: &str, len: usize) -> Result<Block, Error> {
        let units = bytemuck::allocation::try_zeroed_vec(len.div_ceil(size_of::<u128>()));
        let no_memory = || io::Error::new(io::ErrorKind::OutOfMemory, format!("there is no memory for {len} bytes"));
        units.map(Block::Ordinary).map_err(|()| Error::io(operation, no_memory()))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Block::Ordinary(units) => cast_slice(units),
            Block::Group(words) => cast_slice(words),
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Block::Ordinary(units) => cast_slice_mut(units),
            Block::Group(words) => cast_slice_mut(words),
        }
    }
}

/// The unused blocks, oldest first.
#[derive(Default)]
struct Pool(Mutex<Vec<Block>>);

impl Pool {
    /// Takes the smallest block of at least `len` bytes and at most an eighth more. Sizes return from step to step; a
    /// tensor that lasts must not hold memory that it does not fill.
    fn take(&self, len: usize) -> Option<Block> {
        let mut kept = lock(&self.0);
        let fits = |block: &Block| block.bytes().len() >= len && block.bytes().len() - len <= len / 8;
        let best = (0..kept.len()).filter(|i| fits(&kept[*i])).min_by_key(|i| kept[*i].bytes().len());
        best.map(|i| kept.remove(i))
    }

    /// Wraps the block as a tensor's memory. It returns to the pool when the tensor drops it, if the pool still exists:
    /// a tensor may outlive it.
    fn wrap(self: &Arc<Self>, block: Block, len: usize) -> Bytes {
        let pooled = PooledBlock { block: Some(block), pool: Arc::downgrade(self) };
        // SAFETY: the block has at least `len` bytes, and all of them are initialised.
        unsafe { Bytes::from_controller(Box::new(pooled), len) }
    }

    fn put_back(&self, block: Block) {
        let mut kept = lock(&self.0);
        kept.push(block);
        let mut bytes: usize = kept.iter().map(|block| block.bytes().len()).sum();
        // Evict the oldest blocks: they have been unused for the longest time.
        while bytes > MAX_POOLED {
            bytes -= kept.remove(0).bytes().len();
        }
    }
}

/// A block in use by a tensor. `block` is `Some` until this is dropped.
struct PooledBlock {
    block: Option<Block>,
    pool: Weak<Pool>,
}

impl AllocationController for PooledBlock {
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
        // SAFETY: `u8` and `MaybeUninit<u8>` have the same layout, and the caller writes initialised bytes only.
        unsafe { &mut *(memory as *mut [MaybeUninit<u8>]) }
    }

    fn memory(&self) -> &[MaybeUninit<u8>] {
        let memory: &[u8] = self.block.as_ref().map_or(&[], Block::bytes);
        let memory: *const [u8] = memory;
        // SAFETY: `u8` and `MaybeUninit<u8>` have the same layout, and initialised bytes are valid in both.
        unsafe { &*(memory as *const [MaybeUninit<u8>]) }
    }
}

impl Drop for PooledBlock {
    fn drop(&mut self) {
        let Some(block) = self.block.take().filter(|block| block.bytes().len() >= MIN_BLOCK) else { return };
        if let Some(pool) = self.pool.upgrade() {
            pool.put_back(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(len: usize) -> Bytes {
        super::bytes("test", len).unwrap()
    }

    /// A single test, because the pool is shared by the process.
    #[test]
    fn blocks_are_reused_where_they_fit_and_the_pool_is_bounded() {
        let mut first = bytes(3 * MIN_BLOCK + 5);
        first.fill(7);
        let place = first.as_ptr();
        drop(first);
        assert_ne!(bytes(2 * MIN_BLOCK).as_ptr(), place, "a block that is too long is not used");
        let again = bytes(3 * MIN_BLOCK);
        assert_eq!((again.as_ptr(), again.len()), (place, 3 * MIN_BLOCK));
        assert!(again.iter().all(|byte| *byte == 7));
        let smaller = bytes(3 * MIN_BLOCK - 100);
        let smaller_place = smaller.as_ptr();
        drop((again, smaller));
        assert_eq!(bytes(3 * MIN_BLOCK - 100).as_ptr(), smaller_place, "the smallest block that fits is used");

        let many: Vec<_> = (0..5).map(|_| bytes(MAX_POOLED / 4)).collect();
        drop(many);
        assert!(lock(&PROCESS.0).iter().map(|block| block.bytes().len()).sum::<usize>() <= MAX_POOLED);
        drop(bytes(2 * MAX_POOLED));
        assert!(lock(&PROCESS.0).is_empty(), "a block larger than the pool is not kept");
        drop(bytes(10));
        assert!(lock(&PROCESS.0).is_empty(), "a short block is not kept");
    }

    #[cfg(feature = "flex")]
    #[test]
    fn a_tensor_may_outlive_the_pool_of_its_memory() {
        let group = Group::threads(1).unwrap().remove(0);
        let pool = GroupPool::default();
        let first = pool.bytes("test", &group, MIN_BLOCK).unwrap();
        let place = first.as_ptr();
        drop(first);
        let mut again = pool.bytes("test", &group, MIN_BLOCK).unwrap();
        assert_eq!(again.as_ptr(), place);
        drop((pool, group));
        again.fill(7);
        assert!(again.iter().all(|byte| *byte == 7));
    }
}
