//! Steps whose gradients are all there at once.

use super::{Decided, Exchange, Finite, Outcome, Steps, counted};
use crate::agree::broadcast_value;
use crate::lane::Tensor;
use crate::protocol::{Header, Problem, Reader, Refusal, Trailer, Weight, Writer, failed};
use bonfire_core::Error;
use bonfire_core::internal::{AgreedOperations, stop_is_requested};

/// Gradients that are all there.
pub struct Gradients {
    /// The gradients, with the positions of their parameters.
    pub gradients: Vec<(usize, Tensor)>,
    /// What the loss was a mean over. With a weight of 0 the gradients count nothing.
    pub weight: f64,
    /// What is wrong with them.
    pub problem: Option<Problem>,
}

impl Steps {
    /// Exchanges gradients that are all there. Errors name `operation`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if they cannot make the step; the groups stay usable. Otherwise those of
    /// [`Group::all_reduce`](bonfire_core::Group::all_reduce), after which the groups have failed.
    #[track_caller]
    pub fn sync(&self, operation: &'static str, header: Header, gradients: Gradients) -> Result<Outcome, Error> {
        self.check_panicked()?;
        let synced = self.try_sync(operation, header, gradients);
        self.ended(synced.map_err(|error| self.groups().abandon(error)), operation)
    }

    fn try_sync(
        &self,
        operation: &'static str,
        mut header: Header,
        Gradients { gradients, weight, mut problem }: Gradients,
    ) -> Result<Decided<Outcome>, Error> {
        let weight = counted(weight, &mut problem);
        let (main, parameters) = (&self.groups().main, self.parameters());
        let mut sums = {
            let mut state = self.state();
            state.rewound(main.rewinds());
            state.begin(&mut header, main);
            problem = problem.or(state.problem.take()).or((state.open > 0).then_some(Problem::Open));
            state.take_sums()
        };
        let mut own: Vec<Option<Tensor>> = parameters.iter().map(|_| None).collect();
        for (position, gradient) in gradients.into_iter().filter(|_| weight > 0.0) {
            match self.tensors().fits(position, &gradient) {
                true => own[position] = Some(gradient),
                false => drop(problem.get_or_insert(Problem::Other(position))),
            }
        }
        let mut finite = header.skips.then(|| Finite::new(self.shared.model.clone()));
        for (position, own) in own.iter_mut().enumerate() {
            *own = sums.mean(position, own.take(), weight);
            if let (Some(own), Some(finite)) = (own, &mut finite) {
                finite.add(position, own);
            }
        }
        if let (None, Some(finite)) = (problem, finite) {
            problem = finite.problem()?;
        }

        let weight = Weight { weight: sums.weight + weight, problem: None };
        let exists = own.iter().map(Option::is_some).collect();
        let trailer = Trailer { problem, ordered: false, exists, late: Vec::new(), stop: stop_is_requested() };
        let mut words = Writer::default();
        header.write(&mut words);
        weight.write(&mut words);
        trailer.write(&mut words);
        let all = words.finish().exchange(main, operation)?;
        let from = &mut Reader::new(&all, main.world_size());
        let decided = header.evaluate(from).and_then(|_| Ok((weight.evaluate(from)?, trailer.evaluate(from)?)));
        let ((weighting, total), trailers) = match decided {
            Ok(decided) => decided,
            Err(refusal) => return self.explained(&header, refusal).map(Err),
        };
        self.stopping().end_step(trailers.stop);
        if total == 0.0 {
            return Ok(Ok(Outcome::NoSamples));
        }

        let mut state = self.state();
        let buckets = state.existing_buckets(parameters, self.is_on_devices(), &trailers.exists);
        let channel = self.take_blocking(&mut state)?;
        drop(state);
        let mut exchange = Exchange::new(self.shared.model.clone(), channel, buckets);
        exchange.agree(weighting);
        for (position, own) in own.into_iter().enumerate() {
            if let Some(gradient) = own {
                exchange.arrive(position, gradient);
            }
        }
        let gradients = exchange.finish()?;
        let refused = exchange.channel.end_step(main, operation)?;
        self.state().blocking = Some(exchange.channel);
        Ok(refused.map_or_else(|| Ok(Outcome::of(gradients, trailers.exists)), Err))
    }

    /// Finds out what the messages of a step do not say about a refusal. All ranks call it.
    pub(super) fn explained(&self, header: &Header, refusal: Refusal) -> Result<Refusal, Error> {
        let (main, parameters) = (&self.groups().main, self.parameters());
        let Refusal::Problem { rank, problem: Problem::Failed } = refusal else {
            return header.explained(main, parameters, refusal);
        };
        let own = self.state().fault.take();
        let fault: String = broadcast_value(main, &own.unwrap_or_default(), rank)?;
        Ok(Refusal::Explained(failed(rank, &fault)))
    }
}
