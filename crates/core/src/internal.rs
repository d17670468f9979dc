//! Items for the sibling packages beyond the public interface. Nothing here is stable: they pin the exact version.
//!
//! * [`Request`], [`ByteOperations`]: operations on bytes, for tensors, whose element types are known only at run time.
//! * [`AgreedOperations`], [`Agreed`], [`Started`], [`Peers`], [`Attachment`]: operations whose data another library
//!   moves, and what else a layer above does with a group.
//! * [`Entered`], [`Waiting`], [`CallSite`], [`call_site`], [`go_on`]: which of their functions a program is in, and
//!   where it calls it. [`Places`]: where ranks are, as text.
//! * [`Output`], [`reduce_to_all`], [`zeroed`]: kernels and memory for the reductions of the compute server.
//! * [`Bell`], [`lock`], [`spin`], [`oversubscribed`] and the deadlines: how threads wait for each other.
//! * [`BySize`]: tables by size, for the path of CUDA collectives. [`Ranges`], [`Rows`]: where tensors lie in an
//!   operation, and in memory. [`DeviceCalls`], [`DeviceWait`]: what devices of one process have called.
//! * [`function`]: of which function of theirs a call is a part. [`with_local`]: a value of this thread, for a while.
//! * [`RankList`], [`hash`], [`random`], [`process_number`]: ranks as text, a stable hash, random numbers that cannot
//!   be guessed.
//! * [`spare_memory`], [`cgroups`]: memory, and the limits on it.
//! * [`oracle`]: expected results of reductions, for tests and for the benchmark program.
//! * [`Report`], [`Event`] and [`LAUNCHER`]: what ranks tell `bonfire run`. [`unknown_variables`]: misspelled settings.
//! * [`bind_all`]: sockets at several addresses with one port, for the port that `bonfire run` chooses.
//! * [`stop_is_requested`], [`answer_stop`]: a request to stop, for the steps of a training. [`StopSettings`]: how a
//!   job is asked to, for its launcher.
//! * [`frame`], [`OwnRuntime`], [`Dialler`], [`connect`] and the handshake ([`AcceptQueue`] to [`accept_handshake`]):
//!   connections of burn-collective's orchestrator, and of yscv's ranks.
//! * [`TransportPackage`]: how a package brings a transport of groups of processes, as `bonfire-mpi` does. It returns a
//!   [`GroupEndpoint`] of what implements [`Transport`](crate::Transport), [`Collectives`], [`Regroup`] and
//!   [`Neighbours`], and carries the messages of [`PolledControl`]. [`kernel`], [`Scratch`]: reductions in its memory.

pub mod oracle;

pub use crate::control::hang::HangTimeout;
pub use crate::control::invitation::{process_number, random};
pub use crate::group::{
    Agreed, AgreedOperations, Attachment, ByteOperations, CallSite, DEADLINE, DeviceCalls, DeviceWait, Entered, Peers,
    Request, Started, Waiting, answer_stop, call_site, go_on, stop_is_requested, zeroed,
};
pub use crate::machine::{Cgroup, cgroups, spare_memory};
pub use crate::plan::BySize;
pub use crate::reduce::{Kernel, Output, Scratch, kernel, reduce_to_all};
#[cfg(unix)]
pub use crate::sync::OwnRuntime;
pub use crate::sync::{Bell, ENDLESS, SlowWaitWarning, deadline_from_env, lock, oversubscribed, spin, with_local};
pub use crate::transport::{Buffers, Collectives, GroupEndpoint, Neighbours, Regroup, Storage};
pub use crate::types::{Locate, Parts, Places, Ranges, RankList, Rows, function, hash, panic_message, warn};
#[cfg(unix)]
pub use crate::{
    auth::{
        AcceptQueue, Prologue, Purpose, RETRY, Refusal, accept_handshake, bind_all, confirm, connect, require_secret,
    },
    control::{ControlMessage, ControlMessages, Invited, PolledControl, Watch, frame},
    rendezvous::{Dialler, PackageSettings, StopSettings, TransportPackage, env::unknown_variables},
    report::{Event, Report, VARIABLE as LAUNCHER},
    transport::hosts_of,
};
