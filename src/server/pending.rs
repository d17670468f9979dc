//! All-reduces through host memory whose results have not been written yet.

use std::sync::Arc;

use cubecl::bytes::Bytes;
use cubecl::server::Binding;

use super::device_group::DeviceGroup;
use super::memory::{Span, writable};
use bonfire_core::{Deadline, Error};

pub(super) const UNFINISHED: &str = "the memory overlaps a pending result, in part or of another list of devices; \
                                     call sync_collective between the two";

/// A device's call and the memory that its result belongs in.
pub(super) struct PendingResult {
    pub group: Arc<DeviceGroup>,
    pub rank: usize,
    pub number: u64,
    pub target: Binding,
    /// The bytes of `target`.
    pub span: Span,
}

/// Waits for the results of all these calls. Returns the targets and what to write there, in call order.
pub(super) fn results(pending: Vec<PendingResult>, deadline: &Deadline) -> Result<Vec<(Binding, Bytes)>, Error> {
    let mut groups: Vec<(Arc<DeviceGroup>, usize)> = Vec::new();
    for pending in &pending {
        if !groups.iter().any(|(group, _)| Arc::ptr_eq(group, &pending.group)) {
            // Before any wait, since another device may wait for these first.
            pending.group.declare_wait(pending.rank);
            groups.push((pending.group.clone(), pending.rank));
        }
    }
    // Takes from all groups even after a failure: another group may be sound, and would keep its results for this
    // device's next calls.
    let taken: Vec<_> = groups.into_iter().map(|(group, rank)| (group.take(rank, deadline), group)).collect();
    let taken = taken.into_iter().map(|(results, group)| Ok((results?.into_iter(), group)));
    let mut taken = taken.collect::<Result<Vec<_>, Error>>()?;
    let writes = pending.into_iter().map(|pending| {
        let results = taken.iter_mut().find(|(_, group)| Arc::ptr_eq(group, &pending.group));
        let result = results.and_then(|(results, _)| results.next());
        let result = result.ok_or_else(|| Error::broken("sync_collective", "a result is gone"))?;
        Ok((pending.target, writable(result)))
    });
    writes.collect()
}
