//! A convolutional network that predicts pixels of images of different sizes, padded in each batch.

use burn::nn::conv::Conv2dConfig;

use super::learns::Learns;
use super::*;

const CHANNELS: usize = 2;
/// Rows and columns that the two kernels take off an image.
const EDGES: usize = 3;

models! {
    pub struct Pixels {
        first: Conv2d,
        second: Conv2d,
    }
}

/// The height and the width of an image.
fn size(sample: usize) -> [usize; 2] {
    [4 + sample % 3, 5 + sample * 3 % 4]
}

/// Images, padded to the largest of them. Each has its own pixels in its upper left corner.
fn images(samples: &[usize], channels: usize, edges: usize, pixel: impl Fn(usize) -> f64, padding: f64) -> Tensor<4> {
    let largest = |i: usize| samples.iter().map(|sample| size(*sample)[i]).max().unwrap_or(edges) - edges;
    let [height, width] = [largest(0), largest(1)];
    let mut values = Vec::new();
    for sample in samples {
        let [own_height, own_width] = size(*sample);
        for place in 0..channels * height * width {
            let (y, x) = (place / width % height, place % width);
            let inside = y + edges < own_height && x + edges < own_width;
            values.push(if inside {
                pixel(1000 * sample + place / (height * width) * 100 + 10 * y + x)
            } else {
                padding
            });
        }
    }
    Tensor::from_data(TensorData::new(values, [samples.len(), channels, height, width]), (&device(), DType::F64))
}

impl Learns for Pixels {
    fn new() -> Self {
        let first = Conv2dConfig::new([CHANNELS, 3], [3, 3]).init(&device());
        known(Pixels { first, second: Conv2dConfig::new([3, 1], [2, 2]).init(&device()) }, 21)
    }

    fn loss(&self, samples: &[usize]) -> Tensor<1> {
        let input = images(samples, CHANNELS, 0, |pixel| wave(pixel, 1), 3.0);
        let output = self.second.forward(self.first.forward(input).tanh());
        let target = images(samples, 1, EDGES, |pixel| wave(pixel, 2), -7.0);
        let mask = images(samples, 1, EDGES, |_| 1.0, 0.0);
        mean_of(((output - target) * mask).powf_scalar(2.0).sum(), Self::weight(samples))
    }

    /// Pixels that are not padding.
    fn weight(samples: &[usize]) -> usize {
        samples.iter().map(|sample| size(*sample).map(|length| length - EDGES).iter().product::<usize>()).sum()
    }
}

#[test]
fn a_convolution_over_padded_images_trains_as_on_burn_alone() {
    agrees("convolution");
}
