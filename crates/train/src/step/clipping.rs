//! What ranks with parts of gradients compute together to clip them.

use super::Groups;
use crate::agree::all_gather_values;
use crate::lane::{Tensor, Tensors, sums_of_squares};
use bonfire_core::{DType, Error};

impl Groups {
    /// Returns the sum of the squares of each gradient, by position, of which the ranks have parts.
    ///
    /// # Errors
    /// [`Error::Io`] if a gradient cannot be read. Otherwise those of [`add_over_shards`](Self::add_over_shards).
    #[track_caller]
    pub fn squares(&self, tensors: &dyn Tensors, parts: Vec<Option<(Tensor, DType)>>) -> Result<Vec<f64>, Error> {
        let mut squares = vec![0.0; parts.len()];
        let own = parts.into_iter().enumerate().filter_map(|(position, part)| Some((position, part?)));
        let (positions, own): (Vec<usize>, Vec<_>) = own.unzip();
        let own = sums_of_squares(tensors, own).map_err(|error| self.abandon(error))?;
        positions.into_iter().zip(own).for_each(|(position, sum)| squares[position] = sum);
        self.add_over_shards(squares)
    }

    /// Fails on all ranks unless they clip to the same.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they do not, or if nothing can be clipped to `max`. Otherwise those of
    /// [`Group::all_gather`](bonfire_core::Group::all_gather).
    #[track_caller]
    pub fn check_limit(&self, operation: &str, max: f64) -> Result<(), Error> {
        let all = all_gather_values(&self.main, [max])?;
        if let Some(rank) = all.iter().position(|other| other[0].to_bits() != all[0][0].to_bits()) {
            let (first, other) = (all[0][0], all[rank][0]);
            let reason = format!("rank 0 clips to {first} and rank {rank} to {other}; pass the same norm on all ranks");
            return Err(Error::argument(operation, reason));
        }
        match max > 0.0 && max.is_finite() {
            true => Ok(()),
            false => Err(Error::argument(operation, format!("nothing can be clipped to {max}; give a number above 0"))),
        }
    }
}
