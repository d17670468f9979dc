//! The recurrence of `scan_version`, and its backward step.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::tensor::Slice;

use crate::scan_version::{Backend, FloatTensor, ScanOps, TensorMetadata};

/// A place of a sequence, of `[samples, length, width]`.
fn at<B: Backend>(tensor: &FloatTensor<B>, place: usize) -> FloatTensor<B> {
    let (all, place) = (Slice::new(0, None, 1), Slice::from(place..place + 1));
    B::float_slice(tensor.clone(), &[all, place, all])
}

fn length<B: Backend>(tensor: &FloatTensor<B>) -> usize {
    tensor.shape()[1]
}

/// Returns all states.
pub fn states<B: Backend>(decay: FloatTensor<B>, input: FloatTensor<B>) -> FloatTensor<B> {
    let mut states = vec![at::<B>(&input, 0)];
    for place in 1..length::<B>(&input) {
        let kept = B::float_mul(at::<B>(&decay, place), states[place - 1].clone());
        states.push(B::float_add(kept, at::<B>(&input, place)));
    }
    B::float_cat(states, 1)
}

/// Returns the gradients of the decay and the input, of that of the states.
fn gradients<B: Backend>(
    decay: FloatTensor<B>,
    states: FloatTensor<B>,
    gradient: FloatTensor<B>,
) -> [FloatTensor<B>; 2] {
    let length = length::<B>(&states);
    let mut of_inputs = vec![at::<B>(&gradient, length - 1)];
    for place in (1..length).rev() {
        let later = B::float_mul(at::<B>(&decay, place), of_inputs[length - 1 - place].clone());
        of_inputs.push(B::float_add(later, at::<B>(&gradient, place - 1)));
    }
    of_inputs.reverse();
    // The first state depends on no decay.
    let first = at::<B>(&states, 0);
    let mut of_decays = vec![B::float_sub(first.clone(), first)];
    for (place, of_input) in of_inputs.iter().enumerate().skip(1) {
        of_decays.push(B::float_mul(of_input.clone(), at::<B>(&states, place - 1)));
    }
    [B::float_cat(of_decays, 1), B::float_cat(of_inputs, 1)]
}

/// The backward step.
#[derive(Debug)]
pub struct Scan;

impl<B: ScanOps> Backward<B, 2> for Scan {
    /// The decay and the states.
    type State = (FloatTensor<B>, FloatTensor<B>);

    fn backward(self, ops: Ops<Self::State, 2>, of: &mut Gradients, _: &mut Checkpointer) {
        let (decay, states) = ops.state;
        let gradients = gradients::<B>(decay, states, of.consume::<B>(&ops.node));
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let Some(parent) = parent {
                of.register::<B>(parent.id, gradient);
            }
        }
    }
}
