//! Training steps of a model of which every rank keeps a part (ZeRO-3, ZeRO-2).
//!
//! Parameters are gathered block by block where a pass needs them, and freed after it. Every pass reduces its
//! gradients, so that a rank keeps parts of them only; the last pass of a step returns the mean over all.
//!
//! All ranks must start the same gathers in the same order. What a rank starts follows from what its pass uses and from
//! the pass before (`history`), so ranks that run the same model agree without a message. A rank that runs no pass
//! while others do, because it has no data for it, *serves*: the others announce each gather, and it takes part.
//!
//! # What waits
//! A pass waits for a block that it needs: that of the forward pass wherever a parameter is first used, that of the
//! backward pass where a step of it needs the value, while the tensor library may hold locks that other ranks of this
//! process need. What it waits for are gathers, which run on the progress threads of all ranks once every rank has
//! started them. A rank starts its first gathers of the backward pass during its forward pass, and each further one
//! when its own backward pass needs the block before. So a rank whose backward pass has ended keeps no other waiting,
//! whatever locks it waits for. The backward pass of a rank that is a process also waits, with its first gradient for
//! the weights of all ranks, and before it gathers the next block for gradients in flight.
//!
//! A gather is an all-gather of bytes, whatever the element types are. The gradients of a block are one reduce-scatter
//! for each element type, in another group, so that a gather never waits behind gradients.
//!
//! # Why the waits form no cycle
//! A rank starts to gather the block that it needs before it waits for gradients, and sends a bucket as soon as its
//! last gradient is complete. For that it rather waits in the hook for the headers and weights of all ranks, which they
//! send before their backward passes. So whatever the rank that is furthest behind needs, the others have started, also
//! where one backward pass goes through several sharded models.
//!
//! This supposes that a rank gets the gradients of all parameters that it has used. One that lacks a gradient sends
//! that bucket at the end of its pass. So the others wait for a tenth of the deadline only, and then go on with more
//! gradients in memory; on devices, which do not say whether an operation is finished, they wait until the deadline. In
//! later steps, blocks that were incomplete on a rank come last.

mod blocks;
mod history;
pub mod marks;
mod open;
mod pass;
mod progress;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use self::blocks::Gatherer;
use self::history::History;
pub use self::pass::Value;
use self::progress::Progress;
pub use self::progress::{GatherPass, Hooks};
use crate::agree::{lane as lane_group, ranks_are_processes};
use crate::lane::{HostLane, Lane, Tensors};
use crate::parameters::{Parameter, comparison_is_due};
use crate::shards::{Cut, Layout};
use crate::step::{Channel, Groups, Model, Stopping};
use bonfire_core::internal::{AgreedOperations, lock};
use bonfire_core::{Error, Group};

/// The name of full sharding in errors.
const OPERATION: &str = "full sharding";

/// The block of the parameters that are in no block. It is gathered once in a pass, and stays until its end.
pub const ROOT: usize = 0;

/// How many buffers for whole gradients are kept, where their memory is bounded: one is reduced while another is
/// filled. At the end of a pass, where no block is gathered again, a third may be in flight.
const KEPT: usize = 2;

/// How often blocks were gathered in the passes of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GatherCounts {
    /// Gathers that forward passes used.
    pub forward: usize,
    /// Gathers of backward passes. The block that the forward pass used last is still there.
    pub backward: usize,
    /// The most blocks that were gathered, or being gathered, at a time, beside the parameters that are in no block.
    pub most: usize,
}

/// What is kept from step to step. Clones share it.
#[derive(Clone)]
pub struct GatherSteps {
    shared: Arc<Shared>,
}

struct Shared {
    groups: Groups,
    model: Arc<Model>,
    /// By position, the block, and the index among its parameters.
    places: Vec<(usize, usize)>,
    /// The positions of each block.
    blocks: Vec<Vec<usize>>,
    /// Whether blocks stay gathered between the passes.
    keep: AtomicBool,
    /// Whether to leave out steps in which a gradient is not finite.
    skips: AtomicBool,
    /// Whether the parameters of all ranks are on collective devices. The ranks have agreed on it.
    on_devices: bool,
    stopping: Stopping,
    state: Mutex<State>,
}

struct State {
    /// `None` while a pass has it, and after one that was dropped.
    engine: Option<Engine>,
    /// Whether a pass is open.
    is_open: bool,
    steps: u64,
    counts: GatherCounts,
    /// The step in progress.
    progress: Option<Progress>,
}

/// The lanes, and what a pass has learned for the next one.
struct Engine {
    gatherer: Gatherer,
    /// An exchange in progress has it.
    channel: Option<Channel>,
    history: History,
    /// Whether the memory of gradients in flight is bounded. Not if ranks are threads of one process: a rank may send
    /// gradients only after its backward pass, at whose end a tensor library may wait for those of all other threads.
    bounded: bool,
}

impl GatherSteps {
    /// Prepares the training of these parameters, which are the same on all ranks. `blocks` has the block of each;
    /// [`ROOT`] for those in none. All ranks must call it: it makes subgroups.
    ///
    /// # Errors
    /// Those of [`Group::subgroup`]. [`Error::Config`] with a transport on which a process is in one operation at a
    /// time.
    #[track_caller]
    pub fn new(
        groups: Groups,
        parameters: impl Into<Arc<[Parameter]>>,
        blocks: &[usize],
        tensors: Arc<dyn Tensors>,
    ) -> Result<GatherSteps, Error> {
        let parameters = parameters.into();
        groups.main.check_concurrent(OPERATION)?;
        let layout = Layout::new(&parameters, Cut::Rows, groups.shards.world_size(), groups.shards.rank());
        let mut positions = vec![Vec::new(); blocks.iter().max().map_or(1, |last| last + 1)];
        let place = |(position, block): (usize, &usize)| {
            positions[*block].push(position);
            (*block, positions[*block].len() - 1)
        };
        let places = blocks.iter().enumerate().map(place).collect();
        let model = Arc::new(Model { parameters, tensors, layout: Arc::new(layout) });

        let gathers = lane_group(&groups.shards)?;
        let [shards, replicas] = [lane_group(&groups.shards)?, lane_group(&groups.replicas)?];
        let bounded = ranks_are_processes(&groups.main)?;
        let lean = |group: &Group, most| -> Result<Box<dyn Lane>, Error> {
            let device = if group.world_size() > 1 { model.tensors.device_lane(group)? } else { None };
            let host = || Box::new(HostLane::lean(group.clone(), model.tensors.clone(), most)) as _;
            Ok(device.unwrap_or_else(host))
        };
        let most = if bounded { KEPT } else { usize::MAX };
        let channel = Channel { shards: lean(&shards, most)?, replicas: lean(&replicas, most)?, compressor: None };
        // Not made when they are first needed: ranks would be in different operations of the main group then.
        let all_shard = groups.replicas.world_size() == 1;
        let announcements = if all_shard { gathers.clone() } else { lane_group(&groups.main)? };
        let gatherer = Gatherer::new(lean(&gathers, usize::MAX)?, announcements);
        let on_devices = !gatherer.lane.is_on_host();
        let engine = Some(Engine { gatherer, channel: Some(channel), history: History::default(), bounded });
        let state = State { engine, is_open: false, steps: 0, counts: GatherCounts::default(), progress: None };
        let (blocks, [keep, skips], state) = (positions, Default::default(), Mutex::new(state));
        let stopping = Stopping::default();
        Ok(GatherSteps {
            shared: Arc::new(Shared { groups, model, places, blocks, keep, skips, on_devices, stopping, state }),
        })
    }

    /// Keeps blocks gathered from the forward pass to the backward pass (ZeRO-2). All ranks do.
    pub fn keep_gathered(&self) {
        // Relaxed: the same thread begins the passes.
        self.shared.keep.store(true, Ordering::Relaxed);
    }

    /// Leaves out steps in which a gradient of any rank is not finite. All ranks do.
    pub fn skip_non_finite(&self) {
        self.shared.skips.store(true, Ordering::Relaxed);
    }

    /// Returns the groups.
    pub fn groups(&self) -> &Groups {
        &self.shared.groups
    }

    /// Returns the parameters.
    pub fn parameters(&self) -> &Arc<[Parameter]> {
        &self.shared.model.parameters
    }

    /// Returns the parts that the ranks have.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.shared.model.layout
    }

    /// Whether a parameter stays gathered from the forward pass to the backward pass.
    pub fn stays(&self, position: usize) -> bool {
        self.shared.stays(self.shared.places[position].0)
    }

    /// Whether the ranks that have the same parts compare those that are trained, in the pass that is begun next.
    pub fn comparison_is_due(&self, trained: &[bool]) -> bool {
        let (Shared { groups, model, on_devices, .. }, state) = (&*self.shared, lock(&self.shared.state));
        let bytes = |position: usize| {
            model.layout.shape(position).iter().product::<usize>() * model.parameters[position].dtype.size()
        };
        let bytes = (0..trained.len()).filter(|position| trained[*position]).map(bytes).sum();
        // Once in a step.
        let is_first = state.progress.is_none();
        groups.replicas.world_size() > 1 && is_first && comparison_is_due(state.steps, bytes, *on_devices)
    }

    /// See [`Steps::should_stop`](crate::step::Steps::should_stop).
    pub fn should_stop(&self) -> bool {
        self.shared.stopping.answer()
    }

    /// Returns how often blocks were gathered in the last step.
    pub fn counts(&self) -> GatherCounts {
        lock(&self.shared.state).counts
    }
}

impl Shared {
    fn keep(&self) -> bool {
        self.keep.load(Ordering::Relaxed)
    }

    fn skips(&self) -> bool {
        self.skips.load(Ordering::Relaxed)
    }

    /// Whether a block stays gathered until the backward pass.
    fn stays(&self, block: usize) -> bool {
        self.keep() || block == ROOT
    }
}

impl GatherCounts {
    /// Adds those of a pass.
    fn add(&mut self, pass: GatherCounts) {
        self.forward += pass.forward;
        self.backward += pass.backward;
        self.most = self.most.max(pass.most);
    }
}
