//! The trailer of a step, which the ranks exchange after their backward passes, while the last buckets are in flight:
//! which gradients there were, and what went wrong.

use burn::tensor::backend::AutodiffBackend;

use super::agree::Parameter;
use super::announcement::{self, announcements, merge};
use bonfire_core::{Error, Group, Work};

/// The operation's name in errors.
pub(super) const OPERATION: &str = "training step";

/// What is wrong with a rank's gradients. The group stays usable.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Problem {
    /// The rank has samples, and no gradient has arrived.
    NoGradients,
    /// Earlier gradients of parameters that the model does not have.
    Unknown,
    /// Two gradients of the parameter at this position.
    Twice(usize),
    /// A gradient of another shape or element type than the parameter at this position.
    Other(usize),
    /// A gradient of this rank's part of the parameter at this position, which the pass has not gathered.
    Part(usize),
}

/// What a rank tells the others.
pub(super) struct Trailer {
    pub problem: Option<Problem>,
    /// Whether it knows the order in which gradients arrive.
    pub ordered: bool,
    /// By position, whether it had a gradient.
    pub exists: Vec<bool>,
}

/// What the trailers of all ranks say.
pub(super) struct Trailers {
    /// The lowest rank that knows the order in which gradients arrive.
    pub ordered: Option<usize>,
    /// By position, whether any rank had a gradient.
    pub exists: Vec<bool>,
    /// By position, whether all ranks had one.
    pub everywhere: Vec<bool>,
}

/// Words before the bitmap: problem, position, whether there is an order.
const WORDS: usize = 3;

impl Trailer {
    /// Starts the exchange of the trailers.
    pub fn start(&self, group: &Group) -> Result<Work<Vec<u64>>, Error> {
        let (problem, position) = match self.problem {
            None => (0, 0),
            Some(Problem::NoGradients) => (1, 0),
            Some(Problem::Unknown) => (2, 0),
            Some(Problem::Twice(position)) => (3, position),
            Some(Problem::Other(position)) => (4, position),
            Some(Problem::Part(position)) => (5, position),
        };
        let words: [u64; WORDS] = [problem, position as u64, u64::from(self.ordered)];
        announcement::start(group, OPERATION, announcements(group, &words, &self.exists))
    }

    /// Evaluates the trailers of all ranks. If one has a problem, all ranks return the same error.
    pub fn evaluate<B: AutodiffBackend>(
        all: &[u64],
        world_size: usize,
        parameters: &[Parameter<B>],
    ) -> Result<Trailers, Error> {
        let count = parameters.len();
        let mut trailers = Trailers { ordered: None, exists: vec![false; count], everywhere: vec![true; count] };
        for (rank, own) in all.chunks_exact(all.len() / world_size).enumerate() {
            if own[0] > 0 {
                if !parameters.iter().any(|parameter| parameter.trained) {
                    return Err(Error::argument(OPERATION, "the model has no parameters to train"));
                }
                let path = parameters.get(own[1] as usize).map_or("a parameter", |parameter| &parameter.path);
                return Err(Error::argument(OPERATION, reason(rank, own[0], path)));
            }
            if own[2] == 1 && trailers.ordered.is_none() {
                trailers.ordered = Some(rank);
            }
            let mut exists = vec![false; count];
            merge(&own[WORDS..], &mut exists);
            for (position, exists) in exists.into_iter().enumerate() {
                trailers.exists[position] |= exists;
                trailers.everywhere[position] &= exists;
            }
        }
        Ok(trailers)
    }
}

fn reason(rank: usize, problem: u64, path: &str) -> String {
    match problem {
        1 => format!(
            "rank {rank} has samples, and no gradient has arrived; run the backward pass of a loss that the step's own \
             model has computed, and not a fork or a copy without gradients of it, before `finish`"
        ),
        2 => format!(
            "rank {rank} has earlier gradients of parameters that its model does not have; accumulate gradients of the \
             model that `DataParallel::new` returned"
        ),
        3 => format!(
            "rank {rank} has two gradients of `{path}`; run one backward pass in each step: add the losses, or \
             accumulate the gradients of earlier passes"
        ),
        4 => format!("rank {rank}'s gradient of `{path}` has another shape or element type than the parameter"),
        _ => format!(
            "rank {rank} has used its part of `{path}` as if it were the whole parameter; run the forward pass with \
             the step's own model, in which it is gathered"
        ),
    }
}
