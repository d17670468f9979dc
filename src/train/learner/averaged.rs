//! Metrics of training, averaged over the ranks.
//!
//! burn computes metrics on a thread of its own, from the outputs of a rank's model. Rank 0's are shown and recorded,
//! so it needs the other ranks' values by then, and that thread must not wait for them. The other ranks compute their
//! values themselves, on the thread that trains, and all ranks add them up before the next iteration. Only then rank 0
//! hands its own output to burn, and the metric that burn has there adds rank 0's value.

use std::any::Any;
use std::mem::take;
use std::sync::{Arc, Mutex};

use burn_train::metric::state::{FormatOptions, NumericMetricState};
use burn_train::metric::{
    Adaptor, Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericEntry, SerializedEntry,
};
use burn_train::{
    AsyncProcessorTraining, EventProcessorTraining, InferenceStep, ItemLazy, LearnerEvent, LearningComponentsTypes,
    MetricRegistration, SupervisedTraining, TrainStep, TrainingItem,
};

use super::OPERATION;
use bonfire_core::internal::lock;
use bonfire_core::{Error, Group};
use bonfire_train::step::averages::{Pending, Shares};

/// A metric whose values of training are averaged over the ranks, from
/// [`DataParallelStrategy::averaged`](super::DataParallelStrategy::averaged).
pub struct Averaged<Me> {
    pub(super) metric: Me,
    pub(super) registered: Registered,
}

/// What burn's metrics get of an output.
type Synced<O> = <O as ItemLazy>::ItemSync;
type TrainOutput<LC> = <<LC as LearningComponentsTypes>::TrainingModel as TrainStep>::Output;
type ValidOutput<LC> = <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Output;

impl<LC: LearningComponentsTypes, Me: Metric + Numeric + 'static> MetricRegistration<LC> for Averaged<Me>
where
    Synced<TrainOutput<LC>>: Adaptor<Me::Input>,
    Synced<ValidOutput<LC>>: Adaptor<Me::Input>,
{
    fn register(self, training: SupervisedTraining<LC>) -> SupervisedTraining<LC> {
        let Averaged { metric, registered } = self;
        let batches = Shares::default();
        let own: Own<Synced<TrainOutput<LC>>> = Box::new(metric.clone());
        let name = metric.name().to_string();
        lock(&registered).push(Averaging { name, batches: batches.clone(), own: Box::new(own) });
        let across = Across { metric: metric.clone(), batches, state: NumericMetricState::new() };
        training.metric_train_numeric(across).metric_valid_numeric(metric)
    }
}

/// The metrics that a training averages. The type of their outputs is that of its model.
pub(super) type Registered = Arc<Mutex<Vec<Averaging<Box<dyn Any + Send>>>>>;

/// A metric that is averaged, with what computes this rank's own values where burn does not.
pub(super) struct Averaging<O> {
    name: String,
    batches: Shares,
    own: O,
}

type Own<T> = Box<dyn OwnMetric<T>>;

trait OwnMetric<T>: Send {
    /// Returns the value of a batch.
    fn of_batch(&mut self, output: &T, metadata: &MetricMetadata) -> f64;

    /// Begins the next epoch.
    fn begin_epoch(&mut self);
}

impl<T: Adaptor<Me::Input>, Me: Metric + Numeric> OwnMetric<T> for Me {
    fn of_batch(&mut self, output: &T, metadata: &MetricMetadata) -> f64 {
        self.update(&output.adapt(), metadata);
        self.value().current()
    }

    fn begin_epoch(&mut self) {
        self.clear();
    }
}

/// The outputs of a rank's iterations, on their way to the metrics.
pub(super) struct Outputs<T: ItemLazy> {
    metrics: Vec<Averaging<Own<Synced<T>>>>,
    pending: Pending<TrainingItem<T>>,
}

impl<T: ItemLazy + 'static> Outputs<T> {
    /// Takes the metrics of a training whose model has these outputs.
    pub fn new(registered: &Registered) -> Result<Self, Error> {
        let typed = |Averaging { name, batches, own }: Averaging<Box<dyn Any + Send>>| {
            let reason = || format!("the metric {name} is registered in a training of another model; launch that one");
            let own = own.downcast::<Own<Synced<T>>>().map_err(|_| Error::argument(OPERATION, reason()))?;
            Ok(Averaging { name, batches, own: *own })
        };
        let metrics = take(&mut *lock(registered)).into_iter().map(typed).collect::<Result<Vec<_>, Error>>()?;
        let pending = Pending::new(metrics.len());
        Ok(Outputs { metrics, pending })
    }

    /// Returns the names of the metrics that are averaged.
    pub fn averaged(&self) -> Vec<String> {
        self.metrics.iter().map(|metric| metric.name.clone()).collect()
    }

    /// Takes the output of this rank's next iteration.
    pub fn enter(&mut self, item: TrainingItem<T>, samples: u64) {
        self.pending.enter(item, samples);
    }

    /// Adds up the values of the last iteration. All ranks must call it, also those that had no batch.
    pub fn add_up(&mut self, group: &Group) -> Result<(), Error> {
        let metrics = &mut self.metrics;
        self.pending.add_up(group, |item| {
            if metrics.is_empty() {
                return Vec::new();
            }
            let item = item.sync();
            let metadata = MetricMetadata::from(&item);
            metrics.iter_mut().map(|metric| Some(metric.own.of_batch(&item.item, &metadata))).collect()
        })
    }

    /// Hands rank 0's last output over to burn, with the other ranks' values since.
    pub fn leave<V: Send>(&mut self, processor: &mut AsyncProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>) {
        let Some((item, shares)) = self.pending.leave() else { return };
        self.metrics.iter().zip(shares).for_each(|(metric, share)| metric.batches.push(share));
        processor.process_train(LearnerEvent::ProcessedItem(item));
    }

    /// Ends an epoch.
    pub fn end_epoch(&mut self) {
        self.metrics.iter_mut().for_each(|metric| metric.own.begin_epoch());
        self.pending.begin_epoch();
    }
}

/// The metric in its place in rank 0's training, with the mean over all ranks as its value. In a training that was not
/// launched by the strategy the values are those of the metric.
#[derive(Clone)]
struct Across<Me> {
    metric: Me,
    batches: Shares,
    /// The means.
    state: NumericMetricState,
}

impl<Me: Metric> Across<Me> {
    /// As burn's own metrics are shown.
    fn format(&self) -> FormatOptions {
        let format = FormatOptions::new(self.metric.name()).precision(2);
        match self.metric.attributes() {
            MetricAttributes::Numeric(numeric) => numeric.unit.iter().fold(format, |format, unit| format.unit(unit)),
            MetricAttributes::None => format,
        }
    }
}

impl<Me: Metric + Numeric> Metric for Across<Me> {
    type Input = Me::Input;

    fn name(&self) -> MetricName {
        self.metric.name()
    }

    fn description(&self) -> Option<String> {
        self.metric.description()
    }

    fn attributes(&self) -> MetricAttributes {
        self.metric.attributes()
    }

    fn update(&mut self, item: &Me::Input, metadata: &MetricMetadata) -> SerializedEntry {
        let share = self.batches.take();
        let own = self.metric.update(item, metadata);
        let Some((mean, samples)) = share.with(Some(self.metric.value().current())).mean() else { return own };
        self.state.update(mean, samples, self.format())
    }

    fn clear(&mut self) {
        self.metric.clear();
        self.state.reset();
    }
}

impl<Me> Numeric for Across<Me> {
    fn value(&self) -> NumericEntry {
        self.state.current_value()
    }

    fn running_value(&self) -> NumericEntry {
        self.state.running_value()
    }
}
