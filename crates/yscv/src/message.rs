//! Messages on the wire: `count u32 little endian | count values, f32 little endian`.

use std::io::{self, Read, Write};

use bytemuck::cast_slice_mut;

/// Values that are moved at once. The memory of an incoming message grows by this many at a time.
const CHUNK: usize = 16 << 10;

/// Returns a number of values as the wire encodes it, if it fits.
pub(super) fn counted(values: usize) -> Option<u32> {
    u32::try_from(values).ok()
}

/// Writes one message, whose length passed [`counted`]. The count leaves in one write with the first chunk.
pub(super) fn write(stream: &mut impl Write, count: u32, values: &[f32]) -> io::Result<()> {
    let mut words = Vec::with_capacity(1 + values.len().min(CHUNK));
    words.push(count.to_le_bytes());
    let (first, rest) = values.split_at(values.len().min(CHUNK));
    for chunk in std::iter::once(first).chain(rest.chunks(CHUNK)) {
        words.extend(chunk.iter().map(|value| value.to_le_bytes()));
        stream.write_all(words.as_flattened())?;
        words.clear();
    }
    Ok(())
}

/// Reads the number of values in a message.
pub(super) fn read_count(stream: &mut impl Read) -> io::Result<usize> {
    let mut count = [0; 4];
    stream.read_exact(&mut count)?;
    Ok(u32::from_le_bytes(count) as usize)
}

/// Reads a message of at most `most` values. Never allocates more than twice what has arrived plus a chunk.
pub(super) fn read(stream: &mut impl Read, most: usize) -> io::Result<Vec<f32>> {
    let count = read_count(stream)?;
    if count > most {
        let reason = format!(
            "it announced {count} values, and at most {most} are accepted: TcpTransportBuilder::largest_message allows \
             more"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    let mut values = Vec::new();
    while values.len() < count {
        let at = values.len();
        values.resize(count.min(at + CHUNK), 0.0);
        fill(stream, &mut values[at..])?;
    }
    Ok(values)
}

/// Fills `values` from the stream, after the count was read.
pub(super) fn fill(stream: &mut impl Read, values: &mut [f32]) -> io::Result<()> {
    stream.read_exact(cast_slice_mut(values))?;
    // A no-op on little-endian processors.
    values.iter_mut().for_each(|value| *value = f32::from_bits(u32::from_le(value.to_bits())));
    Ok(())
}

/// Reads `sums.len()` values and adds them element-wise to `sums`.
pub(super) fn add(stream: &mut impl Read, sums: &mut [f32]) -> io::Result<()> {
    let mut values = vec![0.0; sums.len().min(CHUNK)];
    for sums in sums.chunks_mut(CHUNK) {
        let values = &mut values[..sums.len()];
        fill(stream, values)?;
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += *value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(values: &[f32]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, counted(values.len()).unwrap(), values).unwrap();
        bytes
    }

    #[test]
    fn messages_of_any_length_round_trip() {
        for length in [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7] {
            let values: Vec<f32> = (0..length).map(|i| i as f32).collect();
            let bytes = message(&values);
            assert_eq!(bytes.len(), 4 + 4 * length);
            assert_eq!(read(&mut &bytes[..], length).unwrap(), values);
            let mut sums = values.clone();
            add(&mut &bytes[4..], &mut sums).unwrap();
            assert!(sums.iter().zip(&values).all(|(sum, value)| *sum == 2.0 * value));
        }
    }

    #[test]
    fn lengths_above_32_bits_are_rejected() {
        let most = u32::MAX as usize;
        assert_eq!([most, most + 1, 2 * most + 2].map(counted), [Some(u32::MAX), None, None]);
    }

    #[test]
    fn fuzz_star_messages() {
        const MOST: usize = 600;
        let seeds = [&[][..], &[1.5], &[f32::NAN, -0.0, f32::INFINITY], &[0.25; MOST]];
        bonfire_testing::fuzz::fuzz("star", seeds.map(message), |bytes| {
            let mut rest = bytes;
            let values = read(&mut rest, MOST);
            let count = bytes.first_chunk().map(|count| u32::from_le_bytes(*count) as usize);
            match (values, count) {
                (Ok(values), Some(count)) => {
                    assert!(values.len() == count && count <= MOST);
                    assert_eq!(message(&values), bytes[..bytes.len() - rest.len()], "every bit is as it was sent");
                    true
                }
                (Err(e), Some(count)) if count > MOST => {
                    assert!(e.kind() == io::ErrorKind::InvalidData && rest.len() == bytes.len() - 4, "{e}");
                    false
                }
                (values, count) => {
                    assert_eq!(values.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
                    assert!(bytes.len() < 4 + 4 * count.unwrap_or(0));
                    false
                }
            }
        });
    }
}
