//! Host memory for results, used again: fresh pages cost as much as the reduction that fills them.

use std::sync::{Arc, Mutex};

use bonfire_core::internal::lock;

/// Memory that is kept for the next results.
#[derive(Default)]
pub(super) struct Pool(Mutex<Vec<Vec<u128>>>);

/// More than this is given back to the system.
const KEPT: usize = 256 << 20;

/// Memory from a pool, to which it returns.
pub(super) struct Lease {
    memory: Vec<u128>,
    bytes: usize,
    pool: Arc<Pool>,
}

impl Pool {
    /// Memory for `bytes` bytes, aligned for every element type; what it holds is left over.
    pub fn lease(self: &Arc<Self>, bytes: usize) -> Lease {
        let blocks = bytes.div_ceil(size_of::<u128>());
        let mut free = lock(&self.0);
        let fitting = free.iter().enumerate().filter(|(_, memory)| memory.len() >= blocks);
        let memory = match fitting.min_by_key(|(_, memory)| memory.len()).map(|(position, _)| position) {
            Some(position) => free.swap_remove(position),
            None => vec![0; blocks],
        };
        Lease { memory, bytes, pool: self.clone() }
    }
}

impl Lease {
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.memory)[..self.bytes]
    }
}

impl AsRef<[u8]> for Lease {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.memory)[..self.bytes]
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        let mut free = lock(&self.pool.0);
        let kept: usize = free.iter().chain([&memory]).map(|memory| size_of_val(&memory[..])).sum();
        if kept <= KEPT {
            free.push(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_returns_to_its_pool_and_the_smallest_that_fits_is_taken() {
        let pool = Arc::new(Pool::default());
        let (small, large) = (pool.lease(100), pool.lease(1000));
        let (at_small, at_large) = (small.as_ref().as_ptr(), large.as_ref().as_ptr());
        drop((large, small));
        let mut again = pool.lease(50);
        assert_eq!((again.as_ref().as_ptr(), again.bytes().len()), (at_small, 50));
        assert_eq!(pool.lease(50).as_ref().as_ptr(), at_large);
    }
}
