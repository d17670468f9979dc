//! What a team that kernels serve puts on a stream, for ranks of one process and of several.

use super::gpu::{LoadedChoice, Prepared, QueuedCall, TeamGpu};
use super::group::GroupTeam;
use super::{Backend, Team};
use crate::address::Address;
use crate::choice::{Choice, Topology};
use crate::control::{Member, Parameters, nanoseconds};
use crate::driver::Gpu;
use crate::memory::Memory;
use crate::remote;
use crate::rounds::{BufferLayout, divide};
use crate::runtime::{DeviceId, Runtime};
use crate::window::Windows;
use bonfire_core::{Call, Error};

/// The control blocks of all ranks, by rank. They are kept until no kernel uses them.
pub(super) enum Controls {
    /// All ranks are local, with their rank as index.
    Own(Vec<Memory>),
    /// One rank is local.
    InWindows(Windows),
}

impl Controls {
    fn addresses(&self) -> Vec<Address> {
        match self {
            Controls::Own(controls) => controls.iter().map(|control| control.address).collect(),
            Controls::InWindows(windows) => windows.addresses(),
        }
    }
}

impl Team {
    /// Creates this rank's part of a group whose ranks are in several processes and use kernels.
    pub fn of_windows<R: Runtime>(
        device: DeviceId,
        rank: usize,
        (topology, windows): (Topology, Windows),
        group: GroupTeam,
    ) -> Result<Team, Error> {
        let team_gpu = TeamGpu::new(Gpu::of(device.ordinal())?, true)?;
        let backend = Backend::Kernels(topology, Controls::InWindows(windows));
        Team::assemble::<R>(vec![device], vec![rank], vec![team_gpu], vec![0], backend, Some(group))
    }

    /// Divides a call of this rank into the rounds that it takes.
    pub fn rounds(&self, local: usize, call: Call, choice: Choice, layout: BufferLayout) -> Vec<(Call, BufferLayout)> {
        match (&self.backend, choice) {
            (Backend::Kernels(topology, Controls::InWindows(windows)), Choice::Kernel(config)) => {
                let rank = (self.local_ranks[local].rank, topology.ranks);
                divide(&call, config.kernel.form, rank, layout, windows.staging())
            }
            _ => vec![(call, layout)],
        }
    }

    /// Enqueues a call of all ranks on this GPU.
    pub(super) fn launch(&self, team_gpu: &TeamGpu, number: u64, calls: &[QueuedCall]) -> Result<(), Error> {
        // Once for all that follows.
        let _entered = team_gpu.gpu.enter()?;
        for (local, QueuedCall { ready, .. }) in team_gpu.local_ranks.iter().zip(calls) {
            team_gpu.stream.wait_for(self.ready_word(*local), ready.ready)?;
            // SAFETY: a layout has the sizes of its call and keeps its memory, and `submit` keeps the layout's memory
            // until the call is done, or after a failure until the stream is idle.
            unsafe { team_gpu.copy(&ready.layout.before) }?;
        }
        let QueuedCall { site, deadline, ready: Prepared { loaded, layout, .. } } = &calls[0];
        match (loaded, &self.backend) {
            (LoadedChoice::Kernel(launch, module), Backend::Kernels(_, controls)) => {
                let parameters = self.parameters(team_gpu, calls, controls);
                let grid = (calls.len() as u32, launch.blocks);
                // SAFETY: `load` has loaded the module on this GPU. Parameters are as `kernels/signal.cuh` has them:
                // those of this process's ranks with memory as above, and control blocks that the team keeps.
                unsafe { team_gpu.stream.launch(module, grid, launch.threads, parameters) }?;
            }
            (LoadedChoice::Nccl, Backend::Nccl(remote)) => {
                let BufferLayout { source, target, peers, incoming, .. } = *layout;
                let memory = remote::Memory { source, target, peers, incoming };
                // SAFETY: as for the copies. The stream is of the communicator's GPU, which is the rank's.
                unsafe { remote.submit(*site, memory, &team_gpu.stream, deadline) }?;
                if let Some(error) = self.failure() {
                    // The thread that failed the team did not abort the communicator if it was in use.
                    remote.abort();
                    return Err(error);
                }
            }
            _ => return Err(Error::broken(site.to_string(), "this team has another backend")),
        }
        // SAFETY: as for the copies before.
        calls.iter().try_for_each(|call| unsafe { team_gpu.copy(&call.ready.layout.after) })?;
        team_gpu.stream.write(team_gpu.done.unwrap_or_else(|| self.host_done_word(team_gpu)), number)
    }

    fn parameters(&self, team_gpu: &TeamGpu, calls: &[QueuedCall], controls: &Controls) -> Parameters {
        let call = &calls[0].ready.call;
        let mut parameters = Parameters {
            timeout: nanoseconds(calls.iter().map(|call| call.ready.timeout).max().unwrap_or_default()),
            ranks: self.ranks() as u64,
            root: call.root.unwrap_or(0) as u64,
            count: call.count as u64,
            width: if call.reduction.is_some() { 0 } else { call.dtype.size() as u64 },
            ..Parameters::default()
        };
        for (place, address) in parameters.control.iter_mut().zip(controls.addresses()) {
            *place = address;
        }
        for ((local, QueuedCall { ready, .. }), member) in
            team_gpu.local_ranks.iter().zip(calls).zip(&mut parameters.members)
        {
            let (rank, host) = (self.local_ranks[*local].rank as u64, self.host_words(*local).address());
            *member = Member { source: ready.layout.source, target: ready.layout.target, rank, host };
        }
        parameters
    }
}
