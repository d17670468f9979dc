//! Values of any type that serde can encode, and work that one rank does for its host.

use std::fmt::Display;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::agreed::AgreedOperations;
use super::check;
use super::handle::Group;
use crate::types::Error;

/// The most bytes that a value may be encoded in.
const LIMIT: usize = 16 << 20;

/// # Values
///
/// Settings, names and results that are no slices of numbers: whatever serde can encode and decode, of the same type on
/// all ranks, in up to 16 MiB. These operations take several messages each, and copies; use those on slices for
/// numbers, and where time counts.
impl Group {
    /// Returns `root`'s value on all ranks. The root passes `Some(value)`, the other ranks `None`.
    ///
    /// ```
    /// let names = bonfire_core::launch::run(bonfire_core::Group::threads(2)?, |group| {
    ///     let name = (group.rank() == 0).then(|| format!("run {}", 17));
    ///     group.broadcast_value(name, 0)
    /// });
    /// assert_eq!(names.unwrap(), ["run 17", "run 17"]);
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// On all ranks: [`Error::InvalidArgument`] if the root passes no value or another rank does, if it takes more than
    /// 16 MiB, or if a rank cannot decode it as its own type; [`Error::Io`] if the root cannot encode it. The group
    /// remains usable. [`Error::InvalidArgument`] on this rank if `root` is not a rank. Otherwise see
    /// [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn broadcast_value<T: Serialize + DeserializeOwned>(&self, value: Option<T>, root: usize) -> Result<T, Error> {
        const OPERATION: &str = "broadcast_value";
        check::rank(OPERATION, "root", root, self.world_size())?;
        let rank = self.rank();
        let encoded = match &value {
            Some(value) if rank == root => self.encoded(OPERATION, value),
            None if rank != root => Ok(Vec::new()),
            _ => {
                let reason = format!("rank {rank} of root {root}: the root passes a value, and no other rank does");
                Err(Error::argument(OPERATION, reason))
            }
        };
        let lens = self.all_gather_results(encoded.as_ref().map(Vec::len).map_err(Clone::clone))?;
        let mut bytes = encoded?;
        bytes.resize(lens[root], 0);
        self.broadcast(&mut bytes, root)?;
        let own = value.map_or_else(|| self.decoded(OPERATION, root, &bytes), Ok);
        self.all_gather_results(own.as_ref().map(drop).map_err(Clone::clone))?;
        own
    }

    /// Returns the values of all ranks, in rank order, on every rank.
    ///
    /// # Errors
    /// On all ranks: [`Error::InvalidArgument`] if a value takes more than 16 MiB, or if a rank cannot decode one as
    /// its own type; [`Error::Io`] if a rank cannot encode its own. The group remains usable. Otherwise see
    /// [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn all_gather_value<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>, Error> {
        const OPERATION: &str = "all_gather_value";
        let all = self.all_gather_results(self.encoded(OPERATION, value))?;
        self.all_decoded(OPERATION, &all)
    }

    /// Returns the values of all ranks, in rank order, on `root`, and `None` on the other ranks.
    ///
    /// # Errors
    /// Those of [`all_gather_value`](Self::all_gather_value), and [`Error::InvalidArgument`] on this rank if `root` is
    /// not a rank.
    #[track_caller]
    pub fn gather_value<T: Serialize + DeserializeOwned>(
        &self,
        value: &T,
        root: usize,
    ) -> Result<Option<Vec<T>>, Error> {
        const OPERATION: &str = "gather_value";
        check::rank(OPERATION, "root", root, self.world_size())?;
        let encoded = self.encoded(OPERATION, value);
        self.all_gather_results(encoded.as_ref().map(drop).map_err(Clone::clone))?;
        let all = self.gather_v(&encoded?, root)?.map(|(bytes, lens)| {
            let mut rest = &bytes[..];
            let each = lens.into_iter().map(|len| {
                let (one, others) = rest.split_at(len);
                rest = others;
                one.to_vec()
            });
            each.collect::<Vec<_>>()
        });
        let decoded = self.all_decoded(OPERATION, all.as_deref().unwrap_or_default())?;
        Ok(all.map(|_| decoded))
    }

    /// Runs `prepare` on the lowest rank of each host, and waits on all ranks until it has ended on every host. For
    /// what a host needs once, such as data that is downloaded and unpacked. Ranks that are threads are all on one
    /// host.
    ///
    /// The ranks that wait do so up to their [deadline](Self::deadline), 300 s unless set: give it time for the work,
    /// as here.
    ///
    /// ```
    /// # let group = bonfire_core::Group::threads(1)?.remove(0);
    /// # fn download() -> std::io::Result<()> { Ok(()) }
    /// let patient = group.with_deadline(std::time::Duration::from_secs(3600));
    /// patient.first_on_host(download)?;
    /// # Ok::<(), bonfire_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Broken`] on all ranks, with the text of the error of the lowest rank on which `prepare` failed. The
    /// group remains usable. [`Error::InvalidArgument`] on a group on a [custom transport](Self::on), which knows no
    /// hosts. Otherwise see [`all_reduce`](Group::all_reduce).
    #[track_caller]
    pub fn first_on_host<E: Display>(&self, prepare: impl FnOnce() -> Result<(), E>) -> Result<(), Error> {
        let (hosts, rank) = (self.regroup("first_on_host")?.hosts(), self.rank());
        let prepared = if hosts.iter().position(|host| *host == hosts[rank]) == Some(rank) {
            let failed = |error| Error::broken("first_on_host", format!("rank {rank} failed for its host: {error}"));
            prepare().map_err(failed)
        } else {
            Ok(())
        };
        self.all_gather_results(prepared).map(drop)
    }

    fn encoded<T: Serialize>(&self, operation: &str, value: &T) -> Result<Vec<u8>, Error> {
        let rank = self.rank();
        let failed = |error| Error::io(format!("{operation}: encoding the value of rank {rank}"), error);
        let bytes = postcard::to_stdvec(value).map_err(failed)?;
        if bytes.len() <= LIMIT {
            return Ok(bytes);
        }
        let (len, limit) = (bytes.len(), LIMIT >> 20);
        let reason = format!(
            "the value of rank {rank} takes {len} bytes, and at most {limit} MiB travel so; use the operations on \
             slices, such as `broadcast` and `all_gather_v`"
        );
        Err(Error::argument(operation, reason))
    }

    fn decoded<T: DeserializeOwned>(&self, operation: &str, of: usize, bytes: &[u8]) -> Result<T, Error> {
        // What is left over was encoded from another type.
        match postcard::take_from_bytes(bytes) {
            Ok((value, [])) => Ok(value),
            _ => {
                let reason = format!(
                    "rank {} cannot decode the value of rank {of}; pass values of the same type on all ranks",
                    self.rank()
                );
                Err(Error::argument(operation, reason))
            }
        }
    }

    /// Decodes values by rank. Fails on all ranks if one rank fails.
    fn all_decoded<T: DeserializeOwned>(&self, operation: &str, values: &[Vec<u8>]) -> Result<Vec<T>, Error> {
        let decoded = values.iter().enumerate().map(|(of, bytes)| self.decoded(operation, of, bytes));
        let decoded: Result<Vec<T>, Error> = decoded.collect();
        self.all_gather_results(decoded.as_ref().map(drop).map_err(Clone::clone))?;
        decoded
    }
}
