//! How each rank ended, what it reported before, and which rank failed first.
//!
//! The order in which ranks end says little: a rank that lost a peer may end before that peer, which still unwinds or
//! frees its memory. So a rank that failed without a word, or with an error of its own, comes before a rank that
//! reported an error which names another rank. Such an error is a consequence.

use std::collections::BTreeMap;

use rustix::process::Signal;

use super::rank::End;
use crate::text::named;

/// What is known about the ranks of this node, by local rank.
pub struct Fates {
    ranks: Vec<Fate>,
    /// The number of reports and ends so far, which orders them.
    events: u64,
    /// Whether the launcher has told the ranks to end.
    ending: bool,
    /// Whether any rank has reported anything. Otherwise no rank uses Bonfire, or a program between the launcher and
    /// the ranks has closed their socket: then only the order of their ends is known.
    heard: bool,
}

#[derive(Clone, Default)]
struct Fate {
    /// The first failure that it reported and did not overcome.
    failure: Option<Failure>,
    end: Option<RankEnd>,
}

#[derive(Clone)]
struct Failure {
    event: u64,
    names_another: bool,
    error: String,
}

#[derive(Clone, Copy)]
struct RankEnd {
    event: u64,
    how: End,
    /// Whether the launcher had told it to end.
    told: bool,
    /// Whether `--tolerate` permitted its failure.
    tolerated: bool,
}

/// Orders the ranks that may have failed first. The least is the first: whether its error names another rank, whether
/// the launcher had told it to end, whether `--tolerate` permitted its failure, whether it reported an error at all,
/// and when it reported it or ended.
type Suspicion = (bool, bool, bool, bool, u64);

impl Fates {
    pub fn new(ranks: u32) -> Self {
        Self { ranks: vec![Fate::default(); ranks as usize], events: 0, ending: false, heard: false }
    }

    /// A group of this rank failed.
    pub fn failed(&mut self, local: u32, names_another: bool, error: String) {
        self.heard = true;
        let event = self.next_event();
        if let Some(fate) = self.ranks.get_mut(local as usize) {
            fate.failure.get_or_insert(Failure { event, names_another, error });
        }
    }

    /// The rank is in a new group.
    pub fn connected(&mut self, local: u32) {
        self.heard = true;
        self.ranks.get_mut(local as usize).map(|fate| fate.failure.take());
    }

    /// The rank's process ended.
    pub fn ended(&mut self, local: u32, how: End, tolerated: bool) {
        let end = RankEnd { event: self.next_event(), how, told: self.ending, tolerated };
        self.ranks[local as usize].end = Some(end);
    }

    /// The launcher tells the ranks to end.
    pub fn end_all(&mut self) {
        self.ending = true;
    }

    /// Whether a rank has reported a failure that it has not overcome.
    pub fn has_failed(&self, local: u32) -> bool {
        self.ranks[local as usize].failure.is_some()
    }

    /// Returns the rank that failed first, as far as is known, of those that have ended, and its exit status.
    pub fn first(&self) -> Option<(u32, u8)> {
        let (_, local, _) = self.suspects().filter(|(_, _, ended)| *ended).min()?;
        Some((local, self.ranks[local as usize].end?.how.status()))
    }

    /// Whether the rank that failed first is known, and not only a consequence of its failure.
    pub fn first_is_known(&self) -> bool {
        self.suspects().min().is_some_and(|((is_consequence, ..), _, ended)| ended && !is_consequence)
    }

    /// Returns the ranks that may have failed first, and whether they have ended. A rank that still runs is one of them
    /// if it reported an error of its own: it is about to end.
    fn suspects(&self) -> impl Iterator<Item = (Suspicion, u32, bool)> {
        let suspect = |(local, fate): (usize, &Fate)| {
            let failure = fate.failure.as_ref();
            let is_consequence = failure.is_some_and(|failure| failure.names_another);
            let (told, tolerated, event) = match (fate.end, failure) {
                (Some(end), _) if end.how.failed() && !(end.told && is_obedient(end.how)) => {
                    (end.told, end.tolerated, failure.map_or(end.event, |failure| failure.event))
                }
                (None, Some(failure)) if !is_consequence => (false, false, failure.event),
                _ => return None,
            };
            Some(((is_consequence, told, tolerated, failure.is_some(), event), local as u32, fate.end.is_some()))
        };
        self.ranks.iter().enumerate().filter_map(suspect)
    }

    /// Describes how the rank that failed first ended, in words that follow `bonfire: `.
    pub fn describe(&self, local: u32, first_rank: u32) -> String {
        let (fate, rank) = (&self.ranks[local as usize], first_rank + local);
        let ended = fate.end.map_or("still runs".to_owned(), |end| end.how.to_string());
        match &fate.failure {
            None if self.heard => format!("rank {rank} failed first: it {ended}"),
            None => format!("rank {rank} ended first: it {ended}"),
            Some(Failure { names_another: false, error, .. }) => {
                format!("rank {rank} failed first: it {ended} after the error: {error}")
            }
            Some(Failure { error, .. }) => format!(
                "no rank of this node failed by itself; rank {rank} was the first that named another: it {ended} after \
                 the error: {error}"
            ),
        }
    }

    /// Returns a line for each way in which ranks ended, if there are several ranks. `first_rank` is that of local rank
    /// 0.
    pub fn list(&self, first_rank: u32) -> Vec<String> {
        if self.ranks.len() == 1 {
            return Vec::new();
        }
        let mut ways: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (local, fate) in self.ranks.iter().enumerate() {
            let Some(end) = fate.end else { continue };
            let why = match &fate.failure {
                _ if end.told && matches!(end.how, End::Killed(_)) && is_obedient(end.how) => ", sent by the launcher",
                _ if end.told => " after it was told to end",
                _ if !end.how.failed() => "",
                Some(failure) if failure.names_another => " after an error that names another rank",
                Some(_) => " after an error of its group",
                None => "",
            };
            ways.entry(format!("{}{why}", end.how)).or_default().push(first_rank as usize + local);
        }
        let mut ways: Vec<_> = ways.into_iter().map(|(how, ranks)| (ranks, how)).collect();
        ways.sort();
        ways.into_iter().map(|(ranks, how)| format!("{}: {}", named(&ranks), how.trim_start_matches("was "))).collect()
    }

    fn next_event(&mut self) -> u64 {
        self.events += 1;
        self.events
    }
}

/// Whether a rank that was told to end may have ended in this way because of it. Any other signal is a fault: the
/// system can take longer to write down the memory of a rank that crashed than the others take to end.
fn is_obedient(end: End) -> bool {
    match end {
        End::Exited(_) => true,
        End::Killed(signal) => [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::KILL]
            .into_iter()
            .any(|sent| sent.as_raw() == signal),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGV: End = End::Killed(11);
    const TERM: End = End::Killed(15);

    /// An event: a rank reports an error that names another rank or none, or connects, or ends.
    enum Step {
        Names(u32),
        Own(u32),
        Connects(u32),
        Ends(u32, End),
        Tolerated(u32, End),
        TellAll,
    }
    use Step::*;

    fn fates(steps: &[Step]) -> Fates {
        let mut fates = Fates::new(3);
        for step in steps {
            match *step {
                Names(local) => fates.failed(local, true, "another".into()),
                Own(local) => fates.failed(local, false, "own".into()),
                Connects(local) => fates.connected(local),
                Ends(local, end) => fates.ended(local, end, false),
                Tolerated(local, end) => fates.ended(local, end, true),
                TellAll => fates.end_all(),
            }
        }
        fates
    }

    const ONE: End = End::Exited(1);

    /// Checks the first cause, and whether it is known, after each of these sequences.
    #[test]
    fn the_first_cause_is_no_consequence() {
        let cases: &[(&[Step], Option<u32>, bool)] = &[
            (&[], None, false),
            (&[Ends(0, End::Exited(0))], None, false),
            // Without reports the order decides.
            (&[Ends(1, ONE), Ends(0, SEGV)], Some(1), true),
            // A consequence never counts while there is something else, before or after it.
            (&[Names(0), Ends(0, ONE)], Some(0), false),
            (&[Names(0), Ends(0, ONE), Ends(2, SEGV)], Some(2), true),
            (&[Ends(2, SEGV), Names(0), Ends(0, ONE)], Some(2), true),
            // All failed as a consequence, of a rank of another node: the first report counts.
            (&[Names(1), Names(0), Ends(0, ONE), Ends(1, ONE)], Some(1), false),
            // A rank with an error of its own tells the others before it ends.
            (&[Own(1), Own(0), Ends(0, ONE)], Some(0), false),
            (&[Own(1), Own(0), Ends(0, ONE), Ends(1, ONE)], Some(1), true),
            (&[Own(1), Ends(2, SEGV)], Some(2), true),
            // What happened before a new group does not count.
            (&[Names(0), Connects(0), Ends(0, ONE)], Some(0), true),
            (&[Tolerated(1, SEGV), Names(0), Connects(0), Ends(2, ONE)], Some(2), true),
            // The others did not survive a tolerated failure.
            (&[Tolerated(1, SEGV), Names(0), Ends(0, ONE)], Some(1), true),
            // What ends because it is told to is no cause, but a crash that takes longer is.
            (&[Names(0), Ends(0, ONE), TellAll, Ends(1, TERM), Ends(2, ONE)], Some(0), false),
            (&[Names(0), Ends(0, ONE), TellAll, Ends(1, TERM), Ends(2, SEGV)], Some(2), true),
            (&[Ends(0, ONE), TellAll, Ends(1, SEGV)], Some(0), true),
        ];
        for (i, (steps, first, known)) in cases.iter().enumerate() {
            let fates = fates(steps);
            let found = fates.first().map(|(local, _)| local);
            assert_eq!((found, fates.first_is_known()), (*first, *known), "case {i}");
        }
    }

    #[test]
    fn every_rank_is_listed_with_its_end() {
        let fates = fates(&[Names(0), Ends(2, SEGV), Ends(0, ONE), TellAll, Ends(1, TERM)]);
        assert_eq!(
            fates.list(10),
            [
                "rank 10: exited with status 1 after an error that names another rank",
                "rank 11: killed by SIGTERM, sent by the launcher",
                "rank 12: killed by SIGSEGV",
            ]
        );
        assert_eq!(fates.describe(2, 10), "rank 12 failed first: it was killed by SIGSEGV");
        // Nothing is claimed that is not known.
        let silent = self::fates(&[Ends(2, SEGV), Ends(0, ONE)]);
        assert_eq!(silent.describe(2, 10), "rank 12 ended first: it was killed by SIGSEGV");
    }

    #[test]
    fn reports_of_unknown_ranks_are_ignored() {
        assert_eq!(fates(&[Names(3), Connects(3)]).first(), None);
    }
}
