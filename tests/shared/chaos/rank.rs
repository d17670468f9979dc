//! A rank: it trains, kills itself where it is ordered to, and otherwise goes on without the lost ranks to the end.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};
use std::{hint, thread};

use bonfire::{Builder, Checkpoints, Error, Group, Sharding};
use bonfire_testing::process::send_line;
use bonfire_testing::resources::Resources;
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};

use super::model::{self, BATCH, Net, STEPS, State};
use crate::burn_version::*;

/// The environment variable with a rank's orders.
pub const ORDERS: &str = "TRAINING_ORDERS";
/// The message of a rank that has joined its group.
pub const GOING: &str = "going";

/// What a training does at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Phase {
    Start,
    Resume,
    Sync,
    /// Between `sync` and the optimizer's step.
    Between,
    /// The optimizer's step; with a sharded optimizer the exchange of gradients, too.
    Step,
    AverageStates,
    /// `shrink`, and all that follows until the training goes on.
    CatchUp,
    Checkpoint,
    End,
}

impl Phase {
    pub const ALL: [Phase; 9] = [
        Phase::Start,
        Phase::Resume,
        Phase::Sync,
        Phase::Between,
        Phase::Step,
        Phase::AverageStates,
        Phase::CatchUp,
        Phase::Checkpoint,
        Phase::End,
    ];

    /// How long it takes about, before that is known.
    fn guess(self) -> Duration {
        Duration::from_micros(if self == Phase::CatchUp { 10_000 } else { 500 })
    }
}

/// The order to die.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Kill {
    pub phase: Phase,
    /// How often this rank has entered the phase before.
    pub after: usize,
    /// When in the phase, as a fraction of the time that it took last.
    pub when: f64,
}

/// What a rank is to do, the same on all ranks but for `kill`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Orders {
    pub hidden: usize,
    /// How the optimizer is sharded, if it is: over blocks of this many ranks if that divides the world size.
    pub shard: Option<usize>,
    pub epochs: usize,
    pub checkpoint: PathBuf,
    pub kill: Option<Kill>,
}

/// How a rank has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub error: Option<String>,
    /// Whether it ended because it lost another before its training had started.
    pub gave_up: bool,
    /// The world size of each step that led to the parameters.
    pub history: Vec<u64>,
    /// The steps that this rank has made: number and world size.
    pub made: Vec<(usize, u64)>,
    /// What [`model::contents`] returns.
    pub digest: u64,
    pub state: f32,
    /// What this rank did when it lost another, and the operation that said so.
    pub losses: Vec<(Phase, String)>,
    pub leaks: Vec<String>,
}

/// Runs this process's rank.
pub fn main() {
    let orders = std::env::var(ORDERS).expect("set by the parent");
    let orders: Orders = serde_json::from_str(&orders).expect("orders are plain data");
    bonfire_testing::log_to_stderr();
    // The backend starts its threads once.
    model::replay(orders.hidden, &[1]).expect("a training without ranks");
    let before = Resources::at_start();
    let mut rank =
        Rank { orders, entered: [0; 9], took: Phase::ALL.map(Phase::guess), now: Phase::Start, log: Log::default() };
    // The thread that waits for signals would stay.
    let builder = Builder::from_env().map(|builder| builder.leave_on_interrupt(false));
    let end = builder.and_then(Builder::connect).and_then(|group| {
        send_line(GOING);
        rank.train(group)
    });
    let mut report = Report {
        error: None,
        gave_up: false,
        history: Vec::new(),
        digest: 0,
        state: 0.0,
        made: rank.log.made,
        losses: rank.log.losses,
        leaks: before.leaks(),
    };
    match end {
        Ok(state) => {
            (report.digest, report.state) = model::contents(&state);
            report.history = state.user;
        }
        Err(error) => {
            report.gave_up = is_lost(&error) && rank.now == Phase::Start && rank.orders.shard.is_none();
            report.error = Some(error.to_string());
        }
    }
    send_line(serde_json::to_string(&report).expect("reports are plain data"));
}

struct Rank {
    orders: Orders,
    /// How often each phase was entered, and how long it took last.
    entered: [usize; 9],
    took: [Duration; 9],
    now: Phase,
    log: Log,
}

#[derive(Default)]
struct Log {
    made: Vec<(usize, u64)>,
    losses: Vec<(Phase, String)>,
}

/// A training on this rank.
struct Training {
    state: State,
    ddp: DataParallel,
    sharded: Option<ShardedAdam<Net>>,
    /// Since ranks were lost last: whether it has resumed from a checkpoint, if it was at the start, and whether this
    /// epoch's checkpoint was written. What comes next follows from the state, because that is the same on all ranks;
    /// some of them may have been further in the program.
    resumed: bool,
    saved: bool,
}

fn is_lost(error: &Error) -> bool {
    matches!(error, Error::PeerLost { .. } | Error::Disconnected { .. } | Error::Left { .. })
}

impl Rank {
    /// Runs a part of the training. Kills this process in it if that was ordered.
    fn phase<T>(&mut self, phase: Phase, run: impl FnOnce() -> T) -> T {
        let number = phase as usize;
        self.now = phase;
        let due = |kill: &&Kill| kill.phase == phase && kill.after == self.entered[number];
        let kill = self.orders.kill.as_ref().filter(due);
        if let Some(kill) = kill {
            die_after(self.took[number].mul_f64(kill.when));
        }
        self.entered[number] += 1;
        let start = Instant::now();
        let result = run();
        self.took[number] = start.elapsed();
        result
    }

    fn train(&mut self, group: Group) -> Result<State, Error> {
        let mut training = self.start(group)?;
        loop {
            match self.advance(&mut training) {
                Ok(true) => return Ok(training.state),
                Ok(false) => {}
                Err(error) => self.recover(&mut training, error)?,
            }
        }
    }

    /// Starts the training. A rank that loses another here gives up, unless the optimizer is sharded: then all ranks
    /// go back to the checkpoint after every loss.
    fn start(&mut self, mut group: Group) -> Result<Training, Error> {
        loop {
            match self.try_start(group.clone()) {
                Err(error) if is_lost(&error) => {
                    self.lost(&error);
                    if self.orders.shard.is_none() {
                        return Err(error);
                    }
                    group = self.phase(Phase::CatchUp, || group.shrink())?;
                }
                result => return result,
            }
        }
    }

    fn try_start(&mut self, group: Group) -> Result<Training, Error> {
        let Orders { hidden, shard, checkpoint, .. } = self.orders.clone();
        let (model, ddp) = self.phase(Phase::Start, || DataParallel::new(group, model::model(hidden)))?;
        let mut state = model::start(model);
        let Some(block) = shard else {
            return Ok(Training { state, ddp, sharded: None, resumed: false, saved: false });
        };
        let blocks = ddp.group().world_size().is_multiple_of(block);
        let sharding = if blocks { Sharding::Blocks(block) } else { Sharding::All };
        let mut optimizer = ShardedOptimizer::new(&ddp, model::adam(), sharding)?;
        self.phase(Phase::Resume, || {
            Checkpoints::new(ddp.group(), checkpoint)?.load((&mut state, &mut optimizer)).map(drop)
        })?;
        Ok(Training { state, ddp, sharded: Some(optimizer), resumed: true, saved: false })
    }

    /// Goes on without lost ranks. A sharded optimizer goes back to the checkpoint.
    fn recover(&mut self, training: &mut Training, error: Error) -> Result<(), Error> {
        if !is_lost(&error) {
            return Err(error);
        }
        self.lost(&error);
        if training.sharded.is_some() {
            let group = self.phase(Phase::CatchUp, || training.ddp.group().shrink())?;
            *training = self.start(group)?;
            return Ok(());
        }
        self.phase(Phase::CatchUp, || training.ddp.shrink(&mut training.state))?;
        (training.resumed, training.saved) = (false, false);
        if training.ddp.group().rank() == 0 && self.orders.checkpoint.exists() {
            load(self.orders.hidden, &self.orders.checkpoint)?;
        }
        Ok(())
    }

    fn lost(&mut self, error: &Error) {
        let text = error.to_string();
        let operation = text.split(['(', ':', ' ']).next().unwrap_or_default();
        self.log.losses.push((self.now, operation.to_owned()));
    }

    /// Makes a step or ends an epoch. Returns true at the end of the training.
    fn advance(&mut self, training: &mut Training) -> Result<bool, Error> {
        let Training { state, ddp, sharded, resumed, saved } = training;
        if (state.epoch, state.samples) == (0, 0) && !*resumed {
            let folder = self.orders.checkpoint.clone();
            self.phase(Phase::Resume, || Checkpoints::new(ddp.group(), folder)?.load(&mut *state).map(drop))?;
            *resumed = true;
        }
        if state.samples == 0 && state.epoch > 0 && !*saved {
            let folder = self.orders.checkpoint.clone();
            self.phase(Phase::Checkpoint, || {
                let mut checkpoints = Checkpoints::new(ddp.group(), folder)?;
                match sharded {
                    None => checkpoints.save(&*state),
                    Some(optimizer) => checkpoints.save((&*state, &*optimizer)),
                }
            })?;
            *saved = true;
        }
        if state.epoch >= self.orders.epochs {
            // Without it, a rank that ends before the others know of a loss would leave them a step behind.
            self.phase(Phase::End, || match sharded {
                None => ddp.verify(&state.model, &state.optimizer),
                Some(_) => ddp.average_states(state.model.clone()).map(drop),
            })?;
            return Ok(true);
        }
        let group = ddp.group().clone();
        let Some(shard) = model::shard(&group, state)? else {
            state.model = self.phase(Phase::AverageStates, || ddp.average_states(state.model.clone()))?;
            state.next_epoch();
            *saved = false;
            return Ok(false);
        };
        let grads = model::gradients(&state.model, &shard);
        if let Some(optimizer) = sharded {
            let rate = state.scheduler.step();
            self.phase(Phase::Step, || {
                let parts = optimizer.sync(&state.model, grads, shard.len())?;
                optimizer.step(rate, &mut state.model, parts)
            })?;
            state.samples += BATCH;
        } else {
            let grads = self.phase(Phase::Sync, || ddp.sync(&state.model, grads, shard.len()))?;
            self.phase(Phase::Between, || {});
            self.phase(Phase::Step, || state.step(grads, BATCH));
        }
        self.log.made.push((state.user.len(), group.world_size() as u64));
        model::note(state, &group);
        debug_assert_eq!(state.user.len(), state.epoch * STEPS + state.samples / BATCH);
        Ok(false)
    }
}

/// Kills this process after this time, measured from the return of this function.
fn die_after(delay: Duration) {
    static STAGE: AtomicU8 = AtomicU8::new(0);
    let wait_for = |stage| {
        while STAGE.load(Ordering::Relaxed) < stage {
            hint::spin_loop();
        }
    };
    thread::spawn(move || {
        STAGE.store(1, Ordering::Relaxed);
        wait_for(2);
        let start = Instant::now();
        // Sleep is not exact enough.
        while start.elapsed() < delay {
            thread::yield_now();
        }
        kill_process(getpid(), Signal::KILL).expect("a signal to oneself");
    });
    wait_for(1);
    STAGE.store(2, Ordering::Relaxed);
}

/// Returns the state in the newest checkpoint, if there is one.
pub fn load(hidden: usize, folder: &Path) -> Result<Option<State>, Error> {
    let (model, ddp) = DataParallel::new(Group::threads(1)?.remove(0), model::model(hidden))?;
    let mut state = model::start(model);
    Ok(Checkpoints::read_only(ddp.group(), folder)?.load(&mut state)?.then_some(state))
}
