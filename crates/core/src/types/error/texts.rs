//! Parts of the texts of errors.

use std::fmt;

use crate::types::Call;
use crate::types::ranks::RankList;
use crate::types::whereabouts::{Places, Whereabouts};

/// Where the ranks of a timeout were, and what to do.
pub(super) struct Advice<'a>(pub &'a usize, pub &'a [usize], pub &'a [(usize, Whereabouts)]);

impl fmt::Display for Advice<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Advice(rank, missing, whereabouts) = *self;
        let places = Places(whereabouts);
        if !whereabouts.is_empty() {
            write!(f, ": {places}")?;
        }
        match places.elsewhere(*rank, missing) {
            Some(functions) => {
                let verb = if functions.len() == 1 { "is" } else { "are" };
                write!(
                    f,
                    "; all ranks must make the same calls in the same order, and {} {verb} called by all ranks; \
                     {TraceHint} says what each rank did",
                    functions.join(" and "),
                )
            }
            None => write!(
                f,
                "; if they are merely slow (evaluating, saving), raise the deadline (BONFIRE_DEADLINE, or \
                 `Group::with_deadline`); else {TraceHint} says what each rank did"
            ),
        }
    }
}

/// How to use `bonfire trace`, which depends on whether this process writes traces.
struct TraceHint;

impl fmt::Display for TraceHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match std::env::var_os("BONFIRE_TRACE").filter(|folder| !folder.is_empty()) {
            Some(folder) => write!(f, "`bonfire trace {}`", folder.display()),
            None => f.write_str("set BONFIRE_TRACE to a folder, and `bonfire trace`"),
        }
    }
}

/// Whose GPU it is, if that is known.
pub(super) struct OfRanks<'a>(pub &'a [usize]);

impl fmt::Display for OfRanks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, " of {}", RankList(self.0)) }
    }
}

/// The calls of ranks that disagree.
pub(super) struct Calls<'a>(pub &'a [(usize, Call)]);

impl fmt::Display for Calls<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (rank, call)) in self.0.iter().enumerate() {
            write!(f, "{}rank {rank} called {call}", if i == 0 { "" } else { ", " })?;
        }
        if let [(_, first), rest @ ..] = self.0
            && !rest.is_empty()
            && rest.iter().all(|(_, call)| call == first)
        {
            write!(f, ", but one sends another length than the other expects, or their sizes differ")?;
        }
        if let [(_, first), rest @ ..] = self.0
            && rest.iter().any(|(_, call)| call != first)
            && rest.iter().all(|(_, call)| call == first || call.differs_in_shape_only(first))
        {
            write!(f, ", which differ in the shape of their tensors or the sizes of their parts only")?;
        }
        Ok(())
    }
}

/// What else is known, if anything is.
pub(super) struct Note<'a>(pub &'a str);

impl fmt::Display for Note<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, "; {}", self.0) }
    }
}

/// Where a rank listens, if it does.
pub(super) struct At<'a>(pub &'a Option<String>);

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |address| write!(f, " at {address}"))
    }
}
