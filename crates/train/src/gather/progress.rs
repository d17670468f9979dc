//! A step: its passes, and its end.

use std::sync::{Arc, Mutex};
use std::thread;

use super::pass::{Parts, Pass as Running, Value};
use super::{GatherCounts, GatherSteps, OPERATION, ROOT, Shared};
use crate::bucket::block_of_name;
use crate::lane::Tensor;
use crate::parameters::{Digested, Parameter, compare};
use crate::protocol::{self, Agreement, Header, PassKind, Problem, Reader, Refusal, Trailer, Trailers, Weight, Writer};
use crate::step::{Decided, Outcome, Pass, Sums, counted, set_progress};
use bonfire_core::internal::{AgreedOperations, CallSite, call_site, function, go_on, lock, stop_is_requested};
use bonfire_core::{Error, Group};

/// A step in progress.
pub(super) struct Progress {
    /// This rank's parts of the means of the passes before the last.
    sums: Sums,
    /// Those of the last pass that has ended, and its weight.
    last: Option<Parts>,
    /// By position, whether a pass of this rank had its gradient.
    exists: Vec<bool>,
    /// By block, whether a backward pass of this rank has needed its values.
    needed: Vec<bool>,
    problem: Option<Problem>,
}

/// A pass in progress. If it is dropped without its end, the groups fail on all ranks, because the others wait for this
/// rank's parts and gradients.
#[must_use = "the other ranks wait for its end"]
pub struct GatherPass {
    steps: GatherSteps,
    is_last: bool,
    pass: Arc<Mutex<Option<Running>>>,
    at: CallSite,
}

/// What the parameters of a pass's model call: each at its first use, and in the backward pass.
#[derive(Clone)]
pub struct Hooks {
    pass: Arc<Mutex<Option<Running>>>,
    /// Where the program has begun the pass.
    at: CallSite,
}

impl Hooks {
    /// Returns a whole parameter for a use in the forward pass. Waits until it is gathered.
    pub fn value(&self, position: usize) -> Value {
        let _call = go_on(self.at);
        lock(&self.pass).as_mut().map_or(Value { tensor: None, gathered: None }, |pass| pass.value(position))
    }

    /// Says that the backward pass will have the gradient of a parameter.
    pub fn expect(&self, position: usize) {
        self.with(|pass| pass.expect(position));
    }

    /// Ends the run of a block, which is freed.
    pub fn end_run(&self, block: usize) {
        self.with(|pass| pass.end_run(block));
    }

    /// Returns a whole parameter for a step of the backward pass. Waits until it is gathered. `None` after a failure.
    pub fn value_again(&self, position: usize) -> Option<Tensor> {
        let _call = go_on(self.at);
        lock(&self.pass).as_mut().and_then(|pass| pass.value_again(position))
    }

    /// Takes a gradient that the backward pass has completed.
    pub fn receive(&self, position: usize, gradient: Tensor) {
        self.with(|pass| pass.receive(position, gradient));
    }

    fn with(&self, f: impl FnOnce(&mut Running)) {
        let _call = go_on(self.at);
        // `None` after the end of the pass.
        if let Some(pass) = &mut *lock(&self.pass) {
            f(pass);
        }
    }
}

impl GatherSteps {
    /// Begins a pass. `parts` are this rank's parts of the parameters by position.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] while another pass is open. Those of the step before, if it has failed.
    #[track_caller]
    pub fn pass(&self, header: Header, parts: Vec<Option<Tensor>>, is_last: bool) -> Result<GatherPass, Error> {
        let kind = if is_last { PassKind::RunsLast } else { PassKind::Runs };
        let pass = self.begin(header, parts, kind)?;
        Ok(GatherPass { steps: self.clone(), is_last, pass: Arc::new(Mutex::new(Some(pass))), at: call_site() })
    }

    /// Makes the step, or what is left of it, on a rank that runs no pass in it. It takes part in those of the others.
    ///
    /// # Errors
    /// See [`Pass::finish`].
    #[track_caller]
    pub fn skip(&self, header: Header, parts: Vec<Option<Tensor>>) -> Result<Outcome, Error> {
        self.end_step(header, parts, vec![PassKind::Runs])
    }

    fn begin(&self, mut header: Header, parts: Vec<Option<Tensor>>, kind: PassKind) -> Result<Running, Error> {
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        let Some(engine) = state.engine.take() else {
            return Err(match state.is_open {
                true => Error::argument(OPERATION, "another pass is open; call its `finish` before this one begins"),
                false => self.failure(),
            });
        };
        state.is_open = true;
        (header.steps, header.pass, header.part) = (state.steps, kind, shared.groups.shards.rank() as u64);
        (header.skips, header.saves) = (shared.skips(), shared.groups.main.saves());
        if state.progress.is_some() {
            // They were compared in the first pass.
            header.digests = None;
        } else {
            state.counts = GatherCounts::default();
            let (sums, exists) = (Sums::new(shared.model.clone()), vec![false; parts.len()]);
            let needed = vec![false; shared.blocks.len()];
            state.progress = Some(Progress { sums, last: None, exists, needed, problem: None });
        }
        drop(state);
        Ok(Running::new(shared.clone(), engine, Agreement::start(&shared.groups.main, header)?, parts))
    }

    /// Ends a pass, and adds its parts to the step. Returns what the ranks have done in it.
    fn end_pass(&self, mut pass: Running) -> Result<Decided<Vec<PassKind>>, Error> {
        let ended = pass.finish().and_then(|ended| Ok((ended, pass.agreement.kinds()?)));
        let (ended, kinds) = ended.map_err(|error| self.abandon(&pass, error))?;
        let mut state = lock(&self.shared.state);
        state.is_open = false;
        state.counts.add(pass.counts);
        state.engine = Some(pass.engine);
        let Some(progress) = &mut state.progress else { return Err(Error::broken(OPERATION, "no step is open")) };
        let weight = pass.agreement.weight.map_or(0.0, |weight| weight.weight);
        progress.problem = progress.problem.or(pass.problem);
        progress.needed.iter_mut().zip(&pass.needed).for_each(|(all, needed)| *all |= needed);
        if weight > 0.0 && !pass.received.contains(&true) {
            progress.problem.get_or_insert(Problem::NoGradients);
        }
        if weight > 0.0 {
            progress.exists.iter_mut().zip(&pass.received).for_each(|(exists, received)| *exists |= received);
        }
        match ended {
            Ok(parts) => {
                if let Some((parts, weight)) = progress.last.replace(parts) {
                    progress.sums.add(parts, weight);
                }
                Ok(kinds)
            }
            Err(refusal) => {
                state.progress = None;
                drop(state);
                let Shared { groups, model, .. } = &*self.shared;
                pass.agreement.header.explained(&groups.main, &model.parameters, refusal).map(Err)
            }
        }
    }

    /// Ends a step after this rank's last pass, in which the ranks did what `kinds` says: serves the passes of the
    /// others, and exchanges the trailers.
    fn end_step(
        &self,
        mut header: Header,
        parts: Vec<Option<Tensor>>,
        mut kinds: Vec<PassKind>,
    ) -> Result<Outcome, Error> {
        let error = |refusal: Refusal| refusal.error(protocol::OPERATION, &self.shared.model.parameters);
        while kinds.contains(&PassKind::Runs) {
            let mut pass = self.begin(header.clone(), parts.clone(), PassKind::Serves)?;
            pass.serve().map_err(|error| self.abandon(&pass, error))?;
            header = pass.agreement.header.clone();
            kinds = self.end_pass(pass)?.map_err(error)?;
        }
        let Some(progress) = lock(&self.shared.state).progress.take() else {
            return Err(Error::broken(OPERATION, "no step is open"));
        };
        let (exists, parameters) = (progress.exists.clone(), progress.exists.len());
        let (problem, stop) = (progress.problem, stop_is_requested());
        let trailer = Trailer { problem, ordered: false, exists, late: Vec::new(), stop };
        let mut words = Writer::default();
        trailer.write(&mut words);
        words.bits(&progress.needed);
        let main = &self.shared.groups.main;
        let all = words.finish().exchange(main, protocol::STEP_END)?;
        let from = &mut Reader::new(&all, main.world_size());
        let trailers = match trailer.evaluate(from) {
            Ok(trailers) => trailers,
            Err(refusal) if refusal.leaves_out(main.rank(), header.steps + 1, self.parameters()) => {
                return Ok(Outcome::left_out(parameters));
            }
            Err(refusal) => return Err(error(refusal)),
        };
        self.shared.stopping.end_step(trailers.stop);
        let Progress { mut sums, last, needed, .. } = progress;
        let needed = from.bits(needed.len()).anywhere();
        let (parts, weight) = last.unwrap_or_default();
        if sums.weight + weight == 0.0 {
            return Ok(Outcome::NoSamples);
        }
        let mut parts = parts.into_iter();
        let means = (0..self.shared.places.len()).map(|i| sums.mean(i, parts.next().flatten(), weight)).collect();
        self.remember(&header.trained, &trailers, needed);
        Ok(Outcome::of(means, trailers.exists))
    }

    /// Keeps what a step has learned for the next one.
    fn remember(&self, trained: &[bool], trailers: &Trailers, needed: Vec<bool>) {
        let mut state = lock(&self.shared.state);
        state.steps += 1;
        set_progress(&self.shared.groups.main, state.steps, None);
        if let Some(engine) = &mut state.engine {
            engine.history.needed = needed;
            let complete = |position: &usize| trailers.everywhere[*position] || !trained[*position];
            engine.history.complete = self.shared.blocks.iter().map(|block| block.iter().all(complete)).collect();
        }
    }

    /// Compares the parts of ranks that have the same: `digests` are those of this rank by position. All ranks must
    /// call it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if they differ: it names the first part that does. Otherwise those of
    /// [`Group::all_gather`](bonfire_core::Group::all_gather).
    #[track_caller]
    pub fn compare(&self, operation: &str, digests: &[u64]) -> Result<(), Error> {
        let Shared { groups, model, state, .. } = &*self.shared;
        let names = model.parameters.iter().map(Parameter::quoted);
        let own = Digested::named(groups.shards.rank() as u64, names, digests);
        let steps = lock(state).steps;
        compare(&groups.main, operation, own, steps)
    }

    /// Returns the whole parameters, by position, of parts that all ranks give. All ranks must call it.
    ///
    /// # Errors
    /// Those of [`Group::all_gather`](bonfire_core::Group::all_gather).
    #[track_caller]
    pub fn gather(&self, parts: &[Option<Tensor>]) -> Result<Vec<Option<Tensor>>, Error> {
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        let Some(engine) = &mut state.engine else { return Err(self.failure()) };
        let mut wholes: Vec<Option<Tensor>> = parts.iter().map(|_| None).collect();
        for (block, positions) in shared.blocks.iter().enumerate() {
            let gatherer = &mut engine.gatherer;
            let gathering = gatherer.start(shared, block, |position| parts[position].clone());
            let gathered = gathering.and_then(|gathering| gatherer.finish(gathering, false));
            let gathered = gathered.map_err(|error| {
                let error = gatherer.lane.group().abandon(error);
                shared.groups.main.abandon(error)
            })?;
            positions.iter().zip(gathered).for_each(|(position, whole)| wholes[*position] = Some(whole));
        }
        Ok(wholes)
    }

    /// Why there can be no more steps.
    pub fn failure(&self) -> Error {
        let failure = self.shared.groups.main.failure();
        failure.unwrap_or_else(|| Error::broken(OPERATION, "a step was dropped before its end"))
    }

    /// Fails all groups, so that no rank waits for this one. Returns the first cause.
    fn abandon(&self, pass: &Running, error: Error) -> Error {
        let steps = {
            let mut state = lock(&self.shared.state);
            state.is_open = false;
            state.steps
        };
        let error = pass.groups.iter().fold(error, |error, group| group.abandon(error));
        set_progress(&self.shared.groups.main, steps, Some(&error));
        self.with_paths(error)
    }

    /// Adds to a mismatch which blocks the ranks have called, and what to do.
    fn with_paths(&self, mut error: Error) -> Error {
        if let Error::Mismatch { calls, note, .. } = &mut error {
            let mut blocks: Vec<usize> =
                calls.iter().filter_map(|(_, call)| block_of_name(&function(call)?)).filter(|b| *b != ROOT).collect();
            blocks.sort_unstable();
            blocks.dedup();
            let known = blocks.iter().filter_map(|block| Some((block, self.path(*block)?)));
            let texts: Vec<_> = known.map(|(block, path)| format!("block {block} is `{path}`")).collect();
            if !texts.is_empty() {
                note.push_str(if note.is_empty() { "" } else { "; " });
                note.push_str(&texts.join(", "));
                note.push_str(
                    "; in a pass all ranks run the same blocks in the same order, and here they differ first, or ahead \
                     of where they do: run each block on all ranks, or remove the mark `ShardedBlock` of one that some \
                     ranks leave out",
                );
            }
        }
        error
    }

    /// Returns the path of a block: what those of its parameters have in common.
    fn path(&self, block: usize) -> Option<String> {
        let Shared { blocks, model, .. } = &*self.shared;
        let mut paths = blocks.get(block)?.iter().map(|position| model.parameters[*position].path.split('.'));
        let mut common: Vec<&str> = paths.next()?.collect();
        if blocks[block].len() == 1 {
            common.pop();
        }
        for path in paths {
            let equal = common.iter().zip(path).take_while(|(one, other)| *one == other).count();
            common.truncate(equal);
        }
        (!common.is_empty()).then(|| common.join("."))
    }
}

impl GatherPass {
    /// Returns what the parameters of the pass's model call.
    pub fn hooks(&self) -> Hooks {
        Hooks { pass: self.pass.clone(), at: self.at }
    }
}

impl Pass for GatherPass {
    fn group(&self) -> &Group {
        &self.steps.shared.groups.main
    }

    fn set_weight(&self, weight: f64) -> Result<(), Error> {
        match &mut *lock(&self.pass) {
            Some(pass) => {
                let weight = counted(weight, &mut pass.problem);
                pass.agreement.weigh(Weight { weight, problem: None })
            }
            None => Ok(()),
        }
    }

    fn finish(
        self: Box<Self>,
        direct: Vec<(usize, Tensor)>,
        problem: Option<Problem>,
    ) -> Result<Option<Outcome>, Error> {
        let pass = lock(&self.pass).take();
        let mut pass = pass.ok_or_else(|| Error::broken(OPERATION, "the pass has ended before"))?;
        // The model in training has parts only.
        let part = direct.first().map(|(position, _)| Problem::Part(*position));
        pass.problem = pass.problem.or(problem).or(part);
        let (header, parts) = (pass.agreement.header.clone(), pass.parts.clone());
        let kinds = self.steps.end_pass(pass)?;
        let kinds = kinds.map_err(|refusal| refusal.error(protocol::OPERATION, self.steps.parameters()))?;
        if self.is_last { self.steps.end_step(header, parts, kinds).map(Some) } else { Ok(None) }
    }

    fn fail(self: Box<Self>, fault: String, _: bool) -> Result<Option<Outcome>, Error> {
        let pass = lock(&self.pass).take();
        let pass = pass.ok_or_else(|| Error::broken(OPERATION, "the pass has ended before"))?;
        // The others may wait for gathers of blocks that this rank does not know.
        let error = Error::broken(protocol::OPERATION, protocol::failed(self.steps.groups().main.rank(), &fault));
        Err(self.steps.abandon(&pass, error))
    }
}

impl Drop for GatherPass {
    fn drop(&mut self) {
        let Some(pass) = lock(&self.pass).take() else { return };
        // A panic ends this rank, unless it is caught: the others find it lost.
        if thread::panicking() {
            return;
        }
        let main = &self.steps.shared.groups.main;
        // A collective of the model that failed is the cause, and the other ranks must hear of it, not of this drop.
        let error = main.failure().unwrap_or_else(|| {
            let reason = format!("rank {} has dropped its training step; it must call `finish`", main.rank());
            Error::broken(OPERATION, reason)
        });
        self.steps.abandon(&pass, error);
    }
}
