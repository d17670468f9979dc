//! Which control connections there are from the start.

/// The most ranks of which all are connected to each other.
///
/// A connection to every other rank costs each rank a heartbeat a second, two tasks and two sockets' buffers. For so many
/// that is little, and each rank then knows by itself which others it can reach.
pub(super) const MESH: usize = 16;

/// Whether ranks of a group hear of each other through rank 0; at most `mesh` of them are all connected.
pub(super) fn is_star(world_size: usize, mesh: usize) -> bool {
    world_size > mesh
}

/// Whether two ranks are connected from the start. In a star, all are to rank 0, and the lowest rank of each host to the
/// others there, to which it hands the memory that they share.
pub(super) fn neighbours((one, other): (usize, usize), hosts: &[usize], mesh: usize) -> bool {
    let maker = |rank: usize| hosts.iter().position(|host| *host == hosts[rank]) == Some(rank);
    let (low, high) = (one.min(other), one.max(other));
    let hand_over = || hosts[low] == hosts[high] && maker(low);
    low != high && (!is_star(hosts.len(), mesh) || low == 0 || hand_over())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(hosts: &[usize], mesh: usize) -> Vec<(usize, usize)> {
        let n = hosts.len();
        let all = (0..n).flat_map(|one| (0..n).map(move |other| (one, other)));
        let pairs: Vec<_> = all.filter(|pair| neighbours(*pair, hosts, mesh)).collect();
        assert!(pairs.iter().all(|(one, other)| pairs.contains(&(*other, *one))));
        pairs.into_iter().filter(|(one, other)| one < other).collect()
    }

    #[test]
    fn few_ranks_are_all_connected_and_many_to_rank_0_and_to_their_hosts_lowest() {
        for n in 1..=MESH {
            assert_eq!(pairs(&vec![0; n], MESH).len(), n * (n - 1) / 2);
        }
        assert_eq!(pairs(&[0; MESH + 1], MESH), (1..=MESH).map(|rank| (0, rank)).collect::<Vec<_>>());
        assert_eq!(pairs(&[0, 1, 0, 1, 4, 1], 3), [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 3), (1, 5)]);
    }
}
