//! Command line arguments of `bonfire run`.

use std::ffi::OsString;
use std::net::IpAddr;

use clap::Parser;

use super::address::{Master, parse_host};

/// Start a command once per rank, on this machine or on several
///
/// Each line that a rank prints is prefixed with its rank, as in `[2] text`, and printed on the same
/// stream, standard output or standard error. A carriage return also ends a line, so each state of
/// a progress bar is a line. The standard input of the ranks is empty.
#[derive(Parser)]
#[command(after_help = "See `bonfire run --help` for the environment of the ranks, examples and exit \
                        statuses.", after_long_help = LONG_HELP)]
pub struct Args {
    /// Ranks to start on this node, the same number on every node [default: the number of cores]
    #[arg(short = 'n', long = "ranks", value_name = "N")]
    pub ranks: Option<u32>,

    /// Number of nodes (machines) in the run
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub nodes: u32,

    /// Number of this node, counted from 0; node 0 has rank 0 [required with several nodes]
    #[arg(long, value_name = "K")]
    pub node_rank: Option<u32>,

    /// Address at which rank 0 listens, the same on every node; write an IPv6 address in brackets [required with
    /// several nodes; default on a single node: a free port of --host, else of 127.0.0.1]
    #[arg(long, value_name = "HOST:PORT")]
    pub master: Option<Master>,

    /// Address of this node's own interface on which its ranks listen [default: loopback]
    ///
    /// Without this option the ranks use loopback only, and --master must be loopback too. With it, several nodes need
    /// a shared secret in BONFIRE_SECRET_FILE or BONFIRE_SECRET, described below. Ranks authenticate each other with
    /// the secret; the data that they send is not encrypted.
    #[arg(long, value_name = "ADDR", value_parser = parse_host)]
    pub host: Option<IpAddr>,

    /// Seconds that the ranks have to find each other [default: BONFIRE_RENDEZVOUS_TIMEOUT, else 120]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub rendezvous_timeout: Option<u32>,

    /// Grace period: seconds that ranks have to end after a signal, before they are killed; for training programs that
    /// stop in order, to agree on it [default: BONFIRE_GRACE, else 10]
    #[arg(long, value_name = "SECONDS")]
    pub grace: Option<u32>,

    /// Number of ranks that may fail before the others are ended, for programs that continue without them
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub tolerate: u32,

    /// Print the ranks' lines without prefixes
    #[arg(long)]
    pub no_prefix: bool,

    /// Command to run as every rank, with its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

const LONG_HELP: &str = "\
The environment of each rank has:
  BONFIRE_RANK, RANK                          its rank in the whole run, from 0
  BONFIRE_WORLD_SIZE, WORLD_SIZE              number of ranks in the whole run
  BONFIRE_LOCAL_RANK, LOCAL_RANK              its rank on its node, from 0
  BONFIRE_LOCAL_WORLD_SIZE, LOCAL_WORLD_SIZE  number of ranks on its node
  BONFIRE_ADDRESS                             host:port at which rank 0 listens
  MASTER_ADDR, MASTER_PORT                    the same, as two variables
  BONFIRE_HOST                                address at which this node's ranks listen
  BONFIRE_RENDEZVOUS_TIMEOUT                  seconds to find each other, with --rendezvous-timeout
  BONFIRE_GRACE                               seconds of the grace period
  BONFIRE_SECRET_FILE or BONFIRE_SECRET       as you set it; otherwise, on a single node, a random
                                              BONFIRE_SECRET
  BONFIRE_LAUNCHER                            a socket on which it reports failures and long waits
  A variable that looks like one of Bonfire's and is none is named when the launcher starts.

  A port that the launcher chooses belongs to the run until it ends: no other socket is given it,
  and on Linux one that sets SO_REUSEADDR, as rank 0's does, can listen at it.

Secret:
  Ranks authenticate each other with a shared secret when they connect. On a single node there is
  nothing to do. Several nodes need the same secret, unless all addresses are loopback: a file with
  at least 32 random bytes, owned by you or root, with mode 0600, whose path is in
  BONFIRE_SECRET_FILE. BONFIRE_SECRET can hold the secret itself; setting both is an error. There is
  no option for it, because all users of a machine can read the arguments of its processes.
    (umask 077; openssl rand -hex 32 > job.secret)          then copy it to every node
  The secret authenticates ranks; it does not encrypt data.

Examples:
  Four ranks on this machine:
    bonfire run -n 4 -- ./train --epochs 3
  Two machines with eight ranks each; on the first (10.0.0.1), then on the second (10.0.0.2):
    export BONFIRE_SECRET_FILE=job.secret
    bonfire run -n 8 --nodes 2 --node-rank 0 --master 10.0.0.1:29400 --host 10.0.0.1 -- ./train
    bonfire run -n 8 --nodes 2 --node-rank 1 --master 10.0.0.1:29400 --host 10.0.0.2 -- ./train

Signals:
  SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGQUIT are forwarded to every rank and to the processes that
  it started; those still running after the grace period are killed. A second Ctrl-C kills at once.
  SIGUSR1 and SIGUSR2 are forwarded and have no other effect. A signal that was ignored when the
  launcher started, such as SIGHUP under nohup, stays ignored.

  A training program that asks whether it should stop (should_stop) does not end at once at SIGTERM,
  or at USR1 or USR2 if BONFIRE_STOP_SIGNAL says so: all ranks hear of the signal after the same
  training step, save and end. Once they have heard, they are waited for, however long that takes. A
  second signal kills them.

Failures:
  When a rank fails, the other ranks are ended: SIGTERM after a second, then SIGKILL after the grace
  period. The launcher waits for 5 seconds instead of one if ranks are about to end by themselves. At
  the end it prints how every rank ended, then the last lines of the rank that failed first. A rank
  whose group failed with an error that names another rank is a consequence and not the first
  failure, even if it ends first. Programs without Bonfire report no failures: of their ranks, the
  first to end is the first failure. A rank that exits with status 0 does not end the others. When a
  rank has ended, all processes left in its process group are killed.

Output:
  Output that cannot be written never ends the ranks. If a stream of the launcher fails, because its
  reader has ended or a disk is full, lines for it are dropped, which is said on the other stream;
  they are counted where they are missing, or at the end. A reader that pauses or is slow delays the
  ranks only once 16 MiB wait for it. If it then takes nothing for 10 seconds, lines are dropped
  until it goes on. None of this changes the exit status.

Hangs:
  When a rank has waited for others for a tenth of the deadline (BONFIRE_DEADLINE, 300 seconds by
  default), the launcher prints in which operation and for which ranks.

Exit status:
  0      every rank exited with status 0, apart from the failures that --tolerate permits; also after
         the signal that asks the ranks to stop
  S      the rank that failed first, of those that --tolerate does not permit, exited with status S
  128+N  that rank was killed by signal N, or signal N to the launcher ended the run otherwise
  1      the launcher failed
  2      bad arguments; nothing was started
  126    the command cannot be executed
  127    the command was not found";
