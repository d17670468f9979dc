//! Expert parallelism: sends tokens to the experts and their results back, through all ranks or only the experts'
//! ranks.

use burn::tensor::kind::Basic as Kind;
use burn::tensor::{Int, Tensor};

use super::{DeviceCommunicator, GatherInput, Routing, destroyed};
use crate::tensor::operation;
use bonfire_core::internal::{call_site, go_on, lock};
use bonfire_core::{Error, Group, ReduceOp};
use bonfire_tensor::Sizes;

/// # Experts
impl DeviceCommunicator {
    /// Sets the group that [`dispatch`](Self::dispatch), [`combine`](Self::combine) and [`route`](Self::route) use
    /// without sequence parallelism: the ranks with this one's position in tensor parallelism. Unless it is set, they
    /// use all ranks of the communicator.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] after [`destroy`](Self::destroy).
    pub fn set_data_parallel_group(&mut self, group: Group) -> Result<(), Error> {
        let name = &self.name;
        let groups = self.groups.as_mut().ok_or_else(|| destroyed(name))?;
        groups.data_parallel = Some(group);
        Ok(())
    }

    /// Gathers all ranks' tokens, their router logits and `extra_tensors` on every rank.
    ///
    /// All tensors have one row per token, along their first dimension; ranks may have different numbers of tokens. The
    /// results are concatenated in rank order. They are gathered in one operation. Every rank then runs its experts on
    /// the tokens routed to them, and [`combine`](Self::combine) sums the results. With `is_sequence_parallel`, the
    /// tokens are split over the ranks of the communicator, and all of them take part; otherwise the [data parallel
    /// group](Self::set_data_parallel_group) does. In a group of one rank, the results are the inputs.
    ///
    /// To send each token only to the ranks that have its experts, use [`route`](Self::route).
    ///
    /// # Errors
    /// As [`all_gather_v_list`](Self::all_gather_v_list).
    #[track_caller]
    pub fn dispatch<const D: usize, K: Kind>(
        &self,
        hidden_states: Tensor<D>,
        router_logits: Tensor<D>,
        is_sequence_parallel: bool,
        extra_tensors: Vec<Tensor<D, K>>,
    ) -> Result<(Tensor<D>, Tensor<D>, Vec<Tensor<D, K>>), Error> {
        let _call = go_on(call_site());
        let (group, metadata) = self.expert_groups(is_sequence_parallel)?;
        if group.world_size() == 1 {
            return Ok((hidden_states, router_logits, extra_tensors));
        }
        let mut inputs = vec![GatherInput::read(hidden_states, 0)?, GatherInput::read(router_logits, 0)?];
        for tensor in extra_tensors {
            inputs.push(GatherInput::read(tensor, 0)?);
        }
        let Some(axis) = GatherInput::axis(&inputs)? else {
            return Err(Error::argument("dispatch", "nothing to dispatch"));
        };
        let sizes = Sizes::Exchanged.resolve(metadata, "dispatch", axis)?;
        let wholes = GatherInput::all_gather(&inputs, group, &sizes)?;
        let mut gathered = inputs.iter().zip(wholes);
        let (Some((states, hidden_states)), Some((logits, router_logits))) = (gathered.next(), gathered.next()) else {
            return Err(Error::broken("dispatch", "the group returned fewer tensors than were sent"));
        };
        let gathered = (
            states.whole(hidden_states, &sizes),
            logits.whole(router_logits, &sizes),
            gathered.map(|(extra, whole)| extra.whole(whole, &sizes)).collect(),
        );
        lock(&self.dispatched)[usize::from(is_sequence_parallel)] = Some(sizes);
        Ok(gathered)
    }

    /// Sums the ranks' results for the tokens of the last [`dispatch`](Self::dispatch) and returns the rows of this
    /// rank's own tokens.
    ///
    /// `hidden_states` has one row for every token of that dispatch, in its order. In a group of one rank, the result
    /// is the input.
    ///
    /// # Errors
    /// Those of [`operation::reduce_scatter_v`]. [`Error::InvalidArgument`]
    /// also if nothing was dispatched, or after [`destroy`](Self::destroy).
    #[track_caller]
    pub fn combine<const D: usize>(
        &self,
        hidden_states: Tensor<D>,
        is_sequence_parallel: bool,
    ) -> Result<Tensor<D>, Error> {
        let _call = go_on(call_site());
        let (group, _) = self.expert_groups(is_sequence_parallel)?;
        if group.world_size() == 1 {
            return Ok(hidden_states);
        }
        let sizes = lock(&self.dispatched)[usize::from(is_sequence_parallel)].clone();
        let sizes = sizes.ok_or_else(|| Error::argument("combine", "nothing was dispatched: call dispatch first"))?;
        operation::reduce_scatter_v(hidden_states, ReduceOp::Sum, 0, &sizes, group)
    }

    /// Determines which rank receives which tokens, and tells each rank how many it receives.
    ///
    /// `experts` has the shape `[tokens, choices]`. Row `t` lists the experts of token `t`, as numbers below `count`,
    /// the number of experts on all ranks, which is the same on all of them. The experts are distributed over the ranks
    /// in order and as equally as possible (see [`partition`](crate::partition())). Ranks may have different numbers of
    /// tokens. All ranks of the group of [`dispatch`](Self::dispatch) must call this.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an expert outside `0..count` or after [`destroy`](Self::destroy); otherwise the
    /// errors of [`Group::all_to_all_v`].
    #[track_caller]
    pub fn route(&self, experts: Tensor<2, Int>, count: usize, is_sequence_parallel: bool) -> Result<Routing, Error> {
        let _call = go_on(call_site());
        let (group, metadata) = self.expert_groups(is_sequence_parallel)?;
        Routing::new(experts, count, metadata, group)
    }

    /// Returns the groups on which tokens and their metadata are sent.
    fn expert_groups(&self, is_sequence_parallel: bool) -> Result<(&Group, &Group), Error> {
        let groups = self.groups()?;
        Ok(match &groups.data_parallel {
            Some(group) if !is_sequence_parallel => (group, group),
            _ => (&groups.tensors, &groups.metadata),
        })
    }
}
