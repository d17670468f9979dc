//! The traces of one group: where it stands, and who disagrees.

use bonfire::trace::{Message, Record, State, Trace};
use bonfire::{Call, Operation};
use serde::{Serialize, Serializer};

use super::pace::{self, Collectives, Pace};

/// What the traces of a group say together.
pub struct Diagnosis {
    /// By rank, ascending, and not empty.
    pub traces: Vec<Trace>,
    /// Ranks without a trace.
    pub absent: Vec<usize>,
    pub stand: Option<Stand>,
    pub messages: Vec<Lonely>,
    pub disagreements: Vec<Disagreement>,
    pub paces: Vec<Pace>,
}

/// The first collective that some rank has not done.
#[derive(Serialize)]
pub struct Stand {
    pub sequence: u64,
    /// What was called there, by those who are in it.
    pub calls: Vec<Called>,
    /// Who has a trace and has not called it.
    pub behind: Vec<Behind>,
    /// Who called it after others had given up.
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
    /// What it called last.
    #[serde(skip)]
    pub last: Option<Record>,
}

#[derive(Serialize)]
pub struct Late {
    pub rank: usize,
    pub after_ns: u64,
}

/// A message that is not done, and whose other side has not been called.
#[derive(Serialize)]
pub struct Lonely {
    pub rank: usize,
    pub call: String,
    pub sequence: u64,
    #[serde(rename = "missing")]
    pub peer: usize,
}

/// Different calls where all should be the same.
#[derive(Serialize)]
pub struct Disagreement {
    pub sequence: u64,
    /// Ranks of a message, the sender first.
    #[serde(rename = "from_to")]
    pub between: Option<(usize, usize)>,
    pub calls: Vec<Called>,
}

impl Diagnosis {
    /// Of traces of one group by rank, of which there is one at least.
    pub fn new(traces: Vec<Trace>) -> Diagnosis {
        let mut present = traces.iter().map(|trace| trace.rank).peekable();
        let world_size = traces.first().map_or(0, |trace| trace.world_size);
        let absent = (0..world_size).filter(|rank| present.next_if_eq(rank).is_none()).collect();
        let collectives = collectives(&traces);
        Diagnosis {
            absent,
            stand: stand(&traces, &collectives),
            messages: lonely(&traces),
            disagreements: disagreements(&traces, &collectives),
            paces: pace::paces(&traces, &collectives),
            traces,
        }
    }

    /// Whether there is nothing to complain of.
    pub fn is_well(&self) -> bool {
        let done = |trace: &Trace| trace.operations.iter().all(|record| record.state == State::Done);
        let well = self.traces.iter().all(|trace| trace.failure.is_none() && done(trace));
        well && self.absent.is_empty() && self.stand.is_none() && self.disagreements.is_empty()
    }

    /// The different failures, with who has them.
    pub fn failures(&self) -> Vec<(&str, Vec<usize>)> {
        let failed = self.traces.iter().filter_map(|trace| Some((trace.failure.as_deref()?, trace.rank)));
        gather(failed)
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

/// Puts equal things together, in the order in which they first come.
pub fn gather<T: PartialEq>(things: impl Iterator<Item = (T, usize)>) -> Vec<(T, Vec<usize>)> {
    let mut gathered: Vec<(T, Vec<usize>)> = Vec::new();
    for (thing, rank) in things {
        match gathered.iter_mut().find(|(other, _)| *other == thing) {
            Some((_, ranks)) => ranks.push(rank),
            None => gathered.push((thing, vec![rank])),
        }
    }
    gathered
}

/// The different calls, with who made them.
fn called(traces: &[Trace], records: &[(usize, &Record)]) -> Vec<Called> {
    let calls = gather(records.iter().map(|(i, record)| (record.call, traces[*i].rank)));
    calls.into_iter().map(|(call, ranks)| Called { call, ranks }).collect()
}

fn stand(traces: &[Trace], collectives: &Collectives<'_>) -> Option<Stand> {
    let open = |records: &Vec<(usize, &Record)>| records.iter().any(|(_, record)| record.state != State::Done);
    let (&sequence, records) = collectives.iter().find(|(_, records)| open(records))?;
    let behind = traces.iter().filter(|trace| trace.collectives <= sequence).map(|trace| {
        let last = trace.operations.iter().rfind(|record| record.message.is_none()).cloned();
        let (last_call, last_sequence) =
            (last.as_ref().map(Record::to_string), last.as_ref().map(|last| last.sequence));
        Behind { rank: trace.rank, last_call, last_sequence, last }
    });
    // Where clocks can be compared: when the first to give up did so.
    let gave_up = |clock: &str| {
        let failed = records.iter().filter(|(i, record)| traces[*i].clock == clock && record.state == State::Failed);
        failed.filter_map(|(_, record)| record.ended_ns).min()
    };
    let late = records.iter().filter_map(|(i, record)| {
        let after_ns = record.begun_ns.checked_sub(gave_up(&traces[*i].clock)?)?;
        (after_ns > 0).then_some(Late { rank: traces[*i].rank, after_ns })
    });
    Some(Stand { sequence, calls: called(traces, records), behind: behind.collect(), late: late.collect() })
}

/// The peer's messages with `rank`, in the direction of `message`; none without the peer's trace.
fn counterpart(traces: &[Trace], rank: usize, message: Message) -> Option<impl Iterator<Item = &Record>> {
    let trace = traces.iter().find(|trace| trace.rank == message.peer)?;
    let other = Message { peer: rank, sends: !message.sends };
    Some(trace.operations.iter().filter(move |record| record.message == Some(other) && is_numbered(record)))
}

/// Whether the messages of a pair of ranks can be told apart.
fn is_numbered(record: &Record) -> bool {
    record.call.operation == Operation::Send
}

fn lonely(traces: &[Trace]) -> Vec<Lonely> {
    let mut lonely = Vec::new();
    for trace in traces {
        for record in trace.operations.iter().filter(|record| record.state != State::Done && is_numbered(record)) {
            let Some(message) = record.message else { continue };
            let Some(others) = counterpart(traces, trace.rank, message) else { continue };
            let last = others.last().map(|other| other.sequence);
            // Without one, whether there has been any is known only where nothing was forgotten.
            let whole = |trace: &Trace| trace.operations.first().is_none_or(|first| first.number == 0);
            let known = last.is_some() || traces.iter().any(|other| other.rank == message.peer && whole(other));
            if known && last.is_none_or(|last| last < record.sequence) {
                let (call, sequence) = (record.to_string(), record.sequence);
                lonely.push(Lonely { rank: trace.rank, call, sequence, peer: message.peer });
            }
        }
    }
    lonely
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
