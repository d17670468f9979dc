//! What peers say about an operation before it runs, and whether they agree.

use burn::tensor::DType;
use serde::{Deserialize, Serialize};

use super::error::{CollectiveError, GlobalCollectiveError};
use super::names::PeerId;
use bonfire_core::ReduceOp;

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Call {
    AllReduce(ReduceOp),
    Reduce(ReduceOp, PeerId),
    Broadcast,
    /// Agreement about the parameters whose gradients come next, by a digest of their ids. Moves nothing.
    Parameters(u64),
}

/// What one peer, or the peers of a node together, are about to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Claim {
    pub call: Call,
    /// Shape and element type, where a tensor is brought.
    pub tensor: Option<(Vec<usize>, DType)>,
    /// How many peers the claim stands for.
    pub devices: usize,
    /// Which of those whose claims were merged has the root of a reduction or the tensor of a broadcast.
    pub holder: Option<usize>,
}

/// A claim, or why its peers cannot go on: then nobody does.
pub(super) type Claimed = Result<Claim, CollectiveError>;

/// The claim at the beginning of what a node sent.
pub(super) fn read(bytes: &[u8]) -> Claimed {
    match postcard::take_from_bytes::<Claimed>(bytes) {
        Ok((claim, _padding)) => claim,
        Err(_) => Err(GlobalCollectiveError::PeerSentIncoherentTensor.into()),
    }
}

/// The claims of all, in their order, as one; or the same error wherever the same claims are merged.
pub(super) fn merge(claims: impl IntoIterator<Item = Claimed>) -> Claimed {
    let claims: Vec<Claim> = claims.into_iter().collect::<Result<_, _>>()?;
    let mut merged = claims.first().cloned().ok_or(CollectiveError::LocalServerMissing)?;
    if let Some(error) = claims.iter().find_map(|claim| disagreement(&merged.call, &claim.call)) {
        return Err(error);
    }
    let differ = claims.iter().any(|claim| claim.tensor != merged.tensor);
    match merged.call {
        Call::AllReduce(_) if differ => return Err(CollectiveError::AllReduceShapeMismatch),
        Call::Reduce(..) if differ => return Err(CollectiveError::ReduceShapeMismatch),
        _ => {}
    }
    let mut holders = (0..claims.len()).filter(|i| claims[*i].holder.is_some());
    merged.holder = holders.next();
    if holders.next().is_some() {
        return Err(match merged.call {
            Call::Broadcast => CollectiveError::BroadcastMultipleTensors,
            _ => CollectiveError::ReduceRootMismatch,
        });
    }
    if let (Call::Broadcast, Some(holder)) = (merged.call, merged.holder) {
        merged.tensor = claims[holder].tensor.clone();
    }
    // Other nodes' words.
    let devices = claims.iter().try_fold(0usize, |sum, claim| sum.checked_add(claim.devices));
    merged.devices = devices.ok_or(GlobalCollectiveError::PeerSentIncoherentTensor)?;
    Ok(merged)
}

/// A claim that stands for everybody must have a root or a tensor where the operation needs one.
pub(super) fn complete(claim: Claim) -> Claimed {
    match claim.call {
        Call::Broadcast if claim.holder.is_none() => Err(CollectiveError::BroadcastNoTensor),
        Call::Reduce(..) if claim.holder.is_none() => Err(CollectiveError::RegisterNotFirstOperation),
        _ => Ok(claim),
    }
}

fn disagreement(one: &Call, other: &Call) -> Option<CollectiveError> {
    use Call::*;
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

    fn claim(call: Call, len: Option<usize>, holder: Option<usize>) -> Claimed {
        Ok(Claim { call, tensor: len.map(|len| (vec![len], DType::F32)), devices: 1, holder })
    }

    #[test]
    fn equal_claims_add_up_to_one_for_all() {
        let root = Call::Reduce(ReduceOp::Sum, PeerId(1));
        let node = |holder| merge([claim(root, Some(4), None), claim(root, Some(4), holder)]);
        assert_eq!(node(Some(0)).unwrap().holder, Some(1));
        let all = merge([node(None), node(None), node(Some(0))]).unwrap();
        assert_eq!((all.devices, all.holder), (6, Some(2)));
        assert_eq!(complete(merge([node(None)]).unwrap()), Err(CollectiveError::RegisterNotFirstOperation));
        assert_eq!(merge([node(Some(0)), node(Some(0))]), Err(CollectiveError::ReduceRootMismatch));
    }

    #[test]
    fn a_broadcast_takes_the_shape_of_the_one_tensor() {
        let with = |len: usize| claim(Call::Broadcast, Some(len), Some(0));
        let without = || claim(Call::Broadcast, None, None);
        let merged = merge([without(), with(3)]).unwrap();
        assert_eq!((merged.holder, merged.tensor), (Some(1), Some((vec![3], DType::F32))));
        assert_eq!(merge([with(3), without(), with(3)]), Err(CollectiveError::BroadcastMultipleTensors));
        assert_eq!(merge([without(), without()]).and_then(complete), Err(CollectiveError::BroadcastNoTensor));
    }

    #[test]
    fn fuzz_claims() {
        let calls = [Call::AllReduce(ReduceOp::Mean), Call::Reduce(ReduceOp::Sum, PeerId(300)), Call::Broadcast];
        let mut claims: Vec<_> =
            calls.into_iter().flat_map(|call| [None, Some(0)].map(|h| claim(call, Some(7), h))).collect();
        claims.extend([claim(Call::Parameters(u64::MAX), None, None), Err(CollectiveError::Other("no".into()))]);
        let seeds = claims.iter().map(|claim| postcard::to_stdvec(claim).unwrap());
        bonfire_testing::fuzz::fuzz("claim", seeds, |bytes| {
            let read = read(bytes);
            for ours in &claims {
                let merged = merge([ours.clone(), read.clone()]);
                // Nodes merge the same claims in the same order, and what comes out is what some of them hold.
                let Ok(merged) = merged else { continue };
                let (Ok(ours), Ok(theirs)) = (ours, &read) else { panic!("a failure is everybody's") };
                assert!(ours.call == merged.call && theirs.call == merged.call);
                assert!(merged.devices >= theirs.devices && merged.holder.is_none_or(|holder| holder < 2));
                assert!([&ours.tensor, &theirs.tensor].contains(&&merged.tensor));
            }
            read.is_ok_and(|claim| {
                assert_eq!(super::read(&postcard::to_stdvec::<Claimed>(&Ok(claim.clone())).unwrap()), Ok(claim));
                true
            })
        });
    }

    #[test]
    fn one_failure_is_everybodys() {
        let failed = Err(CollectiveError::Other("no".into()));
        assert_eq!(merge([claim(Call::Broadcast, None, None), failed.clone()]), failed);
    }
}
