//! Tokens on their way to experts and back.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

use crate::tensor::autodiff::{self, CollectiveBackend};
use crate::tensor::{host, operation};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Group, Operation, partition};
use bytemuck::{cast_slice, cast_slice_mut};

/// Which rank gets which tokens, and where their results go: see [`DeviceCommunicator::route`](crate::DeviceCommunicator::route).
///
/// Each rank has some of the experts, and a token goes to one or several of them. `dispatch` brings this rank the tokens
/// for its experts, the first expert's first, and of one expert's in the order of the ranks that they are from. `combine`
/// brings the results back. Gradients flow through [`dispatch_tracked`](Self::dispatch_tracked) and
/// [`combine_tracked`](Self::combine_tracked).
#[derive(Clone, Debug)]
pub struct Routing {
    group: Group,
    /// For each row to send, which choice it is: of token `choice / per_token`.
    order: Vec<usize>,
    tokens: usize,
    per_token: usize,
    /// Rows for each rank, and from each.
    send: Vec<usize>,
    recv: Vec<usize>,
    /// For each row as the experts see it, which of the received ones it is.
    arrival: Vec<usize>,
    rows: Vec<usize>,
}

const OPERATION: &str = "route";

impl Routing {
    /// Exchanges on `metadata` how many tokens there are for each expert; tensors go by `group`.
    pub(super) fn new<B: Backend>(
        experts: Tensor<B, 2, Int>,
        count: usize,
        metadata: &Group,
        group: &Group,
    ) -> Result<Self, Error> {
        let ([tokens, per_token], n, rank) = (experts.dims(), group.world_size(), group.rank());
        let chosen = numbers::<B>(experts)?;
        if let Some(wrong) = chosen.iter().find(|expert| **expert >= count as i64 || **expert < 0) {
            return Err(Error::argument(
                OPERATION,
                format!("there is no expert {wrong}: give one from 0 on below {count}"),
            ));
        }
        // Stable: of one expert's tokens the first stays the first.
        let mut order: Vec<usize> = (0..chosen.len()).collect();
        order.sort_by_key(|choice| chosen[*choice]);
        let mut outgoing = vec![0u64; count];
        chosen.iter().for_each(|expert| outgoing[*expert as usize] += 1);

        let experts_of = |rank: usize| partition(count, n, rank);
        let here = experts_of(rank).len();
        let mut incoming = vec![0u64; n * here];
        let lens: Vec<usize> = (0..n).map(|rank| experts_of(rank).len()).collect();
        let request = Request::new(Operation::AllToAllV, DType::U64).shape(&[count]);
        let (sent, received) =
            ((cast_slice(&outgoing), &lens[..]), (cast_slice_mut(&mut incoming), &vec![here; n][..]));
        metadata.operate_pairs(request, sent, received)?;
        let incoming: Result<Vec<usize>, _> = incoming.into_iter().map(usize::try_from).collect();
        let absurd = || Error::broken(OPERATION, "a rank has more tokens than there can be");
        let incoming = incoming.map_err(|_| absurd())?;
        let total = incoming.iter().try_fold(0usize, |sum, rows| sum.checked_add(*rows));
        let total = total.filter(|total| *total <= isize::MAX as usize / size_of::<usize>()).ok_or_else(absurd)?;

        // Rows come rank by rank, and each rank's expert by expert.
        let begins: Vec<usize> = (0..incoming.len()).map(|at| incoming[..at].iter().sum()).collect();
        let mut arrival = Vec::new();
        arrival.try_reserve_exact(total).map_err(|error| Error::io(OPERATION, error))?;
        for expert in 0..here {
            for from in 0..n {
                let at = from * here + expert;
                arrival.extend(begins[at]..begins[at] + incoming[at]);
            }
        }
        Ok(Routing {
            group: group.clone(),
            order,
            tokens,
            per_token,
            send: (0..n).map(|to| experts_of(to).map(|expert| outgoing[expert] as usize).sum()).collect(),
            recv: (0..n).map(|from| incoming[from * here..(from + 1) * here].iter().sum()).collect(),
            arrival,
            rows: (0..here).map(|expert| (0..n).map(|from| incoming[from * here + expert]).sum()).collect(),
        })
    }

    /// How many tokens each of this rank's experts gets.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// The tokens for this rank's experts, of this rank's tokens and the other ranks'.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where there is not a row for each token, else those of
    /// [`Group::all_to_all_v_into`].
    pub fn dispatch<B: Backend>(&self, tokens: Tensor<B, 2>) -> Result<Tensor<B, 2>, Error> {
        self.there(tokens, |rows| operation::all_to_all_v(rows, 0, &self.send, Some(&self.recv), &self.group))
    }

    /// The results for this rank's tokens, of those of this rank's experts and the other ranks'. A token that went to
    /// several experts has a row for each, one after the other.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn combine<B: Backend>(&self, results: Tensor<B, 2>) -> Result<Tensor<B, 2>, Error> {
        self.back(results, |rows| operation::all_to_all_v(rows, 0, &self.recv, Some(&self.send), &self.group))
    }

    /// [`dispatch`](Self::dispatch), through which gradients flow back to where the tokens are from.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn dispatch_tracked<B: CollectiveBackend>(&self, tokens: Tensor<B, 2>) -> Result<Tensor<B, 2>, Error> {
        self.there(tokens, |rows| autodiff::all_to_all_v(rows, 0, &self.send, Some(&self.recv), &self.group))
    }

    /// [`combine`](Self::combine), through which gradients flow back to the experts.
    ///
    /// # Errors
    /// As [`dispatch`](Self::dispatch).
    pub fn combine_tracked<B: CollectiveBackend>(&self, results: Tensor<B, 2>) -> Result<Tensor<B, 2>, Error> {
        self.back(results, |rows| autodiff::all_to_all_v(rows, 0, &self.recv, Some(&self.send), &self.group))
    }

    fn there<B: Backend>(
        &self,
        tokens: Tensor<B, 2>,
        swap: impl FnOnce(Tensor<B, 2>) -> Result<Tensor<B, 2>, Error>,
    ) -> Result<Tensor<B, 2>, Error> {
        check("dispatch", tokens.dims()[0], self.tokens)?;
        let sent = self.order.iter().map(|choice| choice / self.per_token);
        Ok(select(swap(select(tokens, sent))?, self.arrival.iter().copied()))
    }

    fn back<B: Backend>(
        &self,
        results: Tensor<B, 2>,
        swap: impl FnOnce(Tensor<B, 2>) -> Result<Tensor<B, 2>, Error>,
    ) -> Result<Tensor<B, 2>, Error> {
        check("combine", results.dims()[0], self.arrival.len())?;
        Ok(select(swap(select(results, inverse(&self.arrival).into_iter()))?, inverse(&self.order).into_iter()))
    }
}

fn check(operation: &str, rows: usize, right: usize) -> Result<(), Error> {
    if rows == right {
        return Ok(());
    }
    Err(Error::argument(operation, format!("{rows} rows where this routing has {right}")))
}

fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    order.iter().enumerate().for_each(|(at, from)| inverse[*from] = at);
    inverse
}

/// The rows at these places. Where they are all rows in their order, there is nothing to do, and so where there are none.
fn select<B: Backend>(tensor: Tensor<B, 2>, rows: impl ExactSizeIterator<Item = usize>) -> Tensor<B, 2> {
    let rows: Vec<i64> = rows.map(|row| row as i64).collect();
    if rows.len() == tensor.dims()[0] && rows.iter().zip(0..).all(|(row, at)| *row == at) {
        return tensor;
    }
    let device = tensor.device();
    let len = rows.len();
    tensor.select(0, Tensor::from_data(TensorData::new(rows, [len]), &device))
}

/// A tensor's numbers, on the host.
fn numbers<B: Backend>(tensor: Tensor<B, 2, Int>) -> Result<Vec<i64>, Error> {
    Ok(host::data::<B, Int>(OPERATION, tensor.into_primitive())?.iter::<i64>().collect())
}
