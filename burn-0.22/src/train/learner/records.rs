//! Rank 0's learner on all ranks.

use std::sync::{Arc, Mutex};

use burn::lr_scheduler::LrSchedulerRecord;
use burn::optim::OptimizerRecord;
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::Bytes;
use burn_train::checkpoint::{
    AsyncCheckpointer, Checkpoint, Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy,
};
use burn_train::metric::store::EventStoreClient;
use burn_train::{Learner, LearnerModel, LearningCheckpointer};

use bonfire_core::internal::lock;
use bonfire_core::{Error, Group};
use bonfire_train::agree::all_or_none;

const OPERATION: &str = "sharing a learner";

/// Gives all ranks rank 0's parameters with their ids, by which an optimizer finds its state, its optimizer and its
/// schedule. All have the same model.
pub(super) fn share<M: LearnerModel>(
    group: &Group,
    learner: &mut Learner<M>,
    store: &EventStoreClient,
) -> Result<(), Error> {
    let records = if group.rank() == 0 { save(learner, store) } else { Ok(Default::default()) };
    let [model, optimizer, schedule] = all_or_none(group, records)?.map(|record| broadcast(group, record));
    let loaded = ModuleRecord::from_bytes(model?).map(|record| learner.load_model(record));
    let loaded = loaded.and(OptimizerRecord::from_bytes(optimizer?).map(|record| learner.load_optim(record)));
    let loaded = loaded.and(LrSchedulerRecord::from_bytes(schedule?).map(|record| learner.load_scheduler(record)));
    all_or_none(group, loaded.map_err(broken))
}

fn broken(error: RecordError) -> Error {
    Error::io(OPERATION, error)
}

fn broadcast(group: &Group, record: Vec<u8>) -> Result<Bytes, Error> {
    let mut len = [record.len() as u64];
    group.broadcast(&mut len, 0)?;
    let mut record = record;
    record.resize(len[0] as usize, 0);
    group.broadcast(&mut record, 0)?;
    Ok(Bytes::from_bytes_vec(record))
}

/// Returns the records of the model, the optimizer and the schedule. A learner shows them to checkpointers only.
fn save<M: LearnerModel>(learner: &Learner<M>, store: &EventStoreClient) -> Result<[Vec<u8>; 3], Error> {
    let kept = [(); 3].map(|()| Kept::default());
    let [model, optimizer, schedule] = kept.clone();
    let mut checkpointer = LearningCheckpointer::<M>::new(
        AsyncCheckpointer::new(model),
        AsyncCheckpointer::new(optimizer),
        AsyncCheckpointer::new(schedule),
        Box::new(Once),
    );
    checkpointer.checkpoint(learner, 0, store);
    // Their threads end here.
    drop(checkpointer);
    let mut records = [(); 3].map(|()| Vec::new());
    for (record, kept) in records.iter_mut().zip(kept) {
        let saved = lock(&kept.0).take();
        let saved = saved.ok_or_else(|| Error::broken(OPERATION, "a checkpointer has got no record"))?;
        *record = saved.map_err(broken)?.to_vec();
    }
    Ok(records)
}

/// A checkpointer that keeps the last record in memory.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Option<Result<Bytes, RecordError>>>>);

impl<R: Checkpoint> Checkpointer<R> for Kept {
    fn save(&self, _epoch: usize, record: R) -> Result<(), CheckpointerError> {
        *lock(&self.0) = Some(record.checkpoint_into_bytes());
        Ok(())
    }

    fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _epoch: usize) -> Result<R, CheckpointerError> {
        Err(CheckpointerError::Unknown("it only saves".into()))
    }
}

/// Saves whenever it is asked.
struct Once;

impl CheckpointingStrategy for Once {
    fn checkpointing(&mut self, _epoch: usize, _store: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}
