//! How the ranks of a group work together on their GPUs.
//!
//! They agree on it once, when they first bring devices: by kernels where all are devices of one process that reach each
//! other, by NCCL where each has a GPU, or by both, and by which of them for a call is in `choice`. What neither does goes
//! through host memory.

use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex};

use cubecl::cuda::CudaRuntime;
use cubecl::device::DeviceId;
use cubecl::server::Binding;
use cubecl::stream_id::StreamId;
use serde::{Deserialize, Serialize};

use super::choice::{self, ROUTE, Way, wants_nccl, way};
use super::driver::Gpu;
use super::lane::place;
use super::order::{self, Server};
use super::remote::{self, Remote};
use super::team::{Copy, Ready, Team, fit, ordinal};
use crate::server::engine::{Errand, Flight, Launch, Route};
use bonfire_core::internal::{Agreement, Keepsake, lock, random};
use bonfire_core::{Call, Deadline, Error, Group, Operation, partition};

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
    ranks: usize,
    kernels: Option<Side>,
    nccl: Option<Side>,
}

/// A team, and this rank's place in it.
struct Side {
    team: Arc<Team>,
    seat: usize,
    told: Mutex<Told>,
}

/// What the seat's `READY` word was told so far.
#[derive(Default)]
struct Told {
    value: u64,
    last: Option<StreamId>,
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

static PROCESS: LazyLock<u64> = LazyLock::new(random);

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
    let card = {
        let found = Gpu::of(ordinal(device)).and_then(|gpu| remote::available(gpu.ordinal));
        let nccl = found.map_err(|error| error.to_string());
        let (host, nccl_only) = (*ROUTE == choice::Route::Host, *ROUTE == choice::Route::Nccl);
        let device = (device.type_id, device.index_id);
        Card { process: *PROCESS, device, host, nccl_only, nccl, team: random() }
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
    let side = |team: Arc<Team>, seat| Side { team, seat, told: Mutex::default() };
    let (kernels, nccl) = (kernels.map(|team| side(team, rank)), nccl.map(|team| side(team, 0)));
    Ok(Agreed { device, route: Some(Arc::new(GroupRoute { ranks: cards.len(), kernels, nccl })) })
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
    let connected = Gpu::of(ordinal(device)).and_then(|gpu| Remote::connect(group, &gpu, &Deadline::after(limit)));
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

    fn prepare(&self, server: &mut Server, errand: Errand) -> Result<Launch, Error> {
        let call = errand.call;
        let none = move || Error::argument(call.operation, format!("no GPU does {call}"));
        let way = self.way(&call).ok_or_else(none)?;
        let side = match way {
            Way::Kernel(_) => &self.kernels,
            Way::Nccl => &self.nccl,
        };
        let Side { team, seat, told } = side.as_ref().ok_or_else(none)?;
        if let Some(error) = team.failure() {
            return Err(error);
        }
        let means = team.prepare(*seat, way)?;
        let mut streams: Vec<StreamId> =
            errand.sources.iter().chain(&errand.targets).map(|(memory, _)| memory.stream).collect();
        streams.sort_unstable_by_key(|stream| stream.value);
        streams.dedup();
        let (stream, limit) = (errand.stream, errand.limit);
        let Layout { source, target, before, after, kept } = Layout::of(server, errand, self.ranks, way == Way::Nccl)?;
        let kept: Box<dyn Send> = Box::new(kept);
        let mut told = lock(told);
        told.value += 1;
        let word = (team.ready(*seat), told.value);
        order::tensors_ready(server, &streams, &mut told.last, word, stream);
        let (ready, patience) = (told.value, limit);
        let ready = move |site, deadline| Ready {
            site,
            means,
            patience,
            deadline,
            ready,
            source,
            target,
            before,
            after,
            kept: Some(kept),
        };
        let (team, seat) = (team.clone(), *seat);
        Ok(Box::new(move |site, deadline| {
            let number = team.number(seat, call)?;
            team.submit(seat, ready(*site, *deadline)).inspect_err(|error| team.fail(error.clone()))?;
            let (site, deadline) = (*site, *deadline);
            let flight: Flight =
                Box::new(move |trouble: &dyn Fn() -> Option<Error>| team.land(seat, number, site, &deadline, trouble));
            Ok(flight)
        }))
    }
}

/// Where an errand's data is for whoever does it, and how it gets there.
struct Layout {
    source: u64,
    target: u64,
    before: Vec<Copy>,
    after: Vec<Copy>,
    kept: Vec<Binding>,
}

impl Layout {
    fn of(server: &mut Server, errand: Errand, ranks: usize, nccl: bool) -> Result<Layout, Error> {
        let Errand { call, rank, sources, targets, stream, .. } = errand;
        let mut find = |pieces: &[(Binding, Range<usize>)]| {
            let found = pieces.iter().map(|(memory, part)| Ok((place(server, memory, stream)?, part.clone())));
            found.collect::<Result<Vec<_>, Error>>()
        };
        let (from, to) = (find(&sources)?, find(&targets)?);
        let kept: Vec<Binding> = sources.into_iter().chain(targets).map(|(memory, _)| memory).collect();
        let mut layout = Layout { source: 0, target: 0, before: Vec::new(), after: Vec::new(), kept };
        match (&from[..], &to[..]) {
            // Root and others of a broadcast have one piece of memory.
            ([(memory, _)], []) | ([], [(memory, _)]) => (layout.source, layout.target) = (*memory, *memory),
            ([(source, read)], [(target, written)]) => {
                (layout.source, layout.target) = (*source, *target);
                let own = partition(call.count, ranks, rank).start * call.dtype.size();
                let in_place = match call.operation {
                    Operation::AllGather => *source == target + own as u64,
                    Operation::ReduceScatter => *target == source + own as u64,
                    Operation::AllToAll => source == target && !nccl,
                    _ => source == target,
                };
                let apart = source + read.len() as u64 <= *target || target + written.len() as u64 <= *source;
                let misaligned = |at: &u64| call.reduction.is_some() && !at.is_multiple_of(call.dtype.size() as u64);
                if !in_place && !apart || misaligned(source) {
                    layout.source = layout.scratch(server, read.len(), stream)?;
                    layout.before.push(Copy { from: *source, to: layout.source, bytes: read.len() });
                }
                if misaligned(target) {
                    layout.target = layout.scratch(server, written.len(), stream)?;
                    layout.after.push(Copy { from: layout.target, to: *target, bytes: written.len() });
                }
            }
            _ => {
                let whole = layout.scratch(server, call.bytes(), stream)?;
                let at = |part: &Range<usize>| whole + part.start as u64;
                layout.before =
                    from.iter().map(|(memory, part)| Copy { from: *memory, to: at(part), bytes: part.len() }).collect();
                layout.after =
                    to.iter().map(|(memory, part)| Copy { from: at(part), to: *memory, bytes: part.len() }).collect();
                (layout.source, layout.target) = (whole, whole);
            }
        }
        Ok(layout)
    }

    /// Memory that nobody else knows.
    fn scratch(&mut self, server: &mut Server, bytes: usize, stream: StreamId) -> Result<u64, Error> {
        let memory = order::fresh(server, bytes, stream);
        let address = place(server, &memory, stream)?;
        self.kept.push(memory);
        Ok(address)
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
