//! What `bonfire run` is told to start.

use std::ffi::OsString;
use std::net::IpAddr;

use clap::Parser;

use super::address::{Master, parse_host};

/// Start a command once per rank, on this machine or on several
///
/// Every line a rank writes is printed behind its rank, as in `[2] text`, on the stream it was
/// written to. A carriage return ends a line too, so each state of a progress bar is a line of its
/// own. Ranks read nothing: their standard input is empty.
#[derive(Parser)]
#[command(after_help = "Try `bonfire run --help` for what the ranks are given, examples and exit \
                        statuses.", after_long_help = LONG_HELP)]
pub struct Args {
    /// Ranks to start on this node, the same number on every node [default: the number of cores]
    #[arg(short = 'n', long = "ranks", value_name = "N")]
    pub ranks: Option<u32>,

    /// Nodes (machines) the run consists of
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub nodes: u32,

    /// Number of this node, counted from 0; node 0 holds rank 0
    #[arg(long, value_name = "K")]
    pub node_rank: Option<u32>,

    /// Where rank 0 listens, the same on every node; an IPv6 address stands in brackets [default,
    /// on a single node: a free port of --host, else of 127.0.0.1]
    #[arg(long, value_name = "HOST:PORT")]
    pub master: Option<Master>,

    /// Address of this node's own interface on which its ranks listen [default: loopback]
    ///
    /// Nothing but loopback is used unless this is given. Several nodes then need a secret that
    /// all of them share, in BONFIRE_SECRET_FILE or BONFIRE_SECRET: see --help. Ranks prove it to
    /// each other; what they send afterwards is not encrypted.
    #[arg(long, value_name = "ADDR", value_parser = parse_host)]
    pub host: Option<IpAddr>,

    /// Seconds that ranks get to end after a signal, before they are killed
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub grace: u32,

    /// Ranks that may fail before the others are ended: for programs that go on without them
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub tolerate: u32,

    /// Print the ranks' lines as they are, without the rank before each
    #[arg(long)]
    pub no_prefix: bool,

    /// The command of every rank, with its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
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
