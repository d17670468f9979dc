//! Rank 0's learner on all ranks.
//!
//! burn loads a checkpoint from the folder of its own process, and processes may have different folders. So only rank
//! 0's process loads one, and the others take over what it has.

use std::sync::{Arc, Mutex};

use burn::record::Record;
use burn::tensor::backend::Backend;
use burn_train::checkpoint::{
    AsyncCheckpointer, Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy,
};
use burn_train::metric::store::EventStoreClient;
use burn_train::{
    Learner, LearnerModelRecord, LearnerOptimizerRecord, LearnerSchedulerRecord, LearningCheckpointer,
    LearningComponentsTypes,
};

use crate::train::record::{load, record};
use bonfire_core::Error;
use bonfire_core::internal::lock;

/// What all ranks take over from rank 0 besides the model: the first epoch, the optimizer and the scheduler.
type LearnerRecord<LC> = (u64, LearnerOptimizerRecord<LC>, LearnerSchedulerRecord<LC>);

/// Returns the record of all but the model.
pub(super) fn save<LC: LearningComponentsTypes>(
    learner: &Learner<LC>,
    first_epoch: usize,
    store: &EventStoreClient,
) -> Result<Vec<u8>, Error> {
    let (model, optimizer, scheduler) = (Kept::default(), Kept::default(), Kept::default());
    // A learner shows its optimizer and its scheduler to checkpointers only.
    let mut checkpointer = LearningCheckpointer::<LC>::new(
        AsyncCheckpointer::<LearnerModelRecord<LC>, _>::new(model),
        AsyncCheckpointer::new(optimizer.clone()),
        AsyncCheckpointer::new(scheduler.clone()),
        Box::new(Once),
    );
    checkpointer.checkpoint(learner, first_epoch, store);
    // Their threads end here.
    drop(checkpointer);
    let (optimizer, scheduler) = (lock(&optimizer.0).take(), lock(&scheduler.0).take());
    let (Some(optimizer), Some(scheduler)) = (optimizer, scheduler) else {
        return Err(Error::broken("resuming", "a checkpointer has not got the optimizer or the scheduler"));
    };
    record::<LC::Backend, LearnerRecord<LC>>((first_epoch as u64, optimizer, scheduler))
}

/// Loads what [`save`] returned. Returns the first epoch.
pub(super) fn restore<LC: LearningComponentsTypes>(
    learner: &mut Learner<LC>,
    saved: Vec<u8>,
    device: &<LC::Backend as burn::tensor::backend::BackendTypes>::Device,
) -> Result<usize, Error> {
    let (first_epoch, optimizer, scheduler) = load::<LC::Backend, LearnerRecord<LC>>(saved, device)?;
    learner.load_optim(optimizer);
    learner.load_scheduler(scheduler);
    Ok(first_epoch as usize)
}

/// A checkpointer that keeps the last record in memory.
struct Kept<R>(Arc<Mutex<Option<R>>>);

impl<R> Clone for Kept<R> {
    fn clone(&self) -> Self {
        Kept(self.0.clone())
    }
}

impl<R> Default for Kept<R> {
    fn default() -> Self {
        Kept(Arc::default())
    }
}

impl<R: Record<B>, B: Backend> Checkpointer<R, B> for Kept<R> {
    fn save(&self, _epoch: usize, record: R) -> Result<(), CheckpointerError> {
        *lock(&self.0) = Some(record);
        Ok(())
    }

    fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _epoch: usize, _device: &B::Device) -> Result<R, CheckpointerError> {
        lock(&self.0).take().ok_or_else(|| CheckpointerError::Unknown("nothing was saved".into()))
    }
}

/// Saves whenever it is asked.
struct Once;

impl CheckpointingStrategy for Once {
    fn checkpointing(&mut self, _epoch: usize, _store: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}
