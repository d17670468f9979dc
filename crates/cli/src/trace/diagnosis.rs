//! Diagnosis of the traces of one group: where it is stuck, and which ranks disagree.

use std::collections::BTreeMap;

use bonfire::error::Whereabouts;
use bonfire::trace::{Message, Record, State, Trace};
use bonfire::{Call, Operation};
use serde::{Serialize, Serializer};

use super::pace::{self, Collectives, Pace};

/// The findings from all traces of a group.
pub struct Diagnosis {
    /// By rank, ascending, and not empty.
    pub traces: Vec<Trace>,
    /// Ranks without a trace.
    pub absent: Vec<usize>,
    pub stall: Option<Stall>,
    pub messages: Vec<Unmatched>,
    pub disagreements: Vec<Disagreement>,
    pub paces: Vec<Pace>,
}

/// The first collective that some rank has not completed. It may precede the operation in which other ranks failed:
/// ranks that completed it fail in the next.
#[derive(Serialize)]
pub struct Stall {
    pub sequence: u64,
    /// The calls at this number in the sequence, with their ranks.
    pub calls: Vec<Called>,
    /// Ranks that have a trace but have not called it.
    pub behind: Vec<Behind>,
    /// Ranks that called it after it had failed on another rank of their host.
    pub late: Vec<Late>,
}

#[derive(Serialize)]
pub struct Called {
    #[serde(serialize_with = "as_text")]
    pub call: Call,
    pub ranks: Vec<usize>,
}

fn as_text<S: Serializer>(call: &Call, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(call)
}

#[derive(Serialize)]
pub struct Behind {
    pub rank: usize,
    last_call: Option<String>,
    last_sequence: Option<u64>,
    /// Its last collective.
    #[serde(skip)]
    pub last: Option<Record>,
}

#[derive(Serialize)]
pub struct Late {
    pub rank: usize,
    pub after_ns: u64,
}

/// A message that is not done and whose other side has not been called.
#[derive(Serialize)]
pub struct Unmatched {
    pub rank: usize,
    pub call: String,
    pub sequence: u64,
    #[serde(rename = "missing")]
    pub peer: usize,
}

/// Different calls where all must be the same.
#[derive(Serialize)]
pub struct Disagreement {
    pub sequence: u64,
    /// Ranks of a message, the sender first.
    #[serde(rename = "from_to")]
    pub between: Option<(usize, usize)>,
    pub calls: Vec<Called>,
}

impl Diagnosis {
    /// Diagnoses the traces of one group, at least one, in ascending order of rank.
    pub fn new(traces: Vec<Trace>) -> Diagnosis {
        let mut present = traces.iter().map(|trace| trace.rank).peekable();
        let world_size = traces.first().map_or(0, |trace| trace.world_size);
        let absent = (0..world_size).filter(|rank| present.next_if_eq(rank).is_none()).collect();
        let collectives = collectives(&traces);
        Diagnosis {
            absent,
            stall: stall(&traces, &collectives),
            messages: unmatched(&traces),
            disagreements: disagreements(&traces, &collectives),
            paces: pace::paces(&traces, &collectives),
            traces,
        }
    }

    /// Whether every rank has a trace and no operation is unfinished, failed or mismatched.
    pub fn is_healthy(&self) -> bool {
        let done = |trace: &Trace| trace.operations.iter().all(|record| record.state == State::Done);
        let healthy = self.traces.iter().all(|trace| trace.failure.is_none() && done(trace));
        healthy && self.absent.is_empty() && self.stall.is_none() && self.disagreements.is_empty()
    }

    /// Returns where each rank was in its program, as far as it is known: by its own trace, or else by that of a rank
    /// that waited for it.
    pub fn whereabouts(&self) -> Vec<(usize, Whereabouts)> {
        let own = self.traces.iter().map(|trace| (trace.rank, trace));
        let of_absent = self.absent.iter().flat_map(|rank| self.traces.iter().map(move |trace| (*rank, trace)));
        let told = own
            .chain(of_absent)
            .filter_map(|(rank, trace)| trace.whereabouts.iter().find(|(of, _)| *of == rank).cloned());
        told.collect::<BTreeMap<_, _>>().into_iter().collect()
    }

    /// Returns the different failures, each with its ranks.
    pub fn failures(&self) -> Vec<(&str, Vec<usize>)> {
        let failed = self.traces.iter().filter_map(|trace| Some((trace.failure.as_deref()?, trace.rank)));
        group_equal(failed)
    }
}

fn collectives(traces: &[Trace]) -> Collectives<'_> {
    let mut collectives = Collectives::new();
    for (i, trace) in traces.iter().enumerate() {
        for record in trace.operations.iter().filter(|record| record.message.is_none()) {
            collectives.entry(record.sequence).or_default().push((i, record));
        }
    }
    collectives
}

/// Groups equal things, in the order of their first occurrence.
pub fn group_equal<T: PartialEq>(things: impl Iterator<Item = (T, usize)>) -> Vec<(T, Vec<usize>)> {
    let mut gathered: Vec<(T, Vec<usize>)> = Vec::new();
    for (thing, rank) in things {
        match gathered.iter_mut().find(|(other, _)| *other == thing) {
            Some((_, ranks)) => ranks.push(rank),
            None => gathered.push((thing, vec![rank])),
        }
    }
    gathered
}

/// Returns the different calls, each with its ranks.
fn called(traces: &[Trace], records: &[(usize, &Record)]) -> Vec<Called> {
    let calls = group_equal(records.iter().map(|(i, record)| (record.call, traces[*i].rank)));
    calls.into_iter().map(|(call, ranks)| Called { call, ranks }).collect()
}

fn stall(traces: &[Trace], collectives: &Collectives<'_>) -> Option<Stall> {
    let open = |records: &Vec<(usize, &Record)>| records.iter().any(|(_, record)| record.state != State::Done);
    let (&sequence, records) = collectives.iter().find(|(_, records)| open(records))?;
    let behind = traces.iter().filter(|trace| trace.collectives <= sequence).map(|trace| {
        let last = trace.operations.iter().rfind(|record| record.message.is_none()).cloned();
        let (last_call, last_sequence) =
            (last.as_ref().map(Record::to_string), last.as_ref().map(|last| last.sequence));
        Behind { rank: trace.rank, last_call, last_sequence, last }
    });
    // The time of the first failure, among ranks with the same clock.
    let first_failure = |clock: &str| {
        let failed = records.iter().filter(|(i, record)| traces[*i].clock == clock && record.state == State::Failed);
        failed.filter_map(|(_, record)| record.ended_ns).min()
    };
    let late = records.iter().filter_map(|(i, record)| {
        let after_ns = record.begun_ns.checked_sub(first_failure(&traces[*i].clock)?)?;
        (after_ns > 0).then_some(Late { rank: traces[*i].rank, after_ns })
    });
    Some(Stall { sequence, calls: called(traces, records), behind: behind.collect(), late: late.collect() })
}

/// Returns the peer's records of messages with `rank` in the direction of `message`, or None without the peer's trace.
fn counterpart(traces: &[Trace], rank: usize, message: Message) -> Option<impl Iterator<Item = &Record>> {
    let trace = traces.iter().find(|trace| trace.rank == message.peer)?;
    let other = Message { peer: rank, sends: !message.sends };
    Some(trace.operations.iter().filter(move |record| record.message == Some(other) && is_numbered(record)))
}

/// Whether the record's sequence number identifies the message between its two ranks.
fn is_numbered(record: &Record) -> bool {
    record.call.operation == Operation::Send
}

fn unmatched(traces: &[Trace]) -> Vec<Unmatched> {
    let mut unmatched = Vec::new();
    for trace in traces {
        for record in trace.operations.iter().filter(|record| record.state != State::Done && is_numbered(record)) {
            let Some(message) = record.message else { continue };
            let Some(others) = counterpart(traces, trace.rank, message) else { continue };
            let last = others.last().map(|other| other.sequence);
            // Without a record of the other side, it is known not to have been called only if no record was dropped.
            let complete = |trace: &Trace| trace.operations.first().is_none_or(|first| first.number == 0);
            let known = last.is_some() || traces.iter().any(|other| other.rank == message.peer && complete(other));
            if known && last.is_none_or(|last| last < record.sequence) {
                let (call, sequence) = (record.to_string(), record.sequence);
                unmatched.push(Unmatched { rank: trace.rank, call, sequence, peer: message.peer });
            }
        }
    }
    unmatched
}

fn disagreements(traces: &[Trace], collectives: &Collectives<'_>) -> Vec<Disagreement> {
    let mut found = Vec::new();
    for (&sequence, records) in collectives {
        let calls = called(traces, records);
        if calls.len() > 1 {
            found.push(Disagreement { sequence, between: None, calls });
        }
    }
    for trace in traces {
        let sends = trace.operations.iter().filter(|record| is_numbered(record));
        let sends = sends.filter_map(|r| Some((r, r.message.filter(|message| message.sends)?)));
        for (record, message) in sends {
            let received = counterpart(traces, trace.rank, message);
            let other = received.and_then(|mut others| others.find(|other| other.sequence == record.sequence));
            if let Some(other) = other.filter(|other| other.call != record.call) {
                let sides = [(record.call, trace.rank), (other.call, message.peer)];
                let calls = sides.map(|(call, rank)| Called { call, ranks: vec![rank] }).into();
                let between = Some((trace.rank, message.peer));
                found.push(Disagreement { sequence: record.sequence, between, calls });
            }
        }
    }
    found
}
