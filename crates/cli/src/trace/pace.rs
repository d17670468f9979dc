//! Who comes last, and how long the others wait for it.

use bonfire::{Record, Trace};

use super::diagnosis::Collectives;

/// Ranks whose times can be compared, and the operations that all of them have in their traces.
pub struct Pace {
    pub host: String,
    pub ranks: Vec<usize>,
    /// Operations compared.
    pub compared: usize,
    /// From the first of them to the last, in nanoseconds.
    pub span: u64,
    /// One for each rank.
    pub ranked: Vec<Ranked>,
}

/// How often a rank came last, and what it cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ranked {
    pub rank: usize,
    pub last: usize,
    /// For how long all others were there, in nanoseconds.
    pub cost: u64,
    /// The most in one operation.
    pub worst: u64,
}

/// A rank is called slow if the others waited for it for this part of the time.
const SLOW: f64 = 0.05;

impl Pace {
    /// Who made the others wait, the worst first.
    pub fn slow(&self) -> Vec<Ranked> {
        let mut slow: Vec<_> = self.ranked.iter().filter(|r| self.share(r) >= SLOW).copied().collect();
        slow.sort_by_key(|ranked| std::cmp::Reverse(ranked.cost));
        slow
    }

    /// The part of the time that went by while all others waited for this rank.
    pub fn share(&self, ranked: &Ranked) -> f64 {
        if self.span == 0 { 0.0 } else { ranked.cost as f64 / self.span as f64 }
    }
}

/// By clock, for those that two ranks or more share.
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
    let mut ranked: Vec<_> =
        here.iter().map(|i| Ranked { rank: traces[*i].rank, last: 0, cost: 0, worst: 0 }).collect();
    let (mut compared, mut first, mut end) = (0, u64::MAX, 0);
    for records in collectives.values() {
        let mut begun: Vec<(u64, usize)> =
            here.iter().filter_map(|i| Some((begun(records, *i)?, traces[*i].rank))).collect();
        if begun.len() < here.len() {
            continue;
        }
        begun.sort_unstable();
        let [.., (before, _), (last, rank)] = begun[..] else { continue };
        compared += 1;
        (first, end) = (first.min(begun[0].0), end.max(last));
        if let Some(ranked) = ranked.iter_mut().find(|ranked| ranked.rank == rank) {
            ranked.last += 1;
            ranked.cost = ranked.cost.saturating_add(last - before);
            ranked.worst = ranked.worst.max(last - before);
        }
    }
    let ranks = here.iter().map(|i| traces[*i].rank).collect();
    let host = traces[here[0]].host.clone();
    Some(Pace { host, ranks, compared, span: end.saturating_sub(first), ranked })
}

fn begun(records: &[(usize, &Record)], trace: usize) -> Option<u64> {
    records.iter().find(|(i, _)| *i == trace).map(|(_, record)| record.begun_ns)
}
