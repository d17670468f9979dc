//! Values as text for people.

/// `a, b, c`
pub fn list(all: &[impl ToString]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// `rank 3`, `ranks 0-2, 5` or `no rank`; the ranks ascend.
pub fn named(ranks: &[usize]) -> String {
    match ranks {
        [] => "no rank".into(),
        [one] => format!("rank {one}"),
        many => format!("ranks {}", numbers(many)),
    }
}

/// `0-2, 5`
pub fn numbers(ranks: &[usize]) -> String {
    let run = |run: &[usize]| match run {
        [first, .., last] => format!("{first}-{last}"),
        one => list(one),
    };
    list(&ranks.chunk_by(|a, b| a + 1 == *b).map(run).collect::<Vec<_>>())
}

/// Bytes of memory, such as `64 MiB`.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..1_048_576 => format!("{} KiB", bytes >> 10),
        1_048_576..1_073_741_824 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}

/// Nanoseconds in a unit that suits.
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
    fn runs_are_short() {
        assert_eq!(named(&[]), "no rank");
        assert_eq!(named(&[7]), "rank 7");
        assert_eq!(named(&[0, 1, 2, 5, 7, 8]), "ranks 0-2, 5, 7-8");
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!([0, 4096, 64 << 20, 3 << 29].map(size), ["0 KiB", "4 KiB", "64 MiB", "1.5 GiB"]);
    }
}
