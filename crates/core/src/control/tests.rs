use std::time::Duration;

use super::connection::Frame;
use super::invitation::{Endpoint, Invitation};
use super::message::{Goodbye, Message};
use super::shrink::{Membership, ShrinkMessage};
use crate::types::{Call, DType, Error, Operation, ProgramCall, ReduceOp, Site, Whereabouts};

#[test]
fn fuzz_messages() {
    let (operation, reduction, root) = (Operation::Reduce, Some(ReduceOp::Sum), Some(1));
    let call = Call {
        operation,
        dtype: DType::F32,
        count: 1000,
        reduction,
        root,
        sizes: crate::types::Fingerprint::from_word(7),
    };
    let site = Site { call, sequence: 300 };
    let elapsed = Duration::from_millis(1500);
    let called = |function: &str| ProgramCall { function: function.into(), at: "src/main.rs:57".into() };
    let whereabouts = Whereabouts {
        calls: vec![called("sync")],
        waits: true,
        background: vec![called("Checkpoints::save_in_background")],
        last: Some(called("all_reduce")),
        since: elapsed,
        progress: "after 5 training steps".into(),
    };
    let errors = [
        Error::argument("broadcast", "no"),
        Error::Config("no".into()),
        Error::Rendezvous { rank: 1, address: "10.0.0.1:29500".into(), reason: "late".into(), elapsed },
        Error::Mismatch { sequence: 300, calls: vec![(0, call), (1, Call { count: 1001, ..call })], note: "no".into() },
        Error::Timeout { site, rank: 1, missing: vec![0, 2], elapsed, whereabouts: [(0, whereabouts.clone())].into() },
        Error::PeerLost { site, peer: 2, address: Some("10.0.0.1:1".into()), reason: "ended".into(), elapsed },
        Error::Disconnected { site, rank: 1, peer: 2, reason: "it was closed".into(), elapsed },
        Error::Left { site, rank: 3, note: "here".into() },
        Error::broken("listening", "no"),
    ];
    let mut messages = errors.map(|error| Message::Failed(error, 7)).to_vec();
    let membership = Membership { members: [0, 2, 300].into(), ended: [1].into(), attempt: 1 };
    let proposes = ShrinkMessage::Proposes(membership.clone(), Endpoint { port: 29500, key: u64::MAX });
    messages.extend(
        [proposes, ShrinkMessage::Formed(membership.clone()), ShrinkMessage::Agreed(membership)]
            .map(Message::ShrinkMessage),
    );
    let endpoint = Endpoint { port: 1, key: 7 };
    messages.push(Message::Invites(Invitation { members: vec![300, 0, 2], endpoint }));
    messages.extend([Message::Heartbeat, Message::Calling(site), Message::Called(site), Message::Locate]);
    messages.push(Message::Located(whereabouts));
    messages.extend([false, true].map(|panicked| Message::Goodbye(Goodbye { panicked, begun: 300 })));
    messages.push(Message::Elsewhere);
    let mut frames: Vec<Frame> = messages.iter().cloned().map(Frame::Own).collect();
    let message = || Message::Calling(site);
    frames.extend([None, Some(300)].map(|to| Frame::Relay { to, message: message() }));
    frames.extend([Frame::Relayed { from: 300, message: message() }, Frame::Begun, Frame::Meet, Frame::Leaves]);
    frames.push(Frame::Calls(vec![(site, vec![0, 300]), (Site { sequence: 301, ..site }, vec![1])]));
    frames.push(Frame::Through);
    frames.push(Frame::Lost { peer: 300, reason: "its connection was closed".into(), ended: true });
    bonfire_testing::fuzz::fuzz_frames("control", &frames);
}
