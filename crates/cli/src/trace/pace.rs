//! Stragglers: which rank begins operations last, and how long the others wait for it.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use bonfire::trace::{Record, Trace};
use serde::Serialize;

/// The collectives of all traces by number in the sequence: the traces' indices with their records.
pub type Collectives<'a> = BTreeMap<u64, Vec<(usize, &'a Record)>>;

/// A comparison of ranks with the same clock, over the operations that the traces of all of them contain.
#[derive(Serialize)]
pub struct Pace {
    pub host: String,
    /// Operations compared.
    pub compared: usize,
    /// From the first begin of any of them to the last.
    span_ns: u64,
    /// Stragglers, the worst first.
    pub slow: Vec<usize>,
    pub ranks: Vec<RankDelays>,
}

/// How often a rank began last, and how long the others waited for it.
#[derive(Serialize)]
pub struct RankDelays {
    pub rank: usize,
    pub last: usize,
    /// Total time during which all others had begun an operation and this rank had not.
    pub cost_ns: u64,
    /// The largest such time in one operation.
    pub worst_ns: u64,
    /// `cost_ns` as a fraction of `span_ns`.
    pub share: f64,
}

/// A rank whose `share` is at least this counts as a straggler,
const SLOW: f64 = 0.05;

/// if it cost at least this much time in all: a rank that has just started, or shares its core, is some milliseconds
/// late by chance.
const NOISE_NS: u64 = 10_000_000;

/// Compares the ranks of each clock that two or more ranks share.
pub fn paces(traces: &[Trace], collectives: &Collectives<'_>) -> Vec<Pace> {
    let mut clocks: Vec<&str> = traces.iter().map(|trace| trace.clock.as_str()).collect();
    clocks.sort_unstable();
    clocks.dedup();
    clocks.into_iter().filter_map(|clock| pace(traces, collectives, clock)).collect()
}

fn pace(traces: &[Trace], collectives: &Collectives<'_>, clock: &str) -> Option<Pace> {
    let here: Vec<usize> = (0..traces.len()).filter(|i| traces[*i].clock == clock).collect();
    if here.len() < 2 {
        return None;
    }
    let delays = |i: &usize| RankDelays { rank: traces[*i].rank, last: 0, cost_ns: 0, worst_ns: 0, share: 0.0 };
    let mut ranks: Vec<_> = here.iter().map(delays).collect();
    let (mut compared, mut first, mut end) = (0, u64::MAX, 0);
    for records in collectives.values() {
        let mut begun: Vec<_> = (0..here.len()).filter_map(|i| Some((begun(records, here[i])?, i))).collect();
        begun.sort_unstable();
        let [.., (before, _), (last, slowest)] = begun[..] else { continue };
        if begun.len() < here.len() {
            continue;
        }
        compared += 1;
        (first, end) = (first.min(begun[0].0), end.max(last));
        let slowest = &mut ranks[slowest];
        slowest.last += 1;
        slowest.cost_ns = slowest.cost_ns.saturating_add(last - before);
        slowest.worst_ns = slowest.worst_ns.max(last - before);
    }
    let span_ns = end.saturating_sub(first);
    for delays in ranks.iter_mut().filter(|_| span_ns > 0) {
        delays.share = delays.cost_ns as f64 / span_ns as f64;
    }
    let mut slow: Vec<_> = ranks.iter().filter(|delays| delays.share >= SLOW && delays.cost_ns >= NOISE_NS).collect();
    slow.sort_by_key(|delays| Reverse(delays.cost_ns));
    let slow = slow.into_iter().map(|delays| delays.rank).collect();
    Some(Pace { host: traces[here[0]].host.clone(), compared, span_ns, slow, ranks })
}

fn begun(records: &[(usize, &Record)], trace: usize) -> Option<u64> {
    records.iter().find(|(i, _)| *i == trace).map(|(_, record)| record.begun_ns)
}
