//! The step header, which the ranks exchange before gradients: sample counts, a bitmap of the existing gradients, and
//! what must be the same on all ranks.
//!
//! # Why a message of its own
//! The alternative is to put the bitmap into the buckets. The extra message costs some microseconds. In exchange the
//! weights are known before packing, a gradient that exists nowhere is not sent, and a bucket with a single tensor is
//! reduced in that tensor's memory.

use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;

use super::agree::Parameter;
use super::bucket::Weighting;
use super::values::{NOTHING, compare, digest};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Group, Operation};
use bytemuck::cast_slice_mut;

/// One rank's input to a step. Its header is made from it.
pub(crate) struct StepHeader<'a, B: AutodiffBackend> {
    /// The name of the calling operation, for errors.
    pub operation: &'static str,
    /// The parameters whose gradients are reduced, in the order that is the same on all ranks.
    pub parameters: &'a [Parameter<B>],
    pub grads: GradientsParams,
    pub samples: usize,
    /// The position of a parameter that this rank's model lacks, or whose shape or element type has changed.
    pub changed: Option<usize>,
    /// The steps so far.
    pub steps: u64,
    /// The learning rate, where the step includes the optimizer's.
    pub rate: f64,
    /// The digests of the model's parameters, in steps in which the ranks compare them.
    pub digests: Option<Vec<u64>>,
}

/// Words of a header before the bitmap: samples, problem, steps, learning rate, digest of the digests.
const WORDS: usize = 5;

/// What a rank knows once the headers are exchanged.
pub(crate) struct AgreedStep {
    /// This rank's gradients: none if it has no samples.
    pub grads: GradientsParams,
    /// How this rank's gradients enter the mean.
    pub weighting: Weighting,
    /// For each parameter, whether any rank has its gradient.
    pub exists: Vec<bool>,
}

impl<B: AutodiffBackend> StepHeader<'_, B> {
    /// Exchanges the headers in one all-gather. If one rank's gradients are invalid, all ranks return the same error.
    ///
    /// A rank's header is its number of samples, a problem code (0 for none, otherwise [`invalid`](Self::invalid)'s
    /// `problem` plus 1), what must be the same on all ranks, and one bit per parameter.
    #[track_caller]
    pub fn exchange(mut self, group: &Group) -> Result<AgreedStep, Error> {
        if self.samples == 0 {
            // The mean over no samples is NaN, and so are its gradients.
            self.grads = GradientsParams::new();
        }
        let (count, world_size) = (self.parameters.len(), group.world_size());
        let width = WORDS + count.div_ceil(64);
        let mut headers = vec![0u64; width * world_size];
        let own = &mut headers[group.rank() * width..][..width];
        let (mut present, mut problem) = (0, 0);
        for (position, parameter) in self.parameters.iter().enumerate() {
            // Gradients are stored without their number of dimensions, so any number matches.
            let Some(grad) = self.grads.get::<B::InnerBackend, 1>(parameter.id) else { continue };
            present += 1;
            own[WORDS + position / 64] |= 1 << (position % 64);
            if grad.dtype() != parameter.dtype || grad.shape() != parameter.shape {
                problem = 1 + position as u64;
            }
        }
        if problem == 0 && present < self.grads.len() {
            problem = 1 + count as u64;
        }
        if let Some(position) = self.changed {
            problem = 2 + (count + position) as u64;
        }
        let digests = self.digests.as_ref().map_or(NOTHING, |digests| digest(bytemuck::cast_slice(digests)));
        own[..WORDS].copy_from_slice(&[self.samples as u64, problem, self.steps, self.rate.to_bits(), digests]);
        let request = Request::new(Operation::AllGather, DType::U64).part_of(self.operation);
        group.operate(request, None, cast_slice_mut(&mut headers))?;

        let mut total = 0u64;
        let mut exists = vec![false; count];
        for (rank, header) in headers.chunks_exact(width).enumerate() {
            total = total.saturating_add(header[0]);
            if header[1] > 0 {
                return Err(self.invalid(rank, header[1] as usize - 1));
            }
            for (position, exists) in exists.iter_mut().enumerate() {
                *exists |= header[WORDS + position / 64] >> (position % 64) & 1 == 1;
            }
        }
        self.check_equal(group, headers.chunks_exact(width))?;
        if total == 0 {
            return Err(no_samples(self.operation));
        }
        let equal = headers.chunks_exact(width).all(|header| header[0] == headers[0]);
        let weighting = if equal { Weighting::Equal } else { Weighting::Share(self.samples as f64 / total as f64) };
        Ok(AgreedStep { grads: self.grads, weighting, exists })
    }

    /// Checks that all ranks are at the same step, with the same learning rate and the same parameters.
    #[track_caller]
    fn check_equal<'h>(&self, group: &Group, headers: impl Iterator<Item = &'h [u64]>) -> Result<(), Error> {
        let headers: Vec<_> = headers.collect();
        let differs = |word: usize| headers.iter().position(|header| header[word] != headers[0][word]);
        if let Some(rank) = differs(2) {
            let (first, other) = (headers[0][2], headers[rank][2]);
            let reason = format!(
                "rank 0 has made {first} steps and rank {rank} {other}; load optimizer state of the same step on all \
                 ranks, or on none"
            );
            return Err(Error::argument(self.operation, reason));
        }
        if let Some(rank) = differs(3) {
            let [first, other] = [0, rank].map(|rank| f64::from_bits(headers[rank][3]));
            let reason = format!(
                "rank 0's learning rate is {first} and rank {rank}'s is {other}; pass the same rate on all ranks"
            );
            return Err(Error::argument(self.operation, reason));
        }
        match (&self.digests, differs(4)) {
            (Some(own), Some(_)) => {
                let name = |position: usize| format!("`{}`", self.parameters[position].path);
                compare(group, self.operation, own, self.steps, name)
            }
            _ => Ok(()),
        }
    }

    /// The error for a rank's problem. With `n` parameters: 0 to `n - 1` is a gradient of another shape or type, `n` is
    /// a gradient of no parameter, and `n + 1 + position` is a changed parameter.
    fn invalid(&self, rank: usize, problem: usize) -> Error {
        let changed = problem.checked_sub(self.parameters.len() + 1).and_then(|position| self.parameters.get(position));
        let reason = match (self.parameters.get(problem), changed) {
            (Some(parameter), _) => format!(
                "rank {rank}'s gradient of `{}` has another shape or element type than the parameter had at the start",
                parameter.path
            ),
            (None, Some(parameter)) => format!(
                "rank {rank}'s model does not have `{}` as it was at the start; pass the model that \
                 `DataParallel::new` returned, as the last step left it",
                parameter.path
            ),
            (None, None) => format!(
                "rank {rank} has gradients of parameters that its model did not have at the start, or that needed \
                 none then; pass the model that `DataParallel::new` returned through the optimizer, and load \
                 checkpoints with `DataParallel::resume`"
            ),
        };
        Error::argument(self.operation, reason)
    }
}

pub(crate) fn no_samples(operation: &str) -> Error {
    Error::argument(operation, "no rank has any samples, so there is no mean; leave out such a step on all ranks")
}
