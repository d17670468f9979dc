//! What it costs to connect many ranks: how long until all are there, and what each holds then.
//!
//! `scripts/many-ranks` starts it with more and more ranks. `STARTED` is when, in seconds since 1970. Rank 0 prints a line
//! of a table: ranks, seconds until all were connected, memory that only this rank has plus its share of what several have
//! (the mean, the most, rank 0's; KiB), control connections (rank 0's, the most of another, all).

use std::error::Error;
use std::fs;
use std::io::{self, ErrorKind};
use std::time::{SystemTime, UNIX_EPOCH};

use bonfire::Group;

fn main() -> Result<(), Box<dyn Error>> {
    env_logger::init();
    let group = Group::from_env()?;
    let connected = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
    // Before the first operation: there are no connections for data.
    let mine = [connected, connections()? as f64];
    let n = group.world_size();
    let mut all = vec![0.0; 2 * n];
    group.all_gather_into(&mine, &mut all)?;
    let memory = share_of_memory()? as f64;
    let mut memories = vec![0.0; n];
    group.all_gather_into(&[memory], &mut memories)?;
    if group.rank() == 0 {
        let started: f64 = std::env::var("STARTED")?.parse()?;
        let most = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
        let last = most(&mut all.iter().copied().step_by(2));
        let ends: Vec<f64> = all.iter().copied().skip(1).step_by(2).collect();
        println!(
            "{n:5} {:8.2} {:8.0} {:8.0} {:8.0} {:8.0} {:8.0} {:8.0}",
            last - started,
            memories.iter().sum::<f64>() / n as f64,
            most(&mut memories.iter().copied()),
            memories[0],
            ends[0],
            most(&mut ends.iter().copied().skip(1)),
            ends.iter().sum::<f64>() / 2.0,
        );
    }
    // Nobody leaves before all have measured.
    Ok(group.barrier()?)
}

/// Proportional set size in KiB.
fn share_of_memory() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/self/smaps_rollup")?;
    let kib = text.lines().find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.parse().ok());
    kib.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "no Pss in /proc/self/smaps_rollup"))
}

/// This process's established TCP connections.
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
