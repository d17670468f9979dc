//! What a loss is a mean over.

use crate::protocol::Problem;

/// What the loss of a pass is a mean over, or a metric: a number of samples, of tokens or of pixels, or the sum of
/// their weights, such as those of classes. It is finite and not negative; 0 counts nothing.
pub trait PassWeight: Copy {
    /// Returns it as a number.
    fn value(self) -> f64;
}

impl PassWeight for usize {
    fn value(self) -> f64 {
        self as f64
    }
}

impl PassWeight for f32 {
    fn value(self) -> f64 {
        self.into()
    }
}

impl PassWeight for f64 {
    fn value(self) -> f64 {
        self
    }
}

/// Refuses a loss of several elements. burn would train on their sum, which is no mean over what the weight of the pass
/// counts.
pub fn check_loss(elements: usize) -> Result<(), String> {
    match elements {
        1 => Ok(()),
        _ => Err(format!("the loss has {elements} elements: return their mean, and the number that it is a mean over")),
    }
}

/// Returns what the weight of a pass counts. One that cannot be used counts nothing, and is the problem of the pass if
/// it has no other.
pub(crate) fn counted(weight: f64, problem: &mut Option<Problem>) -> f64 {
    usable(weight).unwrap_or_else(|| {
        problem.get_or_insert(Problem::Weight);
        0.0
    })
}

/// Returns a weight that can be used; another one counts nothing, and is `None` here.
pub(crate) fn usable(weight: f64) -> Option<f64> {
    Some(weight).filter(|weight| weight.is_finite() && *weight >= 0.0)
}
