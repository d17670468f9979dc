//! One step of a rank: gradients arrive in the middle of the backward pass, and full buckets leave at once.

use std::collections::VecDeque;
use std::future::Future;
use std::mem::replace;
use std::pin::Pin;
use std::task::{self, Poll, Waker};

use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend, ExecutionError};
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{TensorData, TensorMetadata, try_read_sync};

use crate::train::bucket::{BucketTable, Weighting, pop_if_full};
use crate::train::reduction::{Reducer, Reduction};
use crate::train::schedule::Schedule;
use crate::train::step_header::{Refused, StepHeader};
use crate::train::trailer::{OPERATION, Problem, Trailer};
use bonfire_core::{Error, Group, Work};

/// What the hooks of a step and its end share.
///
/// [`receive`](Self::receive) runs inside the backward pass, while burn-autodiff holds locks that other ranks of this
/// process may need. So it never waits: not for a peer, nor for the header, nor for a read from the device. It does
/// what can be done at once and leaves the rest to the next gradient, or to [`finish`](Self::finish).
pub(super) struct Pass<B: AutodiffBackend> {
    pub reducer: Reducer<B>,
    header: StepHeader,
    agreement: Agreement,
    schedule: Schedule,
    /// By position.
    gradients: Vec<Gradient<B::InnerBackend>>,
    /// The positions of the gradients that were not read when they arrived, because the header was still in flight.
    unread: Vec<usize>,
    /// The positions in the order in which their gradients arrived.
    pub order: Vec<usize>,
    /// Gradients of earlier micro-batches, which are added to those that arrive.
    earlier: GradientsParams,
    in_flight: VecDeque<Reduction<B>>,
    results: GradientsParams,
    problem: Option<Problem>,
    failure: Option<Error>,
}

enum Agreement {
    Pending(Work<Vec<u64>>),
    Agreed(Weighting),
    Refused(Refused),
    /// The exchange failed, and [`Pass::failure`] says why.
    Failed,
}

/// A gradient of this rank.
enum Gradient<B: Backend> {
    Missing,
    Arrived(FloatTensor<B>),
    /// It is being read from its device.
    Reading(Pin<Box<dyn Future<Output = Result<TensorData, ExecutionError>> + Send>>),
    Read(TensorData),
    Sent,
}

/// What a step ends with on all ranks.
pub(super) struct Ended {
    pub gradients: GradientsParams,
    /// The lowest rank that knows an order in which gradients arrive.
    pub ordered: Option<usize>,
}

impl<B: AutodiffBackend> Pass<B> {
    pub fn new(reducer: Reducer<B>, buckets: BucketTable, header: StepHeader, headers: Work<Vec<u64>>) -> Pass<B> {
        let count = reducer.parameters.len();
        // A single rank sends nothing.
        let buckets = if reducer.group.world_size() == 1 { [].into() } else { buckets };
        Pass {
            schedule: Schedule::new(buckets, count),
            reducer,
            header,
            agreement: Agreement::Pending(headers),
            gradients: (0..count).map(|_| Gradient::Missing).collect(),
            unread: Vec::new(),
            order: Vec::new(),
            earlier: GradientsParams::new(),
            in_flight: VecDeque::new(),
            results: GradientsParams::new(),
            problem: None,
            failure: None,
        }
    }

    /// Adds these gradients to those of the backward pass that is to come.
    pub fn add_earlier(&mut self, gradients: GradientsParams) {
        self.earlier = gradients;
    }

    /// Takes a gradient that the backward pass has completed.
    pub fn receive(&mut self, position: usize, gradient: FloatTensor<B::InnerBackend>) {
        // Gradients of no samples are NaN.
        if self.failure.is_some() || self.header.samples == 0 {
            return;
        }
        let parameter = &self.reducer.parameters[position];
        if !matches!(self.gradients[position], Gradient::Missing) {
            self.report(Problem::Twice(position));
            return;
        }
        if gradient.shape() != parameter.shape || gradient.dtype() != parameter.dtype {
            self.report(Problem::Other(position));
            return;
        }
        let gradient = match self.earlier.remove::<B::InnerBackend, 1>(parameter.id) {
            Some(earlier) => B::InnerBackend::float_add(earlier.into_primitive().tensor(), gradient),
            None => gradient,
        };
        self.order.push(position);
        self.accept(position, gradient);
        if let Err(error) = self.advance() {
            self.failure.get_or_insert(error);
        }
    }

    /// Tells the other ranks of a problem with this rank's gradients at the end of the step.
    pub fn report(&mut self, problem: Problem) {
        self.problem.get_or_insert(problem);
    }

    fn accept(&mut self, position: usize, gradient: FloatTensor<B::InnerBackend>) {
        if self.reducer.group.world_size() == 1 {
            self.gradients[position] = Gradient::Sent;
            self.reducer.parameters[position].register(gradient, &mut self.results);
        } else if self.schedule.complete(position) {
            self.gradients[position] = Gradient::Arrived(gradient);
            self.unread.push(position);
        }
    }

    /// Sends the buckets that are complete, as far as that takes no waiting.
    fn advance(&mut self) -> Result<(), Error> {
        if matches!(&self.agreement, Agreement::Pending(headers) if headers.is_finished()) {
            self.agree()?;
        }
        let Agreement::Agreed(weighting) = self.agreement else { return Ok(()) };
        self.read(weighting);
        while self.in_flight.front().is_some_and(Reduction::is_finished) {
            self.finish_oldest()?;
        }
        while let Some(positions) = self.schedule.ready() {
            let positions = positions.to_vec();
            for &position in &positions {
                if !self.is_read(position)? {
                    return Ok(());
                }
            }
            self.send(positions, weighting)?;
        }
        Ok(())
    }

    /// Waits for the header and evaluates it.
    fn agree(&mut self) -> Result<(), Error> {
        let headers = match replace(&mut self.agreement, Agreement::Failed) {
            Agreement::Pending(headers) => headers,
            evaluated => {
                self.agreement = evaluated;
                return Ok(());
            }
        };
        let headers = headers.wait().map_err(|(error, _)| error)?;
        let world_size = self.reducer.group.world_size();
        self.agreement = match self.header.agree(&self.reducer.parameters, &headers, world_size) {
            Ok(agreed) => Agreement::Agreed(agreed.weighting),
            Err(refused) => Agreement::Refused(refused),
        };
        Ok(())
    }

    /// Starts to read the gradients that have arrived, unless the reduction takes them from their device.
    fn read(&mut self, weighting: Weighting) {
        for position in self.unread.drain(..) {
            let gradient = &mut self.gradients[position];
            if let Gradient::Arrived(tensor) = replace(gradient, Gradient::Missing) {
                let tensor = self.reducer.widen(position, tensor, weighting);
                *gradient = match self.reducer.is_on_device() {
                    true => Gradient::Arrived(tensor),
                    false => Gradient::Reading(Box::pin(B::InnerBackend::float_into_data(tensor))),
                };
            }
        }
    }

    /// Whether a gradient can be sent at once. Polling it starts a read that is not started yet.
    fn is_read(&mut self, position: usize) -> Result<bool, Error> {
        let gradient = &mut self.gradients[position];
        if let Gradient::Reading(read) = gradient {
            match read.as_mut().poll(&mut task::Context::from_waker(Waker::noop())) {
                Poll::Pending => return Ok(false),
                Poll::Ready(data) => *gradient = Gradient::Read(data.map_err(unreadable)?),
            }
        }
        Ok(true)
    }

    /// Starts the reduction of a bucket, after waiting for reads. Gradients that this rank does not have count as zero.
    fn send(&mut self, positions: Vec<usize>, weighting: Weighting) -> Result<(), Error> {
        let in_flight = if self.reducer.is_on_device() {
            let tensors =
                positions.iter().map(|position| match replace(&mut self.gradients[*position], Gradient::Sent) {
                    Gradient::Arrived(tensor) => tensor,
                    _ => self.reducer.zeros(*position, weighting),
                });
            let tensors = tensors.collect();
            self.reducer.start_on_device(positions, tensors, weighting)?
        } else {
            let mut read = Vec::with_capacity(positions.len());
            for position in positions {
                let data = match replace(&mut self.gradients[position], Gradient::Sent) {
                    Gradient::Read(data) => data,
                    Gradient::Reading(reading) => match try_read_sync(reading) {
                        Some(data) => data.map_err(unreadable)?,
                        None => return Err(unreadable("the backend reads tensors only asynchronously")),
                    },
                    _ => self.reducer.zeros_on_host(position, weighting),
                };
                read.push((position, data));
            }
            self.reducer.start(read, weighting)?
        };
        self.in_flight.push_back(in_flight);
        self.schedule.sent();
        Ok(())
    }

    fn finish_oldest(&mut self) -> Result<(), Error> {
        match self.in_flight.pop_front() {
            Some(oldest) => self.reducer.finish(oldest, &mut self.results),
            None => Ok(()),
        }
    }

    /// Ends the step after the backward pass: sends what is left and waits for all results. The inner error is the same
    /// on all ranks, and the groups stay usable; after the outer one they do not. `None` if no rank has samples. `main`
    /// is the group that has exchanged the headers. It exchanges the trailers too: on the lane they would wait for the
    /// buckets, and a rank that skips a pass in which others run collectives would not meet them.
    pub fn finish(&mut self, main: &Group) -> Result<Result<Option<Ended>, Error>, Error> {
        if let Some(error) = self.failure.take() {
            return Err(error);
        }
        self.agree()?;
        let weighting = match &self.agreement {
            Agreement::Agreed(weighting) => *weighting,
            Agreement::Refused(Refused::NoSamples) => return Ok(Ok(None)),
            Agreement::Refused(Refused::Because(error)) => return Ok(Err(error.clone())),
            Agreement::Refused(Refused::Digests) => {
                return Ok(Err(self.header.compare(main, &self.reducer.parameters)));
            }
            _ => return Err(Error::broken(OPERATION, "it has no agreement and no failure")),
        };
        if self.header.samples > 0 && self.order.is_empty() && self.earlier.is_empty() {
            self.report(Problem::NoGradients);
        }
        let trailer = self.trailer().start(main)?;
        self.send_rest(weighting)?;
        while !self.in_flight.is_empty() {
            self.finish_oldest()?;
        }
        let all = trailer.wait().map_err(|(error, _)| error)?;
        let trailer = match Trailer::evaluate(&all, self.reducer.group.world_size(), &self.reducer.parameters) {
            Ok(trailer) => trailer,
            Err(error) => return Ok(Err(error)),
        };
        if let Err(error) = self.reducer.end_step(OPERATION)? {
            return Ok(Err(error));
        }
        let mut gradients = std::mem::take(&mut self.results);
        self.reducer.remove_missing(&trailer.exists, &mut gradients);
        Ok(Ok(Some(Ended { gradients, ordered: trailer.ordered })))
    }

    /// Returns this rank's trailer, after counting the gradients of earlier micro-batches alone.
    fn trailer(&mut self) -> Trailer {
        for position in 0..self.gradients.len() {
            if matches!(self.gradients[position], Gradient::Missing)
                && let Some(earlier) = self.earlier.remove::<B::InnerBackend, 1>(self.reducer.parameters[position].id)
            {
                self.accept(position, earlier.into_primitive().tensor());
            }
        }
        if !self.earlier.is_empty() {
            self.report(Problem::Unknown);
        }
        let exists = self.gradients.iter().map(|gradient| !matches!(gradient, Gradient::Missing)).collect();
        Trailer { problem: self.problem, ordered: !self.order.is_empty(), exists }
    }

    /// Sends the buckets that are left.
    fn send_rest(&mut self, weighting: Weighting) -> Result<(), Error> {
        self.read(weighting);
        while let Some(positions) = self.schedule.next().map(<[usize]>::to_vec) {
            // The memory of a bucket is reused once its results were taken.
            if let Some(oldest) = pop_if_full(&mut self.in_flight) {
                self.reducer.finish(oldest, &mut self.results)?;
            }
            self.send(positions, weighting)?;
        }
        Ok(())
    }
}

fn unreadable(cause: impl std::fmt::Display) -> Error {
    Error::io("reading a gradient", std::io::Error::other(cause.to_string()))
}
