//! Scratch memory that grows on demand and never shrinks.

/// Scratch bytes, aligned for every accumulator and reused from call to call.
#[derive(Default)]
pub(crate) struct Scratch(Vec<[u128; 4]>);

impl Scratch {
    pub fn bytes(&mut self, len: usize) -> &mut [u8] {
        let blocks = len.div_ceil(size_of::<[u128; 4]>());
        if self.0.len() < blocks {
            self.0.resize(blocks, [0; 4]);
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }
}
