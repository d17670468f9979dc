//! Where a rank's settings come from, and which of them are still missing.

use std::fmt;

use super::Settings;
use crate::types::Error;

/// The origin of rank, world size and address. The default means that code has set them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    /// The launcher of this rank, such as `Slurm (job 1234, step 0)`.
    pub by: Option<String>,
    /// Whether the ranks are on several hosts, if that is known.
    pub several: Option<bool>,
    /// Where rank 0's address comes from, if a launcher chose it.
    pub address: Option<String>,
    pub numbers: Numbers,
    pub missing: Missing,
}

/// The numbers by which the launcher, `bonfire run`, knows the ranks of a group.
#[derive(Clone, Debug, Default)]
pub(crate) enum Numbers {
    /// Code has numbered the ranks, or there is no such launcher.
    #[default]
    Unknown,
    /// Each process has so many ranks, in their order.
    PerProcess(usize),
    /// By rank.
    Listed(Vec<usize>),
}

impl Numbers {
    pub fn of(&self, rank: usize) -> Option<usize> {
        match self {
            Numbers::Unknown => None,
            Numbers::PerProcess(ranks) => rank.checked_div(*ranks),
            Numbers::Listed(numbers) => numbers.get(rank).copied(),
        }
    }

    /// The numbers of a group of these ranks, in their order.
    pub fn of_members(&self, members: &[usize]) -> Numbers {
        let numbers: Option<_> = members.iter().map(|member| self.of(*member)).collect();
        numbers.map_or(Numbers::Unknown, Numbers::Listed)
    }
}

/// Settings that neither the environment nor code has set: for each, the missing variable and what to do.
#[derive(Clone, Debug, Default)]
pub(crate) struct Missing {
    pub rank: Option<String>,
    pub world_size: Option<String>,
    pub address: Option<String>,
}

impl Settings {
    /// Returns an error while a setting is missing that ranks need to find each other.
    pub(super) fn complete(&self) -> Result<(), Error> {
        self.first_missing().map_or(Ok(()), |reason| Err(Error::Config(reason.clone())))
    }

    fn first_missing(&self) -> Option<&String> {
        let Missing { rank, world_size, address } = &self.source.missing;
        rank.as_ref().or(world_size.as_ref()).or(address.as_ref().filter(|_| self.world_size > 1))
    }

    /// Whether ranks on other hosts have to be reached. If the launcher does not say so, a secret or a configured
    /// interface implies it. A loopback address means that all ranks are on this host, whatever a launcher counts;
    /// nothing is concluded from any other address.
    pub(super) fn spans_hosts(&self) -> bool {
        let meant = || self.interface.is_some() || self.secret.is_some();
        !is_loopback(&self.address) && self.source.several.unwrap_or_else(meant)
    }

    /// Logs what is about to be connected.
    pub fn announce(&self) {
        let Some(launched) = self.launched() else { return };
        log::info!("{launched}");
        if self.world_size > 1 && self.source.several == Some(true) && is_loopback(&self.address) {
            log::warn!("{launched}; by its count some ranks are on other hosts and cannot reach loopback");
        }
    }

    /// Returns what is known about this rank, unless code has set it all.
    pub fn launched(&self) -> Option<Launched> {
        let Missing { rank, world_size, address } = &self.source.missing;
        if self.kind.is_mpi() {
            // MPI assigns the ranks when it is initialised: nothing is missing.
            let known = self.source.by.is_some();
            let rank = (known && rank.is_none()).then_some(self.rank);
            let world_size = (known && world_size.is_none()).then_some(self.world_size);
            return Some(Launched { by: "MPI".into(), rank, world_size, address: None, missing: None });
        }
        Some(Launched {
            by: self.source.by.clone()?,
            rank: rank.is_none().then_some(self.rank),
            world_size: world_size.is_none().then_some(self.world_size),
            address: (address.is_none() && self.world_size > 1).then(|| self.address.clone()),
            missing: self.first_missing().cloned(),
        })
    }
}

/// What the environment says about this process, from [`Builder::launched`](crate::Builder::launched). Its text is one
/// line: `rank 3 of 8 by Slurm (job 1234, step 0): rank 0 at node001:62674`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launched {
    /// The origin: a launcher with its name for the job, or Bonfire's own variables.
    pub by: String,
    /// This process's rank, if it is known.
    pub rank: Option<usize>,
    /// The number of ranks, if it is known.
    pub world_size: Option<usize>,
    /// Where rank 0 listens, as `host:port`. `None` if it is not known, in a world of one, and on MPI.
    pub address: Option<String>,
    /// Which required setting is missing and what to do: the error with which connecting fails.
    pub missing: Option<String>,
}

impl fmt::Display for Launched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |number: Option<usize>| number.map_or("?".into(), |number| number.to_string());
        write!(f, "rank {} of {} by {}", number(self.rank), number(self.world_size), self.by)?;
        if let Some(address) = &self.address {
            write!(f, ": rank 0 at {address}")?;
        }
        self.missing.as_ref().map_or(Ok(()), |missing| write!(f, "; {missing}"))
    }
}

/// Rejects an IPv6 address with a zone, as in `fe80::1%eth0`: ranks tell each other their addresses, and a zone means
/// something on one host only.
pub(super) fn without_zone(name: &str, address: &str) -> Result<(), Error> {
    if address.contains('%') {
        return Err(Error::Config(format!(
            "{name} is '{address}': an address with a zone (%) is valid on one host only; give one that all hosts can \
             reach"
        )));
    }
    Ok(())
}

/// Whether an address (`host:port`) or a host is loopback as written. Names other than `localhost` are not looked up.
pub(super) fn is_loopback(address: &str) -> bool {
    let whole = address.parse::<std::net::IpAddr>().is_ok();
    let host = address.rsplit_once(':').filter(|_| !whole).map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    match host.parse::<std::net::IpAddr>() {
        Ok(ip) => ip.to_canonical().is_loopback(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_keep_the_launchers_numbers() {
        let launched = Numbers::PerProcess(1);
        let survivors = launched.of_members(&[0, 2, 3]);
        let pair = survivors.of_members(&[1, 2]);
        assert_eq!([0, 1, 2, 3].map(|rank| survivors.of(rank)), [Some(0), Some(2), Some(3), None]);
        assert_eq!([0, 1].map(|rank| pair.of(rank)), [Some(2), Some(3)]);
        // Two ranks in each process.
        assert_eq!([0, 1, 2, 5].map(|rank| Numbers::PerProcess(2).of(rank)), [0, 0, 1, 2].map(Some));
        assert_eq!(Numbers::Unknown.of_members(&[0]).of(0), None);
    }
}
