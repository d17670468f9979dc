//! Where ranks are in their programs, for the errors and the log of ranks that wait for them.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ranks::RankList;

/// The most calls of a rank that are told, and the most characters of each of their texts.
const MOST_CALLS: usize = 4;
const LONGEST: usize = 200;

/// A call of one of Bonfire's functions in a program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramCall {
    /// The function, such as `Checkpoints::save` or `all_reduce`.
    pub function: String,
    /// Where the program calls it, `file:line`.
    pub at: String,
}

/// Where a rank is in its program, as it has told another one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whereabouts {
    /// The calls that it is in, at most 4: several if it has several threads. Empty if it is in none.
    pub calls: Vec<ProgramCall>,
    /// Whether it waits for other ranks there. Otherwise it computes.
    pub waits: bool,
    /// The calls that run on threads of Bonfire's own meanwhile, such as a save in the background, at most 4.
    pub background: Vec<ProgramCall>,
    /// The last call that has ended, if the rank is in none.
    pub last: Option<ProgramCall>,
    /// How long it has been there.
    pub since: Duration,
    /// How far its program has come, as a layer above says it, such as `after 5 training steps`. Empty if it does not.
    pub progress: String,
}

/// So many of the ranks for which an operation waits are asked where they are, and in groups of so many all ranks.
const MOST_MISSING: usize = 8;
const SMALL_GROUP: usize = 16;

/// Returns the ranks to ask where they are, if these are missing. There may be a thousand, and as many that ask.
pub(crate) fn asked(missing: &[usize], world_size: usize) -> Vec<usize> {
    if world_size <= SMALL_GROUP {
        (0..world_size).collect()
    } else {
        missing.iter().copied().take(MOST_MISSING).collect()
    }
}

/// Tells where this rank is.
pub trait Locate: Send + Sync {
    /// Returns where it is.
    fn whereabouts(&self) -> Whereabouts;
}

impl ProgramCall {
    pub(crate) fn new(function: impl Into<String>, at: &std::panic::Location<'_>) -> ProgramCall {
        ProgramCall { function: function.into(), at: format!("{}:{}", at.file(), at.line()) }
    }
}

impl fmt::Display for ProgramCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.function, self.at)
    }
}

impl Whereabouts {
    /// Returns what is told to other ranks, and what is believed of them: a message between ranks has a limit.
    pub(crate) fn bounded(mut self) -> Whereabouts {
        let cut = |text: &mut String| text.truncate(text.floor_char_boundary(LONGEST));
        for calls in [&mut self.calls, &mut self.background] {
            calls.truncate(MOST_CALLS);
        }
        for call in self.calls.iter_mut().chain(&mut self.background).chain(&mut self.last) {
            cut(&mut call.function);
            // Of a path, the end tells more.
            let start = call.at.ceil_char_boundary(call.at.len().saturating_sub(LONGEST));
            call.at.drain(..start);
        }
        cut(&mut self.progress);
        self
    }

    /// Whether both ranks are in calls of the same functions.
    fn is_in_those_of(&self, other: &Whereabouts) -> bool {
        let functions = |calls: &[ProgramCall]| calls.iter().map(|call| call.function.clone()).collect::<Vec<_>>();
        functions(&self.calls) == functions(&other.calls)
    }

    /// Whether both texts are the same but for the time.
    fn is_same_place(&self, other: &Whereabouts) -> bool {
        let timeless = |whereabouts: &Whereabouts| Whereabouts { since: Duration::ZERO, ..whereabouts.clone() };
        !self.calls.is_empty() && timeless(self) == timeless(other)
    }
}

/// The place, after a verb: `in sync at main.rs:57`.
impl fmt::Display for Whereabouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |calls: &[ProgramCall]| calls.iter().map(ProgramCall::to_string).collect::<Vec<_>>().join(" and ");
        match (&self.calls[..], &self.last) {
            ([], None) => write!(f, "in no call of Bonfire's yet")?,
            ([], Some(last)) => {
                write!(f, "in no call of Bonfire's for {:.1?}, since {last}", self.since)?;
            }
            (calls, _) => write!(f, "{}in {}", if self.waits { "" } else { "computing " }, list(calls))?,
        }
        if !self.background.is_empty() {
            write!(f, " (and in {} in the background)", list(&self.background))?;
        }
        if !self.progress.is_empty() {
            write!(f, ", {}", self.progress)?;
        }
        Ok(())
    }
}

/// Where some ranks are, as text, ranks at one place together; with what to do about it.
pub struct Places<'a>(pub &'a [(usize, Whereabouts)]);

impl fmt::Display for Places<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut places: Vec<(Vec<usize>, &Whereabouts)> = Vec::new();
        for (rank, whereabouts) in self.0 {
            match places.iter_mut().find(|(_, other)| other.is_same_place(whereabouts)) {
                Some((ranks, _)) => ranks.push(*rank),
                None => places.push((vec![*rank], whereabouts)),
            }
        }
        for (i, (ranks, whereabouts)) in places.iter().enumerate() {
            let verb = if ranks.len() == 1 { "is" } else { "are" };
            write!(f, "{}{} {verb} {whereabouts}", if i == 0 { "" } else { "; " }, RankList(ranks))?;
        }
        Ok(())
    }
}

impl<'a> Places<'a> {
    /// Returns the functions in which the missing ranks wait for others, if all of them do, and `rank` is in no call of
    /// the same ones. Then no time helps: the ranks make different calls.
    pub(crate) fn elsewhere(&self, rank: usize, missing: &[usize]) -> Option<Vec<&'a str>> {
        let of = |rank: usize| self.0.iter().find(|(other, _)| *other == rank).map(|(_, whereabouts)| whereabouts);
        let own = of(rank)?;
        let mut functions = Vec::new();
        for peer in missing {
            let theirs = of(*peer).filter(|theirs| theirs.waits && !theirs.is_in_those_of(own))?;
            for call in &theirs.calls {
                if !functions.contains(&&*call.function) {
                    functions.push(&call.function);
                }
            }
        }
        (!functions.is_empty()).then_some(functions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(function: &str, line: u32) -> ProgramCall {
        ProgramCall { function: function.into(), at: format!("main.rs:{line}") }
    }

    fn waits(function: &str, line: u32) -> Whereabouts {
        Whereabouts { calls: vec![call(function, line)], waits: true, ..Default::default() }
    }

    #[test]
    fn ranks_at_one_place_are_named_together() {
        let later = Whereabouts { since: Duration::from_secs(1), ..waits("sync", 57) };
        let outside =
            Whereabouts { last: Some(call("sync", 57)), since: Duration::from_millis(31_000), ..Default::default() };
        let computes = Whereabouts {
            background: vec![call("Checkpoints::save_in_background", 41)],
            waits: false,
            ..waits("DataParallel::run", 9)
        };
        let places = [(0, waits("Checkpoints::save", 41)), (1, waits("sync", 57)), (2, later), (3, outside.clone())];
        let text = "rank 0 is in Checkpoints::save at main.rs:41; ranks 1, 2 are in sync at main.rs:57; rank 3 is in \
                    no call of Bonfire's for 31.0s, since sync at main.rs:57";
        assert_eq!(Places(&places).to_string(), text);
        let text = "rank 3 is computing in DataParallel::run at main.rs:9 (and in Checkpoints::save_in_background at \
                    main.rs:41 in the background)";
        assert_eq!(Places(&[(3, computes)]).to_string(), text);
        assert_eq!(Places(&[(0, Whereabouts::default())]).to_string(), "rank 0 is in no call of Bonfire's yet");
    }

    #[test]
    fn ranks_that_wait_in_other_functions_make_other_calls() {
        let computes = Whereabouts { waits: false, ..waits("evaluate", 3) };
        let places =
            [(0, waits("Checkpoints::save", 41)), (1, waits("sync", 57)), (2, waits("sync", 60)), (3, computes)];
        let elsewhere = |rank, missing: &[usize]| Places(&places).elsewhere(rank, missing);
        assert_eq!(elsewhere(1, &[0]), Some(vec!["Checkpoints::save"]));
        assert_eq!(elsewhere(1, &[2]), None, "it is in the same function");
        assert_eq!(elsewhere(1, &[0, 3]), None, "one may be slow");
        assert_eq!(elsewhere(1, &[4]), None, "nothing is known");
        assert_eq!(elsewhere(4, &[0]), None, "nothing is known");
        assert_eq!(elsewhere(1, &[]), None);
    }

    #[test]
    fn what_other_ranks_tell_is_bounded() {
        let long = ProgramCall { function: "é".repeat(1000), at: format!("{}:7", "é".repeat(1000)) };
        let whereabouts = Whereabouts {
            calls: vec![long.clone(); 100],
            background: vec![long.clone(); 100],
            last: Some(long),
            ..Default::default()
        };
        let sent = postcard::to_stdvec(&whereabouts.clone().bounded()).unwrap();
        assert!(sent.len() < 4 << 10, "{}", sent.len());
        assert!(whereabouts.bounded().calls[3].at.ends_with(":7"));
    }
}
