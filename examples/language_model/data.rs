//! The text: the first 37 chapters of "Moby-Dick". See `examples/data/README.md`.

use std::io::Read;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use flate2::read::GzDecoder;

use crate::Failure;
use crate::model::CONTEXT;

/// One in this many bytes, at the end of the text, is not trained on.
const HELD_OUT: usize = 32;

/// A text in sequences of [`CONTEXT`] bytes, each with the byte that follows.
pub struct Text {
    pub train: Vec<u8>,
    pub test: Vec<u8>,
}

impl Text {
    pub fn load() -> Result<Text, Failure> {
        let mut train = Vec::new();
        GzDecoder::new(&include_bytes!("../data/moby-dick.txt.gz")[..]).read_to_end(&mut train)?;
        let test = train.split_off(train.len() - train.len() / HELD_OUT);
        Ok(Text { train, test })
    }
}

/// Returns the number of sequences in a text.
pub fn sequences(text: &[u8]) -> usize {
    text.len().saturating_sub(1) / CONTEXT
}

/// Returns the chosen sequences and, for each of their bytes, the next one: `[n, CONTEXT]` both.
pub fn tensors<B: Backend>(text: &[u8], chosen: &[usize], device: &B::Device) -> [Tensor<B, 2, Int>; 2] {
    let tensor = |offset: usize| {
        let bytes = chosen.iter().flat_map(|i| &text[i * CONTEXT + offset..][..CONTEXT]);
        let bytes: Vec<i64> = bytes.map(|byte| i64::from(*byte)).collect();
        Tensor::from_data(TensorData::new(bytes, [chosen.len(), CONTEXT]), device)
    };
    [tensor(0), tensor(1)]
}
