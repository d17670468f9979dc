//! One training step's gradient synchronisation.

use std::time::Instant;

use bonfire::{DType, DataParallel, Error, Group};
use burn::backend::{Autodiff, Flex};
use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::report::{Measurement, Report};
use super::slowest_and_total;

type B = Autodiff<Flex>;

/// Steps; the first warms up, and the median of the rest is reported.
const STEPS: usize = 8;

pub fn run(group: &Group, report: &Report) -> Result<u64, Error> {
    let device = Default::default();
    let sizes = resnet50();
    let model: Vec<Param<Tensor<B, 1>>> =
        sizes.iter().map(|n| Param::from_tensor(Tensor::zeros([*n], &device))).collect();
    let (model, mut parallel) = DataParallel::new(group.clone(), model)?;
    // Small whole numbers, of which the mean is a whole or half number: exact.
    let (own, mean) = ((group.rank() + 1) as f32, (group.world_size() + 1) as f32 / 2.0);
    let (mut times, mut wrong) = (Vec::new(), 0);
    for step in 0..STEPS {
        let mut gradients = GradientsParams::new();
        for parameter in &model {
            gradients.register(parameter.id, Tensor::<Flex, 1>::full(parameter.shape(), own, &device));
        }
        group.barrier()?;
        let start = Instant::now();
        let mut gradients = parallel.sync(gradients, 1)?;
        times.push(start.elapsed().as_secs_f64());
        if step == 0 {
            for parameter in &model {
                let gradient = gradients.remove::<Flex, 1>(parameter.id).map(Tensor::into_data);
                wrong += gradient
                    .map_or(parameter.shape().num_elements(), |data| data.iter::<f32>().filter(|x| *x != mean).count());
            }
        }
    }
    times.remove(0);
    times.sort_by(f64::total_cmp);
    let (seconds, wrong) = slowest_and_total(group, times[times.len() / 2], wrong as u64)?;
    let bytes = sizes.iter().sum::<usize>() * DType::F32.size();
    report.print(group, &Measurement { collective: "gradients", dtype: DType::F32, bytes, seconds, wrong });
    Ok(wrong)
}

/// The lengths of ResNet-50's parameters in the order of its layers (He et al., CVPR 2016): 161 tensors, 25,557,032
/// elements.
fn resnet50() -> Vec<usize> {
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
    #[test]
    fn resnet50_has_its_published_size() {
        let sizes = super::resnet50();
        assert_eq!((sizes.len(), sizes.iter().sum::<usize>()), (161, 25_557_032));
    }
}
