//! Ranks that are killed while they save: there is always a complete set, of a state that was saved.

use std::path::Path;
use std::thread;
use std::time::Duration;

use bonfire::{Checkpoints, Group};
use bonfire_testing::process::{Process, is_child, send_line};
use bonfire_testing::settings::seed;
use bonfire_testing::transport::Random;
use rustix::process::Signal;

use super::state::{Contents, Net, contents, initial, start, step, step_alone};

const FOLDER: &str = "CHECKPOINTS";
const RANKS: &str = "shared::checkpoints::killed::killed_ranks_leave_a_complete_set";
const HANG: Duration = Duration::from_secs(120);

#[test]
fn killed_ranks_leave_a_complete_set() {
    if is_child() {
        return save_until_killed(Path::new(&std::env::var_os(FOLDER).expect("set by the parent")));
    }
    kill(10);
}

#[test]
#[ignore = "takes minutes"]
fn ranks_killed_at_a_hundred_moments_leave_a_complete_set() {
    kill(100);
}

/// A rank: goes on from the newest set, and saves after each step.
fn save_until_killed(folder: &Path) {
    let (mut state, ddp) = start(Group::from_env().expect("the ranks find each other"), 2);
    let mut checkpoints = Checkpoints::new(ddp.group(), folder).unwrap();
    checkpoints.load(&mut state).unwrap();
    // The parent kills other ranks, whose peers get errors.
    for number in 0.. {
        step(&mut state, &ddp);
        let saved = match number % 2 {
            0 => checkpoints.save(&state),
            _ => checkpoints.save_in_background(&state),
        };
        if saved.is_err() {
            return;
        }
        send_line(state.samples);
    }
}

fn kill(rounds: usize) {
    let seed = seed("BONFIRE_CHAOS_SEED");
    println!("BONFIRE_CHAOS_SEED={seed}");
    let mut random = Random(seed | 1);
    (0..4).for_each(|_| _ = random.next());
    let mut below = |limit: u64| (random.next() >> 16) % limit;
    let folder = tempfile::tempdir().unwrap();
    // The contents of the states after each number of steps.
    let mut expected = initial(Net::new(2));
    let (mut known, mut last, mut drafts): (Vec<Contents>, usize, usize) = (vec![contents(&expected)], 0, 0);
    for round in 0..rounds {
        let n = 2 + below(2) as usize;
        let variables = [(FOLDER, folder.path().to_str().expect("a path of text").to_owned())];
        let mut processes = Process::start_ranks_with(RANKS, n, "shm", "60", &variables);
        let mut reported = 0;
        for process in &processes {
            reported = process.read_line_within(HANG).expect("a rank that saves").parse().expect("a number of steps");
        }
        // The moment of the fault.
        thread::sleep(Duration::from_micros(below(60_000)));
        let victims = if below(3) == 0 { 1 } else { n };
        for process in processes.iter().rev().take(victims) {
            process.signal(Signal::KILL);
        }
        for process in &mut processes {
            process.end_within(HANG).expect("the others end");
            while let Ok(line) = process.read_line_within(Duration::ZERO) {
                reported = reported.max(line.parse().expect("a number of steps"));
            }
        }
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        drafts += names.filter(|name| name.to_string_lossy().starts_with(".part-")).count();
        let mut state = initial(Net::new(2));
        let mut checkpoints = Checkpoints::read_only(&Group::threads(1).unwrap()[0], folder.path()).unwrap();
        assert!(checkpoints.load(&mut state).unwrap(), "round {round}: there is no set");
        while known.len() <= state.samples {
            step_alone(&mut expected);
            known.push(contents(&expected));
        }
        assert_eq!(contents(&state), known[state.samples], "round {round}");
        // What was reported, or the step before while the save was in the background, is not lost.
        assert!(
            (reported.max(last + 1) - 1..).contains(&state.samples),
            "round {round}: {} of {reported}",
            state.samples
        );
        // The moments of the optimizer, too.
        let (mut ours, mut theirs) = (state, initial(Net::new(2)));
        last = ours.samples;
        (0..=last).for_each(|_| step_alone(&mut theirs));
        step_alone(&mut ours);
        assert_eq!(contents(&ours), contents(&theirs), "round {round}");
    }
    println!("{rounds} kills, {drafts} in the middle of a save, {last} steps");
}
