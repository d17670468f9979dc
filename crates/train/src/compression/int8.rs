//! 8-bit integers in blocks.

use super::Compression;

/// Gradients travel as 8-bit integers: a quarter of the bytes.
///
/// 256 elements share a scale, an f32 that maps the largest magnitude to 127. An element is wrong by at most half a
/// 127th of that magnitude.
#[derive(Clone, Copy, Debug)]
pub struct Int8;

/// Elements that share a scale: few enough that gradients of different layers rarely do, and 3.9 times fewer bytes than
/// f32.
const BLOCK: usize = 256;

/// Bytes of a scale, which precedes its block.
const SCALE: usize = size_of::<f32>();

impl Compression for Int8 {
    fn name(&self) -> String {
        format!("int8 in blocks of {BLOCK}")
    }

    fn bytes(&self, elements: usize) -> usize {
        elements + elements.div_ceil(BLOCK) * SCALE
    }

    fn compress(&self, values: &[f32], bytes: &mut [u8]) {
        for (values, bytes) in values.chunks(BLOCK).zip(bytes.chunks_mut(SCALE + BLOCK)) {
            let (scale, integers) = bytes.split_at_mut(SCALE);
            // Magnitudes are ordered as their bits are, and NaN is above all numbers.
            let largest = values.iter().fold(0, |largest, value| (value.to_bits() & 0x7fff_ffff).max(largest));
            let largest = f32::from_bits(largest);
            let (mut unit, mut factor) = (largest / 127.0, 127.0 / largest);
            if !largest.is_finite() {
                (unit, factor) = (f32::NAN, 0.0);
            } else if !unit.is_normal() || !factor.is_finite() {
                // Too small for a quotient. Error feedback keeps it.
                (unit, factor) = (0.0, 0.0);
            }
            scale.copy_from_slice(&unit.to_le_bytes());
            for (integer, value) in integers.iter_mut().zip(values) {
                *integer = round(value * factor) as u8;
            }
        }
    }

    fn decompress(&self, bytes: &[u8], values: &mut [f32]) {
        for (values, bytes) in values.chunks_mut(BLOCK).zip(bytes.chunks(SCALE + BLOCK)) {
            let (scale, integers) = bytes.split_at(SCALE);
            let unit = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
            for (value, integer) in values.iter_mut().zip(integers) {
                *value = f32::from(*integer as i8) * unit;
            }
        }
    }
}

/// Rounds a number of a magnitude below 2^22 to the nearest integer, of which the result's lowest bits are the two's
/// complement. Adding 1.5 * 2^23 leaves no fraction, and the integer in the lowest bits of the significand.
fn round(x: f32) -> u32 {
    (x + 12_582_912.0).to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn back(values: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0xaa; Int8.bytes(values.len())];
        Int8.compress(values, &mut bytes);
        let mut back = vec![7.0; values.len()];
        Int8.decompress(&bytes, &mut back);
        back
    }

    #[test]
    fn integers_up_to_127_are_exact_and_so_is_their_multiple() {
        let values: Vec<f32> = (-127..=127).map(|i| i as f32 / 64.0).collect();
        assert_eq!(back(&values), values);
        assert_eq!(round(-3.0) as u8 as i8, -3);
    }

    #[test]
    fn an_element_is_wrong_by_half_a_unit_of_its_block_at_most() {
        let values: Vec<f32> =
            (0..1000).map(|i| ((i * 7919 % 1009) as f32 - 504.0) * 10f32.powi(i / 300 - 2)).collect();
        for (values, back) in values.chunks(BLOCK).zip(back(&values).chunks(BLOCK)) {
            let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
            for (value, back) in values.iter().zip(back) {
                assert!((value - back).abs() <= largest / 127.0 * 0.50001, "{value} {back} of {largest}");
            }
        }
    }

    #[test]
    fn blocks_without_a_scale_are_zero_or_nan() {
        assert_eq!(back(&[0.0; 300]), [0.0; 300]);
        assert_eq!(back(&[1e-44, -1e-38, 0.0]), [0.0; 3]);
        let mut values = [1.0; 300];
        for wrong in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            values[299] = wrong;
            let back = back(&values);
            assert_eq!(back[..BLOCK], [1.0; BLOCK]);
            assert!(back[BLOCK..].iter().all(|value| value.is_nan()));
        }
        assert_eq!(back(&[f32::MAX, -f32::MAX]), [f32::MAX, -f32::MAX].map(|value| value / 127.0 * 127.0));
    }
}
