//! Why the ranks cannot make a step. All find the same, and their groups stay usable.

use bytemuck::{cast_slice, cast_slice_mut};
use serde::{Deserialize, Serialize};

use crate::parameters::Parameter;
use bonfire_core::Error;
use bonfire_core::internal::RankList;

/// What is wrong with a rank's model or with its gradients. The numbers are positions of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Problem {
    /// The model does not have the parameter as it was at the start.
    Changed(usize),
    /// The model has a trained parameter that it did not have at the start, or a gradient is of no parameter.
    Unknown,
    /// Two trained parameters of the model have one id.
    Duplicate(usize),
    /// The rank has a weight, and no gradient has arrived.
    NoGradients,
    /// Two backward passes have computed a gradient of the parameter in one pass of the step.
    Twice(usize),
    /// The gradient has another shape or element type than the parameter.
    Other(usize),
    /// The parameter is of f64, and gradients travel compressed.
    Wide(usize),
    /// A backward pass has computed a gradient of the parameter before the weight of the pass was known.
    Unweighed(usize),
    /// Parts of gradients are of another model or another sharding.
    OtherParts,
    /// The rank has used its part of the parameter as if it were the whole.
    Part(usize),
    /// A pass was dropped after its backward pass had begun.
    Dropped,
    /// Passes of the step were made with another form of training of the same model.
    Elsewhere,
    /// A pass was still open at the end of the step.
    Open,
    /// The program's own code has failed. Its error is exchanged in a message of its own.
    Failed,
    /// The gradient is not finite, and the program leaves out such steps.
    NotFinite(usize),
    /// The weight of a pass is negative or not finite, or the sum of all is not.
    Weight,
}

impl Problem {
    /// Encodes a problem in words; those that are 0 are none.
    pub(crate) fn to_words(problem: Option<Problem>) -> [u64; 2] {
        let mut words = [0; 2];
        // A variant and a number take at most 12 bytes.
        let encoded = postcard::to_slice(&problem, cast_slice_mut(&mut words)).is_ok();
        debug_assert!(encoded);
        words
    }

    fn from_words(words: [u64; 2]) -> Option<Problem> {
        // A rank of another version, if it is none that this one knows.
        postcard::from_bytes(cast_slice(&words)).unwrap_or(Some(Problem::Unknown))
    }

    /// Returns the problem of the lowest rank that has one. What only leaves out the step comes after all others.
    pub(crate) fn first(words: impl Iterator<Item = [u64; 2]>) -> Option<(usize, Problem)> {
        let problems = words.enumerate().filter_map(|(rank, words)| Some((rank, Problem::from_words(words)?)));
        problems.min_by_key(|(_, problem)| matches!(problem, Problem::NotFinite(_)))
    }
}

/// Why the ranks cannot make a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// No rank has samples.
    NoSamples,
    /// No parameter of the model needs a gradient.
    Untrained,
    /// A rank has a problem.
    Problem {
        /// The rank.
        rank: usize,
        /// Its problem.
        problem: Problem,
    },
    /// The ranks are at different steps.
    Steps {
        /// The steps of rank 0.
        first: u64,
        /// A rank with other steps.
        rank: usize,
        /// Its steps.
        other: u64,
    },
    /// Some ranks have begun a save of a checkpoint that others have not called. By rank, how many each has begun.
    Saves(Vec<u64>),
    /// Learning rates differ.
    Rates {
        /// The rate of rank 0.
        first: f64,
        /// A rank with another rate.
        rank: usize,
        /// Its rate.
        other: f64,
    },
    /// Sizes of buckets differ.
    BucketBytes {
        /// The bytes of rank 0; 0 for the measured size.
        first: u64,
        /// A rank with another size.
        rank: usize,
        /// Its bytes.
        other: u64,
    },
    /// Compressions differ.
    Compression {
        /// A rank with another one than rank 0.
        rank: usize,
    },
    /// Some ranks leave out steps whose gradients are not finite, and others do not.
    Skips {
        /// A rank that does not do as rank 0.
        rank: usize,
    },
    /// Some ranks train a parameter, and others do not.
    Trained {
        /// The first such parameter.
        position: usize,
        /// The ranks that train it.
        with: Vec<usize>,
        /// The number of all ranks.
        ranks: usize,
    },
    /// The ranks' parameters differ.
    Digests,
    /// What the ranks have found out about another refusal.
    Explained(String),
    /// A gradient is not finite, which compression cannot carry.
    NotFinite {
        /// A rank and a position; none if all gradients are finite, and the mean is not.
        gradient: Option<(usize, usize)>,
        /// The name of the encoding.
        encoding: String,
    },
}

impl Refusal {
    /// Logs on rank 0 that the step is left out, if that is all: all ranks go on, without gradients.
    pub(crate) fn leaves_out(&self, rank: usize, step: u64, parameters: &[Parameter]) -> bool {
        let is_left_out = matches!(self, Refusal::Problem { problem: Problem::NotFinite(_), .. });
        if is_left_out && rank == 0 {
            log::warn!("training step {step} is left out on all ranks: {}", self.reason(parameters));
        }
        is_left_out
    }

    /// Returns the error of an operation on these parameters.
    pub fn error(&self, operation: &str, parameters: &[Parameter]) -> Error {
        Error::argument(operation, self.reason(parameters))
    }

    fn reason(&self, parameters: &[Parameter]) -> String {
        let path = |position: usize| parameters.get(position).map_or("a parameter", |parameter| &parameter.path);
        match self {
            Refusal::NoSamples => {
                "no rank has any samples, so there is no mean; leave out such a step on all ranks".into()
            }
            Refusal::Untrained => {
                "the model has no parameters to train: it has none, or all are frozen; leave out such a step on all \
                 ranks"
                    .into()
            }
            Refusal::Problem { rank, problem } => problem_reason(*rank, *problem, path),
            Refusal::Steps { first, rank, other } => format!(
                "rank 0 has made {first} steps and rank {rank} {other}; load optimizer state of the same step on all \
                 ranks, or on none"
            ),
            Refusal::Saves(of_ranks) => saves_reason(of_ranks),
            Refusal::Rates { first, rank, other } => format!(
                "rank 0's learning rate is {first} and rank {rank}'s is {other}; pass the same rate on all ranks"
            ),
            Refusal::BucketBytes { first, rank, other } => {
                let text = |bytes: &u64| match bytes {
                    0 => "the measured size".into(),
                    bytes => format!("{bytes} bytes"),
                };
                let (first, other) = (text(first), text(other));
                format!("rank 0's buckets have {first} and rank {rank}'s {other}; set the same size on all ranks")
            }
            Refusal::Compression { rank } => {
                format!("rank 0 and rank {rank} compress gradients differently; set the same compression on all ranks")
            }
            Refusal::Skips { rank } => format!(
                "of rank 0 and rank {rank} one leaves out steps whose gradients are not finite; call `skip_non_finite` \
                 on all ranks or on none"
            ),
            Refusal::Trained { position, with, ranks } => {
                let without: Vec<usize> = (0..*ranks).filter(|rank| !with.contains(rank)).collect();
                let verbs = |ranks: &[usize], one, many| if ranks.len() == 1 { one } else { many };
                format!(
                    "{} {} `{}`, and {} {}; freeze and unfreeze parameters on all ranks alike",
                    RankList(with),
                    verbs(with, "trains", "train"),
                    path(*position),
                    RankList(&without),
                    verbs(&without, "does not", "do not"),
                )
            }
            Refusal::Digests => "the ranks' parameters differ".into(),
            Refusal::Explained(reason) => reason.clone(),
            Refusal::NotFinite { gradient: Some((rank, position)), encoding } => format!(
                "rank {rank}'s gradient of `{}` has elements that are not finite, which cannot travel as {encoding}; \
                 lower the learning rate, or exchange gradients without compression",
                path(*position)
            ),
            Refusal::NotFinite { gradient: None, encoding } => {
                format!("{encoding} has made a mean that is not finite of gradients that are")
            }
        }
    }
}

fn saves_reason(of_ranks: &[u64]) -> String {
    let most = of_ranks.iter().copied().max().unwrap_or(0);
    let with = |saves: u64| (0..of_ranks.len()).filter(|rank| of_ranks[*rank] == saves).collect::<Vec<_>>();
    let without: Vec<usize> = (0..of_ranks.len()).filter(|rank| of_ranks[*rank] != most).collect();
    let (with, verb) = (with(most), if without.len() == 1 { "has" } else { "have" });
    format!(
        "{} {verb} not saved the checkpoint that {} saves; call `Checkpoints::save` or `save_in_background` on all \
         ranks after the same step",
        RankList(&without),
        RankList(&with),
    )
}

fn problem_reason<'a>(rank: usize, problem: Problem, path: impl Fn(usize) -> &'a str) -> String {
    match problem {
        Problem::Changed(position) => format!(
            "rank {rank}'s model does not have `{}` as it was at the start; pass the model in training, as the last \
             step left it",
            path(position)
        ),
        Problem::Unknown => format!(
            "rank {rank} has gradients of parameters that its model did not have at the start; pass the model that \
             `new` returned through the optimizer, and load checkpoints with `Checkpoints`"
        ),
        Problem::Duplicate(position) => format!(
            "rank {rank}'s model has `{}` twice, with one id, and a burn optimizer updates only one of them; give each \
             its own parameters",
            path(position)
        ),
        Problem::NoGradients => format!(
            "rank {rank} has samples, and no gradient has arrived; run the backward pass of a loss that the pass's own \
             model has computed, and not a fork or a copy without gradients of it, before `finish`"
        ),
        Problem::Twice(position) => format!(
            "rank {rank} has two gradients of `{}` in one pass; run one backward pass for each: add the losses, or \
             begin a pass for each loss",
            path(position)
        ),
        Problem::Other(position) => format!(
            "rank {rank}'s gradient of `{}` has another shape or element type than the parameter had at the start",
            path(position)
        ),
        Problem::Wide(position) => format!(
            "rank {rank} trains `{}`, whose elements of f64 cannot travel compressed; train it in f32, or exchange \
             gradients without compression",
            path(position)
        ),
        Problem::Unweighed(position) => format!(
            "rank {rank} has a gradient of `{}` before the weight of its pass is known; in the closure of a pass do \
             not call `backward`, but return the loss",
            path(position)
        ),
        Problem::OtherParts => format!(
            "rank {rank} has parts of another model or another sharding; pass what the passes of this optimizer \
             return, or those of one for the same `DataParallel` and sharding"
        ),
        Problem::Part(position) => format!(
            "rank {rank} has used its part of `{}` as if it were the whole parameter; run the forward pass with the \
             model of the pass, in which it is gathered",
            path(position)
        ),
        Problem::Dropped => {
            format!("rank {rank} has dropped a pass of this step after its backward pass; call `finish` for each")
        }
        Problem::Elsewhere => format!(
            "rank {rank} has passes of this step with another `ShardedOptimizer`, or with the `DataParallel` itself; \
             make all passes of a step with one of them"
        ),
        Problem::Open => {
            format!("rank {rank} has another pass of this step that is not finished; call its `finish` before")
        }
        Problem::Failed => format!("rank {rank}'s own code has failed"),
        Problem::NotFinite(position) => format!("rank {rank}'s gradient of `{}` is not finite", path(position)),
        Problem::Weight => format!(
            "the weight of a pass of rank {rank} is negative or not finite, or the sum of all is not; return the \
             number of samples, tokens or the like that its loss is a mean over, or the sum of their weights"
        ),
    }
}

/// Says that the program's own code has failed on a rank.
pub(crate) fn failed(rank: usize, fault: &str) -> String {
    format!("rank {rank}'s own code has failed: {fault}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use bonfire_core::DType;

    #[test]
    fn only_a_gradient_that_is_not_finite_leaves_out_a_step_and_every_other_problem_comes_first() {
        let words = |problems: &[Option<Problem>]| problems.iter().map(|p| Problem::to_words(*p)).collect::<Vec<_>>();
        let first = |problems: &[Option<Problem>]| Problem::first(words(problems).into_iter());
        let not_finite = Some(Problem::NotFinite(0));
        assert_eq!(first(&[None, not_finite, Some(Problem::Open)]), Some((2, Problem::Open)));
        assert_eq!(first(&[None, Some(Problem::Open), Some(Problem::Unknown)]), Some((1, Problem::Open)));
        assert_eq!(first(&[None, not_finite, not_finite]), Some((1, Problem::NotFinite(0))));

        let parameters = [Parameter { path: "first".into(), shape: vec![2], dtype: DType::F32 }];
        let of = |problem| Refusal::Problem { rank: 2, problem };
        assert!(of(Problem::NotFinite(0)).leaves_out(0, 1, &parameters));
        assert!(!of(Problem::Open).leaves_out(0, 1, &parameters));
        assert_eq!(of(Problem::NotFinite(0)).reason(&parameters), "rank 2's gradient of `first` is not finite");
    }
}
