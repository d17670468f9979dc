//! Which rank receives which tokens, and in which order: expert parallelism.

use bytemuck::{cast_slice, cast_slice_mut};

use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Group, Operation, partition};

/// The ways of tokens to the ranks that have their experts, and back.
///
/// Each rank has some of the experts, as equally many as possible ([`partition`]), and a token goes to one or several
/// of them. A token is a row of a matrix.
#[derive(Clone, Debug)]
pub struct Routes {
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

/// An exchange of rows, by indices: those to send, one rank after the other, and those of the result among what comes.
pub struct Order<'a> {
    /// The rows to send.
    pub sent: Vec<usize>,
    /// How many of them each rank gets.
    pub send: &'a [usize],
    /// How many rows come from each rank.
    pub recv: &'a [usize],
    /// The rows of the result.
    pub result: Vec<usize>,
}

const OPERATION: &str = "route";

impl Routes {
    /// Exchanges the number of tokens for each expert on `group`. `chosen` has the experts of each of `tokens` tokens,
    /// `per_token` of `count` for each.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an expert outside `0..count`; those of [`Group::all_to_all_v`].
    pub fn new(chosen: &[i64], [tokens, per_token]: [usize; 2], count: usize, group: &Group) -> Result<Routes, Error> {
        let n = group.world_size();
        if let Some(unknown) = chosen.iter().find(|expert| **expert >= count as i64 || **expert < 0) {
            let reason = format!("there is no expert {unknown}: pass numbers from 0 to below {count}");
            return Err(Error::argument(OPERATION, reason));
        }
        // A stable sort, so the tokens of one expert keep their order.
        let mut order: Vec<usize> = (0..chosen.len()).collect();
        order.sort_by_key(|choice| chosen[*choice]);
        let mut outgoing = vec![0u64; count];
        chosen.iter().for_each(|expert| outgoing[*expert as usize] += 1);

        let experts_of = |rank: usize| partition(count, n, rank);
        let own_count = experts_of(group.rank()).len();
        let mut incoming = vec![0u64; n * own_count];
        let counts: Vec<usize> = (0..n).map(|rank| experts_of(rank).len()).collect();
        let request = Request::new(Operation::AllToAllV, DType::U64).shape(&[count]);
        let (sent, received) =
            ((cast_slice(&outgoing), &counts[..]), (cast_slice_mut(&mut incoming), &vec![own_count; n][..]));
        group.operate_pairs(request, sent, received)?;
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
        Ok(Routes {
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

    /// Returns the exchange of so many of this rank's tokens. The result has consecutive rows for each of this rank's
    /// experts.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless there is one row for each token.
    pub fn dispatch(&self, rows: usize) -> Result<Order<'_>, Error> {
        check_rows("dispatch", rows, self.tokens)?;
        let sent = self.order.iter().map(|choice| choice / self.per_token).collect();
        Ok(Order { sent, send: &self.send, recv: &self.recv, result: self.arrival.clone() })
    }

    /// Returns the exchange of so many rows of this rank's experts, in the order in which [`dispatch`](Self::dispatch)
    /// returns them. The result has one row for each choice of each token.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless there is one row for each that was dispatched to this rank.
    pub fn combine(&self, rows: usize) -> Result<Order<'_>, Error> {
        check_rows("combine", rows, self.arrival.len())?;
        Ok(Order { sent: inverse(&self.arrival), send: &self.recv, recv: &self.send, result: inverse(&self.order) })
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
