//! Counts what happened at several addresses, for the log and for the error of a rank that tried in vain.

use std::fmt;

/// Most kinds of outcomes that are kept apart: a flood of connections must fill neither memory nor a disk.
const MOST: usize = 64;

/// Most kinds of outcomes in a text.
const SHOWN: usize = 6;

/// What happened at which address, and how often.
#[derive(Debug, Default)]
pub struct Tally {
    /// Outcomes of one address are next to each other.
    kinds: Vec<Kind>,
    /// All outcomes, those beyond [`MOST`] kinds too.
    total: u64,
}

#[derive(Debug)]
struct Kind {
    address: String,
    outcome: String,
    /// Whether it says more than that a stranger came, or that no process listens yet.
    telling: bool,
    count: u64,
}

/// How an outcome relates to those before it.
#[derive(Debug, PartialEq)]
pub enum Seen {
    /// The first of its kind.
    First,
    /// Of a known kind.
    Again,
    /// Of a kind that is not kept. The number of outcomes so far.
    Uncounted(u64),
}

impl Tally {
    /// Counts an outcome. `telling` outcomes displace others once there are too many kinds.
    pub fn add(&mut self, address: &impl fmt::Display, outcome: &impl fmt::Display, telling: bool) -> Seen {
        let (address, outcome) = (address.to_string(), outcome.to_string());
        self.total += 1;
        if let Some(kind) = self.kinds.iter_mut().find(|kind| kind.address == address && kind.outcome == outcome) {
            kind.count += 1;
            return Seen::Again;
        }
        if self.kinds.len() >= MOST {
            let Some(least) = self.kinds.iter().position(|kind| telling && !kind.telling) else {
                return Seen::Uncounted(self.total);
            };
            self.kinds.remove(least);
        }
        let after = self.kinds.iter().rposition(|kind| kind.address == address);
        let kind = Kind { address, outcome, telling, count: 1 };
        self.kinds.insert(after.map_or(self.kinds.len(), |after| after + 1), kind);
        Seen::First
    }

    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// Whether an outcome was more than that a stranger came, or that no process listens yet.
    pub fn is_telling(&self) -> bool {
        self.kinds.iter().any(|kind| kind.telling)
    }
}

/// Each address with its outcomes, such as `10.0.0.1:29400 (3 times: it has no secret, once: it was closed)`.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Telling ones first, if there is no room for all. Both passes keep the order.
        let all = self.kinds.len() <= SHOWN;
        let shown = self.kinds.iter().filter(|kind| all || kind.telling);
        let shown = shown.chain(self.kinds.iter().filter(|kind| !all && !kind.telling)).take(SHOWN);
        let (mut last, mut counted) = (None, 0);
        for Kind { address, outcome, count, .. } in shown {
            match last {
                Some(other) if other == address => f.write_str(", ")?,
                Some(_) => write!(f, "), {address} (")?,
                None => write!(f, "{address} (")?,
            }
            match count {
                1 => write!(f, "once: {outcome}")?,
                _ => write!(f, "{count} times: {outcome}")?,
            }
            (last, counted) = (Some(address), counted + count);
        }
        if last.is_some() {
            f.write_str(")")?;
        }
        match self.total - counted {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_grouped_by_address_and_counted() {
        let mut tally = Tally::default();
        assert!(tally.is_empty() && tally.to_string().is_empty());
        for (address, outcome, seen) in [
            ("a:1", "refused", Seen::First),
            ("b:1", "refused", Seen::First),
            ("a:1", "refused", Seen::Again),
            ("a:1", "closed", Seen::First),
            ("a:1", "refused", Seen::Again),
        ] {
            assert_eq!(tally.add(&address, &outcome, false), seen);
        }
        assert!(!tally.is_telling());
        assert_eq!(tally.to_string(), "a:1 (3 times: refused, once: closed), b:1 (once: refused)");
    }

    #[test]
    fn a_flood_is_bounded_and_does_not_hide_what_is_telling() {
        let mut tally = Tally::default();
        for number in 1..=1000 {
            let seen = tally.add(&number, &"noise", false);
            assert_eq!(seen, if number <= MOST { Seen::First } else { Seen::Uncounted(number as u64) });
        }
        assert_eq!(tally.add(&"b:1", &"it has another secret", true), Seen::First);
        assert_eq!(tally.kinds.len(), MOST);
        let text = tally.to_string();
        assert!(text.starts_with("b:1 (once: it has another secret), ") && text.ends_with(" and 995 more"), "{text}");
        assert!(text.len() < 300, "{text}");
    }
}
