//! Ranks that agree, on paper: words arrive in any order that connections allow, and ranks die and lose each other at any
//! moment.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

/// What comes on a connection, in order.
enum Item {
    Word(Word),
    /// Its end, and whether the rank is known to have ended.
    Gone(bool),
}

#[derive(Default)]
struct Node {
    agreement: Option<Agreement>,
    forming: Option<Standing>,
    dead: bool,
    /// The group that it goes on in, if it does.
    end: Option<Option<Standing>>,
}

struct World {
    nodes: Vec<Node>,
    /// From one rank to another, at `from * n + to`.
    wires: Vec<VecDeque<Item>>,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Begin(usize),
    Deliver(usize, usize),
    Form(usize),
    Crash(usize),
    /// The first hears nothing of the second any more.
    Lose(usize, usize),
}

impl World {
    fn new(n: usize) -> World {
        World { nodes: (0..n).map(|_| Node::default()).collect(), wires: (0..n * n).map(|_| VecDeque::new()).collect() }
    }

    fn n(&self) -> usize {
        self.nodes.len()
    }

    fn wire(&mut self, from: usize, to: usize) -> &mut VecDeque<Item> {
        let n = self.n();
        &mut self.wires[from * n + to]
    }

    /// All that can happen but for faults.
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
            // Connecting takes all of them.
            let there = |standing: &Standing| {
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
                    Some(Item::Word(word)) => agreement.hear(from, word),
                    Some(Item::Gone(certain)) => agreement.exclude(from, certain),
                    None => {}
                }
            }
            Step::Form(rank) => {
                let standing = self.nodes[rank].forming.take().unwrap();
                self.nodes[rank].agreement.as_mut().unwrap().formed();
                self.say(rank, &Word::Formed(standing));
            }
            Step::Crash(rank) => {
                self.nodes[rank].dead = true;
                // Of what was on its way, any part is lost.
                for to in 0..n {
                    let wire = self.wire(rank, to);
                    wire.truncate(if to % 2 == 0 { cut } else { usize::MAX });
                    wire.push_back(Item::Gone(true));
                }
            }
            Step::Lose(who, whom) => self.wire(whom, who).push_front(Item::Gone(false)),
        }
        if let Step::Begin(rank) | Step::Deliver(_, rank) | Step::Form(rank) = step {
            self.act(rank);
        }
    }

    /// Does what the rank does next, until it waits.
    fn act(&mut self, rank: usize) {
        loop {
            let end = match self.nodes[rank].agreement.as_mut().unwrap().next() {
                Next::Propose(standing) => {
                    self.nodes[rank].forming = None;
                    self.say(rank, &Word::Proposes(standing, Door { port: 0, key: rank as u64 }));
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
                    self.say(rank, &Word::Agreed(standing.clone()));
                    Some(standing)
                }
                Next::Excluded { .. } | Next::Minority { .. } => {
                    // The program ends, most likely.
                    (0..self.n()).for_each(|to| self.wire(rank, to).push_back(Item::Gone(true)));
                    None
                }
            };
            self.nodes[rank].end = Some(end);
            return;
        }
    }

    fn say(&mut self, rank: usize, word: &Word) {
        for to in (0..self.n()).filter(|to| *to != rank) {
            self.wire(rank, to).push_back(Item::Word(word.clone()));
        }
    }

    /// Runs to the end; `choices` say what comes next, and when who dies or is lost.
    fn run(n: usize, choices: &[u16], crashes: &[(u16, usize)], losses: &[(u16, usize, usize)]) -> World {
        let mut world = World::new(n);
        for (at, choice) in choices.iter().copied().chain((0..).map(|i: usize| i as u16)).enumerate() {
            for (_, rank) in crashes.iter().filter(|(when, _)| usize::from(*when) == at) {
                world.take(Step::Crash(rank % n), usize::from(choice) % 4);
            }
            for (_, who, whom) in losses.iter().filter(|(when, ..)| usize::from(*when) == at) {
                if who % n != whom % n {
                    world.take(Step::Lose(who % n, whom % n), 0);
                }
            }
            let steps = world.steps();
            if steps.is_empty() && at >= choices.len() {
                break;
            }
            if !steps.is_empty() {
                world.take(steps[usize::from(choice) % steps.len()], 0);
            }
            assert!(at < 100_000, "it does not end");
        }
        for (rank, node) in world.nodes.iter().enumerate() {
            assert!(node.dead || node.end.is_some(), "rank {rank} waits for ever");
        }
        world
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5000))]

    #[test]
    fn survivors_agree_whoever_dies_when(
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
    fn not_two_groups_go_on_whoever_loses_whom(
        n in 2..6usize,
        choices in prop::collection::vec(any::<u16>(), 200),
        crashes in prop::collection::vec((0..200u16, 0..6usize), 0..2),
        losses in prop::collection::vec((0..150u16, 0..6usize, 0..6usize), 1..12),
    ) {
        let world = World::run(n, &choices, &crashes, &losses);
        let ends: Vec<_> = world.nodes.iter().map(|node| node.end.clone().flatten()).collect();
        let mut going_on = Vec::new();
        for standing in ends.iter().flatten() {
            // Of the group that was agreed on, those that are in it, and whether they would go on at its next failure.
            let joined = |rank: &usize| ends[*rank].as_ref() == Some(standing);
            let (dead, inside): (Vec<_>, Vec<_>) = (0..n).filter(joined).partition(|rank| world.nodes[*rank].dead);
            let place = |rank: &usize| standing.members.iter().position(|member| member == rank).unwrap();
            let mut group = Agreement::new(0, standing.members.len());
            group.standing = Standing { members: inside.iter().map(place).collect(), gone: dead.iter().map(place).collect() };
            let lives = !inside.is_empty();
            if lives && group.may_go_on() && !going_on.contains(&standing) {
                going_on.push(standing);
            }
        }
        prop_assert!(going_on.len() <= 1, "{:?}", going_on);
    }
}

#[test]
fn of_two_halves_the_one_with_the_lowest_rank_goes_on_and_who_has_ended_counts_if_others_are_silent() {
    let decides = |rank, n, silent: &[usize], gone: &[usize]| {
        let mut agreement = Agreement::new(rank, n);
        silent.iter().for_each(|peer| agreement.exclude(*peer, false));
        gone.iter().for_each(|peer| agreement.exclude(*peer, true));
        // As if the other members had said the same.
        let standing = agreement.standing().clone();
        for member in standing.members.iter().filter(|member| **member != rank) {
            agreement.hear(*member, Word::Proposes(standing.clone(), Door { port: 1, key: 1 }));
        }
        assert_eq!(agreement.next(), Next::Propose(standing));
        !matches!(agreement.next(), Next::Minority { .. })
    };
    assert!(decides(0, 2, &[1], &[]) && !decides(1, 2, &[0], &[]));
    assert!(decides(1, 2, &[], &[0]) && decides(0, 2, &[], &[1]));
    assert!(decides(2, 5, &[0, 1], &[]) && !decides(0, 5, &[2, 3, 4], &[]));
    assert!(decides(0, 6, &[3, 4, 5], &[]) && !decides(3, 6, &[0, 1, 2], &[]) && decides(5, 6, &[], &[0, 1, 2, 3, 4]));
    // Who is gone may have gone on with those that are silent, and ended there.
    assert!(!decides(2, 4, &[3], &[0, 1]) && decides(0, 4, &[3], &[1]));
}
