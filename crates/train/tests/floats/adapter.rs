//! An adapter over `Vec<f32>`, and a network of two layers with gradients by hand.

use std::sync::{Arc, Mutex};

use bonfire_core::{DType, Error};
use bonfire_train::lane::{Elements, Memory, Read, Tensor, Tensors};
use bonfire_train::parameters::Parameter;
use bytemuck::{cast_slice, cast_slice_mut};

/// Tensors that are vectors.
pub struct Floats(pub Arc<[Parameter]>);

/// A vector as a tensor.
pub fn tensor(values: Vec<f32>) -> Tensor {
    Arc::new(values)
}

/// The values of a tensor.
pub fn values(tensor: &Tensor) -> &[f32] {
    tensor.downcast_ref::<Vec<f32>>().expect("a tensor of this adapter")
}

struct Vector(Vec<f32>);

impl Memory for Vector {
    fn bytes(&self) -> &[u8] {
        cast_slice(&self.0)
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        cast_slice_mut(&mut self.0)
    }
}

impl Read for Vector {
    fn is_ready(&mut self) -> bool {
        true
    }

    fn wait(self: Box<Self>) -> Result<Elements, Error> {
        Ok(Elements::Owned(self))
    }
}

impl Tensors for Floats {
    fn fits(&self, position: usize, tensor: &Tensor) -> bool {
        values(tensor).len() == self.0[position].elements()
    }

    fn cast(&self, _: usize, tensor: Tensor, _: DType) -> Tensor {
        tensor
    }

    fn scale(&self, tensor: Tensor, _: DType, factor: f64) -> Tensor {
        self::tensor(values(&tensor).iter().map(|x| x * factor as f32).collect())
    }

    fn add(&self, one: Tensor, other: Tensor) -> Tensor {
        tensor(values(&one).iter().zip(values(&other)).map(|(a, b)| a + b).collect())
    }

    fn sum(&self, tensor: Tensor, _: DType) -> Tensor {
        self::tensor(vec![values(&tensor).iter().sum()])
    }

    fn read(&self, tensor: Tensor) -> Box<dyn Read> {
        Box::new(Vector(values(&tensor).to_vec()))
    }

    fn memory(&self, _: DType, elements: usize) -> Result<Box<dyn Memory>, Error> {
        Ok(Box::new(Vector(vec![0.0; elements])))
    }

    fn tensor(&self, _: usize, _: &[usize], _: DType, memory: Box<dyn Memory>) -> Tensor {
        tensor(cast_slice(memory.bytes()).to_vec())
    }
}

const INPUTS: usize = 3;
const HIDDEN: usize = 5;

/// `output = second * softsign(first * input + bias)`, and a parameter that is not used. Softsign needs no library of
/// mathematics: of 200,000 numbers 7 have another tanh on aarch64 than on x86-64 (glibc 2.36).
pub fn parameters() -> Arc<[Parameter]> {
    let shapes: [(&str, &[usize]); 4] =
        [("first", &[HIDDEN, INPUTS]), ("bias", &[HIDDEN]), ("second", &[HIDDEN]), ("unused", &[2])];
    shapes.map(|(path, shape)| Parameter { path: path.into(), shape: shape.to_vec(), dtype: DType::F32 }).into()
}

/// The block of each parameter: the second layer is one.
pub const BLOCKS: [usize; 4] = [0, 0, 1, 0];

/// A number from -1 to 1 for each `i`, the same on every system: all steps are exact.
fn scatter(i: usize) -> f32 {
    ((i as u32).wrapping_mul(0x9e37_79b9) >> 8) as f32 / (1 << 23) as f32 - 1.0
}

pub fn initial() -> Vec<Vec<f32>> {
    parameters().iter().zip(1..).map(|(p, seed)| (0..p.elements()).map(|i| scatter(seed * 50 + i)).collect()).collect()
}

/// A sample with which no gradient is finite.
pub const SPOILED: usize = usize::MAX;

/// A sample: its inputs and its target.
pub fn sample(index: usize) -> ([f32; INPUTS], f32) {
    if index == SPOILED {
        return ([1.0; INPUTS], f32::INFINITY);
    }
    (std::array::from_fn(|i| scatter(1000 + index * 3 + i)), scatter(9000 + index))
}

fn softsign(x: f32) -> f32 {
    x / (1.0 + x.abs())
}

/// Runs both passes over some samples, whose mean squared error is the loss. `parameter` returns a parameter where a
/// pass needs it, in the backward pass once more; `receive` gets each gradient when it is complete.
pub fn passes(
    samples: &[usize],
    parameter: &dyn Fn(usize, bool) -> Vec<f32>,
    receive: &mut dyn FnMut(usize, Vec<f32>),
) {
    let (first, bias) = (parameter(0, false), parameter(1, false));
    let hidden = |inputs: &[f32; INPUTS]| -> Vec<f32> {
        let sum = |h: usize| (0..INPUTS).map(|i| first[h * INPUTS + i] * inputs[i]).sum::<f32>();
        (0..HIDDEN).map(|h| softsign(sum(h) + bias[h])).collect()
    };
    let second = parameter(2, false);
    let forward = samples.iter().map(|&index| {
        let (inputs, target) = sample(index);
        let hidden = hidden(&inputs);
        let error = hidden.iter().zip(&second).map(|(h, w)| h * w).sum::<f32>() - target;
        (inputs, hidden, 2.0 * error / samples.len() as f32)
    });
    let forward: Vec<_> = forward.collect();

    let second = parameter(2, true);
    let of = |h: usize| forward.iter().map(move |(_, hidden, d)| hidden[h] * d).sum();
    receive(2, (0..HIDDEN).map(of).collect());
    let slope = |hidden: f32| (1.0 - hidden.abs()) * (1.0 - hidden.abs());
    let through = |h: usize, hidden: &[f32], d: f32| second[h] * d * slope(hidden[h]);
    let of = |h: usize| forward.iter().map(|(_, hidden, d)| through(h, hidden, *d)).sum();
    receive(1, (0..HIDDEN).map(of).collect());
    let of = |k: usize| forward.iter().map(|(x, hidden, d)| through(k / INPUTS, hidden, *d) * x[k % INPUTS]).sum();
    receive(0, (0..HIDDEN * INPUTS).map(of).collect());
}

/// Stochastic gradient descent with momentum, for which a slice of the update is the update of the slice.
#[derive(Default)]
pub struct Momentum(Mutex<Vec<Option<Vec<f32>>>>);

impl Momentum {
    pub fn step(&self, position: usize, value: &mut [f32], gradient: &[f32]) {
        let mut states = self.0.lock().unwrap();
        states.resize(parameters().len(), None);
        let state = states[position].get_or_insert_with(|| vec![0.0; value.len()]);
        for ((value, state), gradient) in value.iter_mut().zip(state).zip(gradient) {
            *state = 0.9 * *state + gradient;
            *value -= 0.1 * *state;
        }
    }
}
