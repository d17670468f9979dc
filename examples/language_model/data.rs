//! The text: the first 37 chapters of "Moby-Dick". See `examples/data/README.md`.

use std::io::Read;

use flate2::read::GzDecoder;

use crate::command::Failure;

/// The bytes that the model looks at.
pub const CONTEXT: usize = 64;

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

/// Returns the chosen sequences one after the other, from this byte of each on.
pub fn bytes(text: &[u8], chosen: &[usize], offset: usize) -> Vec<i64> {
    let bytes = chosen.iter().flat_map(|i| &text[i * CONTEXT + offset..][..CONTEXT]);
    bytes.map(|byte| i64::from(*byte)).collect()
}
