//! The parameters of a model, as the ranks compare them.

mod digest;

use std::fmt;

use serde::{Deserialize, Serialize};

pub(crate) use self::digest::{Difference, Digest, comparison_is_due, difference};
pub use self::digest::{Digested, NOTHING, compare, digest};
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{DType, Error, Group};

/// A float parameter. Its gradients can be exchanged.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Its path in the model.
    pub path: String,
    /// Its shape, that of the whole.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: DType,
}

impl Parameter {
    /// Returns the number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns its name in errors.
    pub(crate) fn quoted(&self) -> String {
        format!("`{}`", self.path)
    }

    /// Returns the number of bytes.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }
}

/// Names parameters in the log of rank 0 that burn alone may train in other steps than the ranks do. `unclear` has the
/// paths, and whether the ranks train them.
pub fn warn_of_unclear<'a>(group: &Group, operation: &str, unclear: impl IntoIterator<Item = (&'a str, bool)>) {
    if group.rank() > 0 {
        return;
    }
    let (trained, untrained): (Vec<_>, Vec<_>) = unclear.into_iter().partition(|(_, trained)| *trained);
    for (parameters, here) in [(trained, "trained"), (untrained, "not trained")] {
        let names: Vec<String> = parameters.iter().map(|(path, _)| format!("`{path}`")).collect();
        if !names.is_empty() {
            log::warn!(
                "{operation}: of {} it is not clear whether to train: the tensor is the result of an operation, or \
                 needs a gradient where the parameter does not. burn alone may train it in some steps, in all or in \
                 none; here it is {here}. Before this call say which: `param.map(|value| \
                 value.detach()).set_require_grad(true)`, or `false`",
                names.join(", ")
            );
        }
    }
}

/// The description of a parameter of any kind, which must be the same on all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Description {
    /// Its path in the model.
    pub path: String,
    /// Kind, element type, shape and whether it needs a gradient, as text.
    pub what: String,
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`: {}", self.path, self.what)
    }
}

/// Returns the first position where two lists of parameters differ. One past the end of the shorter list stands for a
/// parameter that it lacks.
pub fn first_difference(one: &[Description], other: &[Description]) -> Option<usize> {
    (0..one.len().max(other.len())).find(|&i| one.get(i) != other.get(i))
}

/// Checks that all ranks have rank 0's parameters.
///
/// # Errors
/// [`Error::InvalidArgument`] on all ranks if a rank has others: it describes the first one that differs. Otherwise
/// those of [`Group::all_gather`].
#[track_caller]
pub fn check_same_model(group: &Group, operation: &str, own: &[Description]) -> Result<(), Error> {
    let all = group.all_gather_results(Ok(own.to_vec()))?;
    let differences =
        all.iter().enumerate().filter_map(|(rank, other)| Some((first_difference(other, &all[0])?, rank)));
    let Some((position, rank)) = differences.min() else { return Ok(()) };
    let text = |rank: usize| {
        let parameter: Option<&Description> = all[rank].get(position);
        parameter.map_or("nothing, its model ends before".into(), ToString::to_string)
    };
    let (first, other) = (text(0), text(rank));
    let reason = format!(
        "the ranks' models differ first at parameter {position}: rank 0 has {first}; rank {rank} has {other}; build \
         the same model on all ranks"
    );
    Err(Error::argument(operation, reason))
}
