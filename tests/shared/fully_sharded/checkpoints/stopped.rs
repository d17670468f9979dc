//! One rank is asked to stop: all save the same step and succeed, and a new job goes on as if nothing had been.

use std::path::Path;
use std::thread;

use bonfire::{Error, Group};
use bonfire_core::internal::stop_is_requested;
use bonfire_testing::process::{Process, is_child, report, send_line};
use bonfire_testing::ranks;
use burn::tensor::DType;
use rustix::process::Signal;

use super::{Form, Net, Run, adam};
use crate::checkpoint_version::Adam;

const NAME: &str = "shared::fully_sharded::checkpoints::stopped::all_ranks_save_the_step_in_which_one_is_asked_to_stop";
const FOLDER: &str = "CHECKPOINTS";
const FORM: &str = "FORM";
const FORMS: [Form; 4] = [Form::Replicas, Form::Optimizer, Form::Gradients, Form::Full];
const RANKS: usize = 3;
/// The rank that is asked to stop, and after which step.
const ASKED: usize = 1;
const AFTER: usize = 3;
const LAST: usize = 7;

fn new_run(group: Group, form: Form) -> Run<Adam> {
    Run::new(group, form, Net::new(7, DType::F32), &adam)
}

#[test]
fn all_ranks_save_the_step_in_which_one_is_asked_to_stop() {
    if is_child() {
        let folder = std::env::var_os(FOLDER).expect("set by the parent");
        let form: usize = std::env::var(FORM).ok().and_then(|text| text.parse().ok()).expect("set by the parent");
        return report(&train(Path::new(&folder), FORMS[form]).map(|step| step.to_string()));
    }
    let mut uninterrupted = new_run(Group::threads(1).unwrap().remove(0), Form::Replicas);
    (0..LAST).for_each(|_| _ = uninterrupted.step());
    let [_, expected] = uninterrupted.values();
    for (number, form) in FORMS.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().expect("a path of text").to_owned();
        let variables = [(FOLDER, path), (FORM, number.to_string())];
        let mut processes = Process::start_ranks_with(NAME, RANKS, "tcp", "60", &variables);
        processes.iter().for_each(|process| assert_eq!(process.read_line(), "going", "{form:?}"));
        processes[ASKED].signal(Signal::TERM);
        for process in &mut processes {
            assert_eq!(process.outcome(), Ok((AFTER + 1).to_string()), "{form:?}");
            assert!(process.end().success(), "{form:?}");
        }
        let resumed = ranks(RANKS, |group| {
            let mut run = new_run(group, form);
            assert!(run.load(folder.path()).unwrap());
            assert_eq!(run.state.samples, AFTER + 1, "{form:?}");
            (AFTER + 1..LAST).for_each(|_| _ = run.step());
            let [_, whole] = run.values();
            whole
        });
        assert!(resumed.iter().all(|whole| *whole == expected), "{form:?}");
    }
}

/// A rank: trains until the ranks stop, saves, and returns after which step.
fn train(folder: &Path, form: Form) -> Result<usize, Error> {
    let mut run = new_run(Group::from_env()?, form);
    loop {
        run.try_step()?;
        if run.should_stop() {
            run.save(folder)?;
            return Ok(run.state.samples);
        }
        if run.state.samples == AFTER {
            send_line("going");
            // The signal arrives in the middle of the training.
            while run.group().rank() == ASKED && !stop_is_requested() {
                thread::yield_now();
            }
        }
    }
}
