//! Ranks that do not make the same calls: their errors say where in the program each is.

use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use bonfire::{Checkpoints, Error};
use bonfire_testing::{Kind, in_parallel, ranks, run_ranks};
use burn::lr_scheduler::exponential::ExponentialLrSchedulerConfig;
use burn::optim::{AdamConfig, GradientsParams};

use super::checkpoints::state::{start, step};
use super::fully_sharded::Deep;
use crate::burn_version::*;
use crate::checkpoint_version::ScheduledTraining;

/// Long enough for what comes before the call that fails.
const LIMIT: Duration = Duration::from_secs(8);

/// Lines of the test's program, by rank.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<[u32; 3]>>);

impl Lines {
    /// Says that the rank is about to make a call in this line.
    fn set(&self, rank: usize, line: u32) {
        self.0.lock().unwrap()[rank] = line;
    }

    fn of(&self, rank: usize) -> String {
        format!("{}:{}", file!(), self.0.lock().unwrap()[rank])
    }
}

const KINDS: [Kind; 3] = [Kind::Threads, Kind::Tcp, Kind::Shm];

#[test]
fn a_save_on_one_rank_is_named_where_the_others_wait_in_a_step() {
    in_parallel(&KINDS, 3, |kind| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_path_buf();
        let lines = Lines::default();
        let of_ranks = lines.clone();
        // Rank 0 leaves when one of the others has, which must not be before the last of them has given up.
        let given_up = Arc::new(Barrier::new(2));
        let results = run_ranks(*kind, 3, move |group| {
            // The others give up first. With the same deadline rank 0 may leave before they do.
            let limit = if group.rank() == 0 { 10 * LIMIT } else { LIMIT };
            let (state, ddp) = start(group.with_deadline(limit), 2);
            let mut checkpoints = Checkpoints::new(ddp.group(), &path).unwrap();
            let rank = ddp.group().rank();
            if rank == 0 {
                of_ranks.set(rank, line!() + 1);
                checkpoints.save(&state)
            } else {
                of_ranks.set(rank, line!() + 1);
                let result = ddp.sync(&state.model, GradientsParams::new(), 1).map(drop);
                given_up.wait();
                result
            }
        });
        assert!(results[0].is_err(), "the others leave");
        for result in &results[1..] {
            let Err(error @ Error::Timeout { missing, .. }) = result else { panic!("{kind:?}: {result:?}") };
            let error = error.to_string();
            assert_eq!(missing, &[0], "{kind:?}");
            for expected in [
                format!("rank 0 is in Checkpoints::save at {}", lines.of(0)),
                format!("ranks 1, 2 are in DataParallel::sync at {}", lines.of(1)),
                "all ranks must make the same calls in the same order, and Checkpoints::save is called by all".into(),
            ] {
                assert!(error.contains(&expected), "{kind:?}: {expected}: {error}");
            }
            assert!(!error.contains("raise the deadline"), "{kind:?}: {error}");
        }
    });
}

/// The ranks are in one group, so they disagree at once.
#[test]
fn a_mismatch_says_where_the_ranks_are() {
    in_parallel(&KINDS, 3, |kind| {
        let lines = Lines::default();
        let of_ranks = lines.clone();
        let results = run_ranks(*kind, 3, move |group| {
            let (state, ddp) = start(group, 2);
            let rank = ddp.group().rank();
            if rank == 0 {
                of_ranks.set(rank, line!() + 1);
                DataParallel::new(ddp.group().clone(), Deep::new(1)).map(drop)
            } else {
                of_ranks.set(rank, line!() + 1);
                ddp.sync(&state.model, GradientsParams::new(), 1).map(drop)
            }
        });
        for result in results {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::Mismatch { .. }), "{kind:?}: {error}");
            let error = error.to_string();
            let [new, sync] = [0, 1].map(|rank| lines.of(rank));
            let expected = [format!("DataParallel::new at {new}"), format!("DataParallel::sync at {sync}")];
            assert!(expected.iter().all(|expected| error.contains(expected)), "{kind:?}: {error}");
        }
    });
}

#[test]
fn a_rank_that_computes_may_be_slow() {
    let end = Arc::new(Barrier::new(3));
    let results = run_ranks(Kind::Tcp, 3, move |group| {
        let rank = group.rank();
        let (state, ddp) = start(group.with_deadline(LIMIT), 2);
        let result = match rank {
            0 => Ok(()),
            _ => ddp.sync(&state.model, GradientsParams::new(), 1).map(drop),
        };
        end.wait();
        result
    });
    for result in &results[1..] {
        let error = result.as_ref().unwrap_err().to_string();
        // `start` is the test's own, and makes the call in another line.
        let state = include_str!("checkpoints/state.rs").lines().position(|line| line.contains("DataParallel::new("));
        let since = format!("state.rs:{}", state.unwrap() + 1);
        for expected in ["rank 0 is in no call of Bonfire's for", "since DataParallel::new at", &since, "raise the"] {
            assert!(error.contains(expected), "{expected}: {error}");
        }
    }
}

#[test]
fn a_save_in_the_background_on_one_rank_is_an_error_of_the_next_step_on_all() {
    let expected = "ranks 1, 2 have not saved the checkpoint that rank 0 saves";
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    ranks(3, |group| {
        let (mut state, ddp) = start(group, 2);
        let mut checkpoints = Checkpoints::new(ddp.group(), folder.path()).unwrap();
        checkpoints.save_in_background(&state).unwrap();
        step(&mut state, &ddp);
        if ddp.group().rank() == 0 {
            checkpoints.save_in_background(&state).unwrap();
        }
        let error = ddp.sync(&state.model, GradientsParams::new(), 1).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(expected), "{error}");
        let error = ddp.verify(&state.model, &state.optimizer).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        if ddp.group().rank() != 0 {
            // Those that were left out catch up.
            checkpoints.save_in_background(&state).unwrap();
        }
        checkpoints.wait().unwrap();
        step(&mut state, &ddp);
    });
    ranks(3, |group| {
        let rank = group.rank();
        let (model, fsdp) = FullyShardedParallel::new(group, Deep::new(2)).unwrap();
        let schedule = ExponentialLrSchedulerConfig::new(0.1, 0.8).init().unwrap();
        let state = ScheduledTraining::<Deep, u64>::new(model, AdamConfig::new().init(), schedule, 0);
        let mut checkpoints = Checkpoints::new(fsdp.group(), other.path()).unwrap();
        if rank == 0 {
            checkpoints.save_in_background((&state, &fsdp)).unwrap();
        }
        let error = fsdp.run(&state.model, [1], |model, seed| (model.loss(seed), 1)).map(drop).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    });
}
