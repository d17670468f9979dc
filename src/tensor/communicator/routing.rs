//! Sends each token to the ranks that have its experts, and the results back.

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};

use crate::tensor::autodiff;
use crate::tensor::{host, operation};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Group, Operation, partition};
use bytemuck::{cast_slice, cast_slice_mut};

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
    /// For each row to send, the index of its choice in the flattened experts. Choice `c` is of token `c / per_token`.
    order: Vec<usize>,
    tokens: usize,
    per_token: usize,
    /// Number of rows to send to each rank, and to receive from each.
    send: Vec<usize>,
    recv: Vec<usize>,
    /// For each row in the order of experts, its index among the received rows.
    arrival: Vec<usize>,
    /// Number of rows of each of this rank's experts.
    rows: Vec<usize>,
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
        let ([tokens, per_token], n, rank) = (experts.dims(), group.world_size(), group.rank());
        let chosen = to_host::<B>(experts)?;
        if let Some(unknown) = chosen.iter().find(|expert| **expert >= count as i64 || **expert < 0) {
            return Err(Error::argument(
                OPERATION,
                format!("there is no expert {unknown}: pass numbers from 0 to below {count}"),
            ));
        }
        // A stable sort, so the tokens of one expert keep their order.
        let mut order: Vec<usize> = (0..chosen.len()).collect();
        order.sort_by_key(|choice| chosen[*choice]);
        let mut outgoing = vec![0u64; count];
        chosen.iter().for_each(|expert| outgoing[*expert as usize] += 1);

        let experts_of = |rank: usize| partition(count, n, rank);
        let own_count = experts_of(rank).len();
        let mut incoming = vec![0u64; n * own_count];
        let counts: Vec<usize> = (0..n).map(|rank| experts_of(rank).len()).collect();
        let request = Request::new(Operation::AllToAllV, DType::U64).shape(&[count]);
        let (sent, received) =
            ((cast_slice(&outgoing), &counts[..]), (cast_slice_mut(&mut incoming), &vec![own_count; n][..]));
        metadata.operate_pairs(request, sent, received)?;
        let incoming: Result<Vec<usize>, _> = incoming.into_iter().map(usize::try_from).collect();
        let overflow = || Error::broken(OPERATION, "a rank reports more tokens than are possible");
        let incoming = incoming.map_err(|_| overflow())?;
        let total = incoming.iter().try_fold(0usize, |sum, rows| sum.checked_add(*rows));
        let total = total.filter(|total| *total <= isize::MAX as usize / size_of::<usize>()).ok_or_else(overflow)?;

        // Rows arrive sorted by rank, and those of one rank by expert.
        let offsets: Vec<usize> = (0..incoming.len()).map(|at| incoming[..at].iter().sum()).collect();
        let mut arrival = Vec::new();
        arrival.try_reserve_exact(total).map_err(|error| Error::io(OPERATION, error))?;
        for expert in 0..own_count {
            for from in 0..n {
                let at = from * own_count + expert;
                arrival.extend(offsets[at]..offsets[at] + incoming[at]);
            }
        }
        Ok(Routing {
            group: group.clone(),
            order,
            tokens,
            per_token,
            send: (0..n).map(|to| experts_of(to).map(|expert| outgoing[expert] as usize).sum()).collect(),
            recv: (0..n).map(|from| incoming[from * own_count..(from + 1) * own_count].iter().sum()).collect(),
            arrival,
            rows: (0..own_count).map(|expert| (0..n).map(|from| incoming[from * own_count + expert]).sum()).collect(),
        })
    }

    /// Returns the number of tokens that all ranks together send to each of this rank's experts.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Sends this rank's tokens, one per row of as many elements on all ranks, and returns all ranks' tokens for this
    /// rank's experts. The result has [`rows()[e]`](Self::rows) consecutive rows for this rank's `e`-th expert.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless there is one row for each token; otherwise the errors of
    /// [`Group::all_to_all_v_into`].
    pub fn dispatch<B: Backend>(&self, tokens: Tensor<B, 2>) -> Result<Tensor<B, 2>, Error> {
        self.dispatch_with(tokens, |rows| operation::all_to_all_v(rows, 0, &self.send, Some(&self.recv), &self.group))
    }

    /// Sends the results of this rank's experts, in the rows of [`dispatch`](Self::dispatch), and returns the results
    /// for this rank's tokens. A token that went to several experts has one row for each, consecutively and in the
    /// order of the choices passed to [`route`](crate::DeviceCommunicator::route).
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn combine<B: Backend>(&self, results: Tensor<B, 2>) -> Result<Tensor<B, 2>, Error> {
        self.combine_with(results, |rows| operation::all_to_all_v(rows, 0, &self.recv, Some(&self.send), &self.group))
    }

    /// Differentiable [`dispatch`](Self::dispatch): gradients flow back to the ranks that sent the tokens.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch) and [`autodiff`](crate::tensor::autodiff#errors).
    ///
    /// # Panics
    /// In the backward pass; see [panics](crate::tensor::autodiff#panics).
    pub fn dispatch_tracked<B: AutodiffBackend>(&self, tokens: Tensor<B, 2>) -> Result<Tensor<B, 2>, Error> {
        self.dispatch_with(tokens, |rows| autodiff::all_to_all_v(rows, 0, &self.send, Some(&self.recv), &self.group))
    }

    /// Differentiable [`combine`](Self::combine): gradients flow back to the experts.
    ///
    /// # Errors
    /// As [`dispatch_tracked`](Self::dispatch_tracked).
    ///
    /// # Panics
    /// In the backward pass; see [panics](crate::tensor::autodiff#panics).
    pub fn combine_tracked<B: AutodiffBackend>(&self, results: Tensor<B, 2>) -> Result<Tensor<B, 2>, Error> {
        self.combine_with(results, |rows| autodiff::all_to_all_v(rows, 0, &self.recv, Some(&self.send), &self.group))
    }

    fn dispatch_with<B: Backend>(
        &self,
        tokens: Tensor<B, 2>,
        exchange: impl FnOnce(Tensor<B, 2>) -> Result<Tensor<B, 2>, Error>,
    ) -> Result<Tensor<B, 2>, Error> {
        check_rows("dispatch", tokens.dims()[0], self.tokens)?;
        let sent = self.order.iter().map(|choice| choice / self.per_token);
        Ok(select(exchange(select(tokens, sent))?, self.arrival.iter().copied()))
    }

    fn combine_with<B: Backend>(
        &self,
        results: Tensor<B, 2>,
        exchange: impl FnOnce(Tensor<B, 2>) -> Result<Tensor<B, 2>, Error>,
    ) -> Result<Tensor<B, 2>, Error> {
        check_rows("combine", results.dims()[0], self.arrival.len())?;
        Ok(select(exchange(select(results, inverse(&self.arrival).into_iter()))?, inverse(&self.order).into_iter()))
    }
}

fn check_rows(operation: &str, rows: usize, expected: usize) -> Result<(), Error> {
    if rows == expected {
        return Ok(());
    }
    Err(Error::argument(operation, format!("{rows} rows where this routing has {expected}")))
}

fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    order.iter().enumerate().for_each(|(at, from)| inverse[*from] = at);
    inverse
}

/// Returns the rows with these indices. Returns the tensor itself if they are all rows in order, or if it has none.
fn select<B: Backend>(tensor: Tensor<B, 2>, rows: impl ExactSizeIterator<Item = usize>) -> Tensor<B, 2> {
    let rows: Vec<i64> = rows.map(|row| row as i64).collect();
    if rows.len() == tensor.dims()[0] && rows.iter().zip(0..).all(|(row, at)| *row == at) {
        return tensor;
    }
    let device = tensor.device();
    let len = rows.len();
    tensor.select(0, Tensor::from_data(TensorData::new(rows, [len]), &device))
}

/// Reads the tensor's elements to the host.
fn to_host<B: Backend>(tensor: Tensor<B, 2, Int>) -> Result<Vec<i64>, Error> {
    Ok(host::data::<B, Int>(OPERATION, tensor.into_primitive())?.iter::<i64>().collect())
}
