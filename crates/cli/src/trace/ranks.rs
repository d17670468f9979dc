//! Lists of ranks as text.

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
    let runs = ranks.chunk_by(|a, b| a + 1 == *b);
    let run = |run: &[usize]| match run {
        [first, .., last] => format!("{first}-{last}"),
        one => one.iter().map(ToString::to_string).collect(),
    };
    runs.map(run).collect::<Vec<_>>().join(", ")
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
}
