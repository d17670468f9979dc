//! 16-bit floats.

use bytemuck::{cast_slice, cast_slice_mut};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::Compression;

/// Gradients travel as bf16: half the bytes, the range of f32, 8 significant bits.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;

/// Gradients travel as f16: half the bytes, 11 significant bits from 6e-5 to 65504, fewer below. Larger ones travel as
/// 65504, and the rest of them with the next step.
#[derive(Clone, Copy, Debug)]
pub struct F16;

impl Compression for Bf16 {
    fn name(&self) -> String {
        "bf16".into()
    }

    fn bytes(&self, elements: usize) -> usize {
        2 * elements
    }

    fn compress(&self, values: &[f32], bytes: &mut [u8]) {
        let largest = bf16::MAX.to_f32();
        for (bits, value) in cast_slice_mut::<u8, u16>(bytes).iter_mut().zip(values) {
            let value = within(*value, largest).to_bits();
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

impl Compression for F16 {
    fn name(&self) -> String {
        "f16".into()
    }

    fn bytes(&self, elements: usize) -> usize {
        2 * elements
    }

    fn compress(&self, values: &[f32], bytes: &mut [u8]) {
        const CHUNK: usize = 256;
        let (largest, mut chunk) = (f16::MAX.to_f32(), [0.0; CHUNK]);
        for (out, values) in cast_slice_mut::<u8, f16>(bytes).chunks_mut(CHUNK).zip(values.chunks(CHUNK)) {
            chunk.iter_mut().zip(values).for_each(|(x, value)| *x = within(*value, largest));
            out.convert_from_f32_slice(&chunk[..values.len()]);
        }
    }

    fn decompress(&self, bytes: &[u8], values: &mut [f32]) {
        cast_slice::<u8, f16>(bytes).convert_to_f32_slice(values);
    }
}

/// Limits the magnitude of a finite value. Others become infinite.
fn within(value: f32, largest: f32) -> f32 {
    let limited = value.clamp(-largest, largest);
    if value.is_finite() { limited } else { f32::INFINITY }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn back(compression: &impl Compression, values: &[f32]) -> Vec<f32> {
        let mut memory = vec![u64::MAX; compression.bytes(values.len()).div_ceil(8)];
        let bytes = &mut cast_slice_mut(&mut memory)[..compression.bytes(values.len())];
        compression.compress(values, bytes);
        let mut back = vec![7.0; values.len()];
        compression.decompress(bytes, &mut back);
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
        let limited = |largest: f32| values.iter().map(move |value| value.clamp(-largest, largest));
        let expected = limited(bf16::MAX.to_f32()).map(|value| bf16::from_f32(value).to_f32());
        assert!(back(&Bf16, &values).into_iter().eq(expected));
        let expected = limited(f16::MAX.to_f32()).map(|value| f16::from_f32(value).to_f32());
        assert!(back(&F16, &values).into_iter().eq(expected));
    }

    #[test]
    fn values_that_are_not_finite_stay_so() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
            assert_eq!(back(&Bf16, &[1.0, value]), [1.0, f32::INFINITY]);
            assert_eq!(back(&F16, &[1.0, value]), [1.0, f32::INFINITY]);
        }
    }
}
