//! The digits as items and batches for burn's data loaders.

use burn::data::dataloader::batcher::Batcher;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

use crate::digits::{Digits, PIXELS};

/// An image and the digit that it shows.
pub type Item = ([f32; PIXELS], u8);

impl Digits {
    pub fn items(&self) -> Vec<Item> {
        self.images.iter().copied().zip(self.labels.iter().copied()).collect()
    }
}

/// Images `[n, 64]` and labels `[n]`.
#[derive(Clone, Debug)]
pub struct Batch<B: Backend> {
    pub images: Tensor<B, 2>,
    pub labels: Tensor<B, 1, Int>,
}

#[derive(Clone)]
pub struct Images;

impl<B: Backend> Batcher<B, Item, Batch<B>> for Images {
    fn batch(&self, items: Vec<Item>, device: &B::Device) -> Batch<B> {
        let images: Vec<f32> = items.iter().flat_map(|(image, _)| *image).collect();
        let labels: Vec<i64> = items.iter().map(|(_, label)| i64::from(*label)).collect();
        Batch {
            images: Tensor::from_data(TensorData::new(images, [items.len(), PIXELS]), device),
            labels: Tensor::from_data(TensorData::new(labels, [items.len()]), device),
        }
    }
}
