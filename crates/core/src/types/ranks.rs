//! Ranks as text.

use std::fmt;

/// In lists of more ranks, those that follow each other are named by the first and the last: there may be a thousand.
const LONG: usize = 8;

/// Ranks in rising order as text: `rank 3`, `ranks 1, 2`, or `ranks 0-12, 14, 16-999`.
pub struct RankList<'a>(pub &'a [usize]);

impl fmt::Display for RankList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => return write!(f, "its turn"),
            [one] => return write!(f, "rank {one}"),
            _ => write!(f, "ranks ")?,
        }
        let is_long = self.0.len() > LONG;
        let runs = self.0.chunk_by(|one, next| is_long && *next == one + 1);
        for (i, run) in runs.enumerate() {
            f.write_str(if i == 0 { "" } else { ", " })?;
            match run {
                [first, .., last] => write!(f, "{first}-{last}")?,
                run => run.iter().try_for_each(|rank| write!(f, "{rank}"))?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_has_ranges() {
        let text = |ranks: &[usize]| RankList(ranks).to_string();
        assert_eq!(text(&[]), "its turn");
        assert_eq!(text(&[3]), "rank 3");
        assert_eq!(text(&[0, 1, 2, 3, 4, 5, 6, 9]), "ranks 0, 1, 2, 3, 4, 5, 6, 9");
        let many: Vec<usize> = (0..1000).filter(|rank| ![13, 15].contains(rank)).collect();
        assert_eq!(text(&many), "ranks 0-12, 14, 16-999");
        assert_eq!(text(&[1, 3, 5, 7, 9, 11, 13, 15, 16]), "ranks 1, 3, 5, 7, 9, 11, 13, 15-16");
    }
}
