//! A rank: a process, and all processes that it starts in its process group.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitIdStatus, kill_process_group, waitid};
use tokio::process::{ChildStderr, ChildStdout};
use tokio::signal::unix::{self, SignalKind};

use super::layout::Layout;
use super::reports::Reports;
use super::signals;
use crate::text::size;

/// A started rank. Dropping it kills its process group and reaps it.
///
/// The process is reaped nowhere else. Until then the kernel cannot reuse its process id for another process or group,
/// so no signal reaches a wrong one.
///
/// A process that left the group (`setsid`) has detached itself on purpose and is left alone.
pub struct Rank(Child);

/// Returns how many hardware queues CUDA is to give each GPU: the most that it has, unless the environment says.
/// Streams that share one block each other, so calls in flight may wait for each other. CUDA reads the variable when it
/// starts, and a library cannot set variables safely in a program that may have threads.
fn hardware_queues() -> Option<(&'static str, &'static str)> {
    const VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    std::env::var_os(VARIABLE).is_none().then_some((VARIABLE, "32"))
}

impl Rank {
    /// Starts the rank with local rank `local` in its own process group. A terminal's Ctrl-C then reaches the rank and
    /// the processes that it starts only once, through the launcher.
    pub fn start(
        command: &[OsString],
        layout: &Layout,
        reports: &Reports,
        local: u32,
    ) -> io::Result<(Self, RankHandles)> {
        // Subscribed before the process starts, so that its exit is not missed.
        let exits = unix::signal(SignalKind::child())?;
        // clap rejects an empty command.
        let mut process = Command::new(&command[0]);
        process
            .args(&command[1..])
            .envs(layout.environment(local))
            .envs(layout.secret())
            .envs([reports.variable(local)])
            .envs(hardware_queues())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        #[cfg(target_os = "linux")]
        die_with_launcher(&mut process);
        let mut rank = Self(process.spawn()?);
        let (Some(stdout), Some(stderr)) = (rank.0.stdout.take(), rank.0.stderr.take()) else {
            return Err(io::Error::other("its output is not piped"));
        };
        let handles = RankHandles {
            process: rank.process(),
            exits,
            stdout: ChildStdout::from_std(stdout)?,
            stderr: ChildStderr::from_std(stderr)?,
        };
        Ok((rank, handles))
    }

    /// Sends `signal` to the rank and the processes it started.
    pub fn signal(&self, signal: Signal) {
        // Fails only if the group has no processes left.
        let _ = kill_process_group(self.process(), signal);
    }

    pub fn process(&self) -> Pid {
        Pid::from_child(&self.0)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        // If the rank has moved to another group, this kills it, so that `wait` returns.
        let _ = self.0.kill();
        if let Err(error) = self.0.wait() {
            log::warn!("cannot reap process {}: {error}", self.0.id());
        }
    }
}

/// What the launcher observes of a rank: its process, and streams of exits and of output.
pub struct RankHandles {
    pub process: Pid,
    /// SIGCHLD. An item arrives after each exit of a child; several exits may share one.
    pub exits: unix::Signal,
    pub stdout: ChildStdout,
    pub stderr: ChildStderr,
}

/// How a rank ended.
#[derive(Clone, Copy, Debug)]
pub enum End {
    Exited(u8),
    Killed(i32),
    /// Killed by the system, because memory ran out: the bytes that its control group may use, if that was the limit.
    OutOfMemory {
        limit: Option<u64>,
    },
}

impl End {
    pub fn failed(self) -> bool {
        !matches!(self, Self::Exited(0))
    }

    /// Returns the exit status with which a shell, and so the launcher, reports this end.
    pub fn status(self) -> u8 {
        match self {
            Self::Exited(status) => status,
            Self::Killed(signal) => signals::exit_status(signal),
            Self::OutOfMemory { .. } => signals::exit_status(Signal::KILL.as_raw()),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exited(status) => write!(f, "exited with status {status}"),
            Self::Killed(signal) => write!(f, "was killed by {}", signals::name(*signal)),
            Self::OutOfMemory { limit: Some(bytes) } => {
                let most = size(*bytes);
                write!(f, "was killed by SIGKILL, because its control group may use no more than {most} of memory")
            }
            Self::OutOfMemory { limit: None } => {
                f.write_str("was killed by SIGKILL, because the machine had no memory left")
            }
        }
    }
}

/// Waits until the child `process` has ended. Does not reap it.
pub async fn ended(process: Pid, mut exits: unix::Signal) -> io::Result<End> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    loop {
        if let Some(status) = waitid(WaitId::Pid(process), options)? {
            return Ok(end(&status));
        }
        exits.recv().await;
    }
}

fn end(status: &WaitIdStatus) -> End {
    match status.terminating_signal() {
        Some(signal) => End::Killed(signal),
        // The kernel keeps the low eight bits of a status.
        None => End::Exited(status.exit_status().unwrap_or(0) as u8),
    }
}

/// Makes the kernel kill the rank when the launcher's main thread ends for any reason, so that a launcher killed by
/// SIGKILL leaves no rank behind. Processes that a rank started do not inherit this setting: they may live on until
/// they write to a pipe without a reader.
#[cfg(target_os = "linux")]
fn die_with_launcher(process: &mut Command) {
    use rustix::io::Errno;
    use rustix::process::{getpid, getppid, set_parent_process_death_signal};

    let launcher = getpid();
    let ask = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // If the launcher died before the call, the setting has no effect.
        if getppid() != Some(launcher) {
            return Err(io::Error::from(Errno::SRCH));
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe work is allowed. The closure makes two system calls and
    // converts an error number without allocating. It takes no lock, and its only capture is a number.
    unsafe { process.pre_exec(ask) };
}
