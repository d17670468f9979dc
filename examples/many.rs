//! Measures the cost of connecting many ranks: the time until all are connected, and the resources of each. Then rank 0
//! leaves, and the others once they know of it: none may be lost, and none may need more open files for it.
//!
//! `scripts/many-ranks` starts it with increasing numbers of ranks. `STARTED` is the time of the start in seconds since
//! 1970. Rank 0 prints a line of a table: ranks; seconds until all were connected; proportional set size of a rank in
//! KiB (mean, largest, rank 0's); control connections (rank 0's, the most of another rank, all).

use std::error::Error;
use std::fs;
use std::io::{self, ErrorKind};
use std::time::{SystemTime, UNIX_EPOCH};

use bonfire::Group;

fn main() -> Result<(), Box<dyn Error>> {
    env_logger::init();
    let group = Group::from_env()?;
    let connected = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
    // Before the first operation, so there are no data connections.
    let mine = [connected, connections()? as f64];
    let n = group.world_size();
    let mut all = vec![0.0; 2 * n];
    group.all_gather_into(&mine, &mut all)?;
    let memory = proportional_set_size()? as f64;
    let mut memories = vec![0.0; n];
    group.all_gather_into(&[memory], &mut memories)?;
    if group.rank() == 0 {
        let started: f64 = std::env::var("STARTED")?.parse()?;
        let most = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
        let last = most(&mut all.iter().copied().step_by(2));
        let connection_counts: Vec<f64> = all.iter().copied().skip(1).step_by(2).collect();
        println!(
            "{n:5} {:8.2} {:8.0} {:8.0} {:8.0} {:8.0} {:8.0} {:8.0}",
            last - started,
            memories.iter().sum::<f64>() / n as f64,
            most(&mut memories.iter().copied()),
            memories[0],
            connection_counts[0],
            most(&mut connection_counts.iter().copied().skip(1)),
            connection_counts.iter().sum::<f64>() / 2.0,
        );
    }
    // No rank leaves before all have measured.
    group.barrier()?;
    if group.rank() == 0 {
        return Ok(());
    }
    let before = open_files()?;
    match group.barrier() {
        Err(bonfire::Error::Left { rank: 0, .. }) => {}
        other => return Err(format!("rank 0 has left, and the next call returned {other:?}").into()),
    }
    match open_files()? {
        after if after > before => Err(format!("{before} open files, and {after} since rank 0 has left").into()),
        _ => Ok(()),
    }
}

/// Returns the number of this process's open files.
fn open_files() -> io::Result<usize> {
    Ok(fs::read_dir("/proc/self/fd")?.count())
}

/// Returns the proportional set size in KiB: private memory, and an equal share of memory common to several processes.
fn proportional_set_size() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/self/smaps_rollup")?;
    let kib = text.lines().find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.parse().ok());
    kib.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "no Pss in /proc/self/smaps_rollup"))
}

/// Returns the number of this process's established TCP connections.
fn connections() -> io::Result<usize> {
    let files = fs::read_dir("/proc/self/fd")?.filter_map(|file| fs::read_link(file.ok()?.path()).ok());
    let own: Vec<String> = files.map(|target| target.to_string_lossy().into_owned()).collect();
    let table = fs::read_to_string("/proc/self/net/tcp")?;
    let connected = table.lines().skip(1).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        (fields.get(3) == Some(&"01")).then(|| format!("socket:[{}]", fields.get(9).unwrap_or(&"")))
    });
    Ok(connected.filter(|socket| own.contains(socket)).count())
}
