//! How each rank ended, what it reported before, and which rank failed first.
//!
//! The order in which ranks end says little: a rank that lost a peer may end before that peer, which still unwinds or
//! frees its memory. So a rank that failed without a word, or with an error of its own, comes before a rank that
//! reported an error which names another rank. Such an error is a consequence. If there are no others, the rank that
//! they name is where the failure began: it may hang, or have ended as if all were well.

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
    /// The ranks that the error names, of this node or others.
    named: Vec<usize>,
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
    pub fn failed(&mut self, local: u32, names_another: bool, named: Vec<usize>, error: String) {
        self.heard = true;
        let event = self.next_event();
        if let Some(fate) = self.ranks.get_mut(local as usize) {
            fate.failure.get_or_insert(Failure { event, names_another, named, error });
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

    /// Whether every rank has ended with status 0, apart from tolerated failures.
    pub fn all_succeeded(&self) -> bool {
        self.ranks.iter().all(|fate| fate.end.is_some_and(|end| end.tolerated || !end.how.failed()))
    }

    /// Whether a rank has failed, apart from tolerated failures.
    pub fn any_failed(&self) -> bool {
        self.ranks.iter().any(|fate| fate.end.is_some_and(|end| !end.tolerated && end.how.failed()))
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

    /// Describes the cause, given the rank that failed first, in lines that follow `bonfire: `. The last one is about
    /// the rank whose local rank it returns.
    pub fn describe(&self, local: u32, first_rank: u32) -> (Vec<String>, u32) {
        let (fate, rank) = (&self.ranks[local as usize], first_rank + local);
        let ended = fate.end.map_or("still runs".to_owned(), |end| end.how.to_string());
        let what = match &fate.failure {
            None if self.heard => format!("rank {rank} failed first: it {ended}"),
            None => format!("rank {rank} ended first: it {ended}"),
            Some(Failure { names_another: false, error, .. }) => {
                format!("rank {rank} failed first: it {ended} after the error: {error}")
            }
            Some(Failure { error, .. }) => {
                let what = format!(
                    "no rank of this node failed by itself; rank {rank} was the first that named another: it {ended} \
                     after the error: {error}"
                );
                return self.describe_named(what, local, first_rank);
            }
        };
        (vec![what], local)
    }

    /// Adds the rank that the errors name to the description of the first of them, that of `local`.
    fn describe_named(&self, first: String, local: u32, first_rank: u32) -> (Vec<String>, u32) {
        let Some((rank, by)) = self.named(first_rank) else { return (vec![first], local) };
        let errors = if by.len() == 1 { "the error of" } else { "the errors of" };
        let name = if by.len() == 1 { "names" } else { "name" };
        let named = format!("{errors} {} {name} rank {rank}", named(&by));
        let here = rank.checked_sub(first_rank as usize).and_then(|local| Some((local as u32, self.ranks.get(local)?)));
        match here {
            Some((local, fate)) => {
                (vec![first, format!("{named}, which {}", fate.way().unwrap_or("still runs".into()))], local)
            }
            None => (vec![format!("{named}, which is on another node: look at its output there"), first], local),
        }
    }

    /// Returns the rank that most errors of other ranks name, the first of several, and those other ranks.
    fn named(&self, first_rank: u32) -> Option<(usize, Vec<usize>)> {
        let mut failures: Vec<_> = (first_rank as usize..)
            .zip(&self.ranks)
            .filter_map(|(rank, fate)| Some((rank, fate.failure.as_ref()?)))
            .collect();
        failures.sort_by_key(|(_, failure)| failure.event);
        let names = |(rank, failure): &(usize, &Failure), other| *rank != other && failure.named.contains(&other);
        let candidates = failures.iter().flat_map(|(_, failure)| &failure.named).copied();
        let by = |other: usize| -> Vec<usize> {
            let by = failures.iter().filter(|failure| names(failure, other)).map(|(rank, _)| *rank);
            by.collect()
        };
        // Of equal elements the last is the greatest.
        let most = candidates.rev().max_by_key(|named| by(*named).len())?;
        let mut by = by(most);
        by.sort_unstable();
        (!by.is_empty()).then_some((most, by))
    }

    /// Returns a line for each way in which ranks ended, if there are several ranks. `first_rank` is that of local rank
    /// 0.
    pub fn list(&self, first_rank: u32) -> Vec<String> {
        if self.ranks.len() == 1 {
            return Vec::new();
        }
        let mut ways: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (rank, fate) in (first_rank as usize..).zip(&self.ranks) {
            if let Some(way) = fate.way() {
                ways.entry(way).or_default().push(rank);
            }
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

impl Fate {
    /// Returns how the rank ended, and what preceded it.
    fn way(&self) -> Option<String> {
        let end = self.end?;
        let why = match &self.failure {
            _ if end.told && matches!(end.how, End::Killed(_)) && is_obedient(end.how) => ", sent by the launcher",
            _ if end.told => " after it was told to end",
            _ if !end.how.failed() => "",
            Some(failure) if failure.names_another => " after an error that names another rank",
            Some(_) => " after an error of its group",
            None => "",
        };
        Some(format!("{}{why}", end.how))
    }
}

/// Whether a rank that was told to end may have ended in this way because of it. Any other signal is a fault: the
/// system can take longer to write down the memory of a rank that crashed than the others take to end.
fn is_obedient(end: End) -> bool {
    match end {
        End::Exited(_) => true,
        End::OutOfMemory { .. } => false,
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
        NamesRanks(u32, &'static [usize]),
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
                Names(local) => fates.failed(local, true, vec![], "another".into()),
                NamesRanks(local, named) => fates.failed(local, true, named.to_vec(), format!("names {named:?}")),
                Own(local) => fates.failed(local, false, vec![], "own".into()),
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
        assert_eq!(fates.describe(2, 10), (vec!["rank 12 failed first: it was killed by SIGSEGV".into()], 2));
        // Nothing is claimed that is not known.
        let silent = self::fates(&[Ends(2, SEGV), Ends(0, ONE)]);
        assert_eq!(silent.describe(2, 10), (vec!["rank 12 ended first: it was killed by SIGSEGV".into()], 2));
    }

    /// Checks what is said, and whose last lines follow, if no rank of the node failed by itself.
    #[test]
    fn the_rank_that_the_errors_name_is_described() {
        const FIRST: &str = "no rank of this node failed by itself; rank 10 was the first that named another: it \
                             exited with status 1 after the error: names ";
        let cases: [(&[Step], &[&str], u32); 6] = [
            // It hung, and was told to end.
            (
                &[NamesRanks(0, &[11]), NamesRanks(2, &[11]), Ends(0, ONE), Ends(2, ONE), TellAll, Ends(1, TERM)],
                &["[11]", "the errors of ranks 10, 12 name rank 11, which was killed by SIGTERM, sent by the launcher"],
                1,
            ),
            // It ended as if all were well.
            (
                &[Ends(1, End::Exited(0)), NamesRanks(0, &[11]), Ends(0, ONE)],
                &["[11]", "the error of rank 10 names rank 11, which exited with status 0"],
                1,
            ),
            // Its error names another rank: most errors count, and not its own.
            (
                &[NamesRanks(0, &[11, 12]), NamesRanks(1, &[12]), NamesRanks(2, &[12]), Ends(0, ONE), Ends(2, ONE)],
                &[
                    "[11, 12]",
                    "the errors of ranks 10-11 name rank 12, which exited with status 1 after an error that names \
                     another rank",
                ],
                2,
            ),
            // Of two that blame each other, the one that was blamed first.
            (
                &[NamesRanks(0, &[12]), NamesRanks(2, &[10]), Ends(0, ONE)],
                &["[12]", "the error of rank 10 names rank 12, which still runs"],
                2,
            ),
            // It is on another node.
            (
                &[NamesRanks(0, &[3]), Ends(0, ONE)],
                &["the error of rank 10 names rank 3, which is on another node: look at its output there", "[3]"],
                0,
            ),
            (&[NamesRanks(0, &[]), Ends(0, ONE)], &["[]"], 0),
        ];
        for (steps, said, last) in cases {
            let said = said.iter().map(|line| match line.starts_with('[') {
                true => format!("{FIRST}{line}"),
                false => (*line).to_owned(),
            });
            let fates = fates(steps);
            let (first, _) = fates.first().unwrap();
            assert_eq!((first, fates.describe(first, 10)), (0, (said.collect(), last)));
        }
    }

    #[test]
    fn memory_that_ran_out_is_a_cause_also_while_the_ranks_are_told_to_end() {
        let out = End::OutOfMemory { limit: None };
        let fates = fates(&[Names(0), Ends(0, ONE), TellAll, Ends(1, TERM), Ends(2, out)]);
        assert_eq!(fates.first(), Some((2, 137)));
    }

    #[test]
    fn tolerated_failures_are_no_failures() {
        const ZERO: End = End::Exited(0);
        let cases: [(&[Step], (bool, bool)); 5] = [
            (&[], (false, false)),
            (&[Ends(0, ZERO), Ends(1, ZERO)], (false, false)),
            (&[Ends(0, ZERO), Ends(1, ZERO), Ends(2, ZERO)], (true, false)),
            (&[Ends(0, ZERO), Tolerated(1, SEGV), Ends(2, ZERO)], (true, false)),
            (&[Ends(0, ZERO), Ends(1, SEGV), Ends(2, ZERO)], (false, true)),
        ];
        for (i, (steps, expected)) in cases.into_iter().enumerate() {
            let fates = fates(steps);
            assert_eq!((fates.all_succeeded(), fates.any_failed()), expected, "case {i}");
        }
    }

    #[test]
    fn reports_of_unknown_ranks_are_ignored() {
        assert_eq!(fates(&[Names(3), Connects(3)]).first(), None);
    }
}
