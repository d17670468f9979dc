//! Decides which ranks have a control connection from the start.
//!
//! Subgroups and groups of survivors follow the same rule, each with its own rank 0.

/// The largest group in which all ranks are connected to each other.
///
/// Each connection costs each end a heartbeat per second, two tasks and two socket buffers. Up to this size that is
/// little, and each rank knows by itself which other ranks it can reach.
pub(super) const FULL_MESH_LIMIT: usize = 16;

/// Whether the ranks of a group learn of each other through rank 0: those of groups above `full_mesh_limit` ranks.
pub(super) fn is_star(world_size: usize, full_mesh_limit: usize) -> bool {
    world_size > full_mesh_limit
}

/// Returns how many connections `rank` will have at least, with so many data connections to a peer: control
/// connections, and those of a small and of a large all_reduce over TCP.
pub(super) fn fewest_connections(rank: usize, world_size: usize, full_mesh_limit: usize, data: usize) -> usize {
    let control = if is_star(world_size, full_mesh_limit) && rank != 0 { 1 } else { world_size - 1 };
    // Recursive doubling and halving need a peer for each bit, and a ring two.
    let peers = (world_size.next_power_of_two().ilog2() as usize + 2).min(world_size - 1);
    control + data * peers
}

/// Whether two ranks are connected from the start. In a star, rank 0 is connected to all ranks, and the lowest rank of
/// each host to the host's other ranks, to which it passes their shared memory.
pub(super) fn neighbours((one, other): (usize, usize), hosts: &[usize], full_mesh_limit: usize) -> bool {
    let is_lowest_of_host = |rank: usize| hosts.iter().position(|host| *host == hosts[rank]) == Some(rank);
    let (low, high) = (one.min(other), one.max(other));
    let share_memory = || hosts[low] == hosts[high] && is_lowest_of_host(low);
    low != high && (!is_star(hosts.len(), full_mesh_limit) || low == 0 || share_memory())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(hosts: &[usize], full_mesh_limit: usize) -> Vec<(usize, usize)> {
        let n = hosts.len();
        let all = (0..n).flat_map(|one| (0..n).map(move |other| (one, other)));
        let pairs: Vec<_> = all.filter(|pair| neighbours(*pair, hosts, full_mesh_limit)).collect();
        assert!(pairs.iter().all(|(one, other)| pairs.contains(&(*other, *one))));
        pairs.into_iter().filter(|(one, other)| one < other).collect()
    }

    #[test]
    fn rank_0_of_a_star_has_a_connection_to_each_rank_and_the_others_have_few() {
        assert_eq!([0, 3].map(|rank| fewest_connections(rank, 4, 16, 1)), [6, 6]);
        assert_eq!([0, 3].map(|rank| fewest_connections(rank, 1000, 16, 2)), [999 + 24, 1 + 24]);
    }

    #[test]
    fn small_groups_are_a_mesh_and_large_ones_a_star_with_links_within_hosts() {
        for n in 1..=FULL_MESH_LIMIT {
            assert_eq!(pairs(&vec![0; n], FULL_MESH_LIMIT).len(), n * (n - 1) / 2);
        }
        assert_eq!(
            pairs(&[0; FULL_MESH_LIMIT + 1], FULL_MESH_LIMIT),
            (1..=FULL_MESH_LIMIT).map(|rank| (0, rank)).collect::<Vec<_>>()
        );
        assert_eq!(pairs(&[0, 1, 0, 1, 4, 1], 3), [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 3), (1, 5)]);
    }
}
