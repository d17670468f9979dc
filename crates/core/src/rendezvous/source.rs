//! Who said what a rank is, and what nobody has said.

use std::fmt;

use super::Settings;
use crate::types::Error;

/// Where rank, world size and address come from. Nothing in it: from code.
#[derive(Clone, Debug, Default)]
pub(crate) struct Source {
    /// Who started this rank, such as `Slurm (job 1234, step 0)`.
    pub by: Option<String>,
    /// Whether the ranks are on several hosts, where somebody knows.
    pub several: Option<bool>,
    /// What chose rank 0's address, where a launcher did.
    pub address: Option<String>,
    pub missing: Missing,
}

/// What the environment did not say: which variable is missing, and what to do. What code says later is not missing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Missing {
    pub rank: Option<String>,
    pub world_size: Option<String>,
    pub address: Option<String>,
}

impl Settings {
    /// Refuses to connect while anything is missing that ranks need to find each other.
    pub(super) fn complete(&self) -> Result<(), Error> {
        self.lacks().map_or(Ok(()), |reason| Err(Error::Config(reason.clone())))
    }

    fn lacks(&self) -> Option<&String> {
        let Missing { rank, world_size, address } = &self.source.missing;
        rank.as_ref().or(world_size.as_ref()).or(address.as_ref().filter(|_| self.world_size > 1))
    }

    /// Whether ranks on other hosts have to be reached. Where nobody says so, who has a secret or names an interface means
    /// that. An address that is loopback for everybody means that they are all here, whatever a launcher counts.
    pub(super) fn spans_hosts(&self) -> bool {
        let meant = || self.interface.is_some() || self.secret.is_some();
        !is_loopback(&self.address) && self.source.several.unwrap_or_else(meant)
    }

    /// Tells the log what is about to be connected.
    pub fn announce(&self) {
        let Some(launched) = self.launched() else { return };
        log::info!("{launched}");
        if self.world_size > 1 && self.source.several == Some(true) && is_loopback(&self.address) {
            log::warn!("{launched}; some are on other hosts, by its count, and would not reach loopback");
        }
    }

    /// Where somebody else than the program's code started this rank, what is known of it.
    pub fn launched(&self) -> Option<Launched> {
        let Missing { rank, world_size, address } = &self.source.missing;
        if self.medium.is_mpi() {
            // It says who the ranks are, when it is asked: nothing is missing.
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
            missing: self.lacks().cloned(),
        })
    }
}

/// What the environment says of this process, from [`Builder::launched`](crate::Builder::launched). As text it is one line:
/// `rank 3 of 8 by Slurm (job 1234, step 0): rank 0 at node001:62674`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Launched {
    /// Who says so: a launcher, with its name for the job, or Bonfire's own variables.
    pub by: String,
    /// This process's rank.
    pub rank: Option<usize>,
    /// The number of ranks.
    pub world_size: Option<usize>,
    /// Where rank 0 listens. A rank that is alone has none.
    pub address: Option<String>,
    /// What is not known and has to be, and what to do: what connecting fails with.
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

/// Whether an address, `host:port`, or a host, is every host's own by what is written there. Other names are not looked up.
pub(super) fn is_loopback(address: &str) -> bool {
    let whole = address.parse::<std::net::IpAddr>().is_ok();
    let host = address.rsplit_once(':').filter(|_| !whole).map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    match host.parse::<std::net::IpAddr>() {
        Ok(ip) => ip.to_canonical().is_loopback(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}
