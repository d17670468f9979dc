//! Why the launcher itself fails.

use std::ffi::OsString;
use std::io;

use rustix::io::Errno;

use super::args::Args;

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("cannot set up the launcher: {0}")]
    Runtime(io::Error),
    #[error(
        "command not found: {command:?} ({source}): check its spelling, PATH, and for a script the \
         interpreter in its first line"
    )]
    NotFound { command: OsString, source: io::Error },
    #[error(
        "command cannot be executed: {command:?} ({source}): check its permissions, and for a script \
         its first line"
    )]
    NotExecutable { command: OsString, source: io::Error },
    #[error("cannot start rank {rank}: {source}; the ranks already started were killed")]
    Start { rank: u32, source: io::Error },
    #[error("cannot wait for a rank: {0}; all ranks were killed")]
    Wait(io::Error),
}

impl RunError {
    /// The error of a rank that could not be started.
    pub fn start(source: io::Error, args: &Args, rank: u32) -> RunError {
        let command = args.command[0].clone();
        let no_program = source.raw_os_error() == Some(Errno::NOEXEC.raw_os_error());
        match source.kind() {
            io::ErrorKind::NotFound => RunError::NotFound { command, source },
            io::ErrorKind::PermissionDenied => RunError::NotExecutable { command, source },
            _ if no_program => RunError::NotExecutable { command, source },
            _ => RunError::Start { rank, source },
        }
    }

    /// 126 and 127 are a shell's statuses for a command that it could not execute or find.
    pub fn status(&self) -> u8 {
        match self {
            Self::NotFound { .. } => 127,
            Self::NotExecutable { .. } => 126,
            _ => 1,
        }
    }
}
