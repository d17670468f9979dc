//! A signal to one rank, or a request of its program, stops every form of training on all ranks after the same step.

use std::env;
use std::thread;

use bonfire_core::internal::stop_is_requested;
use bonfire_core::{Error, Group, request_stop};
use bonfire_testing::process::{Process, is_child, report, send_line};
use bonfire_train::Sharding;
use bonfire_train::step::iteration::{BatchWeight, Next, RankReport, Stop, agree};
use rustix::process::Signal;

use crate::forms::{Ends, Model, by_parts, by_shards, by_steps, by_sync, reference};

const FORM: &str = "FORM";
/// Set where the program of the rank asks, and no signal.
const BY_PROGRAM: &str = "BY_PROGRAM";
const FORMS: [&str; 7] = ["sync", "steps", "ZeRO-1", "blocks", "ZeRO-3", "hybrid", "lockstep"];
const RANKS: usize = 4;
/// The rank that is asked to stop, and after which step. In the next one it has no samples.
const ASKED: usize = 1;
const AFTER: usize = 3;

/// Trains on one rank of a lockstep that exchanges nothing else, as a learner does before each iteration.
fn in_lockstep(group: &Group, ends: Ends) -> Model {
    for made in 1.. {
        let report = RankReport { batch: Some(BatchWeight::Known(1)), ..RankReport::default() };
        let next = agree(group, report, made as u64).unwrap();
        if next == Next::Stop(ASKED, Stop::Interrupted) {
            assert!(ends(made, &|| true));
            break;
        }
        assert!(!ends(made, &|| false), "{next:?}");
    }
    reference(RANKS, AFTER + 1)
}

/// Trains until the ranks stop. Returns after which step, and the model.
fn train(group: Group) -> (usize, Model) {
    let (rank, steps) = (group.rank(), std::cell::Cell::new(0));
    let ends = |made: usize, should_stop: &dyn Fn() -> bool| {
        steps.set(made);
        let stop = should_stop();
        if made == AFTER {
            assert!(!stop, "nothing has asked for it");
            send_line("going");
            if rank == ASKED && env::var_os(BY_PROGRAM).is_some() {
                request_stop();
            }
            while rank == ASKED && !stop_is_requested() {
                thread::yield_now();
            }
        }
        stop
    };
    let model = match &*env::var(FORM).expect("set by the parent") {
        "sync" => by_sync(group, &ends),
        "steps" => by_steps(group, &ends),
        "ZeRO-1" => by_shards(group, Sharding::All, &ends),
        "lockstep" => in_lockstep(&group, &ends),
        "blocks" => by_shards(group, Sharding::Blocks(2), &ends),
        "ZeRO-3" => by_parts(group, 1, false, false, &ends),
        _ => by_parts(group, 2, false, false, &ends),
    };
    (steps.get(), model)
}

#[test]
fn a_signal_to_one_rank_stops_every_form_after_the_same_step() {
    check("stop::a_signal_to_one_rank_stops_every_form_after_the_same_step", &FORMS, false);
}

#[test]
fn a_request_of_one_ranks_program_stops_all_after_the_same_step() {
    check("stop::a_request_of_one_ranks_program_stops_all_after_the_same_step", &["steps", "lockstep"], true);
}

/// Checks these forms in processes of `test`.
fn check(test: &str, forms: &[&str], by_program: bool) {
    if is_child() {
        let (steps, model) = train(Group::from_env().expect("ranks find each other"));
        return report(&Ok::<_, Error>(serde_json::to_string(&(steps, model)).expect("numbers")));
    }
    let expected = reference(RANKS, AFTER + 1);
    for form in forms {
        let mut variables = vec![(FORM, form.to_string())];
        variables.extend(by_program.then(|| (BY_PROGRAM, "1".into())));
        let mut ranks = Process::start_ranks_with(test, RANKS, "tcp", "60", &variables);
        ranks.iter().for_each(|rank| assert_eq!(rank.read_line(), "going", "{form}"));
        if !by_program {
            ranks[ASKED].signal(Signal::TERM);
        }
        for (rank, process) in ranks.iter_mut().enumerate() {
            let (steps, model): (usize, Model) = serde_json::from_str(&process.outcome().unwrap()).unwrap();
            assert_eq!(steps, AFTER + 1, "{form}, rank {rank}");
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5;
            let equal = model.iter().flatten().zip(expected.iter().flatten()).all(close);
            assert!(equal, "{form}, rank {rank}: {model:?}, not {expected:?}");
            assert!(process.end().success(), "{form}, rank {rank}");
        }
    }
}
