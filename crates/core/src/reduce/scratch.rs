//! Scratch memory that grows on demand and never shrinks.

use std::io;

use crate::types::Error;

/// Scratch bytes, aligned for every accumulator and reused from call to call.
#[derive(Default)]
pub struct Scratch(Vec<[u128; 4]>);

impl Scratch {
    /// Returns `len` bytes of any content. Fails if the system does not have the memory.
    pub fn bytes(&mut self, len: usize) -> Result<&mut [u8], Error> {
        let blocks = len.div_ceil(size_of::<[u128; 4]>());
        if self.0.len() < blocks {
            self.grow(blocks)?;
        }
        Ok(&mut bytemuck::cast_slice_mut(&mut self.0)[..len])
    }

    #[cold]
    fn grow(&mut self, blocks: usize) -> Result<(), Error> {
        self.0.try_reserve_exact(blocks - self.0.len()).map_err(|_| {
            let text = format!("not enough memory for {} bytes", blocks * size_of::<[u128; 4]>());
            Error::io("allocating scratch memory", io::Error::new(io::ErrorKind::OutOfMemory, text))
        })?;
        self.0.resize(blocks, [0; 4]);
        Ok(())
    }
}
