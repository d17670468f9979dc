//! Values as text for people.

/// `a, b, c`
pub fn list(all: &[impl ToString]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Bytes of memory, such as `64 MiB`.
pub fn size(bytes: u64) -> String {
    match bytes {
        0..1_048_576 => format!("{} KiB", bytes >> 10),
        1_048_576..1_073_741_824 => format!("{} MiB", bytes >> 20),
        _ => format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!([0, 4096, 64 << 20, 3 << 29].map(size), ["0 KiB", "4 KiB", "64 MiB", "1.5 GiB"]);
    }
}
