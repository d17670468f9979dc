//! How the ranks of a group work together on their GPUs.
//!
//! They agree on it once, when they first bring devices: by kernels where all are devices of one process that reach each
//! other, by NCCL where each has a GPU, or by both, and by which of them for a call is in `choice`. What neither does goes
//! through host memory.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;
use serde::{Deserialize, Serialize};

use super::choice::{self, ROUTE, Way, wants_nccl, way};
use super::driver::Gpu;
use super::order::Server;
use super::remote;
use super::side::Side;
use super::team::{Team, fit, ordinal};
use crate::server::engine::{Flight, Job, Launch, Route};
use bonfire_core::internal::{Agreement, Keepsake, random};
use bonfire_core::{Call, Deadline, Error, Group};

/// What this rank has for a group.
struct Agreed {
    device: DeviceId,
    route: Option<Arc<GroupRoute>>,
}

impl Keepsake for Agreed {
    fn part(&self) {
        let sides = self.route.iter().flat_map(|route| [&route.kernels, &route.nccl]).flatten();
        sides.for_each(|side| side.team.part());
    }
}

struct GroupRoute {
    kernels: Option<Side>,
    nccl: Option<Side>,
}

/// What the ranks of a group tell each other.
#[derive(Serialize, Deserialize)]
struct Card {
    /// A number that no other process has.
    process: u64,
    device: (u16, u16),
    /// What `BONFIRE_CUDA` asks for.
    host: bool,
    nccl_only: bool,
    /// Why NCCL does not work here, if it doesn't.
    nccl: Result<(), String>,
    /// A number for this group's team, of which rank 0's is taken.
    team: u64,
}

static PROCESS: LazyLock<Result<u64, Error>> = LazyLock::new(random);

/// The way that this rank of the group has for its device, if there is one.
pub(super) fn of(group: &Group, device: DeviceId) -> Result<Option<Arc<dyn Route<CudaRuntime>>>, Error> {
    // The other ranks would go on without this one.
    let agreed = group.keep(|| agree(group, device).inspect_err(|error| group.abandon(error.clone())))?;
    if agreed.route.is_some() && agreed.device != device {
        let reason = format!("rank {} works with {} in this group, not with {device}", group.rank(), agreed.device);
        return Err(Error::argument("a collective on a device", reason));
    }
    Ok(agreed.route.clone().map(|route| route as Arc<dyn Route<CudaRuntime>>))
}

fn agree(group: &Group, device: DeviceId) -> Result<Agreed, Error> {
    let (process, team) = (PROCESS.clone()?, random()?);
    let card = {
        let found = Gpu::of(ordinal(device)).and_then(|gpu| remote::available(gpu.ordinal));
        let nccl = found.map_err(|error| error.to_string());
        let (host, nccl_only) = (*ROUTE == choice::Route::Host, *ROUTE == choice::Route::Nccl);
        let device = (device.type_id, device.index_id);
        Card { process, device, host, nccl_only, nccl, team }
    };
    let cards = group.tell_all(Ok(card))?;
    let devices: Vec<_> = cards.iter().map(|card| DeviceId::new(card.device.0, card.device.1)).collect();
    let possible = Possible::of(&cards, &devices);
    let (limit, rank) = (group.deadline(), group.rank());
    let kernels = if possible.kernels { Some(Team::of_group(cards[0].team, &devices, limit)?) } else { None };
    let topology = kernels.as_ref().and_then(|team| team.topology());
    let forced = cards.iter().any(|card| card.nccl_only);
    let nccl = match possible.nccl {
        Ok(()) if wants_nccl(*ROUTE, topology) => connect(group, device, forced)?,
        Ok(()) => None,
        Err(why) if forced => {
            let reason = format!("BONFIRE_CUDA is nccl, which does not work for these ranks: {why}");
            return Err(Error::Config(reason));
        }
        Err(why) => {
            if kernels.is_none() && rank == 0 {
                log::warn!("collectives on the GPUs of {} ranks go through host memory: {why}", cards.len());
            }
            None
        }
    };
    if kernels.is_none() && nccl.is_none() {
        return Ok(Agreed { device, route: None });
    }
    let (kernels, nccl) = (kernels.map(|team| Side::of(team, rank)), nccl.map(|team| Side::of(team, 0)));
    Ok(Agreed { device, route: Some(Arc::new(GroupRoute { kernels, nccl })) })
}

/// What can work for ranks: the same on all of them.
struct Possible {
    kernels: bool,
    nccl: Result<(), String>,
}

impl Possible {
    fn of(cards: &[Card], devices: &[DeviceId]) -> Possible {
        let together = cards.iter().all(|card| card.process == cards[0].process);
        let shared = together.then(|| (1..devices.len()).find(|i| devices[..*i].contains(&devices[*i]))).flatten();
        if cards.iter().any(|card| card.host) {
            return Possible { kernels: false, nccl: Err("BONFIRE_CUDA is host".into()) };
        }
        if let Some(rank) = shared {
            let reason = format!("rank {rank} has the device of another one");
            return Possible { kernels: false, nccl: Err(reason) };
        }
        let absent = cards.iter().enumerate().find_map(|(rank, card)| Some((rank, card.nccl.as_ref().err()?)));
        let nccl = absent.map_or(Ok(()), |(rank, why)| Err(format!("rank {rank}: {why}")));
        Possible { kernels: together && fit(devices), nccl }
    }
}

/// A communicator of the group's ranks. Where there is none to be had, kernels or the host must do, if that is allowed.
fn connect(group: &Group, device: DeviceId, forced: bool) -> Result<Option<Arc<Team>>, Error> {
    let limit = group.deadline();
    let connected = Gpu::of(ordinal(device)).and_then(|gpu| remote::connect(group, &gpu, &Deadline::after(limit)));
    match connected {
        Ok(remote) => Ok(Some(Arc::new(Team::of_remote(device, group.rank(), remote, limit)?))),
        // The same on all ranks.
        Err(error) if !forced && group.failure().is_none() => {
            log::warn!("NCCL does not work for {} ranks: {error}", group.world_size());
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

impl GroupRoute {
    fn way(&self, call: &Call) -> Option<Way> {
        let topology = self.kernels.as_ref().and_then(|side| side.team.topology());
        way(*ROUTE, call, topology, self.nccl.is_some())
    }
}

impl Route<CudaRuntime> for GroupRoute {
    fn serves(&self, call: &Call) -> bool {
        self.way(call).is_some()
    }

    fn prepare(&self, server: &mut Server, job: Job, limit: Duration) -> Result<Launch, Error> {
        let call = job.call;
        let none = move || Error::argument(call.operation, format!("no GPU does {call}"));
        let way = self.way(&call).ok_or_else(none)?;
        let side = match way {
            Way::Kernel(_) => &self.kernels,
            Way::Nccl => &self.nccl,
        };
        let side = side.as_ref().ok_or_else(none)?;
        if let Some(error) = side.team.failure() {
            return Err(error);
        }
        let ready = side.prepare(server, job, way, limit)?;
        let (team, seat) = (side.team.clone(), side.seat);
        Ok(Box::new(move |site, deadline| {
            let (site, deadline) = (*site, *deadline);
            let number = team.number(seat, call)?;
            team.submit(seat, site, deadline, ready).inspect_err(|error| team.fail(error.clone()))?;
            let flight: Flight =
                Box::new(move |trouble: &dyn Fn() -> Option<Error>| team.land(seat, number, site, &deadline, trouble));
            Ok(flight)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(process: u64, replica: u16) -> Card {
        Card { process, device: (replica, 0), host: false, nccl_only: false, nccl: Ok(()), team: 0 }
    }

    fn possible(cards: &[Card]) -> (bool, Option<String>) {
        let devices: Vec<_> = cards.iter().map(|card| DeviceId::new(card.device.0, card.device.1)).collect();
        let possible = Possible::of(cards, &devices);
        (possible.kernels, possible.nccl.err())
    }

    #[test]
    fn devices_of_several_processes_need_nccl() {
        assert_eq!(possible(&[card(1, 0), card(2, 0)]), (false, None));
        let missing = Card { nccl: Err("it is not found".into()), ..card(2, 0) };
        assert_eq!(possible(&[card(1, 0), missing]), (false, Some("rank 1: it is not found".into())));
    }

    #[test]
    fn one_rank_that_wants_the_host_takes_all_there() {
        let (kernels, why) = possible(&[card(1, 0), Card { host: true, ..card(2, 0) }]);
        assert!(!kernels && why.unwrap().contains("host"));
    }

    #[test]
    fn ranks_do_not_share_a_logical_device() {
        let (kernels, why) = possible(&[card(1, 0), card(1, 3), card(1, 0)]);
        assert_eq!((kernels, why), (false, Some("rank 2 has the device of another one".into())));
    }
}
