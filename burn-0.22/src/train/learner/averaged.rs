//! Metrics of training, averaged over the ranks.
//!
//! burn computes metrics on a thread of its own, from the outputs of a rank's model. Rank 0's are shown and recorded,
//! so it needs the other ranks' values by then, and that thread must not wait for them. The other ranks compute their
//! values themselves, on the thread that trains, and all ranks add them up before the next iteration. Only then rank 0
//! hands its own output to burn, and the metric that burn has there adds rank 0's value.

use std::any::Any;
use std::mem::take;
use std::sync::{Arc, Mutex};

use burn::tensor::TensorReadError;
use burn_train::metric::state::{FormatOptions, NumericMetricState};
use burn_train::metric::{
    Adaptor, Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericEntry, SerializedEntry,
};
use burn_train::{
    AsyncProcessorTraining, EventProcessorTraining, InferenceStep, Interrupter, ItemLazy, LearnerEvent, LearnerModel,
    MetricRegistration, SupervisedTraining, TrainStep, TrainingItem,
};

use super::{OPERATION, fail};
use bonfire_core::internal::lock;
use bonfire_core::{Error, Group};
use bonfire_train::step::averages::{Pending, Shares};

/// A metric whose values of training are averaged over the ranks, from
/// [`DataParallelStrategy::averaged`](super::DataParallelStrategy::averaged).
pub struct Averaged<Me> {
    pub(super) metric: Me,
    pub(super) registered: Registered,
}

impl<M: LearnerModel, Me: Metric + Numeric + 'static> MetricRegistration<M> for Averaged<Me>
where
    <M as TrainStep>::Output: Adaptor<Me::Input>,
    <M as InferenceStep>::Output: Adaptor<Me::Input>,
{
    fn register(self, training: SupervisedTraining<M>) -> SupervisedTraining<M> {
        let Averaged { metric, registered } = self;
        let [batches, epochs] = [(); 2].map(|()| Shares::default());
        let own: Own<<M as TrainStep>::Output> = Box::new(metric.clone());
        let name = metric.name().to_string();
        let state = NumericMetricState::new();
        lock(&registered).push(Averaging {
            name,
            batches: batches.clone(),
            epochs: epochs.clone(),
            own: Box::new(own),
        });
        let across = Across { metric: metric.clone(), batches, epochs, state, has_value: false, last: None };
        training.metric_train_numeric(across).metric_valid_numeric(metric)
    }
}

/// The metrics that a training averages. The type of their outputs is that of its model.
pub(super) type Registered = Arc<Mutex<Vec<Averaging<Box<dyn Any + Send>>>>>;

/// A metric that is averaged, with what computes this rank's own values where burn does not.
pub(super) struct Averaging<O> {
    name: String,
    batches: Shares,
    epochs: Shares,
    own: O,
}

type Own<T> = Box<dyn OwnMetric<T>>;

trait OwnMetric<T>: Send {
    /// Returns the value of a batch, if the metric has one for it.
    fn of_batch(&mut self, output: &T, metadata: &MetricMetadata) -> Result<Option<f64>, TensorReadError>;

    /// Returns the value of the epoch and begins the next one.
    fn of_epoch(&mut self) -> Result<f64, TensorReadError>;
}

impl<T: Adaptor<Me::Input>, Me: Metric + Numeric> OwnMetric<T> for Me {
    fn of_batch(&mut self, output: &T, metadata: &MetricMetadata) -> Result<Option<f64>, TensorReadError> {
        self.update(&output.adapt(), metadata)?;
        Ok(self.value().map(|value| value.current()))
    }

    fn of_epoch(&mut self) -> Result<f64, TensorReadError> {
        let computed = self.compute().map(drop);
        let value = self.final_value().current();
        self.clear();
        computed.map(|()| value)
    }
}

/// The outputs of a rank's iterations, on their way to the metrics.
pub(super) struct Outputs<T> {
    metrics: Vec<Averaging<Own<T>>>,
    pending: Pending<TrainingItem<T>>,
}

impl<T: ItemLazy + 'static> Outputs<T> {
    /// Takes the metrics of a training whose model has these outputs.
    pub fn new(registered: &Registered) -> Result<Self, Error> {
        let typed = |Averaging { name, batches, epochs, own }: Averaging<Box<dyn Any + Send>>| {
            let reason = || format!("the metric {name} is registered in a training of another model; launch that one");
            let own = own.downcast::<Own<T>>().map_err(|_| Error::argument(OPERATION, reason()))?;
            Ok(Averaging { name, batches, epochs, own: *own })
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
    pub fn add_up(&mut self, group: &Group, interrupter: &Interrupter) -> Result<(), Error> {
        let (metrics, rank) = (&mut self.metrics, group.rank());
        self.pending.add_up(group, |item| {
            if metrics.is_empty() {
                return Vec::new();
            }
            let item = match item.sync() {
                Ok(item) => item,
                Err(error) => {
                    fail(interrupter, rank, format!("an output for the metrics cannot be read: {error}"));
                    return vec![None; metrics.len()];
                }
            };
            let metadata = MetricMetadata::from(&item);
            let value = |metric: &mut Averaging<Own<T>>| {
                let value = metric.own.of_batch(&item.item, &metadata);
                metric.read(value, rank, interrupter).flatten()
            };
            metrics.iter_mut().map(value).collect()
        })
    }

    /// Hands rank 0's last output over to burn, with the other ranks' values since.
    pub fn leave<V: Send>(
        &mut self,
        processor: &mut AsyncProcessorTraining<LearnerEvent<T>, LearnerEvent<V>>,
        interrupter: &Interrupter,
    ) {
        let Some((item, shares)) = self.pending.leave() else { return };
        self.metrics.iter().zip(shares).for_each(|(metric, share)| metric.batches.push(share));
        interrupter.fail_on_error(processor.process_train(LearnerEvent::ProcessedItem(item)));
    }

    /// Adds up the values of the epoch. All ranks must call it.
    pub fn end_epoch(&mut self, group: &Group, interrupter: &Interrupter) -> Result<(), Error> {
        let (metrics, rank) = (&mut self.metrics, group.rank());
        let value = |metric: &mut Averaging<Own<T>>| {
            let value = metric.own.of_epoch();
            metric.read(value, rank, interrupter)
        };
        let shares = self.pending.end_epoch(group, || metrics.iter_mut().map(value).collect())?;
        if rank == 0 {
            self.metrics.iter().zip(shares).for_each(|(metric, share)| metric.epochs.push(share));
        }
        Ok(())
    }
}

impl<O> Averaging<O> {
    /// Returns a value, or stops the training with the error.
    fn read<V>(&self, value: Result<V, TensorReadError>, rank: usize, interrupter: &Interrupter) -> Option<V> {
        let failed = |error| fail(interrupter, rank, format!("the metric {} cannot be read: {error}", self.name));
        value.map_err(failed).ok()
    }
}

/// The metric in its place in rank 0's training, with the mean over all ranks as its value. In a training that was not
/// launched by the strategy the values are those of the metric.
#[derive(Clone)]
struct Across<Me> {
    metric: Me,
    batches: Shares,
    epochs: Shares,
    /// The means.
    state: NumericMetricState,
    /// Whether there is a mean of a batch in this epoch.
    has_value: bool,
    /// The mean of the epoch at its end.
    last: Option<f64>,
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

    fn update(&mut self, item: &Me::Input, metadata: &MetricMetadata) -> Result<SerializedEntry, TensorReadError> {
        let share = self.batches.take();
        let own = self.metric.update(item, metadata)?;
        let Some((mean, samples)) = share.with(self.metric.value().map(|value| value.current())).mean() else {
            return Ok(own);
        };
        self.state.update(mean, samples);
        self.has_value = true;
        Ok(self.state.compute_update(self.format()))
    }

    fn compute(&mut self) -> Result<SerializedEntry, TensorReadError> {
        let share = self.epochs.take();
        let own = self.metric.compute()?;
        let Some((mean, samples)) = share.with(Some(self.metric.final_value().current())).mean() else {
            return Ok(own);
        };
        self.last = Some(mean);
        // The entry of an epoch is the mean of all updates.
        self.state.reset();
        self.state.update(mean, samples);
        Ok(self.state.compute_final(self.format()))
    }

    fn clear(&mut self) {
        self.metric.clear();
        self.state.reset();
        (self.has_value, self.last) = (false, None);
    }
}

impl<Me: Numeric> Numeric for Across<Me> {
    fn value(&self) -> Option<NumericEntry> {
        self.has_value.then(|| self.state.current_value())
    }

    fn running_value(&self) -> Option<NumericEntry> {
        self.has_value.then(|| self.state.running_value())
    }

    fn final_value(&self) -> NumericEntry {
        self.last.map_or_else(|| self.metric.final_value(), NumericEntry::Final)
    }
}
