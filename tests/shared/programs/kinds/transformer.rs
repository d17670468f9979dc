//! A transformer that says which word follows each word of sequences of different lengths, padded in each batch, or to
//! a length that the ranks agree on. It sees whole sequences, so what it says depends on the mask of the padding.

use bonfire::train::longest;
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{EmbeddingConfig, LinearConfig};
use burn::optim::AdamConfig;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Bool, Int};

use super::learns::{Learns, plain};
use super::*;

const WORDS: usize = 7;
const WIDTH: usize = 8;
const LONGEST: usize = 5;

models! {
    pub struct Words {
        words: Embedding,
        places: Embedding,
        encoder: TransformerEncoder,
        head: Linear,
    }
}

fn word(sample: usize, place: usize) -> usize {
    (sample * 5 + place * (sample + 3)) % WORDS
}

impl Words {
    /// The mean loss of the words of these sequences, padded to a length.
    fn padded_loss(&self, samples: &[usize], padded: usize) -> Tensor<1> {
        let (device, count) = (device(), samples.len());
        let places = samples.iter().flat_map(|sample| (0..padded).map(move |place| (*sample, place)));
        let places: Vec<(usize, usize)> = places.collect();
        let ids: Vec<i32> = places.iter().map(|(sample, place)| word(*sample, *place) as i32).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [count, padded]), &device);
        let numbers: Vec<i32> = places.iter().map(|(_, place)| *place as i32).collect();
        let numbers = Tensor::<2, Int>::from_data(TensorData::new(numbers, [count, padded]), &device);
        let is_padding: Vec<bool> = places.iter().map(|(sample, place)| *place >= length(*sample)).collect();
        let is_padding = Tensor::<2, Bool>::from_data(TensorData::new(is_padding, [count, padded]), &device);
        let read = self.words.forward(ids) + self.places.forward(numbers);
        let read = TransformerEncoderInput::new(read).mask_pad(is_padding);
        let scores = log_softmax(self.head.forward(self.encoder.forward(read)), 2);
        // 1 for the next word of each place that is no padding.
        let mut expected = vec![0.0; places.len() * WORDS];
        for (row, (sample, place)) in places.iter().enumerate().filter(|(_, (sample, place))| *place < length(*sample))
        {
            expected[row * WORDS + word(*sample, place + 1)] = 1.0;
        }
        let expected = TensorData::new(expected, [count, padded, WORDS]);
        let expected = Tensor::<3>::from_data(expected, (&device, DType::F64));
        mean_of((scores * expected).sum().neg(), tokens(samples))
    }
}

impl Learns for Words {
    fn new() -> Self {
        let device = device();
        let embedding = |count| EmbeddingConfig::new(count, WIDTH).init(&device);
        let encoder = TransformerEncoderConfig::new(WIDTH, 12, 2, 2).with_dropout(0.0).init(&device);
        let head = LinearConfig::new(WIDTH, WORDS).init(&device);
        known(Words { words: embedding(WORDS), places: embedding(LONGEST), encoder, head }, 23)
    }

    fn loss(&self, samples: &[usize]) -> Tensor<1> {
        self.padded_loss(samples, samples.iter().map(|sample| length(*sample)).max().unwrap_or(0))
    }

    fn weight(samples: &[usize]) -> usize {
        tokens(samples)
    }
}

#[test]
fn a_transformer_over_padded_sequences_trains_as_on_burn_alone() {
    agrees("transformer");
}

#[test]
fn a_transformer_over_sequences_of_an_agreed_length_trains_as_on_burn_alone() {
    let expected = plain::<Words>();
    let results = ranks(3, |group| {
        let (mut model, ddp) = DataParallel::new(group.clone(), Words::new()).unwrap();
        let mut optimizer: AdamOf<Words> = AdamConfig::new().init();
        for step in 0..STEPS {
            let samples = uneven(&group, step);
            let own_longest = samples.iter().map(|sample| length(*sample)).max().unwrap_or(0);
            let padded = longest(&group, own_longest, LONGEST).unwrap();
            let grads = ddp
                .run(&model, samples.chunks(2), |model, samples| (model.padded_loss(samples, padded), tokens(samples)));
            model = optimizer.step(RATE, model, grads.unwrap());
        }
        weights(&model)
    });
    for found in results {
        compare("an agreed length", &found, &expected[..found.len()]);
    }
}
