//! What the ranks tell each other before gradients travel.

use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;

use super::agree::Parameter;
use bonfire_core::{Error, Group};

/// One rank's gradients in a step, as the other ranks are told of them.
pub(crate) struct Announcement<'a, B: AutodiffBackend> {
    /// What is called, for its errors.
    pub operation: &'static str,
    /// The parameters whose gradients travel, in the order that is the same on all ranks.
    pub parameters: &'a [Parameter<B>],
    pub grads: GradientsParams,
    pub samples: usize,
    /// The position of a parameter that this rank's model no longer has as it was.
    pub lost: Option<usize>,
}

/// What the ranks do with their gradients.
pub(crate) struct Announced {
    /// Those of this rank, and by what they are multiplied before the ranks' mean.
    pub grads: GradientsParams,
    pub factor: f64,
    /// For each parameter, whether any rank has a gradient.
    pub exists: Vec<bool>,
}

impl<B: AutodiffBackend> Announcement<'_, B> {
    /// Tells the other ranks. All ranks fail alike where the gradients of one do not fit.
    #[track_caller]
    pub fn make(mut self, group: &Group) -> Result<Announced, Error> {
        if self.samples == 0 {
            // The mean over nothing is NaN, and so are its gradients.
            self.grads = GradientsParams::new();
        }
        let (count, world_size) = (self.parameters.len(), group.world_size());
        let width = 2 + count.div_ceil(64);
        let mut words = vec![0u64; width * world_size];
        let own = &mut words[group.rank() * width..][..width];
        let (mut present, mut problem) = (0, 0);
        for (position, parameter) in self.parameters.iter().enumerate() {
            // A gradient is kept without its rank, so any will do.
            let Some(grad) = self.grads.get::<B::InnerBackend, 1>(parameter.id) else { continue };
            present += 1;
            own[2 + position / 64] |= 1 << (position % 64);
            if grad.dtype() != parameter.dtype || grad.shape() != parameter.shape {
                problem = 1 + position as u64;
            }
        }
        if problem == 0 && present < self.grads.len() {
            problem = 1 + count as u64;
        }
        if let Some(position) = self.lost {
            problem = 2 + (count + position) as u64;
        }
        (own[0], own[1]) = (self.samples as u64, problem);
        group.all_gather(&mut words)?;

        let mut total = 0u64;
        let mut exists = vec![false; count];
        for (rank, words) in words.chunks_exact(width).enumerate() {
            total = total.saturating_add(words[0]);
            if words[1] > 0 {
                return Err(self.unfit(rank, words[1] as usize - 1));
            }
            for (position, exists) in exists.iter_mut().enumerate() {
                *exists |= words[2 + position / 64] >> (position % 64) & 1 == 1;
            }
        }
        if total == 0 {
            return Err(no_samples(self.operation));
        }
        let factor = self.samples as f64 * world_size as f64 / total as f64;
        Ok(Announced { grads: self.grads, factor, exists })
    }

    fn unfit(&self, rank: usize, problem: usize) -> Error {
        let lost = problem.checked_sub(self.parameters.len() + 1).and_then(|position| self.parameters.get(position));
        let reason = match (self.parameters.get(problem), lost) {
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
                 checkpoints before it"
            ),
        };
        Error::argument(self.operation, reason)
    }
}

pub(crate) fn no_samples(operation: &str) -> Error {
    Error::argument(operation, "no rank has any samples, so there is no mean; leave out such a step on all ranks")
}
