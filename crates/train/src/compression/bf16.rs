//! 16-bit floats of the range of f32.

use bytemuck::{cast_slice, cast_slice_mut};
use half::bf16;

use super::Compression;

/// Gradients travel as bf16: half the bytes, the range of f32, 8 significant bits.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;

impl Compression for Bf16 {
    fn name(&self) -> String {
        "bf16".into()
    }

    fn bytes(&self, elements: usize) -> usize {
        2 * elements
    }

    fn compress(&self, values: &[f32], bytes: &mut [u8]) {
        for (bits, value) in cast_slice_mut::<u8, u16>(bytes).iter_mut().zip(values) {
            let value = within(*value).to_bits();
            // Round to nearest, ties to even. NaN and infinity have no bits in the lower half, because `within` has
            // removed them.
            *bits = ((value + 0x7fff + (value >> 16 & 1)) >> 16) as u16;
        }
    }

    fn decompress(&self, bytes: &[u8], values: &mut [f32]) {
        for (value, bits) in values.iter_mut().zip(cast_slice::<u8, u16>(bytes)) {
            *value = f32::from_bits(u32::from(*bits) << 16);
        }
    }
}

/// Limits the magnitude of a finite value, so that it is not rounded to infinity. Others become infinite.
fn within(value: f32) -> f32 {
    let largest = bf16::MAX.to_f32();
    if value.is_finite() { value.clamp(-largest, largest) } else { f32::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn back(values: &[f32]) -> Vec<f32> {
        let mut memory = vec![u64::MAX; Bf16.bytes(values.len()).div_ceil(8)];
        let bytes = &mut cast_slice_mut(&mut memory)[..Bf16.bytes(values.len())];
        Bf16.compress(values, bytes);
        let mut back = vec![7.0; values.len()];
        Bf16.decompress(bytes, &mut back);
        back
    }

    #[test]
    fn values_are_rounded_to_nearest_and_stay_in_range() {
        // Every bit pattern with a random lower half would take minutes; these cover all exponents and both signs.
        let values: Vec<f32> = (0..=u16::MAX)
            .flat_map(|high| [0, 0x7fff, 0x8000, 0x8001].map(|low| (high, low)))
            .map(|(high, low)| f32::from_bits(u32::from(high) << 16 | low))
            .filter(|value| value.is_finite())
            .collect();
        let largest = bf16::MAX.to_f32();
        let expected = values.iter().map(|value| bf16::from_f32(value.clamp(-largest, largest)).to_f32());
        assert!(back(&values).into_iter().eq(expected));
    }

    #[test]
    fn values_that_are_not_finite_stay_so() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
            assert_eq!(back(&[1.0, value]), [1.0, f32::INFINITY]);
        }
    }
}
