//! What the steps of a model keep from one to the next.

use std::mem::replace;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::exchange::Channel;
use super::last::Last;
use super::model::Model;
use super::stop::Stopping;
use super::sums::Sums;
use crate::bucket::{BucketTable, Limits, buckets};
use crate::compression::Compressor;
use crate::parameters::Parameter;
use crate::protocol::{Header, Problem};
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{DType, Group};

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

pub(super) struct State {
    model: Arc<Model>,
    pub settings: Settings,
    pub steps: u64,
    /// Gradients of the passes of this step that have ended.
    pub sums: Sums,
    /// Counts what was forgotten. A pass of an older generation belongs to no step any more.
    pub generation: u64,
    /// Which of the steps of one model have kept passes, by their ids.
    pub keeper: Arc<AtomicU64>,
    /// That of all steps of one model.
    pub stopping: Arc<Stopping>,
    id: u64,
    /// Passes that have not ended.
    pub open: usize,
    /// Whether one of them is the last.
    pub last_is_open: bool,
    /// The last pass of a step that a panic has ended.
    pub panicked: Option<Box<Last>>,
    /// What is wrong with a pass that has ended.
    pub problem: Option<Problem>,
    /// The text of the error with which the program's own code has failed.
    pub fault: Option<String>,
    /// For gradients that are exchanged after the backward pass, on the groups themselves.
    pub blocking: Option<Channel>,
    /// For those that are exchanged during it, on groups of their own: collectives of the model run at the same time,
    /// and in no order relative to them. A step in progress has it.
    pub overlapped: Option<Channel>,
    /// The order in which gradients are sent, as positions.
    pub order: Vec<usize>,
    /// Whether they arrive in that order.
    pub is_ordered: bool,
    /// The limits of buckets, once they were measured.
    pub measured: Option<Limits>,
    /// By position, whether the last step trained it.
    pub trained: Vec<bool>,
    /// How often the rank had gone back to an earlier state when the last step began.
    rewinds: u64,
}

/// What the program chooses. It is the same on all ranks.
#[derive(Clone, Default)]
pub(super) struct Settings {
    pub bucket_bytes: Option<usize>,
    pub compressor: Option<Compressor>,
    /// Whether to leave out steps in which a gradient is not finite. All steps of one model share it.
    pub skips: Arc<AtomicBool>,
}

impl State {
    pub fn new(model: Arc<Model>) -> State {
        State {
            settings: Settings::default(),
            steps: 0,
            sums: Sums::new(model.clone()),
            generation: 0,
            keeper: Arc::default(),
            stopping: Arc::default(),
            // Relaxed: only unique. 0 is none.
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            open: 0,
            last_is_open: false,
            panicked: None,
            problem: None,
            fault: None,
            blocking: None,
            overlapped: None,
            // The last layers first: the backward pass computes their gradients first.
            order: (0..model.parameters.len()).rev().collect(),
            is_ordered: false,
            measured: None,
            trained: Vec::new(),
            rewinds: 0,
            model,
        }
    }

    /// Fills in what a header says of this rank's state and of the saves in the group. Notices a change of what is
    /// trained.
    pub fn begin(&mut self, header: &mut Header, main: &Group) {
        (header.steps, header.saves, header.skips) = (self.steps, main.saves(), self.skips());
        header.bucket_bytes = self.settings.bucket_bytes.unwrap_or(0) as u64;
        // Relaxed, as below: a program that makes passes on several threads orders them.
        if ![0, self.id].contains(&self.keeper.load(Ordering::Relaxed)) {
            header.problem = header.problem.or(Some(Problem::Elsewhere));
        }
        if self.settings.compressor.is_some() {
            header.problem = header.problem.or(self.wide(&header.trained).map(Problem::Wide));
        }
        header.compression = self.settings.compressor.as_ref().map_or(0, Compressor::digest);
        if self.trained != header.trained {
            // The order of the new gradients is not known.
            self.is_ordered = false;
            self.trained.clone_from(&header.trained);
        }
    }

    /// Whether to leave out steps in which a gradient is not finite.
    pub fn skips(&self) -> bool {
        self.settings.skips.load(Ordering::Relaxed)
    }

    /// Returns the first of the trained parameters that is of f64, which cannot travel compressed.
    pub fn wide(&self, trained: &[bool]) -> Option<usize> {
        (0..trained.len()).find(|&position| trained[position] && self.model.parameters[position].dtype == DType::F64)
    }

    /// Says that passes are kept here.
    pub fn keep(&self) {
        let _ = self.keeper.compare_exchange(0, self.id, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Takes the gradients of the passes that have ended.
    pub fn take_sums(&mut self) -> Sums {
        let _ = self.keeper.compare_exchange(self.id, 0, Ordering::Relaxed, Ordering::Relaxed);
        replace(&mut self.sums, Sums::new(self.model.clone()))
    }

    /// Forgets the passes that have ended. What is open belongs to no step any more.
    pub fn forget_passes(&mut self) {
        drop(self.take_sums());
        self.problem = None;
        self.generation += 1;
    }

    /// Forgets a step whose result is not used.
    pub fn forget(&mut self) {
        self.forget_passes();
        // A rank whose own header was refused has noticed a change of what is trained, and others have not.
        self.is_ordered = false;
        self.forget_compression_errors();
    }

    /// Forgets what compression has lost before the rank has gone back so often.
    pub fn rewound(&mut self, rewinds: u64) {
        if replace(&mut self.rewinds, rewinds) != rewinds {
            self.forget_compression_errors();
        }
    }

    /// Forgets what compression has lost.
    pub fn forget_compression_errors(&self) {
        if let Some(compressor) = &self.settings.compressor {
            compressor.forget();
        }
    }

    /// Returns the limits of buckets, unless they are not known yet.
    pub fn limits(&self) -> Option<Limits> {
        let of = |bytes| Limits { first: bytes, next: bytes, alone: bytes };
        self.settings.bucket_bytes.map(of).or(self.measured)
    }

    /// Returns the buckets of a step whose gradients are exchanged as they arrive.
    pub fn buckets(&self, parameters: &[Parameter], on_devices: bool) -> BucketTable {
        let trained = self.order.iter().copied().filter(|position| self.trained[*position]);
        buckets(parameters, trained, self.limits().unwrap_or(Limits::of(on_devices)))
    }

    /// Returns the buckets of a step in which these gradients exist, which are all there.
    pub fn existing_buckets(&self, parameters: &[Parameter], on_devices: bool, exists: &[bool]) -> BucketTable {
        let (mut left, mut table) = (exists.to_vec(), Vec::new());
        // Those of overlapped steps are sent as a whole, so that an element has the same place in its bucket, and the
        // same bits.
        if self.limits().is_some() {
            let overlapped = self.buckets(parameters, on_devices);
            table.extend(overlapped.iter().filter(|bucket| bucket.positions.iter().any(|p| exists[*p])).cloned());
            table.iter().flat_map(|bucket| &bucket.positions).for_each(|position| left[*position] = false);
        }
        let rest = (0..left.len()).rev().filter(|position| left[*position]);
        table.extend(buckets(parameters, rest, Limits::of(on_devices)).iter().cloned());
        table.into()
    }
}
