//! What the ranks agree on before gradients are sent: headers and weights.

use super::{Exchanged, Header, OPERATION, PassKind, Refusal, Weight, Writer};
use crate::bucket::Weighting;
use bonfire_core::{Error, Group};

/// How a rank's gradients enter the mean, and the weight of all ranks, unless something is refused.
pub(crate) type Decision = Result<(Weighting, f64), Refusal>;

/// The headers and the weights of a step or a pass, in flight or evaluated.
pub(crate) struct Agreement {
    main: Group,
    pub header: Header,
    headers: Exchanged<Vec<PassKind>>,
    /// This rank's weight. `None` until it is known.
    pub weight: Option<Weight>,
    weights: Exchanged<(Weighting, f64)>,
}

impl Agreement {
    /// Starts to exchange the headers.
    #[track_caller]
    pub fn start(main: &Group, header: Header) -> Result<Agreement, Error> {
        let mut words = Writer::default();
        header.write(&mut words);
        let headers = words.finish().start(main, OPERATION)?;
        Ok(Agreement { main: main.clone(), header, headers, weight: None, weights: Exchanged::Failed })
    }

    /// Starts to exchange the weights.
    pub fn weigh(&mut self, weight: Weight) -> Result<(), Error> {
        let mut words = Writer::default();
        weight.write(&mut words);
        self.weights = words.finish().start(&self.main, "weights")?;
        self.weight = Some(weight);
        Ok(())
    }

    /// Waits for the headers. Returns what the ranks do in the pass.
    pub fn kinds(&mut self) -> Result<Result<Vec<PassKind>, Refusal>, Error> {
        self.headers.get(&self.main, |from| self.header.evaluate(from))
    }

    /// Returns the decision. `None` if this rank's weight is not known, or if it would have to wait and does not.
    pub fn decided(&mut self, wait: bool) -> Result<Option<Decision>, Error> {
        let Some(weight) = self.weight else { return Ok(None) };
        let is_ready = self.headers.is_ready() && self.weights.is_ready();
        if !wait && !is_ready {
            return Ok(None);
        }
        match self.kinds()? {
            Ok(_) => self.weights.get(&self.main, |from| weight.evaluate(from)).map(Some),
            Err(refusal) => Ok(Some(Err(refusal))),
        }
    }
}
