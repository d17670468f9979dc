//! The messages of a step, which all forms of training exchange: what the ranks must agree on, apart from gradients.
//!
//! | message | when | what |
//! |---|---|---|
//! | [`Header`] | at the start of a step | trained parameters, settings, number of the step, digests of parameters |
//! | `Weight` | when the weight of a rank's passes is known | the weight |
//! | `Trailer` | when a rank has all its gradients | which there were, what went wrong, whether it was asked to stop |
//!
//! Each is an all-gather of words that are as many on all ranks. Gradients are sent in between, from the moment in
//! which header and weights of all ranks are there. Where a rank knows all three at once, they are one message.
//!
//! Messages of their own cost some microseconds. In exchange, weights are known before gradients are packed, and none
//! is sent for a step that the ranks cannot make.

mod agreement;
mod message;
mod refusal;

use std::collections::HashMap;

use bytemuck::{Pod, Zeroable};

pub(crate) use self::agreement::Agreement;
pub(crate) use self::message::{Exchanged, Reader, Writer};
pub(crate) use self::refusal::failed;
pub use self::refusal::{Problem, Refusal};
use crate::bucket::Weighting;
use crate::parameters::{Digested, Parameter, difference};
use bonfire_core::{Error, Group};

/// The name of a step in errors.
pub(crate) const OPERATION: &str = "training step";

/// The names of the messages at the ends of a step and of a pass. Messages of other names are other calls, so ranks
/// that exchange different ones learn of it.
pub(crate) const STEP_END: &str = "end of step";
pub(crate) const PASS_END: &str = "end of pass";

/// What a rank says at the start of a step.
#[derive(Clone, Debug, Default)]
pub struct Header {
    /// What is wrong with its model.
    pub problem: Option<Problem>,
    /// By position, whether its model needs the gradient.
    pub trained: Vec<bool>,
    /// The digests of the trained parameters by position, in steps in which the ranks compare them.
    pub digests: Option<Vec<u64>>,
    /// The steps so far.
    pub(crate) steps: u64,
    /// The most bytes in a bucket, where the program has set it. Otherwise 0.
    pub(crate) bucket_bytes: u64,
    /// The saves of checkpoints that the rank has begun in the group.
    pub(crate) saves: u64,
    /// A hash of the name of the compression; 0 without one.
    pub(crate) compression: u64,
    /// What it does in the first pass, where the ranks run passes together.
    pub(crate) pass: PassKind,
    /// Whether it leaves out steps whose gradients are not finite.
    pub(crate) skips: bool,
    /// Which part of the model it has. The digests of equal parts are compared.
    pub(crate) part: u64,
}

/// What a rank does in a pass that the ranks run together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PassKind {
    /// It runs the pass, and more after it.
    #[default]
    Runs,
    /// It runs the pass, its last one.
    RunsLast,
    /// It runs no pass any more, and takes part in those of the others.
    Serves,
}

impl PassKind {
    pub fn to_word(self) -> u64 {
        self as u64
    }

    pub fn from_word(word: u64) -> PassKind {
        match word {
            0 => PassKind::Runs,
            1 => PassKind::RunsLast,
            _ => PassKind::Serves,
        }
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct HeaderWords {
    problem: [u64; 2],
    steps: u64,
    bucket_bytes: u64,
    saves: u64,
    compression: u64,
    pass: u64,
    skips: u64,
    part: u64,
    /// The digest of the digests.
    digest: u64,
}

impl Header {
    /// The header of a rank that trains these parameters, by position.
    pub fn new(trained: Vec<bool>) -> Header {
        Header { trained, ..Default::default() }
    }

    pub(crate) fn write(&self, to: &mut Writer) {
        let words = HeaderWords {
            problem: Problem::to_words(self.problem),
            steps: self.steps,
            bucket_bytes: self.bucket_bytes,
            saves: self.saves,
            compression: self.compression,
            pass: self.pass.to_word(),
            skips: u64::from(self.skips),
            part: self.part,
            digest: self.digest(),
        };
        to.words(&words);
        to.bits(&self.trained);
    }

    fn digest(&self) -> u64 {
        let digest = |digests: &Vec<u64>| crate::parameters::digest(bytemuck::cast_slice(digests));
        self.digests.as_ref().map_or(crate::parameters::NOTHING, digest)
    }

    /// Reads the headers of all ranks. Returns what each of them does in the first pass, unless the ranks cannot make
    /// the step.
    pub(crate) fn evaluate(&self, from: &mut Reader<'_>) -> Result<Vec<PassKind>, Refusal> {
        let headers: Vec<HeaderWords> = from.words();
        let trained = from.bits(self.trained.len());
        if let Some((rank, problem)) = Problem::first(headers.iter().map(|header| header.problem)) {
            return Err(Refusal::Problem { rank, problem });
        }
        let differs = |word: fn(&HeaderWords) -> u64| {
            let rank = headers.iter().position(|header| word(header) != word(&headers[0]))?;
            Some((word(&headers[0]), rank, word(&headers[rank])))
        };
        if let Some((first, rank, other)) = differs(|header| header.steps) {
            return Err(Refusal::Steps { first, rank, other });
        }
        if differs(|header| header.saves).is_some() {
            return Err(Refusal::Saves(headers.iter().map(|header| header.saves).collect()));
        }
        if let Some((first, rank, other)) = differs(|header| header.bucket_bytes) {
            return Err(Refusal::BucketBytes { first, rank, other });
        }
        if let Some((_, rank, _)) = differs(|header| header.compression) {
            return Err(Refusal::Compression { rank });
        }
        if let Some((_, rank, _)) = differs(|header| header.skips) {
            return Err(Refusal::Skips { rank });
        }
        if let Some(position) = trained.first_difference() {
            return Err(Refusal::Trained { position, with: trained.ranks_with(position), ranks: headers.len() });
        }
        if !self.trained.contains(&true) {
            return Err(Refusal::Untrained);
        }
        let mut firsts = HashMap::new();
        let mut of_first = |header: &HeaderWords| *firsts.entry(header.part).or_insert(header.digest);
        match self.digests.is_some() && headers.iter().any(|header| header.digest != of_first(header)) {
            true => Err(Refusal::Digests),
            false => Ok(headers.iter().map(|header| PassKind::from_word(header.pass)).collect()),
        }
    }

    /// Finds out what differs, after [`Refusal::Digests`]. Other refusals say it themselves. All ranks call it.
    pub(crate) fn explained(&self, main: &Group, parameters: &[Parameter], refusal: Refusal) -> Result<Refusal, Error> {
        if refusal != Refusal::Digests {
            return Ok(refusal);
        }
        let digests = self.digests.as_deref().unwrap_or_default();
        let own = Digested::named(self.part, parameters.iter().map(Parameter::quoted), digests);
        Ok(difference(main, own, self.steps)?.map_or(refusal, Refusal::Explained))
    }
}

/// The weight of a rank's passes: what its losses are means over, samples for instance.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weight {
    pub weight: f64,
    pub problem: Option<Problem>,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct WeightWords {
    problem: [u64; 2],
    weight: f64,
}

impl Weight {
    pub fn write(&self, to: &mut Writer) {
        to.words(&WeightWords { problem: Problem::to_words(self.problem), weight: self.weight });
    }

    /// Reads the weights of all ranks. Returns how this rank's gradients enter the mean, and the sum of all weights. A
    /// sum of 0 is left to the caller: other passes of the step may have a weight. One that is not finite is refused.
    pub fn evaluate(&self, from: &mut Reader<'_>) -> Result<(Weighting, f64), Refusal> {
        let weights: Vec<WeightWords> = from.words();
        if let Some((rank, problem)) = Problem::first(weights.iter().map(|weight| weight.problem)) {
            return Err(Refusal::Problem { rank, problem });
        }
        let total: f64 = weights.iter().map(|weight| weight.weight).sum();
        if !total.is_finite() {
            let rank = (0..weights.len()).max_by(|a, b| weights[*a].weight.total_cmp(&weights[*b].weight)).unwrap_or(0);
            return Err(Refusal::Problem { rank, problem: Problem::Weight });
        }
        let equal = weights.iter().all(|weight| weight.weight.to_bits() == weights[0].weight.to_bits());
        let share = if total > 0.0 { self.weight / total } else { 0.0 };
        Ok((if equal && total > 0.0 { Weighting::Equal } else { Weighting::Share(share) }, total))
    }
}

/// What a rank says once it has all its gradients.
#[derive(Clone, Debug)]
pub(crate) struct Trailer {
    pub problem: Option<Problem>,
    /// Whether it knows the order in which gradients arrive.
    pub ordered: bool,
    /// By position, whether it had a gradient.
    pub exists: Vec<bool>,
    /// By position, whether it has one more, which came when the first may have been sent.
    pub late: Vec<bool>,
    /// Whether it was asked to stop.
    pub stop: bool,
}

/// What the trailers of all ranks say.
#[derive(Clone, Debug)]
pub(crate) struct Trailers {
    /// The lowest rank that knows the order in which gradients arrive.
    pub ordered: Option<usize>,
    /// By position, whether any rank had a gradient.
    pub exists: Vec<bool>,
    /// By position, whether all ranks had one.
    pub everywhere: Vec<bool>,
    /// By position, whether any rank has one more.
    pub late: Vec<bool>,
    /// The lowest rank that was asked to stop. All ranks stop if there is one.
    pub stop: Option<usize>,
}

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct TrailerWords {
    problem: [u64; 2],
    ordered: u64,
    stop: u64,
}

impl Trailer {
    pub fn write(&self, to: &mut Writer) {
        let problem = Problem::to_words(self.problem);
        to.words(&TrailerWords { problem, ordered: self.ordered.into(), stop: self.stop.into() });
        to.bits(&self.exists);
        to.bits(&self.late);
    }

    /// Reads the trailers of all ranks.
    pub fn evaluate(&self, from: &mut Reader<'_>) -> Result<Trailers, Refusal> {
        let trailers: Vec<TrailerWords> = from.words();
        let (exists, late) = (from.bits(self.exists.len()), from.bits(self.late.len()));
        match Problem::first(trailers.iter().map(|trailer| trailer.problem)) {
            Some((rank, problem)) => Err(Refusal::Problem { rank, problem }),
            None => Ok(Trailers {
                ordered: trailers.iter().position(|trailer| trailer.ordered == 1),
                exists: exists.anywhere(),
                everywhere: exists.everywhere(),
                late: late.anywhere(),
                stop: trailers.iter().position(|trailer| trailer.stop == 1),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bonfire_core::Group;

    /// What each rank reads of the messages that all write.
    fn exchanged<T: Send>(
        ranks: usize,
        write: impl Fn(usize, &mut Writer) + Sync,
        read: impl Fn(usize, &mut Reader<'_>) -> T + Sync,
    ) -> Vec<T> {
        std::thread::scope(|scope| {
            let threads = Group::threads(ranks).unwrap().into_iter().map(|group| {
                let (write, read) = (&write, &read);
                scope.spawn(move || {
                    let mut writer = Writer::default();
                    write(group.rank(), &mut writer);
                    let all = writer.finish().exchange(&group, "test").unwrap();
                    read(group.rank(), &mut Reader::new(&all, ranks))
                })
            });
            threads.collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn header() -> Header {
        let trained = (0..70).map(|position| position % 3 == 0).collect();
        Header { trained, pass: PassKind::RunsLast, steps: 5, ..Default::default() }
    }

    #[test]
    fn three_messages_in_one_come_back_apart() {
        let weight = |rank| Weight { weight: rank as f64, problem: None };
        let trailer = |rank: usize| Trailer {
            problem: None,
            ordered: rank > 0,
            exists: (0..70).map(|position| position % 2 == rank % 2 || position == 69).collect(),
            late: (0..70).map(|position| rank == 2 && position == 64).collect(),
            stop: rank == 1,
        };
        let read = exchanged(
            3,
            |rank, to| {
                header().write(to);
                weight(rank).write(to);
                trailer(rank).write(to);
            },
            |rank, from| {
                let kinds = header().evaluate(from).unwrap();
                (kinds, weight(rank).evaluate(from).unwrap(), trailer(rank).evaluate(from).unwrap())
            },
        );
        for (rank, (kinds, weighting, trailers)) in read.into_iter().enumerate() {
            assert_eq!(kinds, [PassKind::RunsLast; 3]);
            assert_eq!(weighting, (Weighting::Share(rank as f64 / 3.0), 3.0));
            assert_eq!((trailers.ordered, trailers.stop), (Some(1), Some(1)));
            assert_eq!(trailers.exists, [true; 70]);
            assert!((0..70).all(|position| trailers.everywhere[position] == (position == 69)));
            assert!((0..70).all(|position| trailers.late[position] == (position == 64)));
        }
    }

    #[test]
    fn all_ranks_stop_if_one_was_asked_to() {
        let stop = |asked: fn(usize) -> bool| {
            let own = |rank| {
                let none = vec![false; 3];
                Trailer { problem: None, ordered: false, exists: none.clone(), late: none, stop: asked(rank) }
            };
            exchanged(3, |rank, to| own(rank).write(to), |rank, from| own(rank).evaluate(from).unwrap().stop)
        };
        assert_eq!(stop(|_| false), [None; 3]);
        assert_eq!(stop(|rank| rank == 2), [Some(2); 3]);
        assert_eq!(stop(|rank| rank > 0), [Some(1); 3]);
    }

    #[test]
    fn what_differs_is_the_same_refusal_on_all_ranks() {
        let refused = |change: fn(usize, &mut Header)| {
            let own = |rank| {
                let mut header = header();
                change(rank, &mut header);
                header
            };
            let read = exchanged(3, |rank, to| own(rank).write(to), |rank, from| own(rank).evaluate(from).unwrap_err());
            assert!(read.iter().all(|refusal| *refusal == read[0]), "{read:?}");
            read[0].clone()
        };
        assert_eq!(refused(|rank, header| header.steps += rank as u64), Refusal::Steps { first: 5, rank: 1, other: 6 });
        assert_eq!(refused(|rank, header| header.saves = u64::from(rank == 1)), Refusal::Saves(vec![0, 1, 0]));
        let bytes = refused(|rank, header| header.bucket_bytes = u64::from(rank == 2));
        assert_eq!(bytes, Refusal::BucketBytes { first: 0, rank: 2, other: 1 });
        let trained = refused(|rank, header| header.trained[68] = rank == 1);
        assert_eq!(trained, Refusal::Trained { position: 68, with: vec![1], ranks: 3 });
        assert_eq!(refused(|rank, header| header.digests = Some(vec![rank as u64])), Refusal::Digests);
        assert_eq!(refused(|rank, header| header.skips = rank > 1), Refusal::Skips { rank: 2 });
        let problem = refused(|rank, header| header.problem = (rank == 2).then_some(Problem::Changed(7)));
        assert_eq!(problem, Refusal::Problem { rank: 2, problem: Problem::Changed(7) });
    }
}
