//! The UCI handwritten digits: 1,797 images of 8 x 8 pixels. See `examples/data/README.md`.

use std::io::{self, BufRead, BufReader};

use bonfire::{Group, ShardedSampler};
use flate2::read::GzDecoder;

/// Pixels of an image, row by row.
pub const PIXELS: usize = 64;

/// Images in the test set.
const TEST: usize = 297;

/// Images and the digits that they show.
pub struct Digits {
    /// Pixels from 0 to 1.
    pub images: Vec<[f32; PIXELS]>,
    pub labels: Vec<u8>,
}

impl Digits {
    /// Loads the training set of 1,500 images and the test set of 297. The split is always the same.
    pub fn load() -> Result<(Digits, Digits), Box<dyn std::error::Error + Send + Sync>> {
        let file = include_bytes!("../data/digits.csv.gz");
        let rows: Vec<_> =
            BufReader::new(GzDecoder::new(&file[..])).lines().map(|line| parse(&line?)).collect::<io::Result<_>>()?;
        let order: Vec<usize> =
            ShardedSampler::new(&Group::threads(1)?[0], rows.len(), 1)?.epoch(0)?.flatten().collect();
        let (test, train) = order.split_at(TEST);
        Ok((Digits::of(&rows, train), Digits::of(&rows, test)))
    }

    pub fn len(&self) -> usize {
        self.labels.len()
    }

    fn of(rows: &[([f32; PIXELS], u8)], order: &[usize]) -> Digits {
        let (images, labels) = order.iter().map(|&i| rows[i]).unzip();
        Digits { images, labels }
    }
}

fn parse(line: &str) -> io::Result<([f32; PIXELS], u8)> {
    let broken = || io::Error::new(io::ErrorKind::InvalidData, format!("not an image: {line}"));
    let numbers: Vec<u8> = line.split(',').map(str::parse).collect::<Result<_, _>>().map_err(|_| broken())?;
    match numbers.split_last() {
        Some((&label @ 0..=9, pixels)) if pixels.len() == PIXELS => {
            Ok((std::array::from_fn(|i| f32::from(pixels[i]) / 16.0), label))
        }
        _ => Err(broken()),
    }
}
