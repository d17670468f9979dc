//! Starts launchers and examines their output and processes.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Once};

use rustix::process::{Pid, Signal, kill_process};

pub fn launcher(arguments: &[&str]) -> Command {
    reset_ignored_signals();
    let mut command = Command::new(env!("CARGO_BIN_EXE_bonfire"));
    command.arg("run").args(arguments).arg("--");
    // The environment of the tests may contain settings of Bonfire.
    std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("BONFIRE_")).for_each(|(name, _)| {
        command.env_remove(name);
    });
    command
}

/// Makes processes start with the default action for all signals that these tests send, even if the tests run with some
/// ignored, as under `nohup`: across `exec` an ignored signal stays ignored, while a caught one returns to its default.
fn reset_ignored_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let ignored = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let ignored = ignored.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let ignored = ignored.map_or(0, |mask| u64::from_str_radix(mask.trim(), 16).unwrap());
        for signal in [Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1].map(Signal::as_raw) {
            if ignored & (1 << (signal - 1)) != 0 {
                // The flag is never read: the tests themselves still ignore the signal.
                signal_hook::flag::register(signal, Arc::<AtomicBool>::default()).unwrap();
            }
        }
    });
}

/// Runs `script` as every rank.
pub fn bonfire(arguments: &[&str], script: &str) -> Output {
    let mut command = launcher(arguments);
    command.args(["sh", "-c", script]).output().unwrap()
}

/// A running launcher.
pub struct Running {
    pub child: Child,
    pub stdout: Option<BufReader<ChildStdout>>,
}

impl Running {
    pub fn start(arguments: &[&str], script: &str) -> Self {
        Self::spawn(launcher(arguments).args(["sh", "-c", script]))
    }

    pub fn spawn(command: &mut Command) -> Self {
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let stdout = child.stdout.take().map(BufReader::new);
        Self { child, stdout }
    }

    pub fn lines(&mut self, count: usize) -> Vec<String> {
        let lines = self.stdout.as_mut().unwrap().lines();
        lines.take(count).map(Result::unwrap).collect()
    }

    /// Waits until each of `ranks` ranks has printed `text`.
    pub fn expect(&mut self, text: &str, ranks: usize) {
        let mut lines = self.lines(ranks);
        lines.sort_unstable();
        let expected: Vec<_> = (0..ranks).map(|rank| format!("[{rank}] {text}")).collect();
        assert_eq!(lines, expected);
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub fn wait(&mut self) -> std::process::ExitStatus {
        self.child.wait().unwrap()
    }

    pub fn stderr(&mut self) -> String {
        let mut stderr = String::new();
        let mut pipe = self.child.stderr.take().unwrap();
        pipe.read_to_string(&mut stderr).unwrap();
        stderr
    }
}

impl Drop for Running {
    /// A failed test leaves no process running.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct Fifo(tempfile::TempDir);

impl Fifo {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fifo");
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        Self(folder)
    }

    pub fn path(&self) -> String {
        self.0.path().join("fifo").display().to_string()
    }
}

pub type Environment = std::collections::HashMap<String, String>;

/// Returns the environment of each rank, from the output of `PRINT_ENVIRONMENT`.
pub fn environments(output: &Output) -> Vec<Environment> {
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let mut environments = std::collections::BTreeMap::<&str, Environment>::new();
    for line in text(&output.stdout).lines() {
        let (prefix, variable) = line.split_once(' ').unwrap();
        let (name, value) = variable.split_once('=').unwrap();
        let environment = environments.entry(prefix).or_default();
        environment.insert(name.to_owned(), value.to_owned());
    }
    environments.into_values().collect()
}

pub fn assert_common_names(environment: &Environment) {
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
        assert_eq!(environment[name], environment[&format!("BONFIRE_{name}")]);
    }
    let address = format!("{}:{}", environment["MASTER_ADDR"], environment["MASTER_PORT"]);
    assert_eq!(environment["BONFIRE_ADDRESS"], address);
}

pub fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// Returns the process id that a rank printed.
pub fn number(line: &str) -> i32 {
    line.split_once("] ").unwrap().1.parse().unwrap()
}

/// Waits until the processes are gone: the kernel takes a moment to end one, and its new parent to reap it.
#[cfg(target_os = "linux")]
pub fn wait_until_gone(processes: &[i32]) {
    use std::time::{Duration, Instant};

    let start = Instant::now();
    for process in processes {
        while is_alive(*process) {
            assert!(start.elapsed() < Duration::from_secs(30), "{process} is left");
            std::thread::yield_now();
        }
    }
}

#[cfg(target_os = "linux")]
fn is_alive(process: i32) -> bool {
    match fs::read_to_string(format!("/proc/{process}/stat")) {
        // The state follows the name, which ends with the last parenthesis. A zombie counts as dead: without an init
        // process it may never be reaped.
        Ok(stat) => !stat.rsplit(") ").next().unwrap().starts_with('Z'),
        Err(_) => false,
    }
}
