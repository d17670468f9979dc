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
use super::announcement::{self, announcements, merge, request};
use super::bucket::Weighting;
use super::values::{NOTHING, compare, digest};
use bonfire_core::internal::ByteOperations;
use bonfire_core::{Error, Group, Work};
use bytemuck::cast_slice_mut;

/// One rank's input to a step. Its header is made from it.
///
/// The methods get the parameters whose gradients are reduced, in the order that is the same on all ranks.
#[derive(Default)]
pub(crate) struct StepHeader {
    /// The name of the calling operation, for errors.
    pub operation: &'static str,
    /// None in an overlapped step, whose gradients come later.
    pub grads: GradientsParams,
    pub samples: usize,
    /// The position of a parameter that this rank's model lacks, or whose shape or element type has changed.
    pub changed: Option<usize>,
    /// The steps so far.
    pub steps: u64,
    /// The learning rate, where the step includes the optimizer's.
    pub rate: f64,
    /// The most bytes in a bucket, where the caller has set it. Otherwise 0.
    pub buckets: u64,
    /// A hash of the name of the compression; 0 without one.
    pub compression: u64,
    /// The digests of the model's parameters, in steps in which the ranks compare them.
    pub digests: Option<Vec<u64>>,
}

/// Words of a header before the bitmap: samples, problem, steps, learning rate, bytes of a bucket, compression, digest
/// of the digests.
const WORDS: usize = 7;

/// What a rank knows once the headers are exchanged.
pub(crate) struct AgreedStep {
    /// This rank's gradients: none if it has no samples.
    pub grads: GradientsParams,
    /// How this rank's gradients enter the mean.
    pub weighting: Weighting,
    /// For each parameter, whether any rank has its gradient.
    pub exists: Vec<bool>,
}

/// Why the ranks cannot make a step. All ranks find the same.
pub(crate) enum Refused {
    Because(Error),
    NoSamples,
    /// The ranks' parameters differ. [`StepHeader::compare`] finds out which.
    Digests,
}

impl StepHeader {
    /// Exchanges the headers in one all-gather. If one rank's gradients are invalid, all ranks return the same error.
    #[track_caller]
    pub fn exchange<B: AutodiffBackend>(
        mut self,
        group: &Group,
        parameters: &[Parameter<B>],
    ) -> Result<AgreedStep, Error> {
        let mut headers = self.headers(group, parameters);
        group.operate(request(self.operation), None, cast_slice_mut(&mut headers))?;
        match self.agree(parameters, &headers, group.world_size()) {
            Ok(agreed) => Ok(agreed),
            Err(Refused::Because(error)) => Err(error),
            Err(Refused::NoSamples) => Err(no_samples(self.operation)),
            Err(Refused::Digests) => Err(self.compare(group, parameters)),
        }
    }

    /// Starts the exchange. The headers of all ranks are for [`agree`](Self::agree).
    #[track_caller]
    pub fn start<B: AutodiffBackend>(
        &mut self,
        group: &Group,
        parameters: &[Parameter<B>],
    ) -> Result<Work<Vec<u64>>, Error> {
        let headers = self.headers(group, parameters);
        announcement::start(group, self.operation, headers)
    }

    /// Returns the memory for the headers of all ranks, with this rank's: the words before the bitmap, and one bit per
    /// parameter. The problem is 0 for none, otherwise [`invalid`](Self::invalid)'s `problem` plus 1.
    fn headers<B: AutodiffBackend>(&mut self, group: &Group, parameters: &[Parameter<B>]) -> Vec<u64> {
        if self.samples == 0 {
            // The mean over no samples is NaN, and so are its gradients.
            self.grads = GradientsParams::new();
        }
        let count = parameters.len();
        let (mut exists, mut problem) = (vec![false; count], 0);
        for (position, parameter) in parameters.iter().enumerate() {
            // Gradients are stored without their number of dimensions, so any number matches.
            let Some(grad) = self.grads.get::<B::InnerBackend, 1>(parameter.id) else { continue };
            exists[position] = true;
            if grad.dtype() != parameter.dtype || grad.shape() != parameter.shape {
                problem = 1 + position as u64;
            }
        }
        let present = exists.iter().filter(|exists| **exists).count();
        if problem == 0 && present < self.grads.len() {
            problem = 1 + count as u64;
        }
        if let Some(position) = self.changed {
            problem = 2 + (count + position) as u64;
        }
        let digests = self.digests.as_ref().map_or(NOTHING, |digests| digest(bytemuck::cast_slice(digests)));
        let rate = self.rate.to_bits();
        let words: [u64; WORDS] =
            [self.samples as u64, problem, self.steps, rate, self.buckets, self.compression, digests];
        announcements(group, &words, &exists)
    }

    /// Evaluates the headers of all ranks. Takes the gradients.
    pub fn agree<B: AutodiffBackend>(
        &mut self,
        parameters: &[Parameter<B>],
        headers: &[u64],
        world_size: usize,
    ) -> Result<AgreedStep, Refused> {
        let (count, width) = (parameters.len(), headers.len() / world_size);
        let mut total = 0u64;
        let mut exists = vec![false; count];
        for (rank, header) in headers.chunks_exact(width).enumerate() {
            total = total.saturating_add(header[0]);
            if header[1] > 0 {
                return Err(Refused::Because(self.invalid(parameters, rank, header[1] as usize - 1)));
            }
            merge(&header[WORDS..], &mut exists);
        }
        self.check_equal(headers.chunks_exact(width))?;
        if total == 0 {
            return Err(Refused::NoSamples);
        }
        let equal = headers.chunks_exact(width).all(|header| header[0] == headers[0]);
        let weighting = if equal { Weighting::Equal } else { Weighting::Share(self.samples as f64 / total as f64) };
        Ok(AgreedStep { grads: std::mem::take(&mut self.grads), weighting, exists })
    }

    /// Checks that all ranks are at the same step, with the same settings and the same parameters.
    fn check_equal<'h>(&self, headers: impl Iterator<Item = &'h [u64]>) -> Result<(), Refused> {
        let headers: Vec<_> = headers.collect();
        let differs = |word: usize| headers.iter().position(|header| header[word] != headers[0][word]);
        let refused = |reason: String| Err(Refused::Because(Error::argument(self.operation, reason)));
        if let Some(rank) = differs(2) {
            let (first, other) = (headers[0][2], headers[rank][2]);
            return refused(format!(
                "rank 0 has made {first} steps and rank {rank} {other}; load optimizer state of the same step on all \
                 ranks, or on none"
            ));
        }
        if let Some(rank) = differs(3) {
            let [first, other] = [0, rank].map(|rank| f64::from_bits(headers[rank][3]));
            return refused(format!(
                "rank 0's learning rate is {first} and rank {rank}'s is {other}; pass the same rate on all ranks"
            ));
        }
        if let Some(rank) = differs(4) {
            let text = |bytes: u64| if bytes == 0 { "the measured size".into() } else { format!("{bytes} bytes") };
            let [first, other] = [0, rank].map(|rank| text(headers[rank][4]));
            return refused(format!(
                "rank 0's buckets have {first} and rank {rank}'s {other}; set the same size on all ranks"
            ));
        }
        if let Some(rank) = differs(5) {
            return refused(format!(
                "rank 0 and rank {rank} compress gradients differently; set the same compression on all ranks"
            ));
        }
        if self.digests.is_some() && differs(6).is_some() { Err(Refused::Digests) } else { Ok(()) }
    }

    /// Returns the error for ranks whose parameters differ. All ranks call it.
    #[track_caller]
    pub fn compare<B: AutodiffBackend>(&self, group: &Group, parameters: &[Parameter<B>]) -> Error {
        let name = |position: usize| format!("`{}`", parameters[position].path);
        let own = self.digests.as_deref().unwrap_or_default();
        let equal = || Error::broken(self.operation, "digests of equal parameters differ");
        compare(group, self.operation, own, self.steps, name).err().unwrap_or_else(equal)
    }

    /// The error for a rank's problem. With `n` parameters: 0 to `n - 1` is a gradient of another shape or type, `n` is
    /// a gradient of no parameter, and `n + 1 + position` is a changed parameter.
    fn invalid<B: AutodiffBackend>(&self, parameters: &[Parameter<B>], rank: usize, problem: usize) -> Error {
        let changed = problem.checked_sub(parameters.len() + 1).and_then(|position| parameters.get(position));
        let reason = match (parameters.get(problem), changed) {
            (Some(parameter), _) => format!(
                "rank {rank}'s gradient of `{}` has another shape or element type than the parameter had at the start",
                parameter.path
            ),
            (None, Some(parameter)) => format!(
                "rank {rank}'s model does not have `{}` as it was at the start; pass the model in \
                 training, as the last step left it",
                parameter.path
            ),
            (None, None) => format!(
                "rank {rank} has gradients of parameters that its model did not have at the start, or that needed \
                 none then; pass the model that `new` returned through the optimizer, and load checkpoints with \
                 `DataParallel::resume`"
            ),
        };
        Error::argument(self.operation, reason)
    }
}

pub(crate) fn no_samples(operation: &str) -> Error {
    Error::argument(operation, "no rank has any samples, so there is no mean; leave out such a step on all ranks")
}
