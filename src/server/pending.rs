//! All-reduces through host memory whose results have not been written yet.

use std::sync::Arc;

use cubecl::bytes::Bytes;
use cubecl::server::Binding;

use super::memory::{Span, writable};
use super::round::Round;
use bonfire_core::{Deadline, Error};

pub(super) const UNFINISHED: &str = "the memory holds a part of an earlier result, or one from another list of \
                                     devices, that is not there yet; call sync_collective between the two";

/// A call of one device.
pub(super) struct Pending {
    pub round: Arc<Round>,
    pub rank: usize,
    pub number: u64,
    pub target: Binding,
    /// The target.
    pub span: Span,
}

/// Waits for the results of all these calls, and gives what is to be written where, in the order of the calls.
pub(super) fn results(pending: Vec<Pending>, deadline: &Deadline) -> Result<Vec<(Binding, Bytes)>, Error> {
    let mut rounds: Vec<(Arc<Round>, usize)> = Vec::new();
    for pending in &pending {
        if !rounds.iter().any(|(round, _)| Arc::ptr_eq(round, &pending.round)) {
            // Before any wait: another device may wait for these first.
            pending.round.announce(pending.rank);
            rounds.push((pending.round.clone(), pending.rank));
        }
    }
    // Also after a failure: another list of devices may be sound, and would keep the results for this device's next
    // calls there.
    let taken: Vec<_> = rounds.into_iter().map(|(round, rank)| (round.take(rank, deadline), round)).collect();
    let taken = taken.into_iter().map(|(results, round)| Ok((results?.into_iter(), round)));
    let mut taken = taken.collect::<Result<Vec<_>, Error>>()?;
    let writes = pending.into_iter().map(|pending| {
        let results = taken.iter_mut().find(|(_, round)| Arc::ptr_eq(round, &pending.round));
        let result = results.and_then(|(results, _)| results.next());
        let result = result.ok_or_else(|| Error::broken("sync_collective", "a result is gone"))?;
        Ok((pending.target, writable(result)))
    });
    writes.collect()
}
