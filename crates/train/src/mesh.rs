//! The ranks of a group as an array with named dimensions.

use std::fmt;

use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group};

/// The ranks of a group as an array, row by row, with a name for each dimension.
///
/// Along each dimension a rank has a subgroup: the ranks that differ from it in this coordinate only. With
/// `[("replicate", 2), ("shard", 4)]`, ranks 0 to 3 and 4 to 7 are the subgroups of `shard`; ranks 0 and 4, 1 and 5, 2
/// and 6, 3 and 7 those of `replicate`. The last dimension is the one of consecutive ranks, so let it be the one with
/// most traffic, and as long as a host has ranks.
///
/// Full sharding and the sharded optimizer take a mesh of the dimensions `shard` and `replicate`. Data parallelism
/// trains replicas over these two, and other dimensions give subgroups for collectives of your own, such as those of
/// tensor parallelism.
///
/// ```
/// use bonfire_core::{Error, Group, ReduceOp, launch};
/// use bonfire_train::DeviceMesh;
///
/// fn columns(group: Group) -> Result<[i32; 2], Error> {
///     let rank = group.rank() as i32;
///     let mesh = DeviceMesh::new(group, [("replicate", 2), ("shard", 2)])?;
///     let mut sums = [rank, rank];
///     mesh.group("shard")?.all_reduce(&mut sums[..1], ReduceOp::Sum)?;
///     mesh.group("replicate")?.all_reduce(&mut sums[1..], ReduceOp::Sum)?;
///     Ok(sums)
/// }
///
/// let sums = launch(4, columns)?;
/// # if sums.len() == 4 {
/// assert_eq!(sums, [[1, 2], [1, 4], [5, 2], [5, 4]]);
/// # }
/// # Ok::<(), bonfire_core::launch::Failed>(())
/// ```
#[derive(Clone)]
pub struct DeviceMesh {
    whole: Group,
    dimensions: Vec<Dimension>,
}

#[derive(Clone)]
struct Dimension {
    name: String,
    group: Group,
}

/// Over which ranks the optimizer state is partitioned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sharding {
    /// Over all ranks: of `n` ranks, each keeps `1 / n` of the state.
    All,
    /// Over the ranks of a block of this many consecutive ranks; every block keeps all of the state (hybrid sharding).
    /// The number must divide the world size. Most traffic then stays within a block: with the number of ranks per
    /// host, gradients and parameters are exchanged within a host, and only one part of the gradients crosses hosts.
    Blocks(usize),
    /// Not partitioned: each rank keeps all of the state.
    None,
}

impl Sharding {
    /// Arranges the ranks of a group. All ranks must call this with the same value; with several blocks it blocks until
    /// they have.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], before anything is sent, for blocks whose length does not divide the world size.
    /// Otherwise those of [`Group::split`].
    #[track_caller]
    pub fn mesh(self, operation: &str, group: &Group) -> Result<DeviceMesh, Error> {
        let world_size = group.world_size();
        let ranks = match self {
            Sharding::All => world_size,
            Sharding::Blocks(ranks) => ranks,
            Sharding::None => 1,
        };
        if ranks == 0 || !world_size.is_multiple_of(ranks) {
            let reason = format!("{world_size} ranks are not blocks of {ranks}; give a divisor of {world_size}");
            return Err(Error::argument(operation, reason));
        }
        let blocks = [(REPLICATE.into(), world_size / ranks), (SHARD.into(), ranks)];
        DeviceMesh::arrange(group.clone(), blocks.into())
    }
}

/// The dimension over whose ranks parameters and optimizer state are partitioned.
const SHARD: &str = "shard";

/// The dimension over whose ranks the partitions are replicated.
const REPLICATE: &str = "replicate";

const OPERATION: &str = "device mesh";

impl DeviceMesh {
    /// Arranges the ranks of `group` as an array of these dimensions, each a name and a number of ranks. All ranks must
    /// call this with the same dimensions; it blocks until they have.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks if there is no dimension, a size is 0, two names are equal, the sizes do
    /// not multiply to the world size, or the ranks give different dimensions; the group remains usable. Otherwise the
    /// errors of [`Group::split`].
    #[track_caller]
    pub fn new<N: Into<String>>(
        group: Group,
        dimensions: impl IntoIterator<Item = (N, usize)>,
    ) -> Result<DeviceMesh, Error> {
        let _call = group.enter("DeviceMesh::new");
        let dimensions: Vec<(String, usize)> = dimensions.into_iter().map(|(name, size)| (name.into(), size)).collect();
        let checked = check(&dimensions, group.world_size()).map(|()| dimensions.clone());
        let all = group.all_gather_results(checked)?;
        if let Some(rank) = all.iter().position(|other| *other != all[0]) {
            let text = |dimensions: &[(String, usize)]| {
                dimensions.iter().map(|(name, size)| format!("{name} {size}")).collect::<Vec<_>>().join(" x ")
            };
            let (first, other) = (text(&all[0]), text(&all[rank]));
            let reason = format!("rank 0's mesh is {first} and rank {rank}'s {other}; give the same on all ranks");
            return Err(Error::argument(OPERATION, reason));
        }
        Self::arrange(group, dimensions)
    }

    /// As [`new`](Self::new), for dimensions that are the same on all ranks and multiply to the world size.
    #[track_caller]
    fn arrange(group: Group, dimensions: Vec<(String, usize)>) -> Result<DeviceMesh, Error> {
        let alone = Group::threads(1)?.remove(0);
        let (rank, mut stride) = (group.rank(), group.world_size());
        let dimensions = dimensions.into_iter().map(|(name, size)| {
            stride /= size;
            let coordinate = rank / stride % size;
            let subgroup = match size {
                1 => alone.clone(),
                all if all == group.world_size() => group.clone(),
                // The rank with coordinate 0 stands for the subgroup.
                _ => {
                    group.split(Some((rank - coordinate * stride) as u64), coordinate as i64)?.unwrap_or(alone.clone())
                }
            };
            Ok(Dimension { name, group: subgroup })
        });
        let dimensions = dimensions.collect::<Result<_, Error>>()?;
        Ok(DeviceMesh { whole: group, dimensions })
    }

    /// Returns the group of all ranks.
    pub fn whole(&self) -> &Group {
        &self.whole
    }

    /// Returns this rank's subgroup along a dimension. Its rank in it is its coordinate.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the mesh has no dimension of this name.
    pub fn group(&self, name: &str) -> Result<&Group, Error> {
        self.dimension(name).ok_or_else(|| {
            let reason = format!("there is no dimension `{name}`; this mesh has {}", self.names());
            Error::argument(OPERATION, reason)
        })
    }

    fn dimension(&self, name: &str) -> Option<&Group> {
        self.dimensions.iter().find(|dimension| dimension.name == name).map(|dimension| &dimension.group)
    }

    fn names(&self) -> String {
        self.dimensions.iter().map(|dimension| format!("`{}`", dimension.name)).collect::<Vec<_>>().join(", ")
    }

    /// Returns the group of this rank and the ranks that differ from it only along the dimensions for sharding and for
    /// replicas. They work on other samples with the same parameters. Along other dimensions parameters may differ.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the mesh has neither dimension. Otherwise those of [`Group::split`].
    #[track_caller]
    pub fn replicas(&self, operation: &str) -> Result<Group, Error> {
        let is_own = |dimension: &&Dimension| [SHARD, REPLICATE].contains(&&*dimension.name);
        let (own, others): (Vec<_>, Vec<_>) = self.dimensions.iter().partition(is_own);
        match (&own[..], &others[..]) {
            ([], _) => {
                let names = self.names();
                let reason = format!("the mesh has only {names}; name the dimension to replicate over `{REPLICATE}`");
                Err(Error::argument(operation, reason))
            }
            (_, []) => Ok(self.whole.clone()),
            ([one], _) => Ok(one.group.clone()),
            (_, others) => {
                // Ranks with the same coordinates along all of them belong together.
                let color =
                    others.iter().fold(0, |color, Dimension { group, .. }| color * group.world_size() + group.rank());
                let group = self.whole.split(Some(color as u64), self.whole.rank() as i64)?;
                group.ok_or_else(|| Error::broken(operation, "this rank is in no subgroup"))
            }
        }
    }

    /// Returns this rank's subgroups along the dimensions for sharding and for replicas. A dimension that the mesh does
    /// not have is one rank long.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the mesh has another dimension.
    pub fn shards_and_replicas(&self, operation: &str) -> Result<[Group; 2], Error> {
        if let Some(other) = self.dimensions.iter().find(|dimension| ![SHARD, REPLICATE].contains(&&*dimension.name)) {
            let reason = format!(
                "the mesh has the dimension `{}`; name the one to partition over `{SHARD}`, and the one to replicate \
                 over `{REPLICATE}`",
                other.name
            );
            return Err(Error::argument(operation, reason));
        }
        let alone = Group::threads(1)?.remove(0);
        Ok([SHARD, REPLICATE].map(|name| self.dimension(name).unwrap_or(&alone).clone()))
    }
}

/// A mesh of the one dimension `shard`.
impl From<Group> for DeviceMesh {
    fn from(group: Group) -> DeviceMesh {
        DeviceMesh { dimensions: vec![Dimension { name: SHARD.into(), group: group.clone() }], whole: group }
    }
}

fn check(dimensions: &[(String, usize)], ranks: usize) -> Result<(), Error> {
    let sizes = dimensions.iter().map(|(_, size)| *size);
    let product = sizes.clone().try_fold(1usize, usize::checked_mul);
    let names = dimensions.iter().map(|(name, _)| name);
    let repeated = names.clone().enumerate().find(|(i, name)| names.clone().take(*i).any(|before| before == *name));
    let reason = if dimensions.is_empty() {
        format!("it has no dimensions; give names and sizes that multiply to the world size, {ranks}")
    } else if let Some((_, name)) = repeated {
        format!("two dimensions have the name `{name}`; give each its own")
    } else if product != Some(ranks) {
        let sizes = sizes.map(|size| size.to_string()).collect::<Vec<_>>().join(" x ");
        let product = product.map_or("more than any number of ranks".into(), |product| product.to_string());
        format!("{sizes} is {product}, and there are {ranks} ranks; give sizes that multiply to {ranks}")
    } else {
        return Ok(());
    };
    Err(Error::argument(OPERATION, reason))
}

impl fmt::Debug for DeviceMesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut mesh = f.debug_struct("DeviceMesh");
        self.dimensions.iter().fold(&mut mesh, |mesh, dimension| mesh.field(&dimension.name, &dimension.group)).finish()
    }
}
