//! A pass of a step: a forward pass and its backward pass, on one rank.

use std::mem::replace;
use std::sync::{Arc, Mutex};
use std::thread;

use super::last::Last;
use super::{Outcome, Steps, counted};
use crate::lane::Tensor;
use crate::protocol::{Header, OPERATION, Problem, failed};
use bonfire_core::internal::{CallSite, call_site, go_on, lock};
use bonfire_core::{Error, Group};

/// A pass that has not ended, of any form of training.
#[must_use = "`finish` keeps the gradients; the other ranks wait for that of the last pass"]
pub trait Pass: Send {
    /// Returns the group of all ranks that train the model.
    fn group(&self) -> &Group;

    /// Says what the loss is a mean over, before the backward pass.
    ///
    /// # Errors
    /// Those of starting an operation. Then the groups have failed.
    fn set_weight(&self, weight: f64) -> Result<(), Error>;

    /// Ends the pass after its backward pass. `direct` are gradients that have reached the model in training itself,
    /// and that no hook has received; `problem` is what is wrong with what the program has done. After the last pass of
    /// the step it waits for the exchange; otherwise there is no outcome.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if they cannot make the step; the groups stay usable. Otherwise those of
    /// the exchange, after which the groups have failed.
    fn finish(
        self: Box<Self>,
        direct: Vec<(usize, Tensor)>,
        problem: Option<Problem>,
    ) -> Result<Option<Outcome>, Error>;

    /// Ends the pass because the program's own code has failed on this rank. All ranks get an error with this text in
    /// their step. After a pass that is not the last one there is no outcome: then the last one must fail too.
    /// `communicates` says that the others may wait for this rank in layers of the model: then the groups fail.
    ///
    /// # Errors
    /// See [`finish`](Self::finish).
    fn fail(self: Box<Self>, fault: String, communicates: bool) -> Result<Option<Outcome>, Error>;
}

/// A pass of a model that is whole on every rank. If the last one of a step is dropped without its end, the groups fail
/// on all ranks, because the others wait for this rank's gradients.
pub struct StepPass {
    steps: Steps,
    cell: Arc<Mutex<Cell>>,
}

/// What a pass and its hooks share.
struct Cell {
    /// By position, whether a gradient has arrived.
    received: Vec<bool>,
    /// That of the state in which the pass began.
    generation: u64,
    /// What the loss is a mean over. `None` until it is known.
    weight: Option<f64>,
    problem: Option<Problem>,
    gradients: Gradients,
    /// Where the program has begun the pass.
    at: CallSite,
}

/// Where the gradients of a pass go.
enum Gradients {
    /// They wait on the rank, by position, for the last pass of the step.
    Kept(Vec<Option<Tensor>>),
    /// The pass is the last one: they are exchanged.
    Exchanged(Box<Last>),
    /// The pass has ended: they are ignored.
    Ended,
}

/// Takes the gradients of a pass, inside its backward pass. It waits for nothing.
#[derive(Clone)]
pub struct Receiver {
    steps: Steps,
    cell: Arc<Mutex<Cell>>,
}

impl Receiver {
    /// Takes the gradient of the parameter at a position, which the backward pass has completed.
    pub fn receive(&self, position: usize, gradient: Tensor) {
        let mut cell = lock(&self.cell);
        if matches!(cell.gradients, Gradients::Ended) {
            return;
        }
        let _call = go_on(cell.at);
        let Some(weight) = cell.weight else {
            cell.problem.get_or_insert(Problem::Unweighed(position));
            return;
        };
        // Gradients of no samples are NaN.
        if weight == 0.0 {
            return;
        }
        if replace(&mut cell.received[position], true) {
            cell.problem.get_or_insert(Problem::Twice(position));
        } else if !self.steps.tensors().fits(position, &gradient) {
            cell.problem.get_or_insert(Problem::Other(position));
        } else {
            match &mut cell.gradients {
                Gradients::Kept(gradients) => gradients[position] = Some(gradient),
                Gradients::Exchanged(last) => last.receive(&self.steps, position, gradient, weight),
                Gradients::Ended => {}
            }
        }
    }
}

impl Steps {
    /// Begins a pass. Several may be open. With a header it is the last one of the step, whose gradients are exchanged;
    /// all ranks must begin a last pass in every step.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] while the last pass of a step is open. The first last pass makes subgroups, and
    /// returns the errors of [`Group::subgroup`](bonfire_core::Group::subgroup); [`Error::Config`] with a transport on
    /// which a process is in one operation at a time.
    #[track_caller]
    pub fn pass(&self, last: Option<Header>) -> Result<StepPass, Error> {
        self.check_panicked()?;
        let count = self.parameters().len();
        let generation = {
            let mut state = self.state();
            if state.last_is_open {
                let reason = "the last pass of a step is open; call its `finish` before another pass begins";
                return Err(Error::argument(OPERATION, reason));
            }
            state.open += 1;
            state.last_is_open = last.is_some();
            state.generation
        };
        let gradients = match last {
            None => Gradients::Kept((0..count).map(|_| None).collect()),
            Some(header) => {
                let last = Last::begin(self, header).inspect_err(|_| self.close(true))?;
                Gradients::Exchanged(Box::new(last))
            }
        };
        let cell =
            Cell { received: vec![false; count], generation, weight: None, problem: None, gradients, at: call_site() };
        Ok(StepPass { steps: self.clone(), cell: Arc::new(Mutex::new(cell)) })
    }

    /// Fails if a panic has ended this rank's last step before its end, and the program goes on: the others wait there.
    pub(super) fn check_panicked(&self) -> Result<(), Error> {
        let Some(last) = self.state().panicked.take() else { return Ok(()) };
        let reason = format!(
            "rank {} has panicked in a training step before `finish`, and its program goes on; let a panic end the \
             rank, and return what can fail from the closure of `try_run`",
            self.groups().main.rank()
        );
        Err(last.fail(Error::broken(OPERATION, reason)))
    }

    /// Counts a pass as ended.
    fn close(&self, last: bool) {
        let mut state = self.state();
        state.open -= 1;
        state.last_is_open &= !last;
    }
}

impl StepPass {
    /// Returns what takes the gradients of its backward pass.
    pub fn receiver(&self) -> Receiver {
        Receiver { steps: self.steps.clone(), cell: self.cell.clone() }
    }
}

impl Pass for StepPass {
    fn group(&self) -> &Group {
        &self.steps.groups().main
    }

    fn set_weight(&self, weight: f64) -> Result<(), Error> {
        let mut cell = lock(&self.cell);
        let weight = counted(weight, &mut cell.problem);
        cell.weight = Some(weight);
        match &mut cell.gradients {
            Gradients::Exchanged(last) => last.set_weight(&self.steps, weight),
            _ => Ok(()),
        }
    }

    fn finish(
        self: Box<Self>,
        direct: Vec<(usize, Tensor)>,
        problem: Option<Problem>,
    ) -> Result<Option<Outcome>, Error> {
        let (gradients, weight, mut problem, is_forgotten) = {
            let cell = &mut *lock(&self.cell);
            let is_forgotten = cell.generation != self.steps.state().generation;
            let gradients = replace(&mut cell.gradients, Gradients::Ended);
            (gradients, cell.weight.unwrap_or(0.0), cell.problem.or(problem), is_forgotten)
        };
        let mut gradients = match gradients {
            Gradients::Kept(_) if is_forgotten => {
                self.steps.close(false);
                return Ok(None);
            }
            Gradients::Kept(gradients) => gradients,
            Gradients::Exchanged(last) => {
                let problem = problem.or(is_forgotten.then_some(Problem::Dropped));
                let outcome = last.finish(&self.steps, direct, weight, problem);
                self.steps.close(true);
                return outcome.map(Some);
            }
            Gradients::Ended => return Err(Error::broken(OPERATION, "the pass has ended before")),
        };
        let tensors = self.steps.tensors();
        for (position, gradient) in direct.into_iter().filter(|_| weight > 0.0) {
            let received = gradients[position].take();
            gradients[position] = match (tensors.fits(position, &gradient), received) {
                (true, Some(received)) => Some(tensors.add(received, gradient)),
                (true, None) => Some(gradient),
                (false, received) => {
                    problem.get_or_insert(Problem::Other(position));
                    received
                }
            };
        }
        if weight > 0.0 && gradients.iter().all(Option::is_none) {
            problem.get_or_insert(Problem::NoGradients);
        }
        let mut state = self.steps.state();
        state.problem = state.problem.or(problem);
        state.sums.add(gradients, weight);
        state.keep();
        drop(state);
        self.steps.close(false);
        Ok(None)
    }

    fn fail(self: Box<Self>, fault: String, communicates: bool) -> Result<Option<Outcome>, Error> {
        let mut cell = lock(&self.cell);
        if communicates {
            let error = Error::broken(OPERATION, failed(self.steps.groups().main.rank(), &fault));
            let gradients = replace(&mut cell.gradients, Gradients::Ended);
            drop(cell);
            self.steps.close(matches!(gradients, Gradients::Exchanged(_)));
            return Err(match gradients {
                Gradients::Exchanged(last) => last.fail(error),
                _ => self.steps.groups().abandon(error),
            });
        }
        if let Gradients::Exchanged(_) = cell.gradients {
            self.steps.state().fault = Some(fault);
            cell.problem = Some(Problem::Failed);
            drop(cell);
            return self.finish(Vec::new(), None);
        }
        cell.received.fill(false);
        Ok(None)
    }
}

impl Drop for StepPass {
    fn drop(&mut self) {
        let (gradients, received, generation) = {
            let mut cell = lock(&self.cell);
            let received = cell.received.contains(&true);
            (replace(&mut cell.gradients, Gradients::Ended), received, cell.generation)
        };
        match gradients {
            Gradients::Ended => {}
            Gradients::Kept(_) => {
                self.steps.close(false);
                if received && generation == self.steps.state().generation {
                    self.steps.state().problem.get_or_insert(Problem::Dropped);
                }
            }
            Gradients::Exchanged(last) => {
                self.steps.close(true);
                if thread::panicking() {
                    // It ends this rank, and the others find it lost and can go on without it. If the program catches
                    // it, this rank's next step says so.
                    self.steps.state().panicked = Some(last);
                } else {
                    last.abandon(&self.steps);
                }
            }
        }
    }
}
