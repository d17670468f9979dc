//! Sends each token to the ranks that have its experts, and the results back.

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};

use crate::tensor::autodiff;
use crate::tensor::{host, operation};
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group};
use bonfire_tensor::{Order, Routes};

/// A routing table: which rank receives which tokens and returns their results. It is made by
/// [`DeviceCommunicator::route`](crate::DeviceCommunicator::route).
///
/// Each rank has some of the experts, and a token goes to one or several of them. [`dispatch`](Self::dispatch) returns
/// the tokens for this rank's experts, sorted by expert and then by the rank that sent them. [`combine`](Self::combine)
/// returns the results to the tokens' ranks. Gradients flow through [`dispatch_tracked`](Self::dispatch_tracked) and
/// [`combine_tracked`](Self::combine_tracked). All ranks of the group must call each of them.
#[derive(Clone, Debug)]
pub struct Routing {
    group: Group,
    routes: Routes,
}

const OPERATION: &str = "route";

impl Routing {
    /// Exchanges the number of tokens for each expert on `metadata`. Tokens are sent on `group` later.
    pub(super) fn new<B: Backend>(
        experts: Tensor<B, 2, Int>,
        count: usize,
        metadata: &Group,
        group: &Group,
    ) -> Result<Self, Error> {
        let shape = experts.dims();
        let chosen: Vec<i64> = host::data::<B, Int>(OPERATION, experts.into_primitive())?.iter::<i64>().collect();
        Ok(Routing { group: group.clone(), routes: Routes::new(&chosen, shape, count, metadata)? })
    }

    /// Returns the number of tokens that all ranks together send to each of this rank's experts.
    pub fn rows(&self) -> &[usize] {
        self.routes.rows()
    }

    /// Sends this rank's tokens, one per row of as many elements on all ranks, and returns all ranks' tokens for this
    /// rank's experts. The result has [`rows()[e]`](Self::rows) consecutive rows for this rank's `e`-th expert.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless there is one row for each token; otherwise the errors of
    /// [`Group::all_to_all_v_into`].
    #[track_caller]
    pub fn dispatch<B: Backend>(&self, tokens: Tensor<B, 2>) -> Result<Tensor<B, 2>, Error> {
        let _call = self.group.enter("Routing::dispatch");
        let order = self.routes.dispatch(tokens.dims()[0])?;
        self.exchange(tokens, order, operation::all_to_all_v)
    }

    /// Sends the results of this rank's experts, in the rows of [`dispatch`](Self::dispatch), and returns the results
    /// for this rank's tokens. A token that went to several experts has one row for each, consecutively and in the
    /// order of the choices passed to [`route`](crate::DeviceCommunicator::route).
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    #[track_caller]
    pub fn combine<B: Backend>(&self, results: Tensor<B, 2>) -> Result<Tensor<B, 2>, Error> {
        let _call = self.group.enter("Routing::combine");
        let order = self.routes.combine(results.dims()[0])?;
        self.exchange(results, order, operation::all_to_all_v)
    }

    /// Differentiable [`dispatch`](Self::dispatch): gradients flow back to the ranks that sent the tokens.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch) and [`autodiff`](crate::tensor::autodiff#errors).
    ///
    /// # Panics
    /// In the backward pass; see [panics](crate::tensor::autodiff#panics).
    #[track_caller]
    pub fn dispatch_tracked<B: AutodiffBackend>(&self, tokens: Tensor<B, 2>) -> Result<Tensor<B, 2>, Error> {
        let _call = self.group.enter("Routing::dispatch_tracked");
        let order = self.routes.dispatch(tokens.dims()[0])?;
        self.exchange(tokens, order, autodiff::all_to_all_v)
    }

    /// Differentiable [`combine`](Self::combine): gradients flow back to the experts.
    ///
    /// # Errors
    /// As [`dispatch_tracked`](Self::dispatch_tracked).
    ///
    /// # Panics
    /// In the backward pass; see [panics](crate::tensor::autodiff#panics).
    #[track_caller]
    pub fn combine_tracked<B: AutodiffBackend>(&self, results: Tensor<B, 2>) -> Result<Tensor<B, 2>, Error> {
        let _call = self.group.enter("Routing::combine_tracked");
        let order = self.routes.combine(results.dims()[0])?;
        self.exchange(results, order, autodiff::all_to_all_v)
    }

    fn exchange<B: Backend>(
        &self,
        rows: Tensor<B, 2>,
        order: Order<'_>,
        all_to_all_v: impl FnOnce(Tensor<B, 2>, isize, &[usize], Option<&[usize]>, &Group) -> Exchanged<B>,
    ) -> Exchanged<B> {
        let arrived = all_to_all_v(select(rows, &order.sent), 0, order.send, Some(order.recv), &self.group)?;
        Ok(select(arrived, &order.result))
    }
}

type Exchanged<B> = Result<Tensor<B, 2>, Error>;

/// Returns the rows with these indices. Returns the tensor itself if they are all rows in order, or if it has none.
fn select<B: Backend>(tensor: Tensor<B, 2>, rows: &[usize]) -> Tensor<B, 2> {
    if rows.len() == tensor.dims()[0] && rows.iter().zip(0..).all(|(row, at)| *row == at) {
        return tensor;
    }
    let device = tensor.device();
    let rows = TensorData::new(rows.iter().map(|row| *row as i64).collect(), [rows.len()]);
    tensor.select(0, Tensor::from_data(rows, &device))
}
