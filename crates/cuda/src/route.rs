//! How the ranks of a group exchange data between their GPUs.
//!
//! The ranks agree once, when they first use devices: on kernels if all are devices of one process that can access each
//! other's memory, or of several processes of one host that can open each other's windows; on NCCL if each has a GPU;
//! or on both, and then `choice` decides per call. What neither supports goes through host memory.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::choice::{Choice, Link, Mode, Settings, Topology, choose, settings, wants_nccl};
use super::driver::Gpu;
use super::exchange::{InFlight, Launch, LaunchFn};
use super::launches::{Launches, Ticket};
use super::place::{self, Place};
use super::remote;
use super::runtime::{DeviceId, DeviceOperation, Runtime};
use super::side::TeamHandle;
use super::team::{GroupTeam, Team, kernels_supported};
use super::window::Windows;
use bonfire_core::internal::{AgreedOperations, Attachment, BySize, process_number, random};
use bonfire_core::{Call, Deadline, Error, Group};

/// What the ranks of a group have agreed on, as one rank keeps it: its device, and the route, if there is one.
pub struct RankRoute<R: Runtime> {
    device: DeviceId,
    route: Option<Arc<Route<R>>>,
}

/// How messages between the ranks of a group go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Messages {
    /// All ranks are of one process: the sender's device lends its memory to the receiver's.
    Lent,
    /// As collectives do.
    Carried,
}

impl<R: Runtime> Attachment for RankRoute<R> {
    fn part(&self) {
        let handles = self.route.iter().flat_map(|route| [&route.kernels, &route.nccl]).flatten();
        handles.for_each(|handle| handle.team.mark_group_failed());
    }
}

/// How the ranks of a group exchange data without host memory. A rank has one for its device.
pub struct Route<R: Runtime> {
    by_size: &'static BySize<Mode>,
    kernels: Option<TeamHandle<R>>,
    nccl: Option<TeamHandle<R>>,
    /// The group's number, on which its ranks have agreed.
    group: u64,
    /// The devices of the ranks, if all are of this process.
    devices: Option<Vec<DeviceId>>,
    /// If they are not: the GPU and the rank, for the order of launches.
    ticket: Option<(usize, usize)>,
}

/// What each rank tells the others before they agree.
#[derive(Serialize, Deserialize)]
struct RankInfo {
    /// A number unique to the process.
    process: u64,
    device: DeviceId,
    /// What its user requests.
    settings: String,
    /// The reason for which NCCL does not work here, if it does not.
    nccl: Result<(), String>,
    /// Where its GPU is, or why kernels cannot run there.
    place: Result<Place, String>,
    /// A proposed number for this group's team. Rank 0's is used.
    team: u64,
}

impl<R: Runtime> RankRoute<R> {
    /// Agrees with the other ranks of the group, of which this one contributes `device`. All ranks call it, and keep
    /// the result with the group ([`AgreedOperations::keep`]): it has to learn of the group's failures.
    ///
    /// # Errors
    /// If the ranks cannot agree, after which the group has failed.
    pub fn agree(group: &Group, device: DeviceId) -> Result<RankRoute<R>, Error> {
        // On an error the other ranks would continue without this one.
        agree(group, device).map_err(|error| group.abandon(error))
    }

    /// Returns the route, if there is one.
    pub fn route(&self) -> Option<&Arc<Route<R>>> {
        self.route.as_ref()
    }

    /// Checks that rank `rank` uses the device with which it has agreed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is a route and the device is another one.
    pub fn check_device(&self, rank: usize, device: DeviceId) -> Result<(), Error> {
        if self.route.is_some() && self.device != device {
            let reason = format!("rank {rank} uses {} in this group, not with {device}", self.device);
            return Err(Error::argument("a collective on a device", reason));
        }
        Ok(())
    }
}

fn agree<R: Runtime>(group: &Group, device: DeviceId) -> Result<RankRoute<R>, Error> {
    let (process, team) = (process_number()?, random()?);
    let settings = settings();
    let info = |settings: &Settings| {
        let gpu = Gpu::of(device.ordinal());
        let nccl = gpu.clone().and_then(|gpu| remote::available(gpu.ordinal)).map_err(|error| error.to_string());
        let place = gpu.and_then(|gpu| Place::of(&gpu)).map_err(|error| error.to_string());
        RankInfo { process, device, settings: settings.to_string(), nccl, place, team }
    };
    let infos = group.all_gather_results(settings.clone().map(info))?;
    let settings = settings?;
    let by_size = &settings.by_size;
    let devices: Vec<_> = infos.iter().map(|info| info.device).collect();
    check_settings(&infos)?;
    let supported = Supported::of(settings, &infos, &devices);
    let rank = group.rank();
    let gpus = || devices.iter().map(|device| device.ordinal()).collect();
    let launches = supported.in_process.then(|| Launches::of_group(infos[0].team, gpus())).transpose()?;
    let group_team = |kernels| GroupTeam::new(group.deadline(), launches.clone(), kernels);
    let (kernels, why_no_kernels) = match &supported.kernels {
        Ok(Kernels::OfProcess) => {
            let team = Team::of_group::<R>(infos[0].team, &devices, group_team(None))?;
            (Some(TeamHandle::of(team, rank)), None)
        }
        Ok(Kernels::InWindows(topology, places)) => {
            match open_windows::<R>(group, device, *topology, places, group_team(None))? {
                Ok(team) => (Some(TeamHandle::of(Arc::new(team), 0)), None),
                Err(why) => (None, Some(why)),
            }
        }
        Err(why) => (None, Some(why.clone())),
    };
    let kernel_team = kernels.as_ref().map(|handle| handle.team.clone());
    let topology = kernel_team.as_ref().and_then(|team| team.topology());
    let forced = by_size.paths().any(|mode| mode == Mode::Nccl);
    let nccl = match &supported.nccl {
        Ok(()) if by_size.paths().any(|mode| wants_nccl(mode, topology)) => {
            connect::<R>(group, device, forced, group_team(kernel_team.clone()))?
        }
        Ok(()) => None,
        Err(why) if forced => {
            let reason = format!("BONFIRE_CUDA requests nccl, which does not work for these ranks: {why}");
            return Err(Error::Config(reason));
        }
        Err(_) => None,
    };
    if let (Some(why), 0) = (why_no_kernels, rank) {
        let ranks = infos.len();
        match &supported.nccl {
            Err(nccl) => log::warn!(
                "collectives on the GPUs of {ranks} ranks go through host memory: kernels: {why}; NCCL: {nccl}"
            ),
            Ok(()) if supported.kernels.is_ok() => log::warn!("kernels do not serve the GPUs of {ranks} ranks: {why}"),
            Ok(()) => {}
        }
    }
    if kernels.is_none() && nccl.is_none() {
        return Ok(RankRoute { device, route: None });
    }
    let nccl = nccl.map(|team| TeamHandle::of(team, 0));
    let ticket = (!supported.in_process).then(|| (device.ordinal(), rank));
    let devices = supported.in_process.then_some(devices);
    let route = Route { by_size, kernels, nccl, group: infos[0].team, devices, ticket };
    Ok(RankRoute { device, route: Some(Arc::new(route)) })
}

/// Compares what the ranks' users request: by different tables they would wait for each other on different paths.
fn check_settings(infos: &[RankInfo]) -> Result<(), Error> {
    let Some(rank) = infos.iter().position(|info| info.settings != infos[0].settings) else { return Ok(()) };
    let (first, other) = (&infos[0].settings, &infos[rank].settings);
    let reason = format!("{first} on rank 0, and {other} on rank {rank}; set the same on all ranks");
    Err(Error::Config(reason))
}

/// What works for these ranks. The same on all of them.
struct Supported {
    /// All ranks are in one process.
    in_process: bool,
    kernels: Result<Kernels, String>,
    nccl: Result<(), String>,
}

/// How kernels access the tensors of the ranks.
#[derive(Debug, PartialEq)]
enum Kernels {
    /// Directly: all are of one process.
    OfProcess,
    /// Through windows, if the ranks can open them. The places of the ranks' GPUs.
    InWindows(Topology, Vec<Place>),
}

impl Supported {
    fn of(settings: &Settings, infos: &[RankInfo], devices: &[DeviceId]) -> Supported {
        let in_process = infos.iter().all(|info| info.process == infos[0].process);
        let shared = in_process.then(|| (1..devices.len()).find(|i| devices[..*i].contains(&devices[*i]))).flatten();
        if let Some(rank) = shared {
            let reason = format!("rank {rank} uses the device of another rank");
            return Supported { in_process, kernels: Err(reason.clone()), nccl: Err(reason) };
        }
        let absent = infos.iter().enumerate().find_map(|(rank, info)| Some((rank, info.nccl.as_ref().err()?)));
        let nccl = absent.map_or(Ok(()), |(rank, why)| Err(format!("rank {rank}: {why}")));
        let kernels = match in_process {
            true if kernels_supported(devices) => Ok(Kernels::OfProcess),
            true => Err("the GPUs do not support them".into()),
            false => windows_supported(settings, infos),
        };
        Supported { in_process, kernels, nccl }
    }
}

/// Whether kernels may serve the ranks through windows.
fn windows_supported(settings: &Settings, infos: &[RankInfo]) -> Result<Kernels, String> {
    let requested = settings.by_size.paths().any(Mode::requests_kernels);
    if !requested && !settings.by_size.paths().any(|mode| mode == Mode::Auto) {
        return Err("BONFIRE_CUDA does not select them".into());
    }
    let place = |(rank, info): (usize, &RankInfo)| info.place.clone().map_err(|why| format!("rank {rank}: {why}"));
    let places = infos.iter().enumerate().map(place).collect::<Result<Vec<_>, _>>()?;
    let processes: Vec<_> = infos.iter().map(|info| info.process).collect();
    let topology = place::topology(&places, &processes, requested, settings.share)?;
    Ok(Kernels::InWindows(topology, places))
}

/// Opens the windows of all ranks, and creates a team that uses them. `Ok(Err(why))` if any rank cannot, on all ranks.
fn open_windows<R: Runtime>(
    group: &Group,
    device: DeviceId,
    mut topology: Topology,
    places: &[Place],
    group_team: GroupTeam,
) -> Result<Result<Team, String>, Error> {
    let gpu = Gpu::of(device.ordinal())?;
    let near = Place::near_all(&gpu, places);
    let windows = match Windows::connect(group, &gpu)? {
        Ok(windows) => windows,
        Err(why) => {
            return Ok(Err(format!(
                "{why}; containers of one host need the same PID and IPC namespaces (`--pid=host --ipc=host`), and \
                 each process should see all GPUs that the ranks use"
            )));
        }
    };
    let near = group.all_gather_results(Ok(near))?.into_iter().all(|near| near);
    if near && topology.link == Link::PcieWindows {
        topology.link = Link::NvlinkWindows;
    }
    Team::of_windows::<R>(device, group.rank(), (topology, windows), group_team).map(Ok)
}

/// Connects a communicator of the group's ranks. On failure falls back to kernels or the host, if that is allowed.
fn connect<R: Runtime>(
    group: &Group,
    device: DeviceId,
    forced: bool,
    group_team: GroupTeam,
) -> Result<Option<Arc<Team>>, Error> {
    let deadline = Deadline::after(group.deadline());
    let connected = Gpu::of(device.ordinal()).and_then(|gpu| remote::connect(group, &gpu, &deadline));
    match connected {
        Ok(remote) => Ok(Some(Arc::new(Team::of_remote::<R>(device, group.rank(), remote, group_team)?))),
        // All ranks return the same error here.
        Err(error) if !forced && group.failure().is_none() => {
            log::warn!("NCCL does not work for {} ranks: {error}", group.world_size());
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

impl<R: Runtime> Route<R> {
    fn choose(&self, call: &Call) -> Option<Choice> {
        let topology = self.kernels.as_ref().and_then(|handle| handle.team.topology());
        choose(self.by_size.at(call.bytes()), call, topology, self.nccl.is_some())
    }

    /// Whether the route supports this call. The answer is the same on all ranks.
    pub fn supports(&self, call: &Call) -> bool {
        self.choose(call).is_some()
    }

    /// Returns the number of the group and the devices of its ranks, if all are of this process.
    pub fn in_process(&self) -> Option<(u64, &[DeviceId])> {
        self.devices.as_ref().map(|devices| (self.group, &devices[..]))
    }

    /// Returns how messages between the ranks go, if not through host memory. The answer is the same on all ranks.
    pub fn messages(&self) -> Option<Messages> {
        if self.by_size.paths().all(|mode| mode == Mode::Host) {
            return None;
        }
        let lent = self.devices.as_ref().map(|_| Messages::Lent);
        lent.or_else(|| self.nccl.as_ref().map(|_| Messages::Carried))
    }

    /// Prepares an operation on the memory as the work queued so far leaves it. Neither sources nor targets may be
    /// accessed until it has ended, except by work that [follows](crate::Engine::follow) it. `limit` bounds how long a
    /// device may wait for another one. Called on the device's thread.
    ///
    /// # Errors
    /// If the route does not support the call, or has failed, or the server or the GPU refuses.
    pub fn prepare(&self, server: &mut R::Server, job: DeviceOperation<R>, limit: Duration) -> Result<Launch, Error> {
        let call = job.call;
        let none = move || Error::argument(call.operation, format!("neither kernels nor NCCL support {call}"));
        let is_message = job.peers.is_message();
        let choice = if is_message { Some(Choice::Nccl) } else { self.choose(&call) };
        let choice = choice.ok_or_else(none)?;
        let handle = match choice {
            Choice::Kernel(_) => &self.kernels,
            Choice::Nccl => &self.nccl,
        };
        let handle = handle.as_ref().ok_or_else(none)?;
        if let Some(error) = handle.team.failure() {
            return Err(error);
        }
        // After a fault, whatever a server is asked for fails.
        let prepared = R::guard(&call.operation.to_string(), || {
            let job = job.locate(server)?;
            handle.prepare(server, job, choice, limit)
        });
        let rounds =
            prepared.map_err(|error| handle.team.gpu_fault(call.operation, Duration::ZERO).unwrap_or(error))?;
        let (team, local) = (handle.team.clone(), handle.local);
        let of_processes = self.ticket.as_ref().filter(|_| !is_message);
        let ticket = of_processes.map(|(gpu, rank)| Arc::new(Ticket::new(*gpu, self.group, *rank)));
        let proposing = ticket.clone();
        let run: LaunchFn = Box::new(move |time, site, deadline| {
            let (site, deadline) = (*site, *deadline);
            if let (Some(ticket), Some(time)) = (&ticket, time) {
                ticket.turn(time, &deadline, || team.failure())?;
            }
            let mut number = 0;
            for ready in rounds {
                number = team.next_number(local, ready.call)?;
                team.submit(local, site, deadline, ready).inspect_err(|error| team.fail(error.clone()))?;
            }
            let launched = team.clone();
            Ok(InFlight {
                end: Box::new(move || {
                    launched.wait_launched(local, number, &deadline)?;
                    Ok(launched.end(local, number, limit))
                }),
                wait: Box::new(move |group_failure| team.wait_done(local, number, site, &deadline, group_failure)),
            })
        });
        let propose = |ticket: Arc<Ticket>| Box::new(move || ticket.propose()) as Box<dyn FnOnce() -> u64 + Send>;
        Ok(Launch { propose: proposing.map(propose), run })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::Share;

    fn info(process: u64, number: u16) -> RankInfo {
        let place = Err("no place".into());
        let device = DeviceId { gpu: 0, number };
        RankInfo { process, device, settings: "BONFIRE_CUDA is auto:0-".into(), nccl: Ok(()), place, team: 0 }
    }

    fn supported(infos: &[RankInfo]) -> (bool, Option<String>) {
        let devices: Vec<_> = infos.iter().map(|info| info.device).collect();
        let settings = Settings { by_size: BySize::all(Mode::Auto), share: Share::All };
        let supported = Supported::of(&settings, infos, &devices);
        (supported.kernels.is_ok(), supported.nccl.err())
    }

    #[test]
    fn devices_of_several_processes_need_windows_or_nccl() {
        assert_eq!(supported(&[info(1, 0), info(2, 0)]), (false, None));
        let missing = RankInfo { nccl: Err("it is not found".into()), ..info(2, 0) };
        assert_eq!(supported(&[info(1, 0), missing]), (false, Some("rank 1: it is not found".into())));
    }

    #[test]
    fn ranks_with_different_settings_get_the_same_error() {
        let other = RankInfo { settings: "BONFIRE_CUDA is nccl:0-".into(), ..info(2, 0) };
        assert_eq!(check_settings(&[info(1, 0), info(1, 1)]), Ok(()));
        let error = check_settings(&[info(1, 0), info(1, 1), other]).unwrap_err().to_string();
        assert!(
            error.contains("BONFIRE_CUDA is auto:0- on rank 0, and BONFIRE_CUDA is nccl:0- on rank 2; set the same"),
            "{error}"
        );
    }

    #[test]
    fn ranks_do_not_share_a_logical_device() {
        let (kernels, why) = supported(&[info(1, 0), info(1, 3), info(1, 0)]);
        assert_eq!((kernels, why), (false, Some("rank 2 uses the device of another rank".into())));
    }
}
