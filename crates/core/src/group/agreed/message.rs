//! How two ranks agree on a message whose data the group does not carry.

use crate::group::core::Core;
use crate::group::execute::Task;
use crate::group::record::CallSite;
use crate::group::request::Request;
use crate::group::turn::Turn;
use crate::sync::Deadline;
use crate::types::{Call, DType, Error, Operation, Site};

/// A rank, and what goes to it or comes from it.
pub(super) type Direction = Option<(usize, Call)>;

pub(super) fn message_name(outgoing: Direction, incoming: Direction) -> &'static str {
    match (outgoing, incoming) {
        (Some(_), Some(_)) => "exchange",
        (Some(_), None) => "send",
        (None, _) => "recv",
    }
}

/// Exchanges calls and words with the peers of a message. Returns its sequence number and the word that came in.
pub(super) fn agree_on_message(
    core: &Core,
    turn: &Turn<'_>,
    (outgoing, incoming): (Direction, Direction),
    word: u64,
    deadline: &Deadline,
    at: CallSite,
) -> Result<(u64, u64), Error> {
    const BYTES: usize = Site::BYTES + size_of::<u64>();
    let tag = |direction: Direction| direction.map(|(_, call)| Site { sequence: 0, call }.to_bytes());
    let (mut sent, mut received) = ([0; BYTES], [0; BYTES]);
    if let Some(tag) = tag(outgoing) {
        sent[..Site::BYTES].copy_from_slice(&tag);
        sent[Site::BYTES..].copy_from_slice(&word.to_le_bytes());
    }
    // Those in both directions have no number: the two peers may count differently.
    let operation = if outgoing.is_some() && incoming.is_some() { Operation::Exchange } else { Operation::Send };
    let request = Request::new(operation, DType::U8).part_of("a message between devices");
    let task = Task::Message {
        outgoing: outgoing.map(|(to, _)| (to, &sent[..])),
        incoming: incoming.map(|(from, _)| (from, &mut received[..])),
    };
    let outer = outgoing.or(incoming).map(|(_, call)| call);
    let sequence = core.run_for(turn, outer, request.call(BYTES), task, deadline, at)?;
    let Some((from, call)) = incoming else { return Ok((sequence, 0)) };
    let (found, word) = (received.first_chunk(), received.last_chunk().copied());
    if tag(incoming).as_ref() == found {
        return Ok((sequence, u64::from_le_bytes(word.unwrap_or_default())));
    }
    let found = found.and_then(Site::from_bytes).map(|site| (from, site.call));
    let mut calls: Vec<_> = found.into_iter().chain([(core.rank(), call)]).collect();
    calls.sort_by_key(|(rank, _)| *rank);
    Err(core.abort(Error::Mismatch { sequence, calls, note: String::new() }))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::group::Group;
    use crate::group::agreed::AgreedOperations;

    /// Sends a word around a ring of `n` ranks, in an exchange, or in pairs from even to odd ranks. Returns the words
    /// that `run` got. The call depends on the rank.
    fn pass(
        n: usize,
        in_ring: bool,
        count: impl Fn(usize) -> usize + Copy + Send + 'static,
    ) -> Vec<Result<u64, Error>> {
        let ranks = Group::threads(n).unwrap().into_iter().map(|group| {
            thread::spawn(move || {
                let rank = group.rank();
                let operation = if in_ring { Operation::Exchange } else { Operation::Send };
                let call = |from: usize| Call::new(operation, DType::F32, count(from));
                let (mut to, mut from) = (Some((rank + 1) % n), Some((rank + n - 1) % n));
                if !in_ring {
                    (to, from) = (to.filter(|_| rank % 2 == 0), from.filter(|_| rank % 2 == 1));
                }
                let outgoing = to.map(|to| (to, call(rank)));
                let incoming = from.map(|from| (from, if in_ring { call(from) } else { call(rank) }));
                let prepare = move || Ok(((), 100 + rank as u64));
                let started = group.start_agreed_message(outgoing, incoming, prepare, |(), word, _, _| Ok(word))?;
                let mut result = 0;
                started.wait(|word, _| {
                    result = word;
                    Ok(())
                })?;
                Ok(result)
            })
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    }

    #[test]
    fn messages_bring_the_word_of_the_sender() {
        assert_eq!(pass(3, true, |rank| 5 + rank), [Ok(102), Ok(100), Ok(101)]);
        assert_eq!(pass(2, true, |rank| 5 + rank), [Ok(101), Ok(100)]);
        assert_eq!(pass(4, false, |rank| 5 + rank / 2), [Ok(0), Ok(100), Ok(0), Ok(102)]);
    }

    #[test]
    fn a_message_of_another_call_is_a_mismatch_at_the_receiver() {
        let results = pass(2, false, |rank| 5 + rank);
        let call = |count| Call::new(Operation::Send, DType::F32, count);
        let calls = vec![(0, call(5)), (1, call(6))];
        assert_eq!(results[1], Err(Error::Mismatch { sequence: 0, calls, note: String::new() }));
    }

    #[test]
    fn messages_to_the_caller_itself_or_to_no_rank_are_refused_and_the_group_stays_usable() {
        let groups = Group::threads(2).unwrap().into_iter().map(|group| {
            thread::spawn(move || {
                for peer in [group.rank(), 2] {
                    let to = Some((peer, Call::new(Operation::Send, DType::F32, 1)));
                    let refused = group.start_agreed_message(to, None, || Ok(((), 0)), |(), _, _, _| Ok(())).map(drop);
                    assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
                }
                group.barrier()
            })
        });
        assert!(groups.collect::<Vec<_>>().into_iter().all(|rank| rank.join().unwrap().is_ok()));
    }
}
