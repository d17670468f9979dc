//! The samples on which models train.

/// Features of an input and of a target.
pub const WIDTH: usize = 3;

pub type Sample = ([f32; WIDTH], [f32; WIDTH]);

/// Numbers between -1 and 1, others for each seed.
pub fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i + 1) * (2 * seed + 7919) % 2003) as f32 / 1001.5 - 1.0).collect()
}

/// Samples of which no two are equal.
pub fn samples(count: usize) -> Vec<Sample> {
    let numbers = values(2 * WIDTH * count, 77);
    let row = |at: usize| std::array::from_fn(|i| numbers[at * WIDTH + i]);
    (0..count).map(|sample| (row(2 * sample), row(2 * sample + 1))).collect()
}

/// A rank's part of the samples. The last rank also gets the remainder.
pub fn part(samples: &[Sample], rank: usize, ranks: usize) -> &[Sample] {
    let start = |rank| if rank == ranks { samples.len() } else { rank * (samples.len() / ranks) };
    &samples[start(rank)..start(rank + 1)]
}
