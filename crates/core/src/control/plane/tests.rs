//! Control threads without sockets: frames and events are delivered by hand, in a star in an order that the test draws.

use bonfire_testing::transport::Random;

use super::*;
use crate::control::message::Goodbye;
use crate::types::{Call, DType, Error, Fault, Operation};

/// What a rank does next, and in which operation.
#[derive(Clone, Copy)]
enum Position {
    Begins(u64),
    Waits(u64),
}

impl Position {
    /// Whether the rank has begun this operation.
    fn is_past(self, begin: u64) -> bool {
        match self {
            Position::Begins(sequence) => sequence > begin,
            Position::Waits(sequence) => sequence >= begin,
        }
    }
}

/// The control thread of a rank in a mesh of `n` in which no message has arrived.
fn control((rank, n): (usize, usize), connections: Vec<Connection>) -> Control {
    let timeout = HeartbeatTimeout { first: Duration::from_secs(5), later: Duration::from_secs(5) };
    Control {
        identity: Identity { secret: None, session: 0, rank, world_size: n },
        addresses: vec![SocketAddr::from(([127, 0, 0, 1], 0)); n],
        status: Arc::new(GroupStatus::new(n).unwrap()),
        connections,
        detector: FailureDetector::new(n, timeout, Duration::ZERO),
        events: channel(1).0,
        writing: JoinSet::new(),
        dials: JoinSet::new(),
        opened: 0,
        peer_events: unbounded_channel().0,
        greeted: vec![false; n],
        elsewhere: vec![false; n],
        star: None,
    }
}

struct Network {
    ranks: Vec<Control>,
    /// Receiver, sender, and the frames in flight between them.
    links: Vec<(usize, usize, UnboundedReceiver<Frame>)>,
    /// By rank: frames received so far.
    received: Vec<usize>,
    random: Random,
}

impl Network {
    fn star(n: usize, seed: u64) -> Network {
        let mut links = Vec::new();
        let mut connection = |from: usize, to: usize| {
            // Rank 0 is connected to all ranks.
            if from == to || from != 0 && to != 0 {
                return Connection::Absent;
            }
            let (frames, queue) = unbounded_channel();
            links.push((to, from, queue));
            Connection::Open(Writer::new(frames, 0))
        };
        let control = |rank: usize| {
            let connections = (0..n).map(|peer| connection(rank, peer)).collect();
            // No rank is new, so that only the frames of the questions are counted.
            Control { greeted: vec![true; n], star: Some(Star::new(n)), ..control((rank, n), connections) }
        };
        let ranks = (0..n).map(control).collect();
        Network { ranks, links, received: vec![0; n], random: Random(seed) }
    }

    fn below(&mut self, end: usize) -> usize {
        (self.random.next() >> 8) as usize % end
    }

    fn begin(&mut self, rank: usize, site: Site) {
        for peer in self.ranks[rank].status.begin(&site).unwrap() {
            self.ranks[rank].handle_outgoing(ControlRequest::Called(peer, site));
        }
    }

    fn stall(&mut self, rank: usize, site: Site) {
        self.ranks[rank].handle_outgoing(ControlRequest::Calling(site));
    }

    /// Delivers a frame. Returns whether there was one.
    fn deliver(&mut self) -> bool {
        let (first, count) = (self.below(self.links.len()), self.links.len());
        for i in 0..count {
            let (to, from, queue) = &mut self.links[(first + i) % count];
            if let Ok(frame) = queue.try_recv() {
                self.received[*to] += 1;
                self.ranks[*to].handle_frame(*from, frame);
                return true;
            }
        }
        false
    }

    /// Delivers all frames, until rank 0 has nothing more to send.
    fn settle(&mut self) {
        loop {
            while self.deliver() {}
            if self.ranks[0].updates_due().is_none() {
                return;
            }
            self.ranks[0].send_updates();
        }
    }

    /// The calls of all ranks in this operation, as far as `rank` knows.
    fn known(&self, rank: usize, own: Site) -> Vec<Option<Call>> {
        self.ranks[rank].status.calls(rank, own.sequence, own.call)
    }
}

fn site(sequence: u64, count: usize) -> Site {
    Site { sequence, call: Call::new(Operation::AllReduce, DType::F32, count) }
}

/// A rank leaves in order after it has begun so many collectives, and all ranks hear of it.
fn leaves(network: &mut Network, rank: usize, begun: u64) {
    let goodbye = Message::Goodbye(Goodbye { panicked: false, begun });
    network.ranks[rank].leave(&goodbye);
    network.settle();
    if rank == 0 {
        assert!(!network.ranks[0].must_linger(), "all have nothing more to relay");
        network.ranks[0].fan_out(&Frame::Own(goodbye), None);
        network.settle();
    }
}

#[test]
fn ranks_that_rank_0_has_left_connect_to_each_other_only_if_one_waits() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut network = Network::star(200, 1);
    leaves(&mut network, 5, 0);
    leaves(&mut network, 0, 1);
    let pending = |rank: &Control| {
        rank.connections.iter().filter(|connection| matches!(connection, Connection::Pending(_))).count()
    };
    for rank in network.ranks.iter_mut().filter(|rank| ![0, 5].contains(&rank.rank())) {
        // They find that ranks have left, which is no news, and go on for longer than any timeout.
        for left in [0, 5] {
            let error = Error::Left { site: site(0, 1), rank: left, note: String::new() };
            rank.handle_outgoing(ControlRequest::Failed(error, 0));
        }
        (0..100).for_each(|_| rank.tick());
        assert!(rank.status.has_left(0) && pending(rank) == 0, "rank {}", rank.rank());
        assert!(!rank.must_linger());
    }
    let _within = runtime.enter();
    network.ranks[70].handle_outgoing(ControlRequest::Meet);
    assert_eq!(pending(&network.ranks[70]), 197);
    // It knocks at the higher ranks. They dial no other.
    network.ranks[71].knocked(70);
    assert!(matches!(network.ranks[71].connections[70], Connection::Pending(_)));
    assert_eq!(pending(&network.ranks[71]), 1);
}

/// Whichever rank leaves, and whether a rank is in the operation that it misses or calls that later.
#[test]
fn a_collective_that_a_rank_which_left_has_not_begun_fails_at_once_and_one_that_it_has_goes_on() {
    for left in [0, 3] {
        let mut network = Network::star(6, 1);
        let (completed, missed) = (site(0, 1), site(1, 1));
        for rank in 0..6 {
            network.begin(rank, completed);
        }
        for rank in [1, 2] {
            network.begin(rank, missed);
        }
        let begun = network.ranks[left].status.begun();
        assert_eq!(begun, 1);
        leaves(&mut network, left, begun);
        for rank in (0..6).filter(|rank| *rank != left) {
            let status = &network.ranks[rank].status;
            let named = |fault: Option<Fault>| matches!(fault, Some(Fault::Left { peer }) if peer == left);
            if [1, 2].contains(&rank) {
                // The thread in the operation, whichever rank it waits for, sees this and need ask no other.
                assert!(named(status.failure_in(&missed)), "rank {rank}: {:?}", status.failure());
            } else {
                assert!(status.failure().is_none() && status.absence_in(4, &completed).is_none(), "rank {rank}");
                assert!(named(status.begin(&missed).err()), "rank {rank}");
            }
        }
    }
}

/// Ranks that failed because of another leave, too. They have begun what that one missed.
#[test]
fn of_ranks_that_left_one_that_has_not_begun_the_collective_is_the_cause() {
    let status = GroupStatus::new(5).unwrap();
    status.mark_left(0, 3);
    // Of the two that have not begun it, the one that left after fewer collectives, and not the lowest.
    status.mark_left(3, 2);
    status.mark_left(4, 1);
    status.mark_left(2, u64::MAX);
    for peer in [0, 2, 3, 4] {
        assert!(matches!(status.absence_in(peer, &site(2, 1)), Some(Fault::Left { peer: 4 })));
    }
    assert!(matches!(status.absence_in(0, &site(0, 1)), Some(Fault::Left { peer: 0 })));
    let message = Site { sequence: 1, call: Call::new(Operation::Send, DType::U8, 1) };
    assert!(matches!(status.absence_in(2, &message), Some(Fault::Left { peer: 2 })));
}

#[test]
fn questions_of_all_ranks_cost_a_few_messages_for_each() {
    const RANKS: usize = 256;
    for seed in 1..=3 {
        let mut network = Network::star(RANKS, seed);
        let own = site(0, 1);
        for rank in 0..RANKS - 1 {
            network.begin(rank, own);
        }
        // A rank asks again in each message and for each peer that lets it wait.
        for _ in 0..3 {
            for rank in 0..RANKS - 1 {
                network.stall(rank, own);
            }
            network.settle();
        }
        for rank in 0..RANKS - 1 {
            let missing: Vec<_> = network.known(rank, own).iter().map(Option::is_none).collect();
            assert!(missing[RANKS - 1] && missing.iter().filter(|missing| **missing).count() == 1, "rank {rank}");
        }
        network.begin(RANKS - 1, own);
        network.settle();
        for rank in 0..RANKS - 1 {
            assert_eq!(network.known(rank, own), vec![Some(own.call); RANKS], "rank {rank}");
        }
        // To each other rank a question, and twice the calls that it does not know. From it a question, or an answer,
        // or both.
        let to_others: usize = network.received[1..].iter().sum();
        assert!(network.received[0] <= 2 * RANKS && to_others <= 4 * RANKS, "{} and {to_others}", network.received[0]);
    }
}

#[test]
fn ranks_that_wait_learn_which_ranks_have_begun_and_what_they_called() {
    for seed in 1..=3_000 {
        let mut network = Network::star(2 + seed as usize % 5, seed);
        let n = network.ranks.len();
        // The ranks may disagree in the last operation.
        let last = network.below(4) as u64;
        let counts: Vec<_> = (0..n).map(|_| network.below(8) / 7).collect();
        let own = |rank: usize, sequence| site(sequence, if sequence == last { counts[rank] } else { 0 });
        let agree = counts.iter().all(|count| *count == counts[0]);
        let mut positions = vec![Position::Begins(0); n];
        let mut asked = vec![None; n];
        for _ in 0..network.below(40 * n) {
            match network.below(4) {
                0 => {
                    network.deliver();
                }
                1 => network.ranks[0].send_updates(),
                _ => {
                    let rank = network.below(n);
                    match positions[rank] {
                        Position::Begins(sequence) if sequence > last => {}
                        Position::Begins(sequence) => {
                            network.begin(rank, own(rank, sequence));
                            positions[rank] = Position::Waits(sequence);
                        }
                        Position::Waits(sequence) => {
                            let begun = positions.iter().all(|other| other.is_past(sequence));
                            if begun && (sequence < last || agree) && network.below(2) == 0 {
                                positions[rank] = Position::Begins(sequence + 1);
                            } else {
                                network.stall(rank, own(rank, sequence));
                                asked[rank] = Some(sequence);
                            }
                        }
                    }
                }
            }
        }
        network.settle();
        for rank in 0..n {
            let Position::Waits(sequence) = positions[rank] else { continue };
            if asked[rank] != Some(sequence) {
                continue;
            }
            let begun = |other: &usize| positions[*other].is_past(sequence);
            let calls: Vec<_> = (0..n).map(|other| begun(&other).then(|| own(other, sequence).call)).collect();
            assert_eq!(network.known(rank, own(rank, sequence)), calls, "seed {seed}, rank {rank}");
        }
    }
}

/// Only rank 0 judges the others, and each of them judges rank 0. The victim sends its first message, with which the
/// group begins for it, and is stopped at once. All ranks begin the group later than that.
#[test]
fn a_rank_that_is_stopped_before_all_have_begun_is_lost_after_the_shorter_timeout() {
    // One that loses rank 0 dials the others.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _within = runtime.enter();
    for (judge, victim) in [(0, 1), (2, 0)] {
        let mut network = Network::star(4, 1);
        network.ranks.iter_mut().for_each(|rank| rank.greeted = vec![false; 4]);
        let rank = &mut network.ranks[judge];
        let long = HeartbeatTimeout { first: Duration::from_secs(3600), later: Duration::from_secs(5) };
        rank.detector = FailureDetector::new(4, long, Duration::ZERO);
        // As the task that reads the connection records it.
        let hears = |rank: &mut Control, peer: usize, frame: Frame| {
            rank.status.record_activity(peer);
            rank.handle_frame(peer, frame);
        };
        hears(rank, victim, Frame::Own(Message::Heartbeat));
        (0..40).for_each(|_| rank.tick());
        assert!(rank.status.failure().is_none(), "ranks may connect for so long");
        if judge == 0 {
            (2..4).for_each(|peer| hears(rank, peer, Frame::Own(Message::Heartbeat)));
        } else {
            // It has heard no `Begun` from rank 0, but has completed a collective.
            (0..2).for_each(|sequence| drop(rank.status.begin(&site(sequence, 1)).unwrap()));
        }
        let lost = (0..10_000).find(|_| {
            rank.tick();
            (2..4).for_each(|peer| rank.status.record_activity(peer));
            rank.status.failure().is_some()
        });
        assert!(matches!(rank.status.failure(), Some((Fault::Lost { peer, .. }, _)) if peer == victim));
        assert!(lost.is_some_and(|ticks| ticks <= 20), "{lost:?}");
    }
}

/// What happens to a rank's connection to rank 0 in a group that survivors have agreed on.
#[derive(Clone, Copy)]
enum Happens {
    /// Its first message arrives.
    Greets,
    /// It says that it may go on in another group.
    IsElsewhere,
    Closes,
    /// Nothing arrives from it for too long.
    IsSilent,
}

/// Returns what rank 1 of two tells `shrink` of rank 0.
fn told(events: &[Happens]) -> Vec<&'static str> {
    let (peer_events, mut told) = unbounded_channel();
    let connections = vec![Connection::Open(Writer::new(unbounded_channel().0, 0)), Connection::Absent];
    let mut rank = Control { peer_events, ..control((1, 2), connections) };
    for event in events {
        match event {
            Happens::Greets => rank.handle_event(0, Event::Received(0, Frame::Own(Message::Heartbeat))),
            Happens::IsElsewhere => rank.handle_event(0, Event::Received(0, Frame::Own(Message::Elsewhere))),
            Happens::Closes => rank.handle_event(0, Event::Closed(0, "it was closed".into())),
            Happens::IsSilent => {
                while !rank.detector.check(0, &rank.status, true) {}
                rank.declare_lost(0);
            }
        }
    }
    assert!(rank.status.failure().is_some(), "operations need not wait for it");
    std::iter::from_fn(|| told.try_recv().ok())
        .map(|(_, event)| match event {
            PeerEvent::Closed => "closed",
            PeerEvent::Silent => "silent",
            event => panic!("{event:?}"),
        })
        .collect()
}

#[test]
fn a_rank_that_dies_before_its_first_message_has_ended_unless_it_may_be_elsewhere() {
    use Happens::{Closes, Greets, IsElsewhere, IsSilent};
    assert_eq!(told(&[Closes]), ["closed"]);
    assert_eq!(told(&[Greets, Closes]), ["closed"]);
    assert_eq!(told(&[IsElsewhere, Closes]), ["silent"]);
    assert_eq!(told(&[IsElsewhere, IsElsewhere, Closes]), ["silent"]);
    // It learned that this group was agreed on, and followed.
    assert_eq!(told(&[IsElsewhere, Greets, Closes]), ["closed"]);
    assert_eq!(told(&[IsSilent, Closes]), ["silent", "closed"]);
    assert_eq!(told(&[IsElsewhere, IsSilent, Closes]), ["silent", "silent"]);
}
