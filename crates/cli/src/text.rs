//! Formats values for people.

use clap::ValueEnum;

/// The name of a flag's value on the command line.
pub fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
}

/// `a, b, c`
pub fn list(all: &[impl ToString]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// `rank 3`, `ranks 0-2, 5` or `no rank`, for ranks in ascending order.
pub fn named(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        many => format!("ranks {}", numbers(many)),
    }
}

/// `0-2, 5`, for ranks in ascending order.
pub fn numbers(ranks: &[usize]) -> String {
    let run = |run: &[usize]| match run {
        [first, .., last] => format!("{first}-{last}"),
        one => list(one),
    };
    list(&ranks.chunk_by(|a, b| a + 1 == *b).map(run).collect::<Vec<_>>())
}

/// Bytes with a binary unit: 1K is 1024.
pub fn binary(bytes: f64) -> String {
    let units = ["", "K", "M", "G", "T"];
    let unit = (bytes.max(1.0).log2() / 10.0).floor().min(4.0);
    let number = format!("{:.1}", bytes / 1024f64.powf(unit));
    format!("{}{}", number.strip_suffix(".0").unwrap_or(&number), units[unit as usize])
}

/// Bytes of memory, such as `64 MiB`.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..1_048_576 => format!("{} KiB", bytes >> 10),
        1_048_576..1_073_741_824 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}

/// Nanoseconds in a suitable unit, such as `1.5 ms`.
pub fn time(nanoseconds: u64) -> String {
    let t = nanoseconds as f64;
    match nanoseconds {
        0 => "0 s".into(),
        1..1_000 => format!("{nanoseconds} ns"),
        1_000..1_000_000 => format!("{:.1} us", t / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", t / 1e6),
        _ => format!("{:.2} s", t / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_ranks_are_ranges() {
        assert_eq!(named(&[]), "no rank");
        assert_eq!(named(&[7]), "rank 7");
        assert_eq!(named(&[0, 1, 2, 5, 7, 8]), "ranks 0-2, 5, 7-8");
    }

    #[test]
    fn sizes_are_written_with_binary_units() {
        assert_eq!([1.0, 8.0, 1024.0, 1536.0, 33554432.0].map(binary), ["1", "8", "1K", "1.5K", "32M"]);
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!([0, 4096, 64 << 20, 3 << 29].map(size), ["0 KiB", "4 KiB", "64 MiB", "1.5 GiB"]);
    }
}
