//! Claims: what each peer is about to do, exchanged and compared before an operation runs.

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use super::error::{CollectiveError, GlobalCollectiveError};
use super::names::PeerId;
use bonfire_core::ReduceOp;

/// The operation that a peer calls.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum CollectiveCall {
    AllReduce(ReduceOp),
    Reduce(ReduceOp, PeerId),
    Broadcast,
    /// Agreement on the parameters whose gradients are reduced next, by a digest of their ids. Moves no data.
    Parameters(u64),
}

/// What one peer, or all peers of a node, are about to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Claim {
    pub call: CollectiveCall,
    /// Shape and element type of the tensor, if there is one.
    pub tensor: Option<(Vec<usize>, DType)>,
    /// The number of peers that the claim stands for.
    pub devices: usize,
    /// The index, among the merged claims, of the one with the root of a reduction or the tensor of a broadcast.
    pub holder: Option<usize>,
}

/// A claim, or the error of its peers, which then becomes the error of all peers.
pub(super) type ClaimResult = Result<Claim, CollectiveError>;

/// Decodes the claim at the start of a node's message.
pub(super) fn read(bytes: &[u8]) -> ClaimResult {
    match postcard::take_from_bytes::<ClaimResult>(bytes) {
        Ok((claim, _padding)) => claim,
        Err(_) => Err(GlobalCollectiveError::PeerSentIncoherentTensor.into()),
    }
}

/// Merges claims into one. Returns an error if they disagree. The result depends on the claims and their order only.
pub(super) fn merge(claims: impl IntoIterator<Item = ClaimResult>) -> ClaimResult {
    let claims: Vec<Claim> = claims.into_iter().collect::<Result<_, _>>()?;
    let mut merged = claims.first().cloned().ok_or(CollectiveError::LocalServerMissing)?;
    if let Some(error) = claims.iter().find_map(|claim| disagreement(&merged.call, &claim.call)) {
        return Err(error);
    }
    let differ = claims.iter().any(|claim| claim.tensor != merged.tensor);
    match merged.call {
        CollectiveCall::AllReduce(_) if differ => return Err(CollectiveError::AllReduceShapeMismatch),
        CollectiveCall::Reduce(..) if differ => return Err(CollectiveError::ReduceShapeMismatch),
        _ => {}
    }
    let mut holders = (0..claims.len()).filter(|i| claims[*i].holder.is_some());
    merged.holder = holders.next();
    if holders.next().is_some() {
        return Err(match merged.call {
            CollectiveCall::Broadcast => CollectiveError::BroadcastMultipleTensors,
            _ => CollectiveError::ReduceRootMismatch,
        });
    }
    if let (CollectiveCall::Broadcast, Some(holder)) = (merged.call, merged.holder) {
        merged.tensor = claims[holder].tensor.clone();
    }
    // Counts from other nodes are not trusted.
    let devices = claims.iter().try_fold(0usize, |sum, claim| sum.checked_add(claim.devices));
    merged.devices = devices.ok_or(GlobalCollectiveError::PeerSentIncoherentTensor)?;
    Ok(merged)
}

/// Checks that the merged claim of all peers has the root or the tensor that its operation needs.
pub(super) fn check_complete(claim: Claim) -> ClaimResult {
    match claim.call {
        CollectiveCall::Broadcast if claim.holder.is_none() => Err(CollectiveError::BroadcastNoTensor),
        CollectiveCall::Reduce(..) if claim.holder.is_none() => Err(CollectiveError::RegisterNotFirstOperation),
        _ => Ok(claim),
    }
}

fn disagreement(one: &CollectiveCall, other: &CollectiveCall) -> Option<CollectiveError> {
    use CollectiveCall::*;
    match (one, other) {
        _ if one == other => None,
        (Reduce(op, _), Reduce(other, _)) if op == other => Some(CollectiveError::ReduceRootMismatch),
        (Parameters(_), Parameters(_)) => Some(CollectiveError::AllReduceShapeMismatch),
        (Reduce(..) | Broadcast, Reduce(..) | Broadcast) => Some(CollectiveError::ReduceOperationMismatch),
        _ => Some(CollectiveError::AllReduceOperationMismatch),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(call: CollectiveCall, len: Option<usize>, holder: Option<usize>) -> ClaimResult {
        Ok(Claim { call, tensor: len.map(|len| (vec![len], DType::F32)), devices: 1, holder })
    }

    #[test]
    fn equal_claims_merge_to_one() {
        let root = CollectiveCall::Reduce(ReduceOp::Sum, PeerId(1));
        let node = |holder| merge([claim(root, Some(4), None), claim(root, Some(4), holder)]);
        assert_eq!(node(Some(0)).unwrap().holder, Some(1));
        let all = merge([node(None), node(None), node(Some(0))]).unwrap();
        assert_eq!((all.devices, all.holder), (6, Some(2)));
        assert_eq!(check_complete(merge([node(None)]).unwrap()), Err(CollectiveError::RegisterNotFirstOperation));
        assert_eq!(merge([node(Some(0)), node(Some(0))]), Err(CollectiveError::ReduceRootMismatch));
    }

    #[test]
    fn a_broadcast_takes_the_shape_of_its_only_tensor() {
        let with = |len: usize| claim(CollectiveCall::Broadcast, Some(len), Some(0));
        let without = || claim(CollectiveCall::Broadcast, None, None);
        let merged = merge([without(), with(3)]).unwrap();
        assert_eq!((merged.holder, merged.tensor), (Some(1), Some((vec![3], DType::F32))));
        assert_eq!(merge([with(3), without(), with(3)]), Err(CollectiveError::BroadcastMultipleTensors));
        assert_eq!(merge([without(), without()]).and_then(check_complete), Err(CollectiveError::BroadcastNoTensor));
    }

    #[test]
    fn fuzz_claims() {
        let calls = [
            CollectiveCall::AllReduce(ReduceOp::Mean),
            CollectiveCall::Reduce(ReduceOp::Sum, PeerId(300)),
            CollectiveCall::Broadcast,
        ];
        let mut claims: Vec<_> =
            calls.into_iter().flat_map(|call| [None, Some(0)].map(|h| claim(call, Some(7), h))).collect();
        claims.extend([
            claim(CollectiveCall::Parameters(u64::MAX), None, None),
            Err(CollectiveError::Other("no".into())),
        ]);
        let seeds = claims.iter().map(|claim| postcard::to_stdvec(claim).unwrap());
        bonfire_testing::fuzz::fuzz("claim", seeds, |bytes| {
            let read = read(bytes);
            for ours in &claims {
                let merged = merge([ours.clone(), read.clone()]);
                // A merged claim has the properties of one of its claims.
                let Ok(merged) = merged else { continue };
                let (Ok(ours), Ok(theirs)) = (ours, &read) else { panic!("an error in a claim is the error of all") };
                assert!(ours.call == merged.call && theirs.call == merged.call);
                assert!(merged.devices >= theirs.devices && merged.holder.is_none_or(|holder| holder < 2));
                assert!([&ours.tensor, &theirs.tensor].contains(&&merged.tensor));
            }
            read.is_ok_and(|claim| {
                assert_eq!(super::read(&postcard::to_stdvec::<ClaimResult>(&Ok(claim.clone())).unwrap()), Ok(claim));
                true
            })
        });
    }

    #[test]
    fn an_error_in_one_claim_is_the_error_of_all() {
        let failed = Err(CollectiveError::Other("no".into()));
        assert_eq!(merge([claim(CollectiveCall::Broadcast, None, None), failed.clone()]), failed);
    }
}
