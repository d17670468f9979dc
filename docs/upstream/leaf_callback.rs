//! A callback for the gradient of a tensor, beside what stands for one on burn as published: the ladder of nodes of
//! `burn-0.22/src/tensor/hook.rs`.

#[allow(dead_code, reason = "the file as it is")]
mod ladder;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::backend::DispatchTensor;
use burn::backend::autodiff::NodeId;
use burn::tensor::{Device, Tensor};

use ladder::{GradientReceiver, PassStart, hook, with_step};

/// The operation that an extension needs to reach the callback.
#[cfg(feature = "patched")]
mod callback {
    use std::fmt;

    use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
    use burn::backend::tensor::FloatTensor;
    use burn::backend::{
        Autodiff, Backend, BackendTensor, DispatchKindConversion, DispatchTensor, Flex, backend_extension,
    };

    use super::GradientReceiver;

    #[derive(Clone)]
    pub struct Opaque(pub GradientReceiver);

    impl fmt::Debug for Opaque {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("Opaque")
        }
    }

    #[backend_extension(Flex: cfg(feature = "flex"), Autodiff)]
    pub trait CallbackOps: Backend {
        /// Returns `tensor`, whose gradient goes to `receiver` and nowhere else.
        fn on_gradient(tensor: FloatTensor<Self>, receiver: Opaque) -> FloatTensor<Self> {
            let _ = receiver;
            tensor
        }
    }

    impl CallbackOps for Flex {}

    impl<B: CallbackOps, C: CheckpointStrategy> CallbackOps for Autodiff<B, C>
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        fn on_gradient(tensor: FloatTensor<Self>, receiver: Opaque) -> FloatTensor<Self> {
            tensor.on_gradient(move |gradient| {
                let gradient = BackendTensor::Float(gradient);
                (receiver.0)(<DispatchTensor as DispatchKindConversion<B>>::from_backend(gradient));
                None
            });
            tensor
        }
    }
}

/// How gradients leave a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// After it.
    Plain,
    Ladder,
    #[cfg(feature = "patched")]
    Callback,
}

const WAYS: &[Way] = &[
    Way::Plain,
    Way::Ladder,
    #[cfg(feature = "patched")]
    Way::Callback,
];

/// Returns the tensor to use in the place of a leaf.
fn observed(way: Way, leaf: &Tensor<2>, start: &PassStart, receiver: GradientReceiver) -> Tensor<2> {
    let tensor = leaf.clone().into_dispatch();
    match way {
        Way::Plain => leaf.clone(),
        Way::Ladder => Tensor::from_dispatch(hook(tensor, start, receiver)),
        #[cfg(feature = "patched")]
        Way::Callback => {
            use burn::backend::Dispatch;
            Tensor::from_dispatch(<Dispatch as callback::CallbackOps>::on_gradient(tensor, callback::Opaque(receiver)))
        }
    }
}

/// What happens in a backward pass, in this order.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Event {
    /// The gradient of a layer's weight has arrived.
    Weight(usize),
    /// The backward pass has come to what a layer got as its input.
    Input(usize),
}

/// Layers that multiply by a weight, each of them twice.
struct Layers {
    weights: Vec<Tensor<2>>,
    input: Tensor<2>,
}

impl Layers {
    fn new(count: usize, size: usize) -> Layers {
        let device = Device::flex();
        // Every product of the matrices is the same.
        let weights = vec![Tensor::ones([size, size], &device) / size as f32; count];
        Layers { weights, input: Tensor::ones([4, size], &device) }
    }

    /// Returns the gradients of the weights, after a forward and a backward pass.
    fn pass(&self, way: Way, events: Option<&Arc<Mutex<Vec<Event>>>>) -> Vec<DispatchTensor> {
        let start = PassStart::now();
        let received = Arc::new(Mutex::new(vec![None; self.weights.len()]));
        let mut leaves = Vec::with_capacity(self.weights.len());
        let mut hidden = Tensor::<2>::from_inner(self.input.clone());
        for (position, weight) in self.weights.iter().enumerate() {
            let leaf = Tensor::<2>::from_inner(weight.clone()).require_grad();
            let (slots, log) = (received.clone(), events.cloned());
            let receive = move |gradient| {
                if let Some(log) = &log {
                    log.lock().unwrap().push(Event::Weight(position));
                }
                assert!(slots.lock().unwrap()[position].replace(gradient).is_none(), "{position} twice");
            };
            if let (Some(log), true) = (events.cloned(), position > 0) {
                let value = hidden.clone().inner().into_dispatch();
                let step = move |gradient| {
                    log.lock().unwrap().push(Event::Input(position));
                    gradient
                };
                hidden = Tensor::from_dispatch(with_step(hidden.into_dispatch(), value, Arc::new(step)));
            }
            let used = observed(way, &leaf, &start, Arc::new(receive));
            leaves.push(leaf);
            hidden = hidden.matmul(used.clone()).matmul(used);
        }
        let mut gradients = hidden.sum().backward();
        let mut received = received.lock().unwrap();
        let gradient = |(received, leaf): (&mut Option<DispatchTensor>, Tensor<2>)| {
            let left = leaf.grad_remove(&mut gradients).map(Tensor::into_dispatch);
            assert!(received.is_none() || left.is_none(), "a gradient has arrived twice");
            received.take().or(left).expect("each weight has a gradient")
        };
        received.iter_mut().zip(leaves).map(gradient).collect()
    }
}

fn values(gradients: Vec<DispatchTensor>) -> Vec<Vec<f32>> {
    let values = |gradient| Tensor::<2>::from_dispatch(gradient).into_data().iter::<f32>().collect();
    gradients.into_iter().map(values).collect()
}

#[test]
fn gradients_arrive_complete_and_early() {
    let layers = Layers::new(5, 4);
    let expected = values(layers.pass(Way::Plain, None));
    for way in WAYS.iter().copied().filter(|way| *way != Way::Plain) {
        let events = Arc::default();
        assert_eq!(values(layers.pass(way, Some(&events))), expected, "{way:?}");
        let order = (1..5).rev().flat_map(|layer| [Event::Weight(layer), Event::Input(layer)]);
        let order: Vec<Event> = order.chain([Event::Weight(0)]).collect();
        assert_eq!(*events.lock().unwrap(), order, "{way:?}");
    }
}

#[cfg(feature = "patched")]
#[test]
fn an_unused_callback_is_freed() {
    let layers = Layers::new(1, 4);
    let held = Arc::new(());
    let in_callback = held.clone();
    let leaf = Tensor::<2>::from_inner(layers.weights[0].clone()).require_grad();
    let receive = move |_| drop(in_callback.clone());
    let used = observed(Way::Callback, &leaf, &PassStart::now(), Arc::new(receive));
    assert_eq!(Arc::strong_count(&held), 2);
    drop((leaf, used));
    layers.pass(Way::Plain, None);
    assert_eq!(Arc::strong_count(&held), 1);
}

#[test]
#[ignore = "measures: run it alone with --nocapture"]
fn measure() {
    const ROUNDS: usize = 21;
    println!("layers, way: nodes of the first pass, of a later one; median, least and greatest ms of a pass");
    for count in [100, 1000, 4000] {
        let layers = Layers::new(count, 16);
        let mut times: Vec<Vec<Duration>> = vec![Vec::new(); WAYS.len()];
        let mut nodes = vec![Vec::new(); WAYS.len()];
        for _ in 0..ROUNDS {
            for (at, way) in WAYS.iter().enumerate() {
                let (before, start) = (NodeId::new().value, Instant::now());
                layers.pass(*way, None);
                times[at].push(start.elapsed());
                nodes[at].push(NodeId::new().value - before - 1);
            }
        }
        for (at, way) in WAYS.iter().enumerate() {
            let (first, later) = (nodes[at][0], nodes[at][ROUNDS - 1]);
            // The first pass warms up.
            let mut times: Vec<f64> = times[at][1..].iter().map(|time| time.as_secs_f64() * 1e3).collect();
            times.sort_by(f64::total_cmp);
            let (median, most) = (times[times.len() / 2], times[times.len() - 1]);
            println!("{count}, {way:?}: {first}, {later}; {median:.2}, {:.2}, {most:.2}", times[0]);
        }
    }
}
