//! Diagnoses as text and as JSON.

use bonfire::trace::{Record, State, Trace};
use serde_json::{Value, json};

use super::diagnosis::{Called, Diagnosis, Disagreement, Stall, Unmatched, group_equal};
use super::pace::{Pace, RankDelays};
use crate::text::{list, named, numbers, time};
use bonfire_core::internal::Places;

/// Returns a text of several lines, the findings first.
pub fn text(group: &Diagnosis, last: usize) -> String {
    let size = group.traces.len() + group.absent.len();
    let name = group.traces.first().and_then(|trace| trace.group.as_deref()).unwrap_or("without a name");
    let job = group.traces.first().and_then(|trace| trace.job.as_deref()).filter(|job| *job != name);
    let made_of = job.map_or(String::new(), |job| format!("; it was made of group {job}"));
    let heading = format!("group {name}: traces of {} of {size} ranks{made_of}", group.traces.len());
    let mut lines = vec![heading, String::new()];
    lines.extend(findings(group).into_iter().map(|(kind, what)| format!("{kind:<10}{what}")));
    lines.push(String::new());
    lines.extend(columns(ranks(group)));
    lines.push(String::new());
    lines.extend(columns(operations(group, last)));
    let coarse = group.traces.iter().map(|trace| trace.resolution_ns).max().unwrap_or(0);
    lines.push(String::new());
    lines.push(format!(
        "waited: time in all operations of the trace, whose ends are known to {}; apart: time from the first rank's \
         begin to the last one's, on one host",
        time(coarse)
    ));
    lines.join("\n") + "\n"
}

/// Returns the findings, each with its kind.
fn findings(group: &Diagnosis) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    found.extend(group.failures().into_iter().map(|(text, ranks)| ("failed", format!("{}: {text}", named(&ranks)))));
    let whereabouts = group.whereabouts();
    if !group.is_healthy() && !whereabouts.is_empty() {
        found.push(("where", Places(&whereabouts).to_string()));
    }
    let at = group.stall.as_ref().map_or(String::new(), at);
    if !group.absent.is_empty() {
        let verb = if group.absent.len() == 1 { "has" } else { "have" };
        found.push(("missing", format!("{} {verb} no trace{at}", named(&group.absent))));
    }
    if let Some(stall) = &group.stall {
        let newest = group.traces.iter().map(|trace| trace.taken_unix).max().unwrap_or(0);
        for behind in &stall.behind {
            let (rank, last) = (behind.rank, behind.last.as_ref());
            let last = match last {
                Some(last) => format!("called {last} #{} last ({}), from {}", last.sequence, last.state, last.at),
                None => "has called no collective".into(),
            };
            let trace = group.traces.iter().find(|trace| trace.rank == rank);
            let older = match trace.map_or(0, |trace| newest.saturating_sub(trace.taken_unix)) {
                0..2 => String::new(),
                older => format!("; its trace is {older} s older than the newest, so it may have called since"),
            };
            found.push(("missing", format!("rank {rank} {last}{at}{older}")));
        }
        for late in &stall.late {
            let what = format!("rank {} called {} after a failure on its host{at}", late.rank, time(late.after_ns));
            found.push(("missing", what));
        }
        if group.absent.is_empty() && stall.behind.is_empty() && stall.late.is_empty() {
            found.push(("missing", format!("no rank{at}")));
        }
    }
    for unmatched in &group.messages {
        let Unmatched { rank, call, sequence, peer } = unmatched;
        let what = format!("rank {peer} has not called the other side of rank {rank}'s {call} #{sequence}");
        found.push(("missing", what));
    }
    found.extend(group.disagreements.iter().map(|disagreement| ("disagree", differ(disagreement))));
    if group.disagreements.is_empty() {
        found.push(("disagree", "no rank: the calls that several traces contain are the same".into()));
    }
    if group.paces.is_empty() {
        found.push(("slow", "unknown: no two traces are of one host, and clocks of hosts differ".into()));
    }
    found.extend(group.paces.iter().flat_map(slow).map(|what| ("slow", what)));
    found
}

fn at(stall: &Stall) -> String {
    format!("; at #{} {}", stall.sequence, called(&stall.calls))
}

fn called(calls: &[Called]) -> String {
    let called = |Called { call, ranks }: &Called| format!("{} called {call}", named(ranks));
    list(&calls.iter().map(called).collect::<Vec<_>>())
}

fn differ(Disagreement { sequence, between, calls }: &Disagreement) -> String {
    let calls = called(calls);
    match between {
        None => format!("at #{sequence}: {calls}"),
        Some((from, to)) => format!("message #{sequence} from rank {from} to rank {to}: {calls}"),
    }
}

fn slow(pace: &Pace) -> Vec<String> {
    let Pace { host, compared, .. } = pace;
    let ranks = named(&pace.ranks.iter().map(|delays| delays.rank).collect::<Vec<_>>());
    if *compared == 0 {
        return vec![format!("unknown for {ranks} on {host}: no operation is in all of their traces")];
    }
    if pace.slow.is_empty() {
        return vec![format!("none of {ranks} on {host}, in {compared} operations")];
    }
    let describe = |RankDelays { rank, last, cost_ns, worst_ns, share }: &RankDelays| {
        format!(
            "rank {rank}: the others of {ranks} on {host} waited {} for it, {:.0} % of the time, at most {} at once; \
             it began last in {last} of {compared} operations",
            time(*cost_ns),
            100.0 * share,
            time(*worst_ns),
        )
    };
    let delays = |slow: &usize| pace.ranks.iter().find(|delays| delays.rank == *slow).map(describe);
    pace.slow.iter().filter_map(delays).collect()
}

/// Returns the time in operations, in nanoseconds. An unfinished operation counts until the trace was taken.
fn waited(trace: &Trace) -> u64 {
    let durations = trace.operations.iter().map(|r| r.ended_ns.unwrap_or(trace.taken_ns).saturating_sub(r.begun_ns));
    durations.fold(0, u64::saturating_add)
}

fn ranks(group: &Diagnosis) -> Vec<Vec<String>> {
    let mut rows =
        vec![["rank", "host", "process", "collectives", "waited", "last operation"].map(String::from).to_vec()];
    for trace in &group.traces {
        let last = trace.operations.last().map_or("none".into(), |r| format!("{r} #{}, {}", r.sequence, r.state));
        let (rank, process) = (trace.rank.to_string(), trace.process.to_string());
        rows.push(vec![rank, trace.host.clone(), process, trace.collectives.to_string(), time(waited(trace)), last]);
    }
    rows
}

/// One call at one position in the sequence, and the ranks that made it.
struct Row<'a> {
    record: &'a Record,
    ranks: Vec<(&'a Trace, &'a Record)>,
}

impl Row<'_> {
    fn with(&self, state: State) -> Vec<usize> {
        let with = self.ranks.iter().filter(|(_, record)| record.state == state);
        with.map(|(trace, _)| trace.rank).collect()
    }

    /// Returns the nanoseconds from the first begin to the last, and the rank of the last, if all have the same clock.
    fn apart(&self) -> Option<(u64, usize)> {
        let [(first, _), .., _] = self.ranks[..] else { return None };
        if self.ranks.iter().any(|(trace, _)| trace.clock != first.clock) {
            return None;
        }
        let earliest = self.ranks.iter().map(|(_, record)| record.begun_ns).min()?;
        let (last, rank) = self.ranks.iter().map(|(trace, record)| (record.begun_ns, trace.rank)).max()?;
        Some((last - earliest, rank))
    }
}

/// Returns the last operations: collectives in order, and each message after its rank's preceding collective.
fn rows(group: &Diagnosis, last: usize) -> Vec<Row<'_>> {
    let mut keyed = Vec::new();
    for trace in &group.traces {
        // Collectives that the trace no longer contains came before.
        let kept = trace.operations.iter().filter(|record| record.message.is_none()).count() as u64;
        let mut before = trace.collectives.saturating_sub(kept);
        for record in &trace.operations {
            let key = match record.message {
                None => (record.sequence, 0),
                Some(_) => (before, record.number.saturating_add(1)),
            };
            before = before.max(key.0);
            keyed.push((key, trace, record));
        }
    }
    keyed.sort_by_key(|(key, trace, _)| (*key, trace.rank));
    let places = keyed.chunk_by(|(a, one, _), (b, other, _)| a == b && (a.1 == 0 || one.rank == other.rank));
    let mut rows = Vec::new();
    for place in places {
        let same = group_equal(place.iter().enumerate().map(|(i, (_, _, record))| (record.call, i)));
        rows.extend(same.into_iter().map(|(_, indices)| {
            let ranks: Vec<_> = indices.into_iter().map(|i| (place[i].1, place[i].2)).collect();
            Row { record: ranks[0].1, ranks }
        }));
    }
    rows.split_off(rows.len().saturating_sub(last))
}

fn operations(group: &Diagnosis, last: usize) -> Vec<Vec<String>> {
    let mut table = vec![["#", "called", "done", "begun", "failed", "apart", "from"].map(String::from).to_vec()];
    for row in rows(group, last) {
        let list = |state| match row.with(state) {
            ranks if ranks.is_empty() => "-".into(),
            ranks => numbers(&ranks),
        };
        let apart = row.apart().map_or("-".into(), |(apart, rank)| format!("{} (rank {rank})", time(apart)));
        let sites = group_equal(row.ranks.iter().map(|(trace, record)| (record.at.as_str(), trace.rank)));
        let sites = match &sites[..] {
            [(site, _)] => (*site).to_owned(),
            several => {
                several.iter().map(|(site, ranks)| format!("{site} ({})", numbers(ranks))).collect::<Vec<_>>().join(" ")
            }
        };
        let (number, called) = (row.record.sequence.to_string(), row.record.to_string());
        table.push(vec![number, called, list(State::Done), list(State::Begun), list(State::Failed), apart, sites]);
    }
    table
}

/// Formats rows with left-aligned columns.
fn columns(rows: Vec<Vec<String>>) -> Vec<String> {
    let width = |i: usize| rows.iter().filter_map(|row| row.get(i)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows.first().map_or(0, Vec::len)).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Returns the diagnosis as JSON.
pub fn object(group: &Diagnosis, last: usize) -> Value {
    let ranks = group.traces.iter().map(|trace| {
        json!({
            "rank": trace.rank, "host": trace.host, "process": trace.process, "clock": trace.clock,
            "taken_unix": trace.taken_unix, "collectives": trace.collectives, "waited_ns": waited(trace),
        })
    });
    let operations = rows(group, last).into_iter().map(|row| {
        json!({
            "sequence": row.record.sequence, "call": row.record.to_string(), "at": row.record.at,
            "done": row.with(State::Done), "begun": row.with(State::Begun), "failed": row.with(State::Failed),
            "apart_ns": row.apart().map(|(apart, _)| apart), "last": row.apart().map(|(_, rank)| rank),
        })
    });
    let failures = group.failures().into_iter().map(|(text, ranks)| json!({ "failure": text, "ranks": ranks }));
    json!({
        "group": group.traces.first().and_then(|trace| trace.group.as_deref()),
        "job": group.traces.first().and_then(|trace| trace.job.as_deref()),
        "whereabouts": group.whereabouts(),
        "world_size": group.traces.len() + group.absent.len(),
        "failures": failures.collect::<Vec<_>>(),
        "absent": group.absent,
        "unfinished": group.stall,
        "messages": group.messages,
        "disagreements": group.disagreements,
        "paces": group.paces,
        "ranks": ranks.collect::<Vec<_>>(),
        "operations": operations.collect::<Vec<_>>(),
    })
}
