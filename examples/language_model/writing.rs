//! What the program prints after the training.

use std::fs;
use std::io::{self, Write};

use crate::data::CONTEXT;

/// Writes `len` bytes that a model finds likely. `chances` returns those of each next byte after some text.
pub fn write_text(len: usize, seed: u64, chances: impl Fn(Vec<i64>) -> Vec<f64>) -> Vec<u8> {
    let (mut text, mut random) = (b"\n".to_vec(), seed);
    for _ in 0..len {
        let input = text.iter().skip(text.len().saturating_sub(CONTEXT)).map(|byte| i64::from(*byte)).collect();
        let mut left = uniform(&mut random);
        let byte = chances(input).iter().position(|chance| {
            left -= chance;
            left < 0.0
        });
        text.push(byte.unwrap_or(0) as u8);
    }
    text.split_off(1)
}

/// Prints the peak memory of each rank, or of the process of all, and the loss.
pub fn report(peaks: &[u64], alone: bool, loss_per_byte: f64) -> io::Result<()> {
    let mut out = io::stdout();
    match alone {
        true => writeln!(out, "peak memory of the process with all ranks: {} MiB", peaks[0] >> 20)?,
        false => {
            for (rank, peak) in peaks.iter().enumerate() {
                writeln!(out, "peak memory of rank {rank}: {} MiB", peak >> 20)?;
            }
        }
    }
    writeln!(out, "loss per byte: {loss_per_byte:.4}")
}

/// Returns a number from 0 to 1 (Steele, Lea and Flood's SplitMix64).
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9), (27, 0x94d0_49bb_1331_11eb)] {
        mixed = (mixed ^ mixed >> shift).wrapping_mul(factor);
    }
    ((mixed ^ mixed >> 31) >> 11) as f64 / (1u64 << 53) as f64
}

/// Returns the most memory that this process had, in bytes, or 0 where the system does not tell.
pub fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next()?.parse().ok());
    peak.map_or(0, |kib: u64| kib << 10)
}
