//! Ranks as text.

use std::fmt;

/// Ranks as text: `rank 3` or `ranks 1, 2`.
pub struct RankList<'a>(pub &'a [usize]);

impl fmt::Display for RankList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => write!(f, "its turn"),
            [one] => write!(f, "rank {one}"),
            many => {
                write!(f, "ranks ")?;
                for (i, rank) in many.iter().enumerate() {
                    write!(f, "{}{rank}", if i == 0 { "" } else { ", " })?;
                }
                Ok(())
            }
        }
    }
}
