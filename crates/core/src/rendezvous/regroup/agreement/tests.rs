//! Simulates the agreement: messages arrive in any order that connections allow, and ranks crash and lose each other at
//! any moment.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

/// What arrives on a connection, in order.
enum Event {
    ShrinkMessage(ShrinkMessage),
    /// The connection ended. The flag says whether the rank has certainly ended.
    Gone(bool),
}

#[derive(Default)]
struct Node {
    agreement: Option<Agreement>,
    forming: Option<Membership>,
    dead: bool,
    /// Set once the agreement has ended: the membership that it goes on in, if it does.
    end: Option<Option<Membership>>,
}

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
            let there = |standing: &Membership| {
                standing.members.iter().all(|rank| {
                    let other = &self.nodes[*rank];
                    let ready = other.agreement.as_ref().is_some_and(|agreement| agreement.ready.contains(standing));
                    !other.dead && (other.forming.as_ref() == Some(standing) || ready)
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
            Step::Begin(rank) => self.nodes[rank].agreement = Some(Agreement::new(rank, n)),
            Step::Deliver(from, to) => {
                let item = self.wire(from, to).pop_front();
                let agreement = self.nodes[to].agreement.as_mut().unwrap();
                match item {
                    Some(Event::ShrinkMessage(word)) => agreement.receive(from, word),
                    Some(Event::Gone(certain)) => agreement.exclude(from, certain),
                    None => {}
                }
            }
            Step::Form(rank) => {
                let standing = self.nodes[rank].forming.take().unwrap();
                self.nodes[rank].agreement.as_mut().unwrap().formed();
                self.say(rank, &ShrinkMessage::Formed(standing));
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
        if let Step::Begin(rank) | Step::Deliver(_, rank) | Step::Form(rank) = step {
            self.act(rank);
        }
    }

    /// Runs the rank until it waits.
    fn act(&mut self, rank: usize) {
        loop {
            let end = match self.nodes[rank].agreement.as_mut().unwrap().next() {
                Next::Propose(standing) => {
                    self.nodes[rank].forming = None;
                    self.say(rank, &ShrinkMessage::Proposes(standing, Endpoint { port: 0, key: rank as u64 }));
                    continue;
                }
                Next::Form(doors) => {
                    let standing = self.nodes[rank].agreement.as_ref().unwrap().standing().clone();
                    assert!(doors.iter().all(|(rank, door)| door.key == *rank as u64));
                    assert_eq!(doors.len() + 1, standing.members.len());
                    self.nodes[rank].forming = Some(standing);
                    continue;
                }
                Next::Wait => return,
                Next::Agree(standing) => {
                    self.say(rank, &ShrinkMessage::Agreed(standing.clone()));
                    Some(standing)
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

    fn say(&mut self, rank: usize, word: &ShrinkMessage) {
        for to in (0..self.n()).filter(|to| *to != rank) {
            self.wire(rank, to).push_back(Event::ShrinkMessage(word.clone()));
        }
    }

    /// Runs to the end. `choices` picks each next step; `crashes` and `losses` say before which step a fault occurs.
    fn run(n: usize, choices: &[u16], crashes: &[(u16, usize)], losses: &[(u16, usize, usize)]) -> World {
        let mut world = World::new(n);
        for (at, choice) in choices.iter().copied().chain((0..).map(|i: usize| i as u16)).enumerate() {
            for (_, rank) in crashes.iter().filter(|(when, _)| usize::from(*when) == at) {
                world.take(Step::Crash(rank % n), usize::from(choice) % 4);
            }
            for (_, rank, peer) in losses.iter().filter(|(when, ..)| usize::from(*when) == at) {
                if rank % n != peer % n {
                    world.take(Step::Lose(rank % n, peer % n), 0);
                }
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
        for (rank, node) in world.nodes.iter().enumerate() {
            assert!(node.dead || node.end.is_some(), "rank {rank} waits forever");
        }
        world
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn survivors_agree_whatever_ranks_crash(
        n in 1..6usize,
        choices in prop::collection::vec(any::<u16>(), 200),
        crashes in prop::collection::vec((0..200u16, 0..6usize), 0..4),
    ) {
        let world = World::run(n, &choices, &crashes, &[]);
        let mut alive = (0..n).filter(|rank| !world.nodes[*rank].dead).peekable();
        if let Some(first) = alive.peek() {
            let agreed = world.nodes[*first].end.clone();
            let members = agreed.clone().flatten().expect("survivors of crashes go on").members;
            for rank in alive {
                prop_assert_eq!(&world.nodes[rank].end, &agreed);
                prop_assert!(members.contains(&rank));
            }
        }
    }

    #[test]
    fn at_most_one_group_goes_on_whatever_connections_are_lost(
        n in 2..6usize,
        choices in prop::collection::vec(any::<u16>(), 200),
        crashes in prop::collection::vec((0..200u16, 0..6usize), 0..2),
        losses in prop::collection::vec((0..150u16, 0..6usize, 0..6usize), 1..12),
    ) {
        let world = World::run(n, &choices, &crashes, &losses);
        let ends: Vec<_> = world.nodes.iter().map(|node| node.end.clone().flatten()).collect();
        let mut going_on = Vec::new();
        for standing in ends.iter().flatten() {
            // The ranks that joined this group, and whether they would go on at its next failure.
            let joined = |rank: &usize| ends[*rank].as_ref() == Some(standing);
            let (dead, inside): (Vec<_>, Vec<_>) = (0..n).filter(joined).partition(|rank| world.nodes[*rank].dead);
            let place = |rank: &usize| standing.members.iter().position(|member| member == rank).unwrap();
            let mut group = Agreement::new(0, standing.members.len());
            group.standing = Membership {
                members: inside.iter().map(place).collect(),
                gone: dead.iter().map(place).collect(),
            };
            let lives = !inside.is_empty();
            if lives && group.has_quorum() && !going_on.contains(&standing) {
                going_on.push(standing);
            }
        }
        prop_assert!(going_on.len() <= 1, "{:?}", going_on);
    }
}

#[test]
fn of_two_halves_the_one_with_the_lowest_rank_goes_on_and_ended_ranks_count_if_others_are_silent() {
    let decides = |rank, n, silent: &[usize], gone: &[usize]| {
        let mut agreement = Agreement::new(rank, n);
        silent.iter().for_each(|peer| agreement.exclude(*peer, false));
        gone.iter().for_each(|peer| agreement.exclude(*peer, true));
        // The other members propose the same membership.
        let standing = agreement.standing().clone();
        for member in standing.members.iter().filter(|member| **member != rank) {
            agreement.receive(*member, ShrinkMessage::Proposes(standing.clone(), Endpoint { port: 1, key: 1 }));
        }
        assert_eq!(agreement.next(), Next::Propose(standing));
        !matches!(agreement.next(), Next::Minority { .. })
    };
    assert!(decides(0, 2, &[1], &[]) && !decides(1, 2, &[0], &[]));
    assert!(decides(1, 2, &[], &[0]) && decides(0, 2, &[], &[1]));
    assert!(decides(2, 5, &[0, 1], &[]) && !decides(0, 5, &[2, 3, 4], &[]));
    assert!(decides(0, 6, &[3, 4, 5], &[]) && !decides(3, 6, &[0, 1, 2], &[]) && decides(5, 6, &[], &[0, 1, 2, 3, 4]));
    // Ranks that have ended may have gone on with the silent ones, and ended there.
    assert!(!decides(2, 4, &[3], &[0, 1]) && decides(0, 4, &[3], &[1]));
}
