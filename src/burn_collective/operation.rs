//! Operations: first all peers agree on what they do, then the data moves.

use burn::tensor::backend::Backend;
use burn::tensor::{Float, TensorData, TensorPrimitive};

use super::cargo::Cargo;
use super::claim::{Call, Claim, Claimed, complete};
use super::data::{all_reduce, divide, empty, narrow, reduce, widen};
use super::error::CollectiveError;
use super::names::PeerId;
use super::nodes::Node;
use super::session::{Device, Seat, in_words, session};
use crate::tensor::operation::carry;
use bonfire_core::{Error, Group, ReduceOp};

/// Runs `call` with the tensor that the peer brings, if it brings one. Returns the result, where the peer gets one, and
/// the peer's device. A peer that could not read its tensor takes part, so that the others learn of it.
pub(super) fn run<B: Backend>(
    peer: PeerId,
    call: Call,
    brought: Result<Option<Cargo<B>>, CollectiveError>,
) -> Result<(Option<Cargo<B>>, Device), CollectiveError> {
    let session = session::<B>();
    // Between nodes tensors travel on the host. They are read before the peers agree, so that all learn of a failure.
    let brought = match brought {
        Ok(Some(Cargo::Kept(tensor))) if session.seat(peer).is_ok_and(|seat| seat.node.is_some()) => {
            Cargo::read(tensor).map(Some)
        }
        brought => brought,
    };
    let claim = claim(peer, call, &brought);
    let mut data = brought.unwrap_or_default();
    loop {
        let seat = session.seat(peer)?;
        let mut turn = seat.table.turn(seat.rank)?;
        match seat.agree(&mut turn, claim.clone()).map_err(in_words)? {
            Some(agreement) => {
                let data = seat.carry_out(agreement?, data.take())?;
                return Ok((data, seat.device.clone()));
            }
            // Peers came or went: the operation takes place among those that are there now.
            None => session.leave_table(&seat.table)?,
        }
    }
}

fn claim<B: Backend>(peer: PeerId, call: Call, brought: &Result<Option<Cargo<B>>, CollectiveError>) -> Claimed {
    let data = brought.as_ref().map_err(CollectiveError::clone)?;
    let holds = match call {
        Call::Broadcast => data.is_some(),
        Call::Reduce(_, root) => root == peer,
        Call::AllReduce(_) | Call::Parameters(_) => false,
    };
    let tensor = data.as_ref().map(Cargo::description);
    Ok(Claim { call, tensor, devices: 1, holder: holds.then_some(0) })
}

/// What all peers are about to do.
struct Agreement {
    claim: Claim,
    /// Which peer of this node has the root or the tensor.
    holder: Option<usize>,
}

impl Seat {
    /// `None` if the node's peers did not come together; else whether all peers agree.
    fn agree(&self, turn: &mut u64, claim: Claimed) -> Result<Option<Result<Agreement, CollectiveError>>, Error> {
        let Some(ours) = self.table.merge(self.rank, turn, claim, self.group.deadline()) else { return Ok(None) };
        let holder = ours.as_ref().ok().and_then(|claim| claim.holder);
        let all = match &self.node {
            None => ours,
            Some(node) => {
                let agreed = self.leads().then(|| node.merge(ours));
                self.table.share_agreed(&self.patient(), agreed)?
            }
        };
        Ok(Some(all.and_then(complete).map(|claim| Agreement { claim, holder })))
    }

    fn carry_out<B: Backend>(
        &self,
        agreement: Agreement,
        cargo: Option<Cargo<B>>,
    ) -> Result<Option<Cargo<B>>, CollectiveError> {
        match (agreement.claim.call, cargo, &self.node) {
            (Call::AllReduce(op), Some(Cargo::Kept(tensor)), None) => {
                let tensor = TensorPrimitive::Float(tensor);
                let reduced = carry::all_reduce::<B, Float>((&self.group).into(), tensor, op).map_err(in_words)?;
                Ok(Some(Cargo::Kept(reduced.tensor())))
            }
            (_, cargo, _) => {
                let data = cargo.map(Cargo::into_host).transpose()?;
                Ok(self.carry_out_on_host(agreement, data)?.map(Cargo::Host))
            }
        }
    }

    fn carry_out_on_host(
        &self,
        agreement: Agreement,
        data: Option<TensorData>,
    ) -> Result<Option<TensorData>, CollectiveError> {
        match (agreement.claim.call, data, &self.node) {
            (Call::Parameters(_), ..) => Ok(None),
            (Call::AllReduce(op), Some(mut data), None) => {
                all_reduce(&self.group, &mut data, op).map_err(in_words)?;
                Ok(Some(data))
            }
            (Call::Reduce(op, _), Some(mut data), None) => {
                let root = agreement.holder.ok_or(CollectiveError::RegisterNotFirstOperation)?;
                reduce(&self.group, &mut data, op, root).map_err(in_words)?;
                Ok((self.rank == root).then_some(data))
            }
            (Call::AllReduce(op) | Call::Reduce(op, _), Some(data), Some(node)) => {
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
            self.group.broadcast::<u8>(&mut data.bytes, root).map_err(in_words)?;
        }
        if let (Some(node), Some(root)) = (node, agreement.claim.holder) {
            let outcome = self.leads().then(|| node.broadcast(&mut data, root));
            self.table.share_outcome(&self.patient(), outcome).map_err(in_words)??;
            if agreement.holder.is_none() {
                self.group.broadcast::<u8>(&mut data.bytes, 0).map_err(in_words)?;
            }
        }
        Ok(Some(data))
    }

    /// Peers to their node's first, which reduces with those of the other nodes. The mean is divided and 16-bit elements
    /// are rounded once, at the end.
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
        reduce(&self.group, &mut wide, partial, 0).map_err(in_words)?;
        let outcome = self.leads().then(|| match agreement.claim.holder {
            Some(root) => node.reduce(&mut wide, partial, root),
            None => node.all_reduce(&mut wide, partial),
        });
        let outcome = self.table.share_outcome(&self.patient(), outcome).map_err(in_words)?;
        outcome?;
        if op == ReduceOp::Mean && self.leads() {
            divide(&mut wide, agreement.claim.devices);
        }
        let mut data = narrow(wide, dtype);
        // A root's result goes to all peers of its node: threads, of which the others drop it.
        if agreement.claim.holder.is_none() || agreement.holder.is_some() {
            self.group.broadcast::<u8>(&mut data.bytes, 0).map_err(in_words)?;
        }
        let mine = agreement.claim.holder.is_none() || agreement.holder == Some(self.rank);
        Ok(mine.then_some(data))
    }

    /// Whether this peer talks to the other nodes.
    fn leads(&self) -> bool {
        self.rank == 0
    }

    /// For waits that end when the first peer, whose own deadline began a little later, has heard from the other nodes.
    fn patient(&self) -> Group {
        self.group.with_deadline(self.group.deadline() * 2)
    }
}
