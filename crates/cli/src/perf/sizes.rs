//! The sizes to measure.

/// Flags as in nccl-tests, and `--sizes`.
#[derive(clap::Args, Clone)]
pub struct Sizes {
    /// Smallest size in bytes; suffixes K, M and G are powers of 1024
    #[arg(short = 'b', long, value_name = "BYTES", default_value = "8", value_parser = parse_bytes)]
    min_bytes: usize,

    /// Largest size in bytes, with the same suffixes
    #[arg(short = 'e', long, value_name = "BYTES", default_value = "32M", value_parser = parse_bytes)]
    max_bytes: usize,

    /// Factor from one size to the next [default: 4]
    #[arg(short = 'f', long, value_name = "FACTOR", value_parser = clap::value_parser!(u64).range(2..))]
    factor: Option<u64>,

    /// Bytes from one size to the next, instead of a factor
    #[arg(short = 'i', long, value_name = "BYTES", conflicts_with = "factor", value_parser = parse_bytes)]
    step_bytes: Option<usize>,

    /// Sizes in bytes, separated by commas, instead of a range
    #[arg(long, value_name = "BYTES", value_delimiter = ',', value_parser = parse_bytes,
          conflicts_with_all = ["min_bytes", "max_bytes", "factor", "step_bytes"])]
    sizes: Vec<usize>,
}

const FACTOR: u64 = 4;

impl Sizes {
    /// Returns the sizes in bytes, rounded down to multiples of `unit`, but at least one `unit`. Consecutive
    /// duplicates are removed.
    pub fn list(&self, unit: usize) -> Result<Vec<usize>, String> {
        let Sizes { min_bytes, max_bytes, .. } = *self;
        let whole = |bytes: usize| (bytes / unit).max(1) * unit;
        if let Some(least) = self.sizes.iter().min() {
            if *least < unit {
                return Err(format!("--sizes {least} is less than an element per rank: give at least {unit}"));
            }
            let mut sizes: Vec<usize> = self.sizes.iter().copied().map(whole).collect();
            sizes.dedup();
            return Ok(sizes);
        }
        if max_bytes < min_bytes {
            return Err(format!(
                "--max-bytes {max_bytes} is below --min-bytes {min_bytes}: swap them or leave one out"
            ));
        }
        if max_bytes < unit {
            return Err(format!("--max-bytes {max_bytes} is less than an element per rank: give at least {unit}"));
        }
        let next = |bytes: &usize| {
            let next = match self.step_bytes {
                Some(step) => bytes.checked_add(step),
                None => usize::try_from(self.factor.unwrap_or(FACTOR)).ok().and_then(|f| bytes.checked_mul(f)),
            };
            next.filter(|next| *next <= max_bytes)
        };
        let mut sizes: Vec<usize> = std::iter::successors(Some(min_bytes), next).map(whole).collect();
        sizes.dedup();
        Ok(sizes)
    }
}

/// Reads `4096`, `4K`, `32M` or `1G`.
fn parse_bytes(text: &str) -> Result<usize, String> {
    let (digits, shift) = match text.as_bytes() {
        [.., b'k' | b'K'] => (&text[..text.len() - 1], 10),
        [.., b'm' | b'M'] => (&text[..text.len() - 1], 20),
        [.., b'g' | b'G'] => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    match digits.parse::<usize>().map_err(|_| FORM)?.checked_mul(1 << shift) {
        Some(0) => Err("there is nothing to measure at 0 bytes: give 1 or more".into()),
        // A vector can have at most `isize::MAX` bytes.
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(bytes),
        _ => Err("more bytes than a buffer can hold".into()),
    }
}

const FORM: &str = "write a whole number of bytes such as 4096, or 4K, 32M, 1G";

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(min: &str, max: &str, factor: Option<u64>, step: Option<usize>) -> Sizes {
        let bytes = |text| parse_bytes(text).unwrap();
        Sizes { min_bytes: bytes(min), max_bytes: bytes(max), factor, step_bytes: step, sizes: Vec::new() }
    }

    #[test]
    fn suffixes_are_powers_of_1024() {
        let read: Vec<_> = ["8", "4K", "4k", "32M", "2G"].map(|text| parse_bytes(text).unwrap()).into();
        assert_eq!(read, [8, 4096, 4096, 32 << 20, 2 << 30]);
        for text in ["", "K", "4KB", "4KK", "-4", "1.5K", "4 K", "0", "0K", "18446744073709551615", "99999999999999G"] {
            assert!(parse_bytes(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn sizes_grow_by_a_factor_or_by_steps_up_to_the_largest() {
        assert_eq!(sizes("8", "1K", None, None).list(4).unwrap(), [8, 32, 128, 512]);
        assert_eq!(sizes("8", "1K", Some(16), None).list(4).unwrap(), [8, 128]);
        assert_eq!(sizes("1K", "4K", None, Some(1024)).list(4).unwrap(), [1024, 2048, 3072, 4096]);
        assert_eq!(sizes("64", "64", None, None).list(4).unwrap(), [64]);
    }

    #[test]
    fn sizes_are_whole_units_and_at_least_one() {
        assert_eq!(sizes("1", "100", Some(2), None).list(12).unwrap(), [12, 24, 60]);
        assert!(sizes("1", "11", None, None).list(12).unwrap_err().contains("at least 12"));
        assert!(sizes("8", "4", None, None).list(4).unwrap_err().contains("--min-bytes 8"));
    }
}
