//! Ranks of a training are killed at random moments of each phase. The remaining ranks end with the parameters that a
//! replay of the steps gives, bit for bit; the checkpoint is whole at any time; and nothing hangs or leaks.
//!
//! `BONFIRE_CHAOS` is the minimum number of ranks that are killed (default: 40). `BONFIRE_CHAOS_SEED` repeats a run, as
//! far as moments can be repeated.

mod model;
mod rank;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use bonfire_testing::process::{Process, is_child};
use bonfire_testing::resources::shared_files;
use bonfire_testing::settings::{number, seed};
use bonfire_testing::transport::Random;
use bonfire_testing::{free_address, in_parallel};
use model::STEPS;
use rank::{GOING, Kill, ORDERS, Orders, Phase, Report};
use rustix::process::Signal;

/// A rank that has not ended after this time hangs. Deadlines are shorter.
const HANG: Duration = Duration::from_secs(120);
const DEADLINE: &str = "60";
/// No rank that lives is declared lost, however busy the machine is. One that is killed is known at once.
const HEARTBEAT_TIMEOUT: &str = "30";
/// Trainings at the same time.
const WIDTH: usize = 3;

#[derive(Default)]
struct Totals {
    faults: usize,
    hangs: usize,
    wrong: usize,
    leaks: usize,
    /// Ranks killed in each phase, or from outside.
    killed: BTreeMap<String, usize>,
    /// What the others did when they learned of it, and the operation that said so.
    losses: BTreeMap<(Phase, String), usize>,
}

/// A training: one group that starts it, and another that resumes it from its checkpoint.
struct Case {
    transport: &'static str,
    random: Random,
    hidden: usize,
    shard: Option<usize>,
    totals: Totals,
}

/// The test whose processes are the ranks.
const RANKS: &str = "shared::chaos::killed_ranks_change_nothing_for_the_others";

#[test]
fn killed_ranks_change_nothing_for_the_others() {
    if is_child() {
        return rank::main();
    }
    let faults = number("BONFIRE_CHAOS").unwrap_or(40) as usize;
    let seed = seed("BONFIRE_CHAOS_SEED");
    println!("BONFIRE_CHAOS={faults} BONFIRE_CHAOS_SEED={seed}");
    let (shared, sum) = (shared_files(), Mutex::new(Totals::default()));
    // Of the most cases, those run that are needed.
    let numbers: Vec<u64> = (0..faults as u64).collect();
    in_parallel(&numbers, WIDTH, |&number| {
        if sum.lock().unwrap().faults >= faults {
            return;
        }
        let mut random = Random(seed.wrapping_add(number).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        (0..4).for_each(|_| _ = random.next());
        let mut case = Case {
            transport: ["shm", "tcp"][number as usize % 2],
            hidden: [8, 8, 8, 8, 8192][number as usize / 2 % 5],
            shard: [None, None, Some(5), Some(2)][number as usize / 4 % 4],
            random,
            totals: Totals::default(),
        };
        case.run(&format!("case {number}"));
        sum.lock().unwrap().add(case.totals);
    });
    let mut sum = sum.into_inner().unwrap();
    sum.leaks += shared_files().iter().filter(|file| !shared.contains(file)).count();
    println!("killed: {:?}", sum.killed);
    println!("the others learned of it: {:?}", sum.losses);
    println!("faults {} hangs {} wrong {} leaks {}", sum.faults, sum.hangs, sum.wrong, sum.leaks);
    assert!(sum.faults >= faults && sum.hangs + sum.wrong + sum.leaks == 0);
}

impl Totals {
    fn add(&mut self, other: Totals) {
        self.faults += other.faults;
        self.hangs += other.hangs;
        self.wrong += other.wrong;
        self.leaks += other.leaks;
        other.killed.into_iter().for_each(|(phase, count)| *self.killed.entry(phase).or_default() += count);
        other.losses.into_iter().for_each(|(loss, count)| *self.losses.entry(loss).or_default() += count);
    }
}

impl Case {
    fn below(&mut self, limit: usize) -> usize {
        (self.random.next() >> 16) as usize % limit
    }

    fn run(&mut self, name: &str) {
        let folder = tempfile::tempdir().expect("a folder");
        let checkpoint = folder.path().join("checkpoint");
        let epochs = [3 + self.below(6), 10 + self.below(6)];
        let mut history = Vec::new();
        for epochs in epochs {
            let ranks = 3 + self.below(3);
            let kills = self.kills(ranks, epochs - history.len() / STEPS);
            let orders =
                Orders { hidden: self.hidden, shard: self.shard, epochs, checkpoint: checkpoint.clone(), kill: None };
            let start = Instant::now();
            let (hangs, wrong, leaks) = (self.totals.hangs, self.totals.wrong, self.totals.leaks);
            match self.group(ranks, &kills, &orders, &history) {
                Ok(steps) => history = steps,
                Err(why) => {
                    self.totals.wrong += 1;
                    println!("    {why}");
                }
            }
            if (hangs, wrong, leaks) != (self.totals.hangs, self.totals.wrong, self.totals.leaks) {
                let Case { transport, hidden, shard, .. } = self;
                println!(
                    "{name} FAILED: {ranks} ranks, {transport}, hidden {hidden}, shard {shard:?}: {kills:?}; {:.1?}",
                    start.elapsed()
                );
                return;
            }
        }
    }

    /// Draws who is killed and when: at least one rank, and at least one remains. `None` is a kill from outside.
    fn kills(&mut self, ranks: usize, epochs: usize) -> Vec<(usize, Option<Kill>)> {
        let mut victims: Vec<usize> = (0..ranks).collect();
        let count = 1 + self.below(ranks - 1);
        let mut kills = Vec::new();
        for number in 0..count {
            // Another rank must be lost before one can be killed while it catches up.
            let phases = Phase::ALL.iter().filter(|phase| number > 0 || **phase != Phase::CatchUp);
            let phases: Vec<Phase> = phases.copied().collect();
            let choice = self.below(phases.len() + 1);
            let at = self.below(victims.len());
            let victim = victims.remove(at);
            let kill = phases.get(choice).map(|&phase| Kill {
                phase,
                after: match phase {
                    Phase::Start | Phase::Resume | Phase::End => 0,
                    Phase::Sync | Phase::Between | Phase::Step => self.below(epochs * STEPS),
                    Phase::AverageStates | Phase::Checkpoint => self.below(epochs),
                    Phase::CatchUp => self.below(2),
                },
                when: self.below(1200) as f64 / 1000.0,
            });
            kills.push((victim, kill));
        }
        kills
    }

    /// Runs a group that continues after the steps of `before`. Returns all steps.
    fn group(
        &mut self,
        ranks: usize,
        kills: &[(usize, Option<Kill>)],
        orders: &Orders,
        before: &[u64],
    ) -> Result<Vec<u64>, String> {
        let address = free_address();
        let kill = |rank| kills.iter().find(|(victim, _)| *victim == rank).map(|(_, kill)| kill);
        let start = |rank: usize| {
            let orders = Orders { kill: kill(rank).cloned().flatten(), ..orders.clone() };
            let variables = [
                ("BONFIRE_RANK", rank.to_string()),
                ("BONFIRE_WORLD_SIZE", ranks.to_string()),
                ("BONFIRE_ADDRESS", address.clone()),
                ("BONFIRE_TRANSPORT", self.transport.to_owned()),
                ("BONFIRE_DEADLINE", DEADLINE.to_owned()),
                ("BONFIRE_HEARTBEAT_TIMEOUT", HEARTBEAT_TIMEOUT.to_owned()),
                (ORDERS, serde_json::to_string(&orders).expect("orders are plain data")),
            ];
            Process::start(RANKS, &variables)
        };
        let mut processes: Vec<Process> = (0..ranks).map(start).collect();
        for (rank, process) in processes.iter().enumerate() {
            let said = process.read_line_within(HANG);
            if said.as_deref() != Ok(GOING) {
                return Err(format!("rank {rank} did not join its group: {said:?}"));
            }
        }
        for (victim, _) in kills.iter().filter(|(_, kill)| kill.is_none()) {
            // The moment of the fault.
            thread::sleep(Duration::from_micros(self.below(200_000) as u64));
            processes[*victim].signal(Signal::KILL);
        }
        let mut reports = Vec::new();
        for (rank, process) in processes.iter_mut().enumerate() {
            let Some(status) = process.end_within(HANG) else {
                println!("    rank {rank} hangs");
                self.totals.hangs += 1;
                continue;
            };
            match (status.signal(), kill(rank)) {
                (Some(signal), Some(kill)) if signal == Signal::KILL.as_raw() => {
                    self.totals.faults += 1;
                    let phase = kill.as_ref().map_or("outside".into(), |kill| format!("{:?}", kill.phase));
                    *self.totals.killed.entry(phase).or_default() += 1;
                }
                _ if status.success() => {
                    let report =
                        process.read_line_within(HANG).map_err(|e| format!("rank {rank} reports nothing: {e}"))?;
                    reports.push((rank, serde_json::from_str::<Report>(&report).expect("a report")));
                }
                _ => return Err(format!("rank {rank} ended with {status}")),
            }
        }
        if let Err(error) = std::net::TcpListener::bind(&address) {
            println!("    {address} is taken: {error}");
            self.totals.leaks += 1;
        }
        self.check(reports, ranks, orders, before)
    }

    /// Checks what the remaining ranks report, and the checkpoint. Returns the steps.
    fn check(
        &mut self,
        mut reports: Vec<(usize, Report)>,
        ranks: usize,
        orders: &Orders,
        before: &[u64],
    ) -> Result<Vec<u64>, String> {
        // They count as lost.
        reports.retain(|(_, report)| !report.gave_up);
        if reports.is_empty() {
            return saved(orders).map(|saved| saved.map_or(before.to_vec(), |(history, _)| history));
        }
        for (rank, report) in &reports {
            if let Some(error) = &report.error {
                return Err(format!("rank {rank} ended with the error: {error}; {:?}", report.losses));
            }
            for leak in &report.leaks {
                println!("    rank {rank} has {leak}");
                self.totals.leaks += 1;
            }
            for loss in &report.losses {
                *self.totals.losses.entry(loss.clone()).or_default() += 1;
            }
        }
        let (first, expected) = &reports[0];
        let history = &expected.history;
        for (rank, report) in &reports {
            let same = report.history == *history && report.digest == expected.digest;
            if !same || report.state.to_bits() != expected.state.to_bits() {
                return Err(format!("rank {rank} ended with {report:?}, rank {first} with {expected:?}"));
            }
            // A step that a remaining rank has made counts, unless it was made again after going back to a checkpoint.
            let made: BTreeMap<usize, u64> = report.made.iter().copied().collect();
            if made.len() < report.made.len() && self.shard.is_none() {
                return Err(format!("rank {rank} made a step twice: {:?}", report.made));
            }
            if let Some((step, ranks)) = made.iter().find(|(step, ranks)| history.get(**step) != Some(ranks)) {
                return Err(format!("rank {rank} made step {step} on {ranks} ranks, but counted are {history:?}"));
            }
        }
        if history.len() != orders.epochs * STEPS || !history.starts_with(before) {
            return Err(format!("after {before:?} came {history:?}"));
        }
        let own = &history[before.len()..];
        let sizes = reports.len() as u64..=ranks as u64;
        if !own.is_sorted_by(|a, b| a >= b) || !own.iter().all(|size| sizes.contains(size)) {
            return Err(format!("{} of {ranks} ranks remained, and the steps were made on {own:?}", reports.len()));
        }
        let (digest, states) = model::replay(orders.hidden, history).map_err(|error| error.to_string())?;
        if digest != expected.digest || !states.contains(&expected.state) {
            return Err(format!("{expected:?} instead of {digest} and one of {states:?}"));
        }
        if saved(orders)? != Some((history.clone(), expected.state)) {
            return Err(format!("the checkpoint has {:?} instead of {history:?}", saved(orders)));
        }
        let entries = std::fs::read_dir(&orders.checkpoint).into_iter().flatten().flatten();
        let is_left = |name: &str| !name.starts_with("set-") && name != "job.json";
        let left = entries.map(|entry| entry.file_name()).find(|name| is_left(&name.to_string_lossy()));
        if let Some(left) = left {
            return Err(format!("{left:?} is left of a checkpoint"));
        }
        Ok(history.clone())
    }
}

/// Returns the steps in the checkpoint and the value of the state, if there is a checkpoint: then it must be whole.
fn saved(orders: &Orders) -> Result<Option<(Vec<u64>, f32)>, String> {
    let state = rank::load(orders.hidden, &orders.checkpoint).map_err(|error| error.to_string())?;
    let Some(state) = state else { return Ok(None) };
    let ((digest, value), history) = (model::contents(&state), state.user);
    let (expected, values) = model::replay(orders.hidden, &history).map_err(|error| error.to_string())?;
    if digest == expected && values.contains(&value) {
        Ok(Some((history, value)))
    } else {
        Err(format!("the checkpoint after {history:?} has {digest}, {value} instead of {expected}, {values:?}"))
    }
}
