//! Injects many faults into groups that run mixed operations. Every surviving rank returns the same typed error in
//! time, results are correct, the survivors continue in a smaller group, and nothing leaks.
//!
//! `BONFIRE_CHAOS` is the minimum number of faults (default: 40), `BONFIRE_CHAOS_SEED` repeats a run, and a word as an
//! argument selects the scenarios whose names contain it. Scenarios that need privileges or programs which there are
//! not are skipped, and counted. A run that asks for more than the default must have them.

#[path = "chaos/case.rs"]
mod case;
#[path = "chaos/child.rs"]
mod child;
#[path = "chaos/cuts.rs"]
mod cuts;
#[path = "chaos/hosts.rs"]
mod hosts;
#[path = "chaos/links.rs"]
mod links;
#[path = "chaos/machine.rs"]
mod machine;
#[path = "chaos/meeting.rs"]
mod meeting;
#[path = "chaos/orders.rs"]
mod orders;
#[path = "chaos/ranks.rs"]
mod ranks;
#[path = "chaos/shortage.rs"]
mod shortage;
#[path = "chaos/stream.rs"]
mod stream;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use std::{env, thread};

use bonfire_testing::resources::shared_files;
use bonfire_testing::settings::{number, seed};
use case::Case;
use orders::GroupTransport;
use ranks::{ALL, PROCESSES};
use stream::random;

/// A kind of fault.
struct Scenario {
    name: &'static str,
    transports: &'static [GroupTransport],
    /// Whether every run tries each of the transports, or only one of them.
    each: bool,
    /// How often it is drawn, relative to others, after every scenario has run once.
    weight: usize,
    run: fn(&mut Case),
}

const SCENARIOS: &[Scenario] = &[
    Scenario { name: "killed", transports: PROCESSES, each: true, weight: 12, run: ranks::killed },
    Scenario { name: "stopped", transports: PROCESSES, each: true, weight: 6, run: ranks::stopped },
    Scenario { name: "several killed", transports: PROCESSES, each: true, weight: 4, run: ranks::several_killed },
    Scenario { name: "exits", transports: PROCESSES, each: false, weight: 3, run: ranks::exits },
    Scenario { name: "leaves", transports: ALL, each: false, weight: 3, run: ranks::leaves },
    Scenario { name: "panics", transports: ALL, each: true, weight: 3, run: ranks::panics },
    Scenario { name: "too slow", transports: ALL, each: false, weight: 2, run: ranks::too_slow },
    Scenario { name: "hangs", transports: ALL, each: true, weight: 3, run: ranks::hangs },
    Scenario { name: "pauses", transports: PROCESSES, each: false, weight: 2, run: ranks::pauses },
    Scenario { name: "many ranks", transports: PROCESSES, each: false, weight: 3, run: ranks::many },
    Scenario { name: "slow", transports: ALL, each: false, weight: 2, run: ranks::slow },
    Scenario { name: "disagrees", transports: ALL, each: true, weight: 3, run: ranks::disagrees },
    Scenario { name: "all stopped", transports: PROCESSES, each: false, weight: 1, run: ranks::all_stopped },
    Scenario { name: "reset", transports: PROCESSES, each: true, weight: 4, run: links::reset },
    Scenario { name: "half open", transports: PROCESSES, each: false, weight: 3, run: links::half_open },
    Scenario { name: "one way", transports: PROCESSES, each: false, weight: 2, run: links::one_way },
    Scenario { name: "stalls", transports: PROCESSES, each: false, weight: 2, run: links::stalls },
    Scenario { name: "pieces", transports: PROCESSES, each: false, weight: 2, run: links::pieces },
    Scenario { name: "duplicate rank", transports: PROCESSES, each: false, weight: 2, run: meeting::duplicate },
    Scenario { name: "late rank", transports: PROCESSES, each: false, weight: 2, run: meeting::late },
    Scenario { name: "too late", transports: PROCESSES, each: false, weight: 1, run: meeting::too_late },
    Scenario { name: "world size", transports: PROCESSES, each: false, weight: 2, run: meeting::world_size },
    Scenario { name: "port in use", transports: PROCESSES, each: false, weight: 1, run: meeting::port_in_use },
    Scenario { name: "killed early", transports: PROCESSES, each: true, weight: 3, run: meeting::killed },
    Scenario { name: "few files", transports: PROCESSES, each: false, weight: 4, run: shortage::files_before },
    Scenario { name: "no files", transports: PROCESSES, each: false, weight: 4, run: shortage::files_during },
    Scenario { name: "little memory", transports: PROCESSES, each: false, weight: 2, run: shortage::memory },
    Scenario { name: "/dev/shm full", transports: PROCESSES, each: false, weight: 1, run: shortage::shared_full },
    Scenario { name: "clocks differ", transports: PROCESSES, each: false, weight: 1, run: shortage::clocks_differ },
    Scenario { name: "clock jumps", transports: ALL, each: false, weight: 1, run: shortage::clock_jumps },
    Scenario { name: "packets dropped", transports: hosts::TRANSPORTS, each: false, weight: 1, run: hosts::drops },
    Scenario { name: "bandwidth cut", transports: hosts::TRANSPORTS, each: false, weight: 1, run: hosts::narrows },
    Scenario { name: "link flaps", transports: hosts::TRANSPORTS, each: false, weight: 1, run: hosts::link_flaps },
    Scenario { name: "partition", transports: hosts::TRANSPORTS, each: true, weight: 2, run: hosts::partition },
    Scenario { name: "links cut", transports: hosts::TRANSPORTS, each: true, weight: 3, run: cuts::in_the_stream },
    Scenario {
        name: "links cut early",
        transports: hosts::TRANSPORTS,
        each: false,
        weight: 2,
        run: cuts::in_the_rendezvous,
    },
    Scenario {
        name: "links cut late",
        transports: hosts::TRANSPORTS,
        each: false,
        weight: 2,
        run: cuts::in_the_shrink,
    },
    Scenario { name: "subgroups cut", transports: hosts::TRANSPORTS, each: false, weight: 2, run: cuts::in_subgroups },
];

/// Groups that run at the same time. Most of the time they wait.
const WIDTH: usize = 6;

/// The outcome of all cases.
#[derive(Default)]
struct Totals {
    faults: usize,
    hangs: usize,
    wrong: usize,
    leaks: usize,
    /// Scenarios that this machine does not allow.
    skipped: Vec<&'static str>,
    /// By scenario and transport: faults, and the longest time from a call to its error.
    table: BTreeMap<(&'static str, String), (usize, Duration)>,
}

/// Faults of a run that asks for no number.
const DEFAULT: u64 = 40;

fn main() -> ExitCode {
    if bonfire_testing::process::is_child() {
        child::main();
        return ExitCode::SUCCESS;
    }
    let filter = env::args().skip(1).find(|word| !word.starts_with('-')).unwrap_or_default();
    let scenarios: Vec<_> = SCENARIOS.iter().filter(|scenario| scenario.name.contains(&filter)).collect();
    if env::args().any(|word| word == "--list") {
        scenarios.iter().for_each(|scenario| println!("{}: test", scenario.name));
        return ExitCode::SUCCESS;
    }
    if scenarios.is_empty() {
        return ExitCode::SUCCESS;
    }
    let asked = number("BONFIRE_CHAOS").unwrap_or(DEFAULT) as usize;
    let seed = seed("BONFIRE_CHAOS_SEED");
    println!("BONFIRE_CHAOS={asked} BONFIRE_CHAOS_SEED={seed}");
    let shared = shared_files();
    let mut sum = run(&scenarios, asked, seed);
    let left: Vec<_> = shared_files().into_iter().filter(|file| !shared.contains(file)).collect();
    if !left.is_empty() {
        println!("left in /dev/shm: {left:?}");
        sum.leaks += left.len();
    }
    for ((name, transport), (faults, slowest)) in &sum.table {
        let known = if slowest.is_zero() { "no errors".into() } else { format!("known after {slowest:.1?} at most") };
        println!("{name:<16} {transport:<7} {faults:>3} faults, {known}");
    }
    let Totals { faults, hangs, wrong, leaks, ref skipped, .. } = sum;
    println!("faults {faults} hangs {hangs} wrong {wrong} leaks {leaks} skipped {}", skipped.len());
    let allowed = skipped.is_empty() || asked as u64 <= DEFAULT && skipped.len() < scenarios.len();
    if hangs + wrong + leaks == 0 && allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs every scenario once, then random ones by their weights, until enough faults have been injected.
fn run(scenarios: &[&Scenario], asked: usize, seed: u64) -> Totals {
    let first: Vec<_> = scenarios
        .iter()
        .enumerate()
        .flat_map(|(i, scenario)| {
            let one = random(&[seed, 1, i as u64]).next() as usize % scenario.transports.len();
            let transports = if scenario.each { scenario.transports } else { &scenario.transports[one..=one] };
            transports.iter().map(|transport| (*scenario, *transport))
        })
        .collect();
    let weighed: Vec<_> = scenarios.iter().flat_map(|scenario| vec![*scenario; scenario.weight]).collect();
    let any = |number: usize| {
        let mut random = random(&[seed, 2, number as u64]);
        let scenario = weighed[(random.next() >> 16) as usize % weighed.len()];
        (scenario, scenario.transports[(random.next() >> 16) as usize % scenario.transports.len()])
    };
    let (next, sum) = (Mutex::new(0), Mutex::new(Totals::default()));
    // Bounds the number of cases where this machine does not allow enough faults.
    let most = first.len() + 4 * asked;
    thread::scope(|scope| {
        for _ in 0..WIDTH {
            scope.spawn(|| {
                loop {
                    let number = {
                        let mut next = next.lock().expect("no thread panics while it holds the lock");
                        *next += 1;
                        *next - 1
                    };
                    let (scenario, transport) = first.get(number).copied().unwrap_or_else(|| any(number));
                    let sum_so_far = sum.lock().expect("no thread panics while it holds the lock");
                    if number >= first.len() && (sum_so_far.faults >= asked || number >= most) {
                        break;
                    }
                    if sum_so_far.skipped.contains(&scenario.name) {
                        continue;
                    }
                    drop(sum_so_far);
                    run_case(scenario, transport, number, seed, &sum);
                }
            });
        }
    });
    sum.into_inner().expect("no thread panics while it holds the lock")
}

fn run_case(scenario: &Scenario, transport: GroupTransport, number: usize, seed: u64, sum: &Mutex<Totals>) {
    let start = Instant::now();
    let mut case = Case::new(transport, random(&[seed, 3, number as u64]).next());
    (scenario.run)(&mut case);
    if case.star {
        case.what.push_str(", star");
    }
    let mut sum = sum.lock().expect("no thread panics while it holds the lock");
    if let Some(why) = case.skipped {
        if !sum.skipped.contains(&scenario.name) {
            println!("SKIPPED: {} because {why}", scenario.name);
            sum.skipped.push(scenario.name);
        }
        return;
    }
    sum.faults += case.faults;
    sum.hangs += case.hangs.len();
    sum.wrong += case.wrong.len();
    sum.leaks += case.leaks.len();
    let transport = format!("{transport:?}").to_lowercase();
    let (faults, slowest) = sum.table.entry((scenario.name, transport.clone())).or_default();
    (*faults, *slowest) = (*faults + case.faults, case.slowest.max(*slowest));
    let took =
        if case.slowest == Duration::ZERO { String::new() } else { format!(", known after {:.1?}", case.slowest) };
    println!(
        "{number:>3} {:<16} {transport:<7} {} {}{took} ({:.1?} in all) {}",
        scenario.name,
        if case.faults == 1 { "1 fault:".into() } else { format!("{} faults:", case.faults) },
        case.what,
        start.elapsed(),
        if case.passed() { "ok" } else { "FAILED" },
    );
    let failures = [("hang", &case.hangs), ("wrong", &case.wrong), ("leak", &case.leaks)];
    failures.iter().for_each(|(kind, what)| what.iter().for_each(|what| println!("      {kind}: {what}")));
}
