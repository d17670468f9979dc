//! Random models and random programs: in every form of training the result is that of plain burn on one rank, or all
//! ranks get the same error.
//!
//! Plain burn runs in a process of one thread. The ranks of a program are threads of one process, or processes.
//! `BONFIRE_PROGRAMS` is the number of programs, and `BONFIRE_SEED` the first one's seed.

use std::collections::BTreeMap;
use std::env;
use std::time::Duration;

use bonfire::Group;
use bonfire_testing::process::{Process, is_child, send_line};
use bonfire_testing::settings::{number, seed};
use burn::tensor::DType;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::program::{Feature, MODES, Mode, Program, predict};
use crate::{model, modes, reference};

const NAME: &str = "run::random_programs_train_as_on_one_rank_or_fail_on_all";
const ROLE: &str = "BONFIRE_TEST_ROLE";
const SEED: &str = "BONFIRE_SEED";
const PROGRAMS: &str = "BONFIRE_PROGRAMS";
/// A rank that waits in vain ends a program with another error than predicted.
const DEADLINE: Duration = Duration::from_secs(20);

/// The bits of the parameters after the last step.
type Outcome = Result<Vec<u64>, String>;

fn bits(floats: Vec<f64>) -> Vec<u64> {
    floats.into_iter().map(f64::to_bits).collect()
}

fn send(message: &impl Serialize) {
    send_line(serde_json::to_string(message).expect("outcomes are plain data"));
}

fn receive<T: DeserializeOwned>(process: &Process) -> T {
    serde_json::from_str(&process.read_line()).expect("an outcome")
}

/// Programs from this seed on.
fn programs(seed: u64, count: u64) -> impl Iterator<Item = Program> {
    (seed..seed + count).map(Program::new)
}

/// Runs the part of all programs that this process is for.
fn child() {
    let variables = [SEED, PROGRAMS].map(|variable| number(variable).expect("set by the parent"));
    let programs = programs(variables[0], variables[1]);
    let train = |program: &Program, mode, group: &Group| -> Outcome {
        let group = group.with_deadline(DEADLINE);
        modes::train(program, mode, &group).map(bits).map_err(|error| error.to_string())
    };
    let modes = |program: &Program| MODES.into_iter().filter(|mode| program.runs_in(*mode)).collect::<Vec<_>>();
    match &env::var(ROLE).expect("set by the parent")[..] {
        "reference" => programs.for_each(|program| send(&reference::train(&program).map(bits))),
        "threads" => programs.filter(|program| program.threads).for_each(|program| {
            for mode in modes(&program) {
                send(&bonfire_testing::ranks(program.ranks, |group| train(&program, mode, &group)));
            }
        }),
        _ => {
            let world = Group::from_env().expect("the parent has started all ranks");
            let members = world.members();
            for program in programs.filter(|program| !program.threads && program.ranks == members.len()) {
                for mode in modes(&program) {
                    // An error ends the group of this program only.
                    let group = world.subgroup(&members).expect("the ranks run the same programs");
                    send(&train(&program, mode, &group));
                }
            }
        }
    }
}

/// Returns what is wrong with the outcomes of a program by rank.
fn judge(program: &Program, mode: Mode, expected: Option<&[u64]>, outcomes: &[Outcome]) -> Result<(), String> {
    if let Some(text) = predict(program, mode) {
        let as_predicted = |outcome: &Outcome| outcome.as_ref().is_err_and(|error| error.contains(text));
        return match outcomes.iter().position(|outcome| !as_predicted(outcome)) {
            None => Ok(()),
            Some(rank) => Err(match &outcomes[rank] {
                Ok(_) => format!("rank {rank} trains, but `{text}` was predicted"),
                Err(error) => format!("rank {rank} fails with `{error}`, but `{text}` was predicted"),
            }),
        };
    }
    let expected = expected.ok_or("plain burn has no result")?;
    let bound = match model::dtype(program) {
        _ if program.has(Feature::Mixed) => 2e-2,
        DType::F64 => 1e-12,
        _ => 1e-5,
    };
    for (rank, outcome) in outcomes.iter().enumerate() {
        let own = outcome.as_ref().map_err(|error| format!("rank {rank} fails with `{error}`"))?;
        let pair = |i: usize| (f64::from_bits(own[i]), f64::from_bits(expected[i]));
        // Also if it is not a number.
        let differs = |i: &usize| {
            let (own, expected) = pair(*i);
            !own.is_finite() || (own - expected).abs() > bound * (1.0 + expected.abs())
        };
        if own.len() != expected.len() {
            return Err(format!("rank {rank} has {} numbers instead of {}", own.len(), expected.len()));
        }
        if let Some(at) = (0..own.len()).find(differs) {
            let (own, expected) = pair(at);
            return Err(format!("number {at} of rank {rank} is {own} instead of {expected}"));
        }
        if Ok(own) != outcomes[0].as_ref() {
            return Err(format!("ranks 0 and {rank} have different bits"));
        }
    }
    Ok(())
}

/// What was run so far.
#[derive(Default)]
struct Tally {
    occurred: BTreeMap<(Feature, Mode), usize>,
    runs: usize,
    trained: usize,
    wrong: Vec<String>,
}

impl Tally {
    fn add(&mut self, program: &Program, mode: Mode, verdict: Result<(), String>) {
        for feature in &program.features {
            *self.occurred.entry((*feature, mode)).or_default() += 1;
        }
        self.runs += 1;
        self.trained += usize::from(predict(program, mode).is_none());
        if let Err(reason) = verdict {
            let seed = program.seed;
            println!("seed {seed}, {mode:?}: {reason}\n  {SEED}={seed} {PROGRAMS}=1 repeats it: {program:?}");
            self.wrong.push(format!("{seed} ({mode:?})"));
        }
    }

    fn print(&self) {
        println!("{} of {} runs train, {} differ from the prediction", self.trained, self.runs, self.wrong.len());
        for feature in Feature::ALL {
            let counts = MODES.map(|mode| self.occurred.get(&(feature, mode)).copied().unwrap_or_default());
            println!("{:14}{}", format!("{feature:?}"), counts.map(|count| format!("{count:7}")).concat());
        }
    }
}

#[test]
fn random_programs_train_as_on_one_rank_or_fail_on_all() {
    if is_child() {
        return child();
    }
    let (seed, count) = (seed(SEED), number(PROGRAMS).unwrap_or(100));
    println!("{count} programs: {SEED}={seed} {PROGRAMS}={count} repeats them");
    let variables = |role: &str| [(SEED, seed.to_string()), (PROGRAMS, count.to_string()), (ROLE, role.into())];
    let (reference, threads) =
        (Process::start(NAME, &variables("reference")), Process::start(NAME, &variables("threads")));
    let processes: Vec<Vec<Process>> =
        (1..=4).map(|n| Process::start_ranks_with(NAME, n, "shm", "120", &variables("processes"))).collect();

    let mut tally = Tally::default();
    for program in programs(seed, count) {
        let expected: Option<Vec<u64>> = receive(&reference);
        for mode in MODES.into_iter().filter(|mode| program.runs_in(*mode)) {
            let outcomes: Vec<Outcome> = match program.threads {
                true => receive(&threads),
                false => processes[program.ranks - 1].iter().map(receive).collect(),
            };
            tally.add(&program, mode, judge(&program, mode, expected.as_deref(), &outcomes));
        }
    }
    tally.print();
    assert!(tally.wrong.is_empty(), "{} runs are wrong, with the seeds {}", tally.wrong.len(), tally.wrong.join(", "));
    // Fewer programs may miss something by chance.
    if count >= 5000 {
        assert!(tally.trained * 100 >= tally.runs * 85, "too many programs are refused");
        let rare = |pair: &(Feature, Mode)| tally.occurred.get(pair).is_none_or(|count| *count < 50);
        let pairs = Feature::ALL.into_iter().flat_map(|feature| MODES.map(|mode| (feature, mode)));
        let rare: Vec<_> = pairs.filter(rare).collect();
        assert!(rare.is_empty(), "{rare:?} occurred fewer than 50 times");
    }
}
