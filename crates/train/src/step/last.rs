//! The last pass of a step: its gradients arrive in the middle of the backward pass, and full buckets leave at once.

use std::mem::replace;

use super::exchange::Exchange;
use super::sums::Sums;
use super::{Decided, Outcome, Steps};
use crate::agree;
use crate::bucket::{Limits, agree_on_order, buckets, measured_limits};
use crate::lane::Tensor;
use crate::protocol::{Agreement, Exchanged, Header, OPERATION, Problem, STEP_END, Trailer, Trailers, Weight, Writer};
use bonfire_core::internal::{AgreedOperations, stop_is_requested};
use bonfire_core::{Error, Group};

/// A step from the header to the trailer.
///
/// [`receive`](Self::receive) runs inside the backward pass, while the tensor library may hold locks that other ranks
/// of this process need. So it never waits: not for a peer, nor for a message, nor for a read from the device. It does
/// what can be done at once and leaves the rest to the next gradient, or to [`finish`](Self::finish).
pub(super) struct Last {
    main: Group,
    agreement: Agreement,
    exchange: Exchange,
    gradients: Gradients,
    /// The positions in the order in which their gradients arrived.
    order: Vec<usize>,
    failure: Option<Error>,
}

/// The gradients of the last pass.
enum Gradients {
    /// None has arrived.
    None,
    /// Other passes of the step were open when this one began. Their gradients belong to the mean, so these wait, by
    /// position.
    Held(Vec<Option<Tensor>>),
    /// The passes before have ended. Their sums are added to each gradient, and it leaves.
    Sent(Sums),
}

impl Last {
    /// Begins a step.
    pub fn begin(steps: &Steps, mut header: Header) -> Result<Last, Error> {
        let shared = &steps.shared;
        let main = shared.groups.main.clone();
        main.check_concurrent("an overlapped training step")?;
        let mut state = steps.state();
        state.rewound(main.rewinds());
        state.begin(&mut header, &main);
        let mut agreement = Agreement::start(&main, header)?;
        let channel = match state.overlapped.take() {
            Some(channel) => channel,
            None => {
                // To make the lanes it waits for the others. Here it learns who does not come, or is in another step.
                drop(agreement.kinds()?);
                let lanes = [agree::lane(&shared.groups.shards)?, agree::lane(&shared.groups.replicas)?];
                steps.channel(lanes, &state.settings)?
            }
        };
        let buckets = state.buckets(&shared.model.parameters, shared.on_devices);
        let exchange = Exchange::new(shared.model.clone(), channel, buckets).checked(state.skips());
        Ok(Last { main, agreement, exchange, gradients: Gradients::None, order: Vec::new(), failure: None })
    }

    /// Exchanges the weight of this rank's passes, of which the last one has this weight, unless others are open.
    pub fn set_weight(&mut self, steps: &Steps, weight: f64) -> Result<(), Error> {
        let state = steps.state();
        if self.agreement.weight.is_some() || state.open > 1 {
            return Ok(());
        }
        let (weight, problem) = (state.sums.weight + weight, state.problem);
        drop(state);
        self.agreement.weigh(Weight { weight, problem })
    }

    /// Takes a gradient that the backward pass has completed.
    pub fn receive(&mut self, steps: &Steps, position: usize, gradient: Tensor, weight: f64) {
        if self.failure.is_none()
            && let Err(error) = self.try_receive(steps, position, gradient, weight)
        {
            self.failure = Some(error);
        }
    }

    fn try_receive(&mut self, steps: &Steps, position: usize, gradient: Tensor, weight: f64) -> Result<(), Error> {
        self.order.push(position);
        if let Gradients::None = self.gradients {
            // It is not sent here: a collective of a layer may come before or after it, depending on the rank.
            self.gradients = match self.agreement.weight {
                None => Gradients::Held(steps.parameters().iter().map(|_| None).collect()),
                Some(_) => Gradients::Sent(steps.state().take_sums()),
            };
        }
        match &mut self.gradients {
            Gradients::Sent(sums) => {
                if let Some(mean) = sums.mean(position, Some(gradient), weight) {
                    self.exchange.arrive(position, mean);
                }
            }
            Gradients::Held(held) => held[position] = Some(gradient),
            Gradients::None => {}
        }
        if let Some(Ok((weighting, total))) = self.agreement.decided(false)?
            && total > 0.0
        {
            self.exchange.agree(weighting);
            self.exchange.advance(false)?;
        }
        Ok(())
    }

    /// Ends the step after the backward pass.
    pub fn finish(
        mut self,
        steps: &Steps,
        direct: Vec<(usize, Tensor)>,
        weight: f64,
        problem: Option<Problem>,
    ) -> Result<Outcome, Error> {
        let ended = self.try_finish(steps, direct, weight, problem);
        let ended = ended.map_err(|error| self.fail(error));
        steps.state().overlapped = Some(self.exchange.channel);
        steps.ended(ended, OPERATION)
    }

    fn try_finish(
        &mut self,
        steps: &Steps,
        direct: Vec<(usize, Tensor)>,
        weight: f64,
        mut problem: Option<Problem>,
    ) -> Result<Decided<Outcome>, Error> {
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        let (mut sums, is_open) = {
            let mut state = steps.state();
            problem = state.problem.take().or(problem).or((state.open > 1).then_some(Problem::Open));
            (state.take_sums(), state.open > 1)
        };
        let mut held = Vec::new();
        match replace(&mut self.gradients, Gradients::None) {
            Gradients::Sent(taken) => sums = taken,
            Gradients::Held(gradients) => held = gradients,
            Gradients::None => {}
        }
        let total = sums.weight + weight;
        // The others wait for the weight, whatever is wrong.
        if self.agreement.weight.is_none() {
            self.agreement.weigh(Weight { weight: if is_open { 0.0 } else { total }, problem })?;
        }
        let (weighting, all) = match self.agreement.decided(true)? {
            Some(Ok(decided)) => decided,
            Some(Err(refusal)) => return steps.explained(&self.agreement.header, refusal).map(Err),
            None => return Err(Error::broken(OPERATION, "it has no weights")),
        };
        if all == 0.0 {
            return Ok(Ok(Outcome::NoSamples));
        }
        self.exchange.agree(weighting);
        // In the order of arrival, so that the bits are the same in every run.
        for &position in &self.order {
            let gradient = held.get_mut(position).and_then(Option::take);
            if let Some(mean) = gradient.and_then(|gradient| sums.mean(position, Some(gradient), weight)) {
                self.exchange.arrive(position, mean);
            }
        }
        if weight > 0.0 && self.order.is_empty() && direct.is_empty() {
            problem.get_or_insert(Problem::NoGradients);
        }
        let mut late = Vec::new();
        for (position, gradient) in direct.into_iter().filter(|_| weight > 0.0) {
            if !steps.tensors().fits(position, &gradient) {
                problem.get_or_insert(Problem::Other(position));
            } else if !self.exchange.takes(position) {
                let (dtype, share) = (steps.parameters()[position].dtype, weight / total);
                let weighted = if share == 1.0 { gradient } else { steps.tensors().scale(gradient, dtype, share) };
                late.push((position, weighted));
            } else if let Some(mean) = sums.mean(position, Some(gradient), weight) {
                self.exchange.arrive(position, mean);
            }
        }
        let mut is_late = vec![false; steps.parameters().len()];
        for (position, gradient) in &late {
            is_late[*position] = true;
            self.exchange.check(*position, gradient);
        }
        for (position, is_late) in is_late.iter_mut().enumerate() {
            match sums.mean(position, None, weight) {
                Some(mean) if self.exchange.takes(position) => self.exchange.arrive(position, mean),
                // A pass before has trained it, and the last one does not.
                Some(mean) => {
                    *is_late = true;
                    self.exchange.check(position, &mean);
                    late.push((position, mean));
                }
                None => {}
            }
        }
        let exists: Vec<bool> = (0..is_late.len()).map(|i| is_late[i] || self.exchange.has(i)).collect();
        let problem = problem.map_or_else(|| self.exchange.not_finite(), |problem| Ok(Some(problem)))?;
        let (ordered, stop) = (!self.order.is_empty(), stop_is_requested());
        let trailer = Trailer { problem, ordered, exists, late: is_late, stop };
        let mut words = Writer::default();
        trailer.write(&mut words);
        // On the main group: on a lane it would wait for the buckets, and a rank that skips a pass in which others run
        // collectives would not meet them.
        let mut trailers: Exchanged<Trailers> = words.finish().start(&self.main, STEP_END)?;
        let gradients = self.exchange.finish()?;
        let trailers = match trailers.get(&self.main, |from| trailer.evaluate(from))? {
            Ok(trailers) => trailers,
            Err(refusal) => return steps.explained(&self.agreement.header, refusal).map(Err),
        };
        steps.stopping().end_step(trailers.stop);
        let gradients = self.add_late(steps, gradients, &trailers, late)?;
        if let Some(refusal) = self.exchange.channel.end_step(&self.main, OPERATION)? {
            return Ok(Err(refusal));
        }
        self.order_buckets(steps, trailers.ordered)?;
        Ok(Ok(Outcome::of(gradients, trailers.exists)))
    }

    /// Exchanges the gradients that have come when their buckets may have left, and adds their means.
    fn add_late(
        &mut self,
        steps: &Steps,
        mut gradients: Vec<Option<Tensor>>,
        trailers: &Trailers,
        late: Vec<(usize, Tensor)>,
    ) -> Result<Vec<Option<Tensor>>, Error> {
        let positions = (0..trailers.late.len()).filter(|position| trailers.late[*position]);
        let table = buckets(steps.parameters(), positions, Limits::of(steps.shared.on_devices));
        if table.is_empty() {
            return Ok(gradients);
        }
        let late = self.exchange.exchange_late(table, late)?;
        for (gradient, late) in gradients.iter_mut().zip(late) {
            *gradient = match (gradient.take(), late) {
                (Some(gradient), Some(late)) => Some(steps.tensors().add(gradient, late)),
                (gradient, late) => gradient.or(late),
            };
        }
        Ok(gradients)
    }

    /// Agrees on the order and the size of the buckets of later steps. `leader` is a rank that knows the order in which
    /// gradients arrive.
    fn order_buckets(&mut self, steps: &Steps, leader: Option<usize>) -> Result<(), Error> {
        let shared = &steps.shared;
        let mut state = steps.state();
        let Some(leader) = leader.filter(|_| !state.is_ordered && self.main.world_size() > 1) else { return Ok(()) };
        state.order = agree_on_order(&self.main, leader, &self.order, shared.model.parameters.len())?;
        state.is_ordered = true;
        if state.limits().is_none() {
            let trained = shared.model.parameters.iter().zip(&state.trained).filter(|(_, trained)| **trained);
            let total = trained.map(|(parameter, _)| parameter.bytes()).sum();
            let (lane, position) = (self.exchange.channel.widest(), state.order[0]);
            state.measured = Some(measured_limits(lane, leader, position, total, shared.on_devices)?);
        }
        Ok(())
    }

    /// Fails the groups because this rank drops its step.
    pub fn abandon(self, steps: &Steps) {
        let main = &steps.groups().main;
        // A collective of the model that failed is the cause, and the other ranks must hear of it, not of this drop.
        let error = main.failure().or_else(|| self.exchange.channel.failure()).unwrap_or_else(|| {
            let reason = format!("rank {} has dropped its training step; it must call `finish`", main.rank());
            Error::broken(OPERATION, reason)
        });
        self.fail(error);
    }

    /// Fails all groups, so that no rank waits for this one. Returns the first cause.
    pub fn fail(&self, error: Error) -> Error {
        let error = self.exchange.channel.abandon(error);
        self.main.abandon(error)
    }
}
