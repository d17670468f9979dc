//! Trainings that end before their last epoch.

use bonfire::{Error, Group};
use bonfire_testing::process::{Process, is_child, report, send_line};
use bonfire_testing::ranks;
use burn_train::Interrupter;
use rustix::process::Signal;

use super::{Case, Log, Norm, assert_near};
use crate::learner_version::*;

#[test]
fn interrupting_a_rank_stops_all_after_the_same_iteration() {
    let case = Case::of(24, None);
    // As burn's, a training that was interrupted before makes one iteration.
    for (interrupts, at) in [(0, Some(5)), (2, Some(5)), (1, None)] {
        let steps = ranks(3, |group| {
            let (rank, interrupter) = (group.rank(), Interrupter::new());
            let log = match at {
                Some(at) if rank == interrupts => Log::default().before(interrupt_at(&interrupter, at)),
                None if rank == interrupts => {
                    interrupter.stop(Some("a test"));
                    Log::default()
                }
                _ => Log::default(),
            };
            let settings = |training: Training| training.with_interrupter(interrupter.clone());
            drop(case.rank(group, tempfile::tempdir().unwrap().path(), &log, settings).expect("no failure"));
            let other = format!("rank {interrupts} was interrupted");
            assert!(interrupter.should_stop());
            assert_eq!(interrupter.get_message().unwrap(), if rank == interrupts { "a test" } else { &other });
            log.steps().len()
        });
        assert_eq!(steps, [at.map_or(1, |at| at + 1); 3]);
    }
}

fn interrupt_at(interrupter: &Interrupter, step: usize) -> impl Fn(usize) + Send + Sync + use<> {
    let interrupter = interrupter.clone();
    move |steps| {
        if steps == step {
            interrupter.stop(Some("a test"));
        }
    }
}

#[test]
fn an_interrupted_training_goes_on_from_its_last_checkpoint() {
    // Four iterations in an epoch. Rank 1 is interrupted in the second epoch.
    let case = Case::of(16, None);
    let (expected, _folder) = case.alone(2, Log::default());
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let logs = ranks(2, |group| {
        let (rank, folder, interrupter) = (group.rank(), folders[group.rank()].path(), Interrupter::new());
        let first = if rank == 1 { Log::default().before(interrupt_at(&interrupter, 5)) } else { Log::default() };
        let settings = |training: Training| checkpoints(training).with_interrupter(interrupter);
        drop(case.rank(group.clone(), folder, &first, settings).expect("no failure"));
        assert_eq!(first.steps().len(), 6);
        let (second, resumes) =
            (Log::default(), |training| if rank == 0 { checkpoints(training).checkpoint(1) } else { training });
        check(case.rank(group, folder, &second, resumes).expect("no failure"));
        [first, second]
    });
    for [first, second] in logs {
        assert_near(&first.steps().concat(), &expected.steps()[..6].concat(), "interrupted");
        assert_near(&second.steps().concat(), &expected.steps()[4..].concat(), "resumed");
    }
}

#[test]
fn settings_and_models_that_differ_are_errors_on_all_ranks() {
    let launch = |case: &Case, group: Group, log: &Log| {
        case.rank(group, tempfile::tempdir().unwrap().path(), log, |training| training).map(drop)
    };
    ranks(3, |group| {
        let other = Case { epochs: 1 + group.rank() / 2, ..Case::of(6, Some(2)) };
        let error = launch(&other, group.clone(), &Log::default()).unwrap_err();
        let expected = "rank 0 trains for 1 epochs, accumulating 2 batches and averaging no metric, rank 2 for 2 \
                        epochs, accumulating 2 batches and averaging no metric; give all ranks the same settings";
        assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(expected), "{error}");
        let other = Case::of(6, [None, Some(1), Some(3)][group.rank()]);
        let error = launch(&other, group.clone(), &Log::default()).unwrap_err().to_string();
        assert!(error.contains("accumulating 1 batches") && error.contains("rank 2 for 3 epochs"), "{error}");
        let wide = Log { is_wide: group.rank() == 1, ..Log::default() };
        let error = launch(&Case::of(6, None), group.clone(), &wide).unwrap_err();
        assert!(
            matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains("`hidden.weight`"),
            "{error}"
        );
        // The group is as good as before.
        launch(&Case::of(6, None), group, &Log::default()).unwrap();
    });
}

#[test]
fn layers_that_communicate_need_equally_many_batches() {
    for accumulation in [None, Some(2)] {
        // Rank 1 has a batch more.
        let case = Case::of(5, accumulation);
        let failures = ranks(2, |group| {
            let log = Log::of(Norm::Sync);
            case.rank(group, tempfile::tempdir().unwrap().path(), &log, |training| training).map(drop).unwrap_err()
        });
        assert!(failures.iter().all(|failure| matches!(failure, Error::Mismatch { .. })), "{failures:?}");
    }
}

#[test]
fn a_panic_of_the_model_is_an_error_on_the_other_ranks() {
    let case = Case::of(12, None);
    let groups = Group::threads(2).unwrap();
    let failures = std::thread::scope(|scope| {
        let threads = groups.into_iter().map(|group| {
            let case = &case;
            scope.spawn(move || {
                let fails = group.rank() == 1;
                let log = Log::default().before(move |steps| assert!(!fails || steps < 2, "the model gives up"));
                case.rank(group, tempfile::tempdir().unwrap().path(), &log, |training| training).map(drop)
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    assert!(matches!(failures[0], Ok(Err(Error::PeerLost { peer: 1, .. }))), "{:?}", failures[0]);
    assert!(failures[1].is_err());
}

#[test]
fn a_killed_rank_is_an_error_on_the_others() {
    if is_child() {
        let group = Group::from_env().expect("the ranks find each other");
        let is_killed = group.rank() == 1;
        let log = Log::default().before(move |steps| {
            if is_killed && steps == 2 {
                send_line("in the third step");
                loop {
                    std::thread::park();
                }
            }
        });
        let folder = tempfile::tempdir().unwrap();
        let outcome = Case::of(18, None).rank(group, folder.path(), &log, |training| training);
        return report(&outcome.map(|_| "trained".into()));
    }
    // The error comes long before the deadline.
    let name = "learner::ends::a_killed_rank_is_an_error_on_the_others";
    let processes = Process::start_ranks(name, 3, "auto", "250");
    assert_eq!(processes[1].read_line(), "in the third step");
    processes[1].signal(Signal::KILL);
    for rank in [0, 2] {
        let outcome = processes[rank].outcome();
        assert!(matches!(outcome, Err(Error::PeerLost { peer: 1, .. })), "rank {rank}: {outcome:?}");
    }
}
