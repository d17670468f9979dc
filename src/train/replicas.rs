//! Steps of a model that is whole on every rank.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::TensorMetadata;
use burn::tensor::backend::AutodiffBackend;

use super::adapter::handle;
use super::batch_norm;
use super::model::{InModel, Parameters};
use super::pass::{Form, Nodes, Open};
use super::walk::{Lazy, map_lazily};
use crate::tensor::autodiff::hook::{PassStart, hook};
use bonfire_core::Error;
use bonfire_core::internal::AgreedOperations;
use bonfire_train::protocol::{Header, Problem};
use bonfire_train::step::layers::{Layers, Weight};
use bonfire_train::step::{Gradients, Outcome, Pass, Receiver, Steps, Unused};

/// Trains a model that is whole on every rank.
#[derive(Clone)]
pub(super) struct Replicas<B: AutodiffBackend> {
    pub steps: Steps,
    pub parameters: Parameters<B>,
    pub unused: Arc<Unused>,
    /// Whether any ranks are threads of one process.
    pub has_threads: bool,
    /// Whether layers of the model communicate, as far as it is known.
    pub communicate: Arc<AtomicBool>,
}

static WARNED: Once = Once::new();

impl<B: AutodiffBackend> Replicas<B> {
    /// Returns this rank's parameters in a model.
    pub fn in_model<M: AutodiffModule<B>>(&self, model: &M) -> InModel<B> {
        self.parameters.in_model(model, |position| self.parameters[position].shape.as_slice())
    }

    /// Returns the header of a step with what a model has.
    fn header(&self, own: &InModel<B>) -> Result<Header, Error> {
        self.unused.end();
        let mut header = own.header(&self.parameters, false);
        if self.steps.comparison_is_due(&header.trained) {
            header.digests = Some(own.digests().map_err(|error| self.steps.groups().main.abandon(error))?);
        }
        Ok(header)
    }

    /// Exchanges gradients that are all there.
    #[track_caller]
    pub fn sync<M: AutodiffModule<B>>(
        &self,
        operation: &'static str,
        model: &M,
        gradients: GradientsParams,
        weight: f64,
    ) -> Result<Option<Outcome>, Error> {
        if self.has_threads {
            WARNED.call_once(|| {
                log::warn!(
                    "burn-autodiff 0.21 may lose gradients when a program adds up those of several backward passes and \
                     ranks are threads (burn#5573); use the passes of `DataParallel::run` or `pass`, or ranks that are \
                     processes"
                );
            });
        }
        let header = self.header(&self.in_model(model))?;
        let (gradients, others) = self.parameters.take(gradients);
        let problem = (others && weight > 0.0).then_some(Problem::Unknown);
        let gradients = gradients.into_iter().map(|(position, tensor)| (position, handle::<B::InnerBackend>(tensor)));
        let gradients = Gradients { gradients: gradients.collect(), weight, problem };
        self.steps.sync(operation, header, gradients).map(Some)
    }

    /// Returns the model of a pass: the first use of each parameter that needs a gradient puts a leaf of the pass's own
    /// into the graph, with a hook. So a hook's depth is that of the first use, whatever the order in which the model
    /// declares its parameters. A clone of the model uses the same hooks, because a gradient that arrives in two parts
    /// is incomplete.
    fn observed<M: AutodiffModule<B>>(&self, model: &M, receiver: &Receiver, weight: &Weight) -> (M, Nodes<B>) {
        let nodes: Nodes<B> = (0..self.parameters.len()).map(|_| Arc::default()).collect();
        let start = PassStart::now();
        let enter = |container: &str| {
            if batch_norm::offer::<B>(container, &self.steps.groups().main, Some(weight)) {
                self.communicate.store(true, Ordering::Relaxed);
            }
        };
        let model = map_lazily(model.clone(), enter, |parameter| {
            let position = self.parameters.position(parameter.id).filter(|_| parameter.trained)?;
            let (node, value) = (nodes[position].clone(), parameter.value);
            let (start, receiver, shape) = (start.clone(), receiver.clone(), value.shape());
            let of_first_use = move || {
                let leaf = B::float_detach(value.clone());
                let receiver = receiver.clone();
                let receive = Arc::new(move |gradient| receiver.receive(position, handle::<B::InnerBackend>(gradient)));
                [leaf.clone(), hook::<B>(leaf, &start, receive, None)]
            };
            Some(Lazy { shape, value: Arc::new(move || node.hooked(&of_first_use)) })
        });
        (model, nodes)
    }
}

impl<B: AutodiffBackend> Form<B> for Replicas<B> {
    #[track_caller]
    fn begin<M: AutodiffModule<B>>(&self, model: &M, is_last: bool) -> Result<Open<B, M>, Error> {
        let own = self.in_model(model);
        let header = if is_last { Some(self.header(&own)?) } else { None };
        let pass = self.steps.pass(header)?;
        let weight = Weight::default();
        let layers = Layers::new(&self.communicate);
        let (model, nodes) = self.observed(model, &pass.receiver(), &weight);
        // A layer that waits for other ranks in a backward pass holds locks of burn-autodiff, which a rank on another
        // thread needs at the end of its own. So no rank begins a backward pass before all have ended the last one.
        let barrier = (self.has_threads && !is_last).then(|| self.steps.groups().main.clone());
        let parameters = self.parameters.clone();
        Ok(Open { model, engine: Box::new(pass), weight, nodes, own, parameters, layers, barrier })
    }

    #[track_caller]
    fn skip<M: AutodiffModule<B>>(&self, model: &M) -> Result<Outcome, Error> {
        let pass = Box::new(self.steps.pass(Some(self.header(&self.in_model(model))?))?);
        pass.set_weight(0.0)?;
        pass.finish(Vec::new(), None)?.ok_or_else(|| Error::broken("skip", "a last pass has no outcome"))
    }
}
