//! Compression of gradients for the exchange.
//!
//! A training with [`set_compression`](crate::step::Steps::set_compression) sends gradients as [`Bf16`] or
//! [`Int8`], or in a format of your own: implement [`Compression`]. They are added in f32, and all ranks end with the
//! same bits.
//!
//! # How a bucket travels
//! Each of `n` ranks owns one `n`th of a bucket, its shard. All ranks send it their own elements of that shard,
//! compressed. The owner decompresses and adds them, and sends the sum, compressed again, to all ranks. So compressed
//! bytes travel as often as uncompressed ones in a ring, whatever the number of ranks, and all ranks decompress the
//! same bytes.
//!
//! # Error feedback
//! What compression loses of an element is not lost for the training: the rank adds it to its gradient in the next
//! step. That covers both losses, that of a rank's own gradient and that of the sum, which its owner keeps. It takes
//! four bytes per parameter on each rank.
//!
//! An encoding that cannot carry large values cuts them off, and would send its largest value again, step after step,
//! until the rest is gone. So what is cut off is kept up to 64 times the largest gradient of the bucket, in this step
//! or the one before, whichever is smaller: one spike is over when the gradients are.
//!
//! The errors are not part of a checkpoint. A training that resumes, loads a state or loses ranks goes on without them,
//! as does one after a failed step. [`forget_compression_errors`](crate::step::Steps::forget_compression_errors) drops
//! them where a program itself goes back to weights that it has kept.
//!
//! Error feedback: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; for both directions: Tang et
//! al., "DoubleSqueeze", ICML 2019.

mod bf16;
mod int8;
mod lane;

pub use self::bf16::Bf16;
pub use self::int8::Int8;
pub(crate) use self::lane::{CompressedLane, Compressor};

/// The names that [`by_name`] knows.
pub const NAMES: [&str; 2] = ["bf16", "int8"];

/// Returns one of this module's encodings by its name, for a program's command line. `None` for other names.
///
/// ```
/// use bonfire_train::compression::{Compression, by_name};
///
/// assert!(by_name("int8").is_some_and(|encoding| encoding.bytes(1 << 20) < 4 << 20));
/// assert!(by_name("int3").is_none());
/// ```
pub fn by_name(name: &str) -> Option<Box<dyn Compression>> {
    Some(match name {
        "bf16" => Box::new(Bf16),
        "int8" => Box::new(Int8),
        _ => return None,
    })
}

impl Compression for Box<dyn Compression> {
    fn name(&self) -> String {
        (**self).name()
    }

    fn bytes(&self, elements: usize) -> usize {
        (**self).bytes(elements)
    }

    fn compress(&self, values: &[f32], bytes: &mut [u8]) {
        (**self).compress(values, bytes);
    }

    fn decompress(&self, bytes: &[u8], values: &mut [f32]) {
        (**self).decompress(bytes, values);
    }
}

/// How gradients travel: an encoding of `f32` in bytes.
///
/// It has no state. What an encoding loses is fed back by the exchange, so it may lose much, and even leave elements
/// out, as long as it does not make errors larger from step to step.
///
/// ```
/// use bonfire_train::compression::Compression;
///
/// /// The signs of a shard, and the mean of its magnitudes.
/// struct Signs;
///
/// impl Compression for Signs {
///     fn name(&self) -> String {
///         "signs".into()
///     }
///
///     fn bytes(&self, elements: usize) -> usize {
///         4 + elements.div_ceil(8)
///     }
///
///     fn compress(&self, values: &[f32], bytes: &mut [u8]) {
///         let (mean, signs) = bytes.split_at_mut(4);
///         let sum: f32 = values.iter().map(|value| value.abs()).sum();
///         mean.copy_from_slice(&(sum / values.len() as f32).to_le_bytes());
///         for (signs, values) in signs.iter_mut().zip(values.chunks(8)) {
///             *signs = values.iter().rev().fold(0, |signs, value| signs << 1 | u8::from(*value < 0.0));
///         }
///     }
///
///     fn decompress(&self, bytes: &[u8], values: &mut [f32]) {
///         let mean = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
///         for (i, value) in values.iter_mut().enumerate() {
///             *value = if bytes[4 + i / 8] >> (i % 8) & 1 == 1 { -mean } else { mean };
///         }
///     }
/// }
///
/// let mut bytes = vec![0; Signs.bytes(3)];
/// Signs.compress(&[1.0, -2.0, 3.0], &mut bytes);
/// let mut values = [0.0; 3];
/// Signs.decompress(&bytes, &mut values);
/// assert_eq!(values, [2.0, -2.0, 2.0]);
/// ```
///
/// If a method panics, the step fails on all ranks.
pub trait Compression: Send + Sync + 'static {
    /// The name of the encoding with its settings. If it is not the same on all ranks, the step is an error.
    fn name(&self) -> String;

    /// The size in bytes of `elements` compressed elements. It depends on nothing else, so that all ranks agree on it.
    fn bytes(&self, elements: usize) -> usize;

    /// Compresses `values` into `bytes`, which has the [size](Self::bytes) for that many, is aligned for 8 bytes, and
    /// may hold anything before. Values that are not finite must not become finite ones without a trace: at least one
    /// of the decompressed values must not be finite either.
    fn compress(&self, values: &[f32], bytes: &mut [u8]);

    /// Decompresses `bytes`, aligned in the same way, into all of `values`. The same bytes give the same bits on all
    /// ranks.
    fn decompress(&self, bytes: &[u8], values: &mut [f32]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_has_an_encoding_of_that_name() {
        for name in NAMES {
            assert!(by_name(name).unwrap().name().starts_with(name));
        }
        assert!(by_name("int4").is_none());
    }
}
