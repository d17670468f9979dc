//! `bonfire run`: starts the ranks of one node and watches over them.

mod layout;
#[cfg(unix)]
mod output;
#[cfg(unix)]
mod rank;
#[cfg(unix)]
mod signals;
#[cfg(unix)]
mod supervise;

use std::ffi::OsString;
use std::io;
use std::net::IpAddr;

use layout::{Layout, LayoutError, Master};

/// Start a command once per rank, on this machine or on several
///
/// Every line a rank writes is printed behind its rank, as in `[2] text`, on the stream it was
/// written to. A carriage return ends a line too, so each state of a progress bar is a line of its
/// own. Ranks read nothing: their standard input is empty.
#[derive(clap::Args)]
#[command(after_help = "Try `bonfire run --help` for what the ranks are given, examples and exit \
                        statuses.", after_long_help = LONG_HELP)]
pub struct Args {
    /// Ranks to start on this node, the same number on every node [default: the number of cores]
    #[arg(short = 'n', long = "ranks", value_name = "N")]
    ranks: Option<u32>,

    /// Nodes (machines) the run consists of
    #[arg(long, value_name = "N", default_value_t = 1)]
    nodes: u32,

    /// Number of this node, counted from 0; node 0 holds rank 0
    #[arg(long, value_name = "K")]
    node_rank: Option<u32>,

    /// Where rank 0 listens, the same on every node; an IPv6 address stands in brackets [default,
    /// on a single node: a free port of --host, else of 127.0.0.1]
    #[arg(long, value_name = "HOST:PORT")]
    master: Option<Master>,

    /// Address of this node's own interface on which its ranks listen [default: loopback]
    ///
    /// Nothing but loopback is used unless this is given. Several nodes then need a secret that
    /// all of them share, in BONFIRE_SECRET_FILE or BONFIRE_SECRET: see --help. Ranks prove it to
    /// each other; what they send afterwards is not encrypted.
    #[arg(long, value_name = "ADDR", value_parser = layout::parse_host)]
    host: Option<IpAddr>,

    /// Seconds that ranks get to end after a signal, before they are killed
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    grace: u32,

    /// Ranks that may fail before the others are ended: for programs that go on without them
    #[arg(long, value_name = "N", default_value_t = 0)]
    tolerate: u32,

    /// Print the ranks' lines as they are, without the rank before each
    #[arg(long)]
    no_prefix: bool,

    /// The command of every rank, with its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Args {
    /// `ranks` ranks of `command` on this machine, their output as it is.
    pub fn local(ranks: u32, command: Vec<OsString>) -> Args {
        Args {
            ranks: Some(ranks),
            nodes: 1,
            node_rank: None,
            master: None,
            host: None,
            grace: 10,
            tolerate: 0,
            no_prefix: true,
            command,
        }
    }
}

/// Runs the ranks to their end and returns the launcher's exit status.
pub fn run(args: &Args) -> u8 {
    let ended = Layout::new(args).map_err(RunError::from).and_then(|layout| launch(&layout, args));
    ended.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        error.status()
    })
}

#[cfg(unix)]
fn launch(layout: &Layout, args: &Args) -> Result<u8, RunError> {
    // The ranks ask to die with the thread that started them (see `rank`). On this runtime that is
    // the main thread, which lives as long as the process.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(RunError::Runtime)?;
    let ended = runtime.block_on(supervise::supervise(layout, args));
    // A write to a pipe nobody reads any more must not hold up the exit.
    runtime.shutdown_background();
    ended
}

#[cfg(not(unix))]
fn launch(_: &Layout, _: &Args) -> Result<u8, RunError> {
    Err(RunError::Platform)
}

#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[cfg(not(unix))]
    #[error(
        "`bonfire run` needs process groups and signals, which this system lacks: start each rank \
         by hand, with the variables that `bonfire run --help` names"
    )]
    Platform,
    #[cfg(unix)]
    #[error("cannot set up the launcher: {0}")]
    Runtime(io::Error),
    #[cfg(unix)]
    #[error(
        "command not found: {command:?} ({source}): check its spelling, PATH, and the interpreter \
         named in its first line"
    )]
    NotFound { command: OsString, source: io::Error },
    #[cfg(unix)]
    #[error(
        "command cannot be executed: {command:?} ({source}): check its permissions, and the first \
         line if it is a script"
    )]
    NotExecutable { command: OsString, source: io::Error },
    #[cfg(unix)]
    #[error("cannot start rank {rank}: {source}; the ranks already started were killed")]
    Start { rank: u32, source: io::Error },
    #[cfg(unix)]
    #[error("cannot wait for a rank: {0}; all ranks were killed")]
    Wait(io::Error),
    #[cfg(unix)]
    #[error("cannot print the output of the ranks: {0}; the ranks were ended")]
    Output(io::Error),
}

impl RunError {
    /// 126 and 127 are a shell's statuses for a command it could not execute or find.
    fn status(&self) -> u8 {
        match self {
            Self::Layout(_) => 2,
            #[cfg(unix)]
            Self::NotFound { .. } => 127,
            #[cfg(unix)]
            Self::NotExecutable { .. } => 126,
            _ => 1,
        }
    }
}

const LONG_HELP: &str = "\
Each rank finds in its environment:
  BONFIRE_RANK, RANK                          its number in the whole run, from 0
  BONFIRE_WORLD_SIZE, WORLD_SIZE              ranks in the whole run
  BONFIRE_LOCAL_RANK, LOCAL_RANK              its number on its node, from 0
  BONFIRE_LOCAL_WORLD_SIZE, LOCAL_WORLD_SIZE  ranks on its node
  BONFIRE_ADDRESS                             host:port at which rank 0 listens
  MASTER_ADDR, MASTER_PORT                    the same, in two parts
  BONFIRE_HOST                                address this node's ranks listen on
  BONFIRE_SECRET_FILE or BONFIRE_SECRET       what you set; else, with one node, BONFIRE_SECRET with
                                              fresh random digits

Secret:
  Ranks prove to each other that they know the job's secret before anything else. On one node
  there is nothing to do. Several nodes need the same one on each, unless all are loopback: a file
  with at least 32 random bytes, owned by you or root, with mode 0600, named by
  BONFIRE_SECRET_FILE. BONFIRE_SECRET holds the secret itself; setting both is an error. There is
  no flag for it, since every user of a machine can read the arguments of all processes.
    (umask 077; openssl rand -hex 32 > job.secret)          then copy it to every node
  It authenticates; data are not encrypted.

Examples:
  Four ranks on this machine:
    bonfire run -n 4 -- ./train --epochs 3
  Two machines with eight ranks each; on the first (10.0.0.1), then on the second (10.0.0.2):
    export BONFIRE_SECRET_FILE=job.secret
    bonfire run -n 8 --nodes 2 --node-rank 0 --master 10.0.0.1:29400 --host 10.0.0.1 -- ./train
    bonfire run -n 8 --nodes 2 --node-rank 1 --master 10.0.0.1:29400 --host 10.0.0.2 -- ./train

Signals:
  SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGQUIT are passed to every rank and to the processes it
  started; what still runs after the grace period is killed. A second Ctrl-C kills at once.
  SIGUSR1 and SIGUSR2 are passed on and change nothing else. A signal that was ignored when the
  launcher started, as SIGHUP is under nohup, stays ignored.

When a rank fails, its status and last lines are printed and the other ranks are ended: SIGTERM,
then SIGKILL after the grace period. A rank that ends with status 0 leaves the others running.
When a rank has ended, whatever it left in its process group is killed.

Exit status:
  0      every rank ended with status 0, but for as many as --tolerate says
  S      the first rank that failed, or that was one too many, ended with status S
  128+N  the first rank that failed was killed by signal N, or the launcher was told to end by it
  1      the launcher failed, for instance because its output was closed
  2      bad arguments; nothing was started
  126    the command cannot be executed
  127    the command was not found";
