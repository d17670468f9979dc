//! Environment variables, and pairs of them that give rank and world size.

use crate::rendezvous::source::without_zone;
use crate::types::Error;

/// The environment, or a stand-in for it.
pub(super) struct Variables<'a>(pub &'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    /// Returns the value of a variable that is set and not empty.
    pub fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    pub fn number(&self, name: &str) -> Result<Option<usize>, Error> {
        let Some(text) = (self.0)(name) else { return Ok(None) };
        let wrong = |_| Error::Config(format!("{name} is '{text}': give a whole number"));
        text.trim().parse().map(Some).map_err(wrong)
    }

    /// Returns a host's name or address without brackets, and the name of the variable.
    pub fn host(&self, name: &'static str) -> Result<Option<(String, &'static str)>, Error> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let host = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(&text);
        without_zone(name, &text)?;
        let is_address = host.parse::<std::net::Ipv6Addr>().is_ok();
        let strange = |c: char| ":[]/,".contains(c) || c.is_whitespace();
        if host.is_empty() || host.contains(strange) && !is_address {
            return Err(Error::Config(format!("{name} is '{text}': give one host's name or address, without a port")));
        }
        Ok(Some((host.to_owned(), name)))
    }

    pub fn port(&self, name: &'static str) -> Result<Option<(u16, &'static str)>, Error> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let port = text.parse().ok().filter(|port| *port != 0);
        let wrong = || Error::Config(format!("{name} is '{text}': give a port from 1 to 65535"));
        port.map(|port| Some((port, name))).ok_or_else(wrong)
    }
}

/// The name of a variable and its number.
pub(super) type NamedNumber = (&'static str, Option<usize>);

/// A rank and a world size, as far as they are set.
#[derive(Clone, Copy)]
pub(super) struct RankAndSize {
    pub rank: NamedNumber,
    pub world_size: NamedNumber,
}

impl RankAndSize {
    pub fn of(rank: NamedNumber, world_size: NamedNumber) -> RankAndSize {
        RankAndSize { rank, world_size }
    }

    pub fn read(variables: &Variables, rank: &'static str, world_size: &'static str) -> Result<RankAndSize, Error> {
        Ok(RankAndSize::of((rank, variables.number(rank)?), (world_size, variables.number(world_size)?)))
    }

    pub fn is_empty(&self) -> bool {
        self.rank.1.is_none() && self.world_size.1.is_none()
    }

    /// Returns rank and world size if both are set.
    pub fn both(&self) -> Option<(usize, usize)> {
        self.rank.1.zip(self.world_size.1)
    }

    /// Rejects a rank that is outside the world size.
    pub fn check(&self) -> Result<(), Error> {
        match (self.rank, self.world_size) {
            ((rank, Some(r)), (size, Some(n))) if r >= n => {
                Err(Error::Config(format!("{rank} is {r} and {size} is {n}: ranks go from 0 to the size less 1")))
            }
            _ => Ok(()),
        }
    }

    /// Whether the ranks are on several hosts, derived from the number of ranks on this host.
    pub fn several(&self, variables: &Variables, local: &str) -> Result<Option<bool>, Error> {
        match (variables.number(local)?, self.world_size) {
            (Some(here), (size, Some(all))) if here > all => Err(Error::Config(format!(
                "{local} is {here} and {size} is {all}: no host has more ranks than there are"
            ))),
            (Some(here), (_, Some(all))) => Ok(Some(here < all)),
            _ => Ok(None),
        }
    }

    /// Rejects two launchers that both set rank and world size, but to different numbers.
    pub fn agrees(&self, other: &RankAndSize) -> Result<(), Error> {
        if self.both().is_none() || other.both().is_none() {
            return Ok(());
        }
        for (own, others) in [(self.rank, other.rank), (self.world_size, other.world_size)] {
            if let ((name, Some(one)), (other, Some(another))) = (own, others)
                && one != another
            {
                return Err(Error::Config(format!(
                    "{name} is {one} and {other} is {another}: unset the wrong one, or set BONFIRE_RANK, \
                     BONFIRE_WORLD_SIZE and BONFIRE_ADDRESS, which override both"
                )));
            }
        }
        Ok(())
    }
}
