//! Ranks as processes: a test starts its own binary again, once per rank, with only that test in it.
//!
//! In the child the test's body finds that [`is_child`] is true and reports to the parent with [`send_line`].

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use bonfire_core::Error;
use rustix::process::{Pid, Signal, kill_process};

const CHILD: &str = "BONFIRE_TEST_CHILD";
/// Prefix of a child's messages: the test harness writes to the same stream.
const PREFIX: &str = "bonfire-says:";
/// Longer than any deadline within a child.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Whether this process was started by a test.
pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Sends a message to the parent.
pub fn send_line(words: impl std::fmt::Display) {
    println!("\n{PREFIX}{words}");
}

/// Sends the outcome to the parent.
pub fn report(outcome: &Result<String, Error>) {
    send_line(serde_json::to_string(outcome).expect("outcomes are plain data"));
}

/// A child that runs the test `name`; it is killed when dropped.
pub struct Process {
    child: Child,
    words: Receiver<String>,
}

impl Process {
    /// Starts the child with these variables, and with no other variables of Bonfire.
    pub fn start(name: &str, variables: &[(&str, String)]) -> Process {
        Process::start_by(&[], name, variables)
    }

    /// As [`start`](Process::start), through a command that becomes the child, such as one that enters a namespace.
    pub fn start_by(command: &[String], name: &str, variables: &[(&str, String)]) -> Process {
        let own = std::env::current_exe().expect("the test's own binary");
        Process::spawn(command.iter().map(Into::into).chain([own.into_os_string()]), name, variables)
    }

    /// As [`start`](Process::start), from another program with the same tests: its command line.
    pub fn start_program(program: &[String], name: &str, variables: &[(&str, String)]) -> Process {
        Process::spawn(program.iter().map(Into::into), name, variables)
    }

    fn spawn(mut words: impl Iterator<Item = OsString>, name: &str, variables: &[(&str, String)]) -> Process {
        let mut command = Command::new(words.next().expect("there is at least the binary"));
        command
            .args(words)
            .args([name, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"])
            .stdout(Stdio::piped());
        for variable in ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ADDRESS", "HOST", "IFACE", "SECRET", "SECRET_FILE"]
        {
            command.env_remove(format!("BONFIRE_{variable}"));
        }
        for variable in ["TRANSPORT", "ALGORITHMS", "TCP_CONNECTIONS", "TRACE", "STOP_SIGNAL", "GRACE"] {
            command.env_remove(format!("BONFIRE_{variable}"));
        }
        for limit in ["DEADLINE", "HANG_TIMEOUT", "HEARTBEAT_TIMEOUT", "RENDEZVOUS_TIMEOUT"] {
            command.env_remove(format!("BONFIRE_{limit}"));
        }
        command.env(CHILD, "1").envs(variables.iter().map(|(name, value)| (*name, value)));
        // A shell that starts the tests in the background has them ignore SIGINT, which programs inherit.
        // SAFETY: the closure only calls `signal`, which is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                Ok(())
            });
        }
        let mut child = command.spawn().expect("the test's own binary starts");
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        let (sender, words) = channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if let Some(words) = line.strip_prefix(PREFIX) {
                    let _ = sender.send(words.to_owned());
                }
            }
        });
        Process { child, words }
    }

    /// Starts all ranks of a group, with the environment for [`bonfire_core::Group::from_env`].
    pub fn start_ranks(name: &str, n: usize, transport: &str, deadline: &str) -> Vec<Process> {
        Process::start_ranks_with(name, n, transport, deadline, &[])
    }

    /// As [`start_ranks`](Process::start_ranks), with more variables.
    pub fn start_ranks_with(
        name: &str,
        n: usize,
        transport: &str,
        deadline: &str,
        more: &[(&str, String)],
    ) -> Vec<Process> {
        Process::start_ranks_by(|_| Vec::new(), name, n, transport, deadline, more)
    }

    /// As [`start_ranks_with`](Process::start_ranks_with), each rank through a command, as in
    /// [`start_by`](Process::start_by).
    pub fn start_ranks_by(
        command: impl Fn(usize) -> Vec<String>,
        name: &str,
        n: usize,
        transport: &str,
        deadline: &str,
        more: &[(&str, String)],
    ) -> Vec<Process> {
        let address = super::free_address();
        let variables = |rank: usize| {
            let own = [
                ("BONFIRE_RANK", rank.to_string()),
                ("BONFIRE_WORLD_SIZE", n.to_string()),
                ("BONFIRE_ADDRESS", address.clone()),
                ("BONFIRE_TRANSPORT", transport.to_owned()),
                ("BONFIRE_DEADLINE", deadline.to_owned()),
            ];
            [&own[..], more].concat()
        };
        (0..n).map(|rank| Process::start_by(&command(rank), name, &variables(rank))).collect()
    }

    /// Returns the child's next message.
    pub fn read_line(&self) -> String {
        self.words.recv_timeout(TIMEOUT).expect("a message from the child")
    }

    /// Returns the child's next message, or an error if it ends or sends none within `limit`.
    pub fn read_line_within(&self, limit: Duration) -> Result<String, RecvTimeoutError> {
        self.words.recv_timeout(limit)
    }

    /// Returns the outcome that the child reports next.
    pub fn outcome(&self) -> Result<String, Error> {
        serde_json::from_str(&self.read_line()).expect("an outcome")
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a process has a number");
        kill_process(pid, signal).expect("a signal to one's own child");
    }

    /// Waits until the child has ended.
    pub fn end(&mut self) -> ExitStatus {
        self.end_within(TIMEOUT).expect("the child ends")
    }

    /// As [`end`](Process::end). `None` if the child does not end within `limit`.
    pub fn end_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            let status = self.child.try_wait().expect("one's own child");
            if status.is_some() || start.elapsed() > limit {
                return status;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
