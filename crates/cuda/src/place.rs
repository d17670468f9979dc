//! Where the ranks' GPUs are, and whether kernels can serve ranks of several processes there, as far as can be told
//! before trying.

use cudarc::driver::result;
use serde::{Deserialize, Serialize};

use super::choice::{Link, Share, Topology};
use super::control::MAX_RANKS;
use super::driver::{Gpu, Uuid, failure, uuid};
use super::reach::KERNELS_NEED;
use bonfire_core::Error;

/// Where a rank's GPU is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// The running system.
    host: String,
    gpu: Uuid,
    multiprocessors: u32,
}

impl Place {
    /// The place of this GPU, if kernels can run there.
    pub fn of(gpu: &Gpu) -> Result<Place, Error> {
        let reason = |why: &str| Error::broken("sharing memory between processes", why);
        if !gpu.runs_kernels()? {
            return Err(reason(&format!("the GPU lacks {KERNELS_NEED}")));
        }
        let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
        if host.is_empty() {
            return Err(reason("the system does not say which one it is"));
        }
        let uuid = uuid(gpu.ordinal).map_err(|e| failure("identifying the GPU", gpu.ordinal, e))?;
        Ok(Place { host, gpu: uuid, multiprocessors: gpu.multiprocessors })
    }

    /// Whether NVLink connects this process's GPU to all of these, as far as the driver tells: it does not about GPUs
    /// that are not visible here.
    pub fn near_all(gpu: &Gpu, places: &[Place]) -> bool {
        let visible: Vec<_> = (0..result::device::get_count().unwrap_or(0) as usize).map(uuid).collect();
        let near = |place: &Place| {
            let ordinal = visible.iter().position(|visible| visible.as_ref() == Ok(&place.gpu));
            ordinal.is_some_and(|ordinal| ordinal == gpu.ordinal || gpu.has_nvlink(ordinal))
        };
        places.iter().all(near)
    }
}

/// How kernels could serve these ranks, whose processes are given too, or why they cannot. The link is that of GPUs
/// without NVLink. `requested` is whether the user requests kernels for some sizes, and `share` what they may take.
pub(crate) fn topology(places: &[Place], processes: &[u64], requested: bool, share: Share) -> Result<Topology, String> {
    let ranks = places.len();
    if ranks > MAX_RANKS {
        return Err(format!("they serve {MAX_RANKS} ranks at most"));
    }
    if let Some(rank) = places.iter().position(|place| place.host != places[0].host) {
        return Err(format!("ranks 0 and {rank} are on different hosts"));
    }
    for (rank, place) in places.iter().enumerate() {
        let same = (0..rank).filter(|other| places[*other].gpu == place.gpu);
        for other in same {
            if processes[other] == processes[rank] {
                return Err(format!("ranks {other} and {rank} are in one process and share a GPU, and others are not"));
            }
            if !requested {
                return Err(format!(
                    "ranks {other} and {rank} of two processes share a GPU, which runs one process at a time; to use \
                     kernels nevertheless, set BONFIRE_CUDA=kernels"
                ));
            }
        }
    }
    let sharing = |place: &Place| places.iter().filter(|other| other.gpu == place.gpu).count();
    let first = |(rank, place): &(usize, &Place)| places[..*rank].iter().all(|other| other.gpu != place.gpu);
    let sharing = places.iter().map(sharing).max().unwrap_or(1);
    Ok(Topology {
        ranks,
        gpus: places.iter().enumerate().filter(first).count(),
        link: if sharing > 1 { Link::TimeSliced } else { Link::PcieWindows },
        sharing: sharing as u32,
        multiprocessors: places.iter().map(|place| place.multiprocessors).min().unwrap_or(1),
        share,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(host: &str, gpu: u8) -> Place {
        Place { host: host.into(), gpu: [gpu; 16], multiprocessors: 100 + u32::from(gpu) }
    }

    #[test]
    fn windows_serve_ranks_of_one_host() {
        let topology =
            |places: &[Place], processes: &[u64], requested| topology(places, processes, requested, Share::All);
        let own = |gpus: &[u8]| gpus.iter().map(|gpu| place("a", *gpu)).collect::<Vec<_>>();
        let all = topology(&own(&[3, 1, 2]), &[10, 11, 12], false).unwrap();
        let expected = (3, 3, Link::PcieWindows, 1, 101);
        assert_eq!((all.ranks, all.gpus, all.link, all.sharing, all.multiprocessors), expected);
        // Two processes on each of two GPUs.
        let shared = own(&[1, 2, 1, 2]);
        let why = topology(&shared, &[10, 11, 12, 13], false).unwrap_err();
        assert!(why.contains("ranks 0 and 2 of two processes share a GPU"), "{why}");
        let all = topology(&shared, &[10, 11, 12, 13], true).unwrap();
        assert_eq!((all.gpus, all.link, all.sharing), (2, Link::TimeSliced, 2));
        let why = topology(&shared, &[10, 11, 10, 11], true).unwrap_err();
        assert!(why.contains("ranks 0 and 2 are in one process"), "{why}");
        let why = topology(&[place("a", 1), place("a", 2), place("b", 3)], &[1, 2, 3], true).unwrap_err();
        assert_eq!(why, "ranks 0 and 2 are on different hosts");
        let why = topology(&own(&[0, 1, 2, 3, 4, 5, 6, 7, 8]), &[0, 1, 2, 3, 4, 5, 6, 7, 8], true).unwrap_err();
        assert_eq!(why, "they serve 8 ranks at most");
    }
}
