//! Progress of the training: a bar on a terminal, and a line for each epoch.

use std::time::Instant;

use burn_train::metric::{MetricDefinition, MetricId};
use burn_train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use indicatif::{ProgressBar, ProgressStyle};

/// Displays rank 0's progress.
pub struct Epochs {
    bar: ProgressBar,
    begin: Instant,
    /// The id of the accuracy metric, and its latest value on the test images in percent.
    accuracy: Option<(MetricId, f64)>,
}

impl Epochs {
    pub fn new() -> Self {
        let style = ProgressStyle::with_template("{bar:40} image {pos}/{len}, {eta} left in this epoch");
        let bar = ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Epochs { bar, begin: Instant::now(), accuracy: None }
    }
}

impl MetricsRendererTraining for Epochs {
    fn update_train(&mut self, _state: MetricState) {}

    fn update_valid(&mut self, state: MetricState) {
        if let (MetricState::Numeric(entry, value), Some((id, accuracy))) = (state, &mut self.accuracy)
            && entry.metric_id == *id
        {
            *accuracy = value.current();
        }
    }

    fn render_train(&mut self, item: TrainingProgress, _indicators: Vec<ProgressType>) {
        if let Some(progress) = item.progress {
            self.bar.set_length(progress.items_total as u64);
            self.bar.set_position(progress.items_processed as u64);
        }
    }

    /// Called once per epoch, at its end, as the test images are a single batch.
    fn render_valid(&mut self, item: TrainingProgress, _indicators: Vec<ProgressType>) {
        let (epoch, epochs) = (item.global_progress.items_processed, item.global_progress.items_total);
        let accuracy = self.accuracy.as_ref().map_or(f64::NAN, |(_, accuracy)| *accuracy);
        let seconds = self.begin.elapsed().as_secs_f64();
        self.bar.suspend(|| println!("epoch {epoch}/{epochs}: test accuracy {accuracy:.1} %, after {seconds:.1} s"));
        self.bar.reset();
    }
}

impl MetricsRendererEvaluation for Epochs {
    fn update_test(&mut self, _name: EvaluationName, _state: MetricState) {}
    fn render_test(&mut self, _item: EvaluationProgress, _indicators: Vec<ProgressType>) {}
}

impl MetricsRenderer for Epochs {
    fn manual_close(&mut self) {
        self.bar.finish_and_clear();
    }

    fn register_metric(&mut self, definition: MetricDefinition) {
        if definition.name == "Accuracy" {
            self.accuracy = Some((definition.metric_id, f64::NAN));
        }
    }
}
