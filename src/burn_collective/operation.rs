//! Operations: all peers agree on what they do, then they move the data.

use burn::tensor::backend::Backend;
use burn::tensor::{Float, TensorData, TensorPrimitive};

use super::claim::{Claim, ClaimResult, CollectiveCall, check_complete};
use super::data::{all_reduce, divide, empty, narrow, reduce, widen};
use super::error::CollectiveError;
use super::names::PeerId;
use super::nodes::Node;
use super::payload::Payload;
use super::session::{Device, PeerHandle, other_error, session};
use crate::tensor::operation::carry;
use bonfire_core::{Error, Group, ReduceOp};

/// Runs `call` with the peer's tensor, if it has one. Returns the result, if the peer gets one, and the peer's device.
/// A peer that could not read its tensor passes the error and still takes part, so that all peers return it.
pub(super) fn run<B: Backend>(
    peer: PeerId,
    call: CollectiveCall,
    tensor: Result<Option<Payload<B>>, CollectiveError>,
) -> Result<(Option<Payload<B>>, Device), CollectiveError> {
    let session = session::<B>();
    // Between nodes, tensors are sent from host memory. Read before the peers agree, so that all return a failure.
    let tensor = match tensor {
        Ok(Some(Payload::InPlace(tensor))) if session.handle(peer).is_ok_and(|handle| handle.node.is_some()) => {
            Payload::read(tensor).map(Some)
        }
        tensor => tensor,
    };
    let claim = claim(peer, call, &tensor);
    let mut data = tensor.unwrap_or_default();
    loop {
        let handle = session.handle(peer)?;
        let mut turn = handle.table.turn(handle.rank)?;
        match handle.agree(&mut turn, claim.clone()).map_err(other_error)? {
            Some(agreement) => {
                let data = handle.carry_out(agreement?, data.take())?;
                return Ok((data, handle.device.clone()));
            }
            // Peers have registered or finished: run the operation with the current peers.
            None => session.leave_table(&handle.table)?,
        }
    }
}

fn claim<B: Backend>(
    peer: PeerId,
    call: CollectiveCall,
    tensor: &Result<Option<Payload<B>>, CollectiveError>,
) -> ClaimResult {
    let data = tensor.as_ref().map_err(CollectiveError::clone)?;
    let holds = match call {
        CollectiveCall::Broadcast => data.is_some(),
        CollectiveCall::Reduce(_, root) => root == peer,
        CollectiveCall::AllReduce(_) | CollectiveCall::Parameters(_) => false,
    };
    let tensor = data.as_ref().map(Payload::description);
    Ok(Claim { call, tensor, devices: 1, holder: holds.then_some(0) })
}

/// The operation on which all peers have agreed.
struct Agreement {
    /// The merged claim of all nodes.
    claim: Claim,
    /// The rank, on this node, of the peer with the root or the tensor; `None` if another node or no peer has it.
    holder: Option<usize>,
}

impl PeerHandle {
    /// Exchanges claims with all peers. Returns `None` if the table was closed before all peers of this node arrived.
    fn agree(&self, turn: &mut u64, claim: ClaimResult) -> Result<Option<Result<Agreement, CollectiveError>>, Error> {
        let Some(ours) = self.table.merge(self.rank, turn, claim, self.group.deadline()) else { return Ok(None) };
        let holder = ours.as_ref().ok().and_then(|claim| claim.holder);
        let all = match &self.node {
            None => ours,
            Some(node) => {
                let agreed = self.is_leader().then(|| node.merge(ours));
                self.table.share_agreed(&self.with_double_deadline(), agreed)?
            }
        };
        Ok(Some(all.and_then(check_complete).map(|claim| Agreement { claim, holder })))
    }

    /// Runs the operation, in place if possible.
    fn carry_out<B: Backend>(
        &self,
        agreement: Agreement,
        payload: Option<Payload<B>>,
    ) -> Result<Option<Payload<B>>, CollectiveError> {
        match (agreement.claim.call, payload, &self.node) {
            (CollectiveCall::AllReduce(op), Some(Payload::InPlace(tensor)), None) => {
                let tensor = TensorPrimitive::Float(tensor);
                let reduced = carry::all_reduce::<B, Float>((&self.group).into(), tensor, op).map_err(other_error)?;
                Ok(Some(Payload::InPlace(reduced.tensor())))
            }
            (_, payload, _) => {
                let data = payload.map(Payload::into_host).transpose()?;
                Ok(self.carry_out_on_host(agreement, data)?.map(Payload::Host))
            }
        }
    }

    fn carry_out_on_host(
        &self,
        agreement: Agreement,
        data: Option<TensorData>,
    ) -> Result<Option<TensorData>, CollectiveError> {
        match (agreement.claim.call, data, &self.node) {
            (CollectiveCall::Parameters(_), ..) => Ok(None),
            (CollectiveCall::AllReduce(op), Some(mut data), None) => {
                all_reduce(&self.group, &mut data, op).map_err(other_error)?;
                Ok(Some(data))
            }
            (CollectiveCall::Reduce(op, _), Some(mut data), None) => {
                let root = agreement.holder.ok_or(CollectiveError::RegisterNotFirstOperation)?;
                reduce(&self.group, &mut data, op, root).map_err(other_error)?;
                Ok((self.rank == root).then_some(data))
            }
            (CollectiveCall::AllReduce(op) | CollectiveCall::Reduce(op, _), Some(data), Some(node)) => {
                self.reduce_over_nodes(node, &agreement, op, data)
            }
            (_, data, node) => self.broadcast(node.as_deref(), &agreement, data),
        }
    }

    fn broadcast(
        &self,
        node: Option<&Node>,
        agreement: &Agreement,
        data: Option<TensorData>,
    ) -> Result<Option<TensorData>, CollectiveError> {
        let mut data = match (data, &agreement.claim.tensor) {
            (Some(data), _) => data,
            (None, Some((shape, dtype))) => empty(shape, *dtype)?,
            (None, None) => return Err(CollectiveError::BroadcastNoTensor),
        };
        if let Some(root) = agreement.holder {
            self.group.broadcast::<u8>(&mut data.bytes, root).map_err(other_error)?;
        }
        if let (Some(node), Some(root)) = (node, agreement.claim.holder) {
            let outcome = self.is_leader().then(|| node.broadcast(&mut data, root));
            self.table.share_outcome(&self.with_double_deadline(), outcome).map_err(other_error)??;
            if agreement.holder.is_none() {
                self.group.broadcast::<u8>(&mut data.bytes, 0).map_err(other_error)?;
            }
        }
        Ok(Some(data))
    }

    /// Reduces to the leader of each node, then between the leaders. Divides a mean and rounds 16-bit elements once, at
    /// the end.
    fn reduce_over_nodes(
        &self,
        node: &Node,
        agreement: &Agreement,
        op: ReduceOp,
        data: TensorData,
    ) -> Result<Option<TensorData>, CollectiveError> {
        let dtype = data.dtype;
        let partial = if op == ReduceOp::Mean { ReduceOp::Sum } else { op };
        let mut wide = widen(data);
        reduce(&self.group, &mut wide, partial, 0).map_err(other_error)?;
        let outcome = self.is_leader().then(|| match agreement.claim.holder {
            Some(root) => node.reduce(&mut wide, partial, root),
            None => node.all_reduce(&mut wide, partial),
        });
        let outcome = self.table.share_outcome(&self.with_double_deadline(), outcome).map_err(other_error)?;
        outcome?;
        if op == ReduceOp::Mean && self.is_leader() {
            divide(&mut wide, agreement.claim.devices);
        }
        let mut data = narrow(wide, dtype);
        // On the root's node, all peers get the result, and all but the root drop it: they are threads.
        if agreement.claim.holder.is_none() || agreement.holder.is_some() {
            self.group.broadcast::<u8>(&mut data.bytes, 0).map_err(other_error)?;
        }
        let mine = agreement.claim.holder.is_none() || agreement.holder == Some(self.rank);
        Ok(mine.then_some(data))
    }

    /// Whether this peer is its node's leader, which communicates with the other nodes.
    fn is_leader(&self) -> bool {
        self.rank == 0
    }

    /// A handle with twice the deadline, for waits for the leader: its own wait for the other nodes begins a little
    /// later.
    fn with_double_deadline(&self) -> Group {
        self.group.with_deadline(self.group.deadline() * 2)
    }
}
