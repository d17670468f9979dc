//! Tokens to the experts and back: to all ranks, or to those whose experts they are for.

use burn::tensor::backend::Backend;
use burn::tensor::{Float, Int, Tensor};

use super::{DeviceCommunicator, Routing, destroyed};
use crate::tensor::host::{Kind, Via};
use crate::tensor::operation::carry;
use crate::tensor::operation::fused::{self, Piece};
use crate::tensor::operation::sizes::Sizes;
use bonfire_core::internal::lock;
use bonfire_core::{Error, Group, ReduceOp};

/// # Experts
impl<B: Backend> DeviceCommunicator<B> {
    /// Gives the group that [`dispatch`](Self::dispatch) and [`combine`](Self::combine) use for what is not sequence
    /// parallel: the ranks with this one's place in tensor parallelism. Without it, all ranks of the communicator.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] after [`destroy`](Self::destroy).
    pub fn set_data_parallel_group(&mut self, group: Group) -> Result<(), Error> {
        let name = &self.name;
        let groups = self.groups.as_mut().ok_or_else(|| destroyed(name))?;
        groups.data_parallel = Some(group);
        Ok(())
    }

    /// Brings all ranks' tokens, their router logits and `extra_tensors`, which have a row for each token, to every rank, in
    /// the order of ranks and in one operation: every rank then runs its experts on the tokens that are for them, and
    /// [`combine`](Self::combine) adds up the results. Ranks may have any number of tokens. The ranks are those of the
    /// communicator if the tokens are split among them (`is_sequence_parallel`), else those of the
    /// [data parallel group](Self::set_data_parallel_group). In a group of one, everything stays as it is.
    ///
    /// To send each token only to the ranks that have its experts, see [`route`](Self::route).
    ///
    /// # Errors
    /// As [`all_gather_v_list`](Self::all_gather_v_list).
    #[expect(clippy::type_complexity, reason = "vLLM's three results")]
    pub fn dispatch<const D: usize, K: Kind<B>>(
        &self,
        hidden_states: Tensor<B, D>,
        router_logits: Tensor<B, D>,
        is_sequence_parallel: bool,
        extra_tensors: Vec<Tensor<B, D, K>>,
    ) -> Result<(Tensor<B, D>, Tensor<B, D>, Vec<Tensor<B, D, K>>), Error> {
        let (via, metadata) = self.experts(is_sequence_parallel)?;
        if via.group.world_size() == 1 {
            return Ok((hidden_states, router_logits, extra_tensors));
        }
        let mut pieces = Vec::new();
        for tensor in [hidden_states, router_logits] {
            pieces.push(Piece::read::<B, Float>(tensor.into_primitive(), 0)?);
        }
        for tensor in extra_tensors {
            pieces.push(Piece::read::<B, K>(tensor.into_primitive(), 0)?);
        }
        let Some(axis) = fused::axis(&pieces)? else { return Err(Error::argument("dispatch", "nothing to dispatch")) };
        let sizes = Sizes::Exchanged.resolve(metadata.into(), "dispatch", &axis)?;
        let mut gathered = fused::all_gather::<B>(via, pieces, &sizes)?.into_iter();
        let (Some(hidden_states), Some(router_logits)) = (gathered.next(), gathered.next()) else {
            return Err(Error::broken("dispatch", "the group gave less than was sent"));
        };
        lock(&self.dispatched)[usize::from(is_sequence_parallel)] = Some(sizes);
        Ok((
            Tensor::from_primitive(hidden_states.tensor::<B, Float>()),
            Tensor::from_primitive(router_logits.tensor::<B, Float>()),
            gathered.map(|extra| Tensor::from_primitive(extra.tensor::<B, K>())).collect(),
        ))
    }

    /// The sum, over the ranks, of what their experts made of the tokens of the last [`dispatch`](Self::dispatch): of that
    /// the rows of this rank's own tokens. In a group of one it is the input.
    ///
    /// # Errors
    /// Those of [`operation::reduce_scatter_v`](crate::tensor::operation::reduce_scatter_v); [`Error::InvalidArgument`] also without
    /// a dispatch before, or after [`destroy`](Self::destroy).
    pub fn combine<const D: usize>(
        &self,
        hidden_states: Tensor<B, D>,
        is_sequence_parallel: bool,
    ) -> Result<Tensor<B, D>, Error> {
        let (via, _) = self.experts(is_sequence_parallel)?;
        if via.group.world_size() == 1 {
            return Ok(hidden_states);
        }
        let sizes = lock(&self.dispatched)[usize::from(is_sequence_parallel)].clone();
        let sizes = sizes.ok_or_else(|| Error::argument("combine", "nothing was dispatched: call dispatch before"))?;
        let (tensor, sizes) = (hidden_states.into_primitive(), Some(&sizes[..]));
        let own = carry::reduce_scatter::<B, Float>(via, tensor, ReduceOp::Sum, 0, sizes)?;
        Ok(Tensor::from_primitive(own))
    }

    /// Finds out which rank gets which tokens: `experts` says, in each token's row, which experts it goes to, of `count` that
    /// the ranks have in their order, as equally as possible (see [`partition`](crate::partition())). Each rank may have any
    /// number of tokens.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an expert that there is not, else those of
    /// [`Group::all_to_all_v`].
    pub fn route(
        &self,
        experts: Tensor<B, 2, Int>,
        count: usize,
        is_sequence_parallel: bool,
    ) -> Result<Routing, Error> {
        let (via, metadata) = self.experts(is_sequence_parallel)?;
        Routing::new::<B>(experts, count, metadata, via.group)
    }

    /// The groups that carry tokens to experts, and what there is to know of them.
    fn experts(&self, is_sequence_parallel: bool) -> Result<(Via<'_>, &Group), Error> {
        let groups = self.groups()?;
        Ok(match &groups.data_parallel {
            // Without the memory for results, which is the other group's.
            Some(group) if !is_sequence_parallel => (group.into(), group),
            _ => (self.via()?, &groups.metadata),
        })
    }
}
