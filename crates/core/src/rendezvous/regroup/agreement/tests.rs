//! Simulates the agreement: messages arrive in any order that connections allow, and ranks crash, lose or leave out
//! each other, and repeat their calls, at any moment.

mod search;

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

/// What arrives on a connection, in order.
#[derive(Clone, Hash)]
enum Event {
    ShrinkMessage(ShrinkMessage),
    /// The connection ended. The flag says whether the rank has certainly ended.
    Gone(bool),
}

#[derive(Clone, Default, Hash)]
struct Node {
    agreement: Option<Agreement>,
    forming: Option<Membership>,
    dead: bool,
    /// Whether its last call ended because it is in the minority. An odd rank then calls again until others come.
    minority: bool,
    /// Set once the agreement has ended: the membership that it goes on in, if it does.
    end: Option<Option<Membership>>,
}

#[derive(Clone, Hash)]
struct World {
    nodes: Vec<Node>,
    /// The connection from one rank to another is at `from * n + to`.
    wires: Vec<VecDeque<Event>>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Begin(usize),
    Deliver(usize, usize),
    Form(usize),
    Crash(usize),
    /// The first rank loses its connection to the second.
    Lose(usize, usize),
    /// The call of this rank fails, and is repeated: what it was connecting is lost.
    Again(usize),
    /// This rank leaves out all that it waits for: they live, and have not called for too long.
    LeaveOut(usize),
}

/// The faults of a run: before which steps, and of which ranks.
#[derive(Default)]
struct Faults<'a> {
    crashes: &'a [(u16, usize)],
    losses: &'a [(u16, usize, usize)],
    again: &'a [(u16, usize)],
    hung: &'a [(u16, usize)],
}

impl World {
    fn new(n: usize) -> World {
        World { nodes: (0..n).map(|_| Node::default()).collect(), wires: (0..n * n).map(|_| VecDeque::new()).collect() }
    }

    fn n(&self) -> usize {
        self.nodes.len()
    }

    fn wire(&mut self, from: usize, to: usize) -> &mut VecDeque<Event> {
        let n = self.n();
        &mut self.wires[from * n + to]
    }

    /// Returns all possible steps except for faults.
    fn steps(&self) -> Vec<Step> {
        let n = self.n();
        let acts = |rank: &usize| !self.nodes[*rank].dead && self.nodes[*rank].end.is_none();
        let mut steps = Vec::new();
        for to in (0..n).filter(acts) {
            let node = &self.nodes[to];
            if node.agreement.is_none() {
                steps.push(Step::Begin(to));
                continue;
            }
            let heard = (0..n).filter(|from| !self.wires[from * n + to].is_empty());
            steps.extend(heard.map(|from| Step::Deliver(from, to)));
            // All members have to take part in connecting.
            let there = |membership: &Membership| {
                membership.members.iter().all(|rank| {
                    let other = &self.nodes[*rank];
                    let ready = other.agreement.as_ref().is_some_and(|agreement| agreement.ready.contains(membership));
                    !other.dead && (other.forming.as_ref() == Some(membership) || ready)
                })
            };
            if node.forming.as_ref().is_some_and(there) {
                steps.push(Step::Form(to));
            }
        }
        steps
    }

    fn take(&mut self, step: Step, cut: usize) {
        let n = self.n();
        match step {
            Step::Begin(rank) => {
                self.nodes[rank].agreement = Some(Agreement::new(rank, n));
                self.deliver_pending(rank);
            }
            Step::Deliver(from, to) => self.deliver(from, to),
            Step::Again(rank) => {
                // A proposal stands, with its listener. A second failure may hit before the listener is there.
                if self.nodes[rank].forming.take().is_some() || cut == 0 {
                    self.nodes[rank].agreement.as_mut().unwrap().renew();
                }
                self.deliver_pending(rank);
            }
            Step::LeaveOut(rank) => {
                let agreement = self.nodes[rank].agreement.as_mut().unwrap();
                let hung: Vec<usize> = agreement.stragglers().into_iter().map(|(rank, _)| rank).collect();
                agreement.leave_out(&hung);
            }
            Step::Form(rank) => {
                let membership = self.nodes[rank].forming.take().unwrap();
                self.nodes[rank].agreement.as_mut().unwrap().formed();
                self.send_to_all(rank, &ShrinkMessage::Formed(membership));
            }
            Step::Crash(rank) => {
                self.nodes[rank].dead = true;
                // Some of the messages in flight are lost.
                for to in 0..n {
                    let wire = self.wire(rank, to);
                    wire.truncate(if to % 2 == 0 { cut } else { usize::MAX });
                    wire.push_back(Event::Gone(true));
                }
            }
            Step::Lose(rank, peer) => self.wire(peer, rank).push_front(Event::Gone(false)),
        }
        if let Step::Begin(rank)
        | Step::Deliver(_, rank)
        | Step::Form(rank)
        | Step::Again(rank)
        | Step::LeaveOut(rank) = step
        {
            self.act(rank);
        }
    }

    fn deliver(&mut self, from: usize, to: usize) {
        let item = self.wire(from, to).pop_front();
        let agreement = self.nodes[to].agreement.as_mut().unwrap();
        match item {
            Some(Event::ShrinkMessage(message)) => agreement.receive(from, message),
            Some(Event::Gone(certain)) => agreement.exclude(from, certain),
            None => {}
        }
    }

    /// Delivers all that has arrived, as at the start of a call.
    fn deliver_pending(&mut self, to: usize) {
        for from in 0..self.n() {
            while !self.wire(from, to).is_empty() {
                self.deliver(from, to);
            }
        }
    }

    /// Whether the rank is in a call that has not ended.
    fn calls(&self, rank: usize) -> bool {
        let node = &self.nodes[rank];
        !node.dead && node.end.is_none() && node.agreement.is_some()
    }

    /// Runs the rank until it waits.
    fn act(&mut self, rank: usize) {
        loop {
            let next = self.nodes[rank].agreement.as_mut().unwrap().next();
            self.nodes[rank].minority = matches!(next, Next::Minority { .. });
            let end = match next {
                Next::Propose(membership) => {
                    self.nodes[rank].forming = None;
                    self.send_to_all(
                        rank,
                        &ShrinkMessage::Proposes(membership, Endpoint { port: 0, key: rank as u64 }),
                    );
                    continue;
                }
                Next::Form(endpoints) => {
                    let membership = self.nodes[rank].agreement.as_ref().unwrap().membership().clone();
                    assert!(endpoints.iter().all(|(rank, endpoint)| endpoint.key == *rank as u64));
                    assert_eq!(endpoints.len() + 1, membership.members.len());
                    self.nodes[rank].forming = Some(membership);
                    continue;
                }
                Next::Wait => return,
                Next::Minority { .. } if rank % 2 == 1 => return,
                Next::Agree(membership) => {
                    self.send_to_all(rank, &ShrinkMessage::Agreed(membership.clone()));
                    Some(membership)
                }
                Next::Excluded { .. } | Next::Minority { .. } => {
                    // Its program most likely ends.
                    (0..self.n()).for_each(|to| self.wire(rank, to).push_back(Event::Gone(true)));
                    None
                }
            };
            self.nodes[rank].end = Some(end);
            return;
        }
    }

    fn send_to_all(&mut self, rank: usize, message: &ShrinkMessage) {
        for to in (0..self.n()).filter(|to| *to != rank) {
            self.wire(rank, to).push_back(Event::ShrinkMessage(message.clone()));
        }
    }

    /// Runs to the end. `choices` picks each next step, and what is lost in a fault.
    fn run(n: usize, choices: &[u16], faults: &Faults<'_>) -> World {
        let mut world = World::new(n);
        for (at, choice) in choices.iter().copied().chain((0..).map(|i: usize| i as u16)).enumerate() {
            let now = |fault: &&(u16, usize)| usize::from(fault.0) == at;
            let cut = usize::from(choice) % 4;
            for (_, rank) in faults.crashes.iter().filter(now) {
                world.take(Step::Crash(rank % n), cut);
            }
            for (_, rank, peer) in faults.losses.iter().filter(|(when, ..)| usize::from(*when) == at) {
                if rank % n != peer % n {
                    world.take(Step::Lose(rank % n, peer % n), 0);
                }
            }
            for (_, rank) in
                faults.again.iter().filter(now).filter(|(_, rank)| world.calls(rank % n)).collect::<Vec<_>>()
            {
                world.take(Step::Again(rank % n), cut);
            }
            for (_, rank) in
                faults.hung.iter().filter(now).filter(|(_, rank)| world.calls(rank % n)).collect::<Vec<_>>()
            {
                world.take(Step::LeaveOut(rank % n), 0);
            }
            let steps = world.steps();
            if steps.is_empty() && at >= choices.len() {
                break;
            }
            if !steps.is_empty() {
                world.take(steps[usize::from(choice) % steps.len()], 0);
            }
            assert!(at < 100_000, "the agreement does not terminate");
        }
        world.check_ended();
        world
    }

    /// Checks that the agreement has ended for every live rank, or waits for others because this side is the minority.
    /// Called when no step is left.
    fn check_ended(&self) {
        for (rank, node) in self.nodes.iter().enumerate() {
            assert!(node.dead || node.end.is_some() || node.minority, "rank {rank} waits forever");
        }
    }

    /// Checks that all live ranks go on in one group that has them all, as they must if no rank was lost or left out.
    fn check_survivors(&self) {
        let mut alive = (0..self.n()).filter(|rank| !self.nodes[*rank].dead).peekable();
        if let Some(first) = alive.peek() {
            let agreed = self.nodes[*first].end.clone();
            let members = agreed.clone().flatten().expect("survivors of crashes go on").members;
            for rank in alive {
                assert_eq!(self.nodes[rank].end, agreed);
                assert!(members.contains(&rank));
            }
        }
    }

    /// Checks that at most one group goes on.
    fn check_groups(&self) {
        let ends: Vec<_> = self.nodes.iter().map(|node| node.end.clone().flatten()).collect();
        let mut going_on = Vec::new();
        for membership in ends.iter().flatten() {
            // The ranks that joined this group, and whether they would go on at its next failure.
            let joined = |rank: &usize| ends[*rank].as_ref() == Some(membership);
            let (dead, inside): (Vec<_>, Vec<_>) =
                (0..self.n()).filter(joined).partition(|rank| self.nodes[*rank].dead);
            let place = |rank: &usize| membership.members.iter().position(|member| member == rank).unwrap();
            let mut group = Agreement::new(0, membership.members.len());
            group.membership = Membership {
                members: inside.iter().map(place).collect(),
                ended: dead.iter().map(place).collect(),
                attempt: 0,
            };
            let lives = !inside.is_empty();
            if lives && group.has_quorum(&group.membership) && !going_on.contains(&membership) {
                going_on.push(membership);
            }
        }
        assert!(going_on.len() <= 1, "{going_on:?}");
        self.check_elsewhere();
    }

    /// Checks that a rank which goes on in another group than a member of its own may know has told it: its end of the
    /// other one was ready later, and then it says so on all connections that it had by then.
    fn check_elsewhere(&self) {
        let end = |rank: usize| self.nodes[rank].end.as_ref()?.as_ref();
        for own in (0..self.n()).filter_map(end) {
            for (member, other) in own.members.iter().filter_map(|member| Some((*member, end(*member)?))) {
                let ready = &self.nodes[member].agreement.as_ref().unwrap().ready;
                let place = |membership| ready.iter().position(|ready| ready == membership);
                assert!(
                    other == own || place(own).is_some_and(|own| place(other).is_some_and(|other| other > own)),
                    "rank {member} goes on in {other:?}, and others, without word of it, in {own:?}"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn survivors_agree_whatever_ranks_crash(
        n in 1..6usize,
        choices in prop::collection::vec(any::<u16>(), 200),
        crashes in prop::collection::vec((0..200u16, 0..6usize), 0..4),
        again in prop::collection::vec((0..200u16, 0..6usize), 0..6),
    ) {
        let world = World::run(n, &choices, &Faults { crashes: &crashes, again: &again, ..Faults::default() });
        world.check_survivors();
    }

    #[test]
    fn at_most_one_group_goes_on_whatever_connections_are_lost_and_ranks_are_left_out(
        n in 2..6usize,
        choices in prop::collection::vec(any::<u16>(), 200),
        crashes in prop::collection::vec((0..200u16, 0..6usize), 0..2),
        losses in prop::collection::vec((0..150u16, 0..6usize, 0..6usize), 0..12),
        again in prop::collection::vec((0..200u16, 0..6usize), 0..6),
        hung in prop::collection::vec((0..200u16, 0..6usize), 0..6),
    ) {
        let world = World::run(n, &choices, &Faults { crashes: &crashes, losses: &losses, again: &again, hung: &hung });
        world.check_groups();
    }
}

#[test]
fn of_two_halves_the_one_with_the_lowest_rank_goes_on_and_ended_ranks_count_if_others_are_silent() {
    let decides = |rank, n, silent: &[usize], ended: &[usize]| {
        let mut agreement = Agreement::new(rank, n);
        silent.iter().for_each(|peer| agreement.exclude(*peer, false));
        ended.iter().for_each(|peer| agreement.exclude(*peer, true));
        // The other members propose the same membership.
        let membership = agreement.membership().clone();
        for member in membership.members.iter().filter(|member| **member != rank) {
            agreement.receive(*member, ShrinkMessage::Proposes(membership.clone(), Endpoint { port: 1, key: 1 }));
        }
        assert_eq!(agreement.next(), Next::Propose(membership));
        !matches!(agreement.next(), Next::Minority { .. })
    };
    assert!(decides(0, 2, &[1], &[]) && !decides(1, 2, &[0], &[]));
    assert!(decides(1, 2, &[], &[0]) && decides(0, 2, &[], &[1]));
    assert!(decides(2, 5, &[0, 1], &[]) && !decides(0, 5, &[2, 3, 4], &[]));
    assert!(decides(0, 6, &[3, 4, 5], &[]) && !decides(3, 6, &[0, 1, 2], &[]) && decides(5, 6, &[], &[0, 1, 2, 3, 4]));
    // Ranks that have ended may have gone on with the silent ones, and ended there.
    assert!(!decides(2, 4, &[3], &[0, 1]) && decides(0, 4, &[3], &[1]));
}

/// The survivors' memberships after the ranks in `hung` of `n` did not call.
fn after_hang(n: usize, hung: &[usize]) -> Vec<Option<Vec<usize>>> {
    let mut world = World::new(n);
    let call = |world: &mut World, rank: usize| world.take(Step::Begin(rank), 0);
    let settle = |world: &mut World| {
        while let Some(step) = world.steps().into_iter().find(|step| !matches!(step, Step::Begin(_))) {
            world.take(step, 0);
        }
    };
    (0..n).filter(|rank| !hung.contains(rank)).for_each(|rank| call(&mut world, rank));
    settle(&mut world);
    for rank in (0..n).filter(|rank| !hung.contains(rank)) {
        if world.calls(rank) {
            world.take(Step::LeaveOut(rank), 0);
            settle(&mut world);
        }
    }
    hung.iter().for_each(|rank| call(&mut world, *rank));
    settle(&mut world);
    let members = |membership: Membership| membership.members.into_iter().collect();
    world.nodes.into_iter().map(|node| node.end.and_then(|end| end.map(members))).collect()
}

#[test]
fn a_majority_leaves_out_ranks_that_do_not_call_and_a_minority_waits_for_them() {
    assert_eq!(after_hang(3, &[1]), [Some(vec![0, 2]), None, Some(vec![0, 2])]);
    assert_eq!(after_hang(4, &[0]), [None, Some(vec![1, 2, 3]), Some(vec![1, 2, 3]), Some(vec![1, 2, 3])]);
    assert_eq!(after_hang(2, &[1]), [Some(vec![0]), None]);
    // Without rank 0 no half goes on, and all do when it comes.
    assert_eq!(after_hang(2, &[0]), vec![Some(vec![0, 1]); 2]);
    assert_eq!(after_hang(5, &[0, 1, 3]), vec![Some(vec![0, 1, 2, 3, 4]); 5]);
}

#[test]
fn a_repeated_call_connects_the_same_members_again() {
    let mut world = World::new(3);
    (0..3).for_each(|rank| world.take(Step::Begin(rank), 0));
    while let Some(step) = world.steps().into_iter().find(|step| !matches!(step, Step::Form(_))) {
        world.take(step, 0);
    }
    assert!(world.nodes.iter().all(|node| node.forming.is_some()));
    // Rank 1 cannot connect in time, when rank 0 is connected already.
    world.take(Step::Form(0), 0);
    world.take(Step::Again(1), 1);
    while let Some(step) = world.steps().into_iter().next() {
        world.take(step, 0);
    }
    for node in world.nodes {
        let agreed = node.end.unwrap().unwrap();
        assert_eq!((agreed.members, agreed.attempt), ([0, 1, 2].into(), 1));
    }
}
