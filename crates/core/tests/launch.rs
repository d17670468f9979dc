//! `launch`: ranks as threads without a launcher and as processes under one, and which failure is reported.

use std::panic::{AssertUnwindSafe, catch_unwind};

use bonfire_core::launch::{Failed, launch, run};
use bonfire_core::{Error, Group, ReduceOp};
use bonfire_testing::process::{Process, is_child, send_line};

/// Returns rank, world size and the sum of all ranks' numbers, counted from 1.
fn work(group: Group) -> Result<[usize; 3], Error> {
    let mut sum = [group.rank() as u64 + 1];
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    Ok([group.rank(), group.world_size(), sum[0] as usize])
}

/// What a child says about its launch.
fn words(outcome: Result<Vec<[usize; 3]>, Failed>) -> String {
    match outcome {
        Ok(results) => format!("{results:?}"),
        Err(failed) => format!("failed: {failed}"),
    }
}

#[test]
fn without_a_launcher_the_ranks_are_threads() {
    if is_child() {
        return send_line(words(launch(3, work)));
    }
    let name = "without_a_launcher_the_ranks_are_threads";
    assert_eq!(Process::start(name, &[]).read_line(), "[[0, 3, 6], [1, 3, 6], [2, 3, 6]]");
}

#[test]
fn a_launcher_determines_the_number_of_ranks() {
    if is_child() {
        return send_line(words(launch(5, work)));
    }
    let ranks = Process::start_ranks("a_launcher_determines_the_number_of_ranks", 2, "auto", "60");
    for (rank, process) in ranks.iter().enumerate() {
        assert_eq!(process.read_line(), format!("[[{rank}, 2, 3]]"));
    }
}

#[test]
fn wrong_settings_are_errors_and_do_not_mean_threads() {
    if is_child() {
        return send_line(words(launch(2, work)));
    }
    let says = |variables: &[(&str, &str)]| {
        let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        Process::start("wrong_settings_are_errors_and_do_not_mean_threads", &variables).read_line()
    };
    let missing = says(&[("BONFIRE_WORLD_SIZE", "2")]);
    assert!(missing.starts_with("failed: invalid settings: BONFIRE_RANK is not set"), "{missing}");
    let malformed = says(&[("BONFIRE_DEADLINE", "soon")]);
    assert!(malformed.starts_with("failed: invalid settings: BONFIRE_DEADLINE is 'soon'"), "{malformed}");
    let outside = says(&[("BONFIRE_RANK", "2"), ("BONFIRE_WORLD_SIZE", "2"), ("BONFIRE_ADDRESS", "127.0.0.1:9")]);
    assert!(outside.contains("rank 2 is outside a world of 2"), "{outside}");
}

/// Each round, another rank fails while the others wait for it: their errors are consequences.
#[test]
fn the_first_error_is_reported_with_its_rank() {
    for round in 0..50 {
        let culprit = round % 4;
        let body = move |group: Group| {
            group.barrier()?;
            if group.rank() == culprit { Err(Error::Config("on purpose".into())) } else { group.barrier() }
        };
        let failed = run(Group::threads(4).unwrap(), body).unwrap_err();
        assert_eq!((failed.rank, &*failed.error), (Some(culprit), &Error::Config("on purpose".into())));
        assert_eq!(format!("{failed:?}"), format!("rank {culprit}: invalid settings: on purpose"));
    }
}

#[test]
fn a_panic_of_a_rank_is_the_panic_of_the_call() {
    for culprit in 0..3 {
        let body = move |group: Group| {
            group.barrier()?;
            if group.rank() == culprit {
                assert_eq!(std::thread::current().name(), Some(&*format!("rank {culprit}")));
                panic!("on purpose, by {culprit}");
            }
            group.barrier()
        };
        let groups = Group::threads(3).unwrap();
        let panic = catch_unwind(AssertUnwindSafe(|| run(groups, body))).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>(), Some(&format!("on purpose, by {culprit}")));
    }
}

/// Errors of the program's own type, and no ranks at all.
#[test]
fn other_errors_and_wrong_arguments() {
    type Any = Box<dyn std::error::Error + Send + Sync>;
    let failed = run(Group::threads(1).unwrap(), |_| Err::<(), Any>("no data".into())).unwrap_err();
    let failed: Any = failed.into();
    assert_eq!(failed.to_string(), "rank 0: no data");
    assert_eq!(run(Vec::new(), |_| Ok::<(), Error>(())), Ok(vec![]));
    if std::env::var_os("BONFIRE_RANK").is_none() {
        let failed = launch(0, |_| Ok::<(), Error>(())).unwrap_err();
        assert_eq!((failed.rank, matches!(*failed.error, Error::InvalidArgument { .. })), (None, true));
    }
}
