//! Gradient synchronisation of one training step.

use bonfire::{DataParallel, Group};
use burn::backend::{Autodiff, Flex};
use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::timing::{RankError, Workload};

type B = Autodiff<Flex>;

/// Steps that are timed.
pub const STEPS: usize = 7;

pub struct Gradients {
    model: Vec<Param<Tensor<B, 1>>>,
    parallel: DataParallel<B>,
    own: f32,
    mean: f32,
    gradients: GradientsParams,
}

impl Gradients {
    pub fn new(group: &Group) -> Result<Gradients, RankError> {
        let device = Default::default();
        let model: Vec<Param<Tensor<B, 1>>> =
            resnet50().iter().map(|n| Param::from_tensor(Tensor::zeros([*n], &device))).collect();
        let (model, parallel) = DataParallel::new(group.clone(), model)?;
        // Small integers, whose mean is an integer or a half and therefore exact.
        let (own, mean) = ((group.rank() + 1) as f32, (group.world_size() + 1) as f32 / 2.0);
        Ok(Gradients { model, parallel, own, mean, gradients: GradientsParams::new() })
    }

    pub fn elements() -> usize {
        resnet50().iter().sum()
    }
}

impl Workload for Gradients {
    fn reset(&mut self) {
        self.gradients = GradientsParams::new();
        for parameter in &self.model {
            let gradient = Tensor::<Flex, 1>::full(parameter.shape(), self.own, &Default::default());
            self.gradients.register(parameter.id, gradient);
        }
    }

    fn call(&mut self) -> Result<(), RankError> {
        self.gradients = self.parallel.sync(&self.model, std::mem::take(&mut self.gradients), 1)?;
        Ok(())
    }

    fn wrong(&mut self) -> Result<u64, RankError> {
        let mut wrong = 0;
        for parameter in &self.model {
            let gradient = self.gradients.remove::<Flex, 1>(parameter.id).map(Tensor::into_data);
            let missing = parameter.shape().num_elements();
            wrong += gradient.map_or(missing, |data| data.iter::<f32>().filter(|x| *x != self.mean).count());
        }
        Ok(wrong as u64)
    }
}

/// The lengths of ResNet-50's parameters in the order of its layers (He et al., CVPR 2016): 161 tensors, 25,557,032
/// elements.
pub(super) fn resnet50() -> Vec<usize> {
    let convolution =
        |inputs: usize, outputs: usize, kernel: usize| [inputs * outputs * kernel * kernel, outputs, outputs];
    let mut sizes = convolution(3, 64, 7).to_vec();
    let mut inputs = 64;
    for (width, blocks) in [(64, 3), (128, 4), (256, 6), (512, 3)] {
        for block in 0..blocks {
            sizes.extend(convolution(inputs, width, 1));
            sizes.extend(convolution(width, width, 3));
            sizes.extend(convolution(width, 4 * width, 1));
            if block == 0 {
                sizes.extend(convolution(inputs, 4 * width, 1));
            }
            inputs = 4 * width;
        }
    }
    sizes.extend([2048 * 1000, 1000]);
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resnet50_has_its_published_size() {
        let sizes = resnet50();
        assert_eq!((sizes.len(), sizes.iter().sum::<usize>()), (161, 25_557_032));
    }
}
