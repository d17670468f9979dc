//! Floors: lower bounds on the time of a call on this machine.
//!
//! A floor is a bound and not a forecast. Ranks that access each other's memory must read and write a certain number of
//! bytes (`Facts::traffic`), at most at the rate at which as many threads, with as many bytes each, copy or add arrays
//! of their own. So caches count if the data fits in them. Handing lines from core to core does not count, except for
//! the one hand-off that every operation has at least.
//!
//! Over TCP the floor is one stream in one direction for each rank, as many at once as there are cores. A rank also
//! receives, which costs as much again, so two ranks on two cores stay far from 100 %.

use std::io;
use std::thread::available_parallelism;

use super::args::Transport;
use super::operation::Facts;
use crate::floor::{Loopback, Memory, Point, hand_off};
use crate::text::binary;

/// Bytes that each thread works on when the rates of memory are measured.
const SIZES: [usize; 5] = [1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26];

/// The floors of ranks on one machine.
pub struct Floors {
    ranks: f64,
    /// Cores that the ranks can use at once.
    cores: usize,
    path: DataPath,
}

/// How data moves between the ranks.
enum DataPath {
    /// Ranks access each other's memory, or share some.
    Memory {
        memory: Memory,
        hand_off: f64,
    },
    Tcp(Loopback),
}

impl Floors {
    /// Measures the floors of calls with up to `largest` bytes. None for a single rank, which waits for no peer, for
    /// `auto`, whose links between hosts are unknown, and for devices.
    pub fn measure(transport: Transport, ranks: u32, facts: &Facts, largest: usize) -> io::Result<Option<Floors>> {
        if ranks < 2 || transport == Transport::Auto || transport.path().is_some() {
            return Ok(None);
        }
        // A machine that does not report its number of cores has at least one.
        let cores = available_parallelism().map_or(1, usize::from).min(ranks as usize);
        let path = match transport {
            Transport::Tcp => DataPath::Tcp(Loopback::measure()?),
            _ => {
                let sets = [false, true].map(|in_place| traffic(facts, f64::from(ranks), largest, in_place).1);
                let most = sets[0].max(sets[1]) / cores as f64;
                DataPath::Memory { memory: Memory::measure(cores, needed(most)), hand_off: hand_off() }
            }
        };
        Ok(Some(Floors { ranks: f64::from(ranks), cores, path }))
    }

    /// Returns the floor, in seconds, of a call with this size in the table.
    pub fn seconds(&self, facts: &Facts, bytes: usize, in_place: bool) -> f64 {
        let (size, ranks, cores) = (bytes as f64, self.ranks, self.cores as f64);
        match &self.path {
            DataPath::Memory { memory, hand_off } => {
                let (traffic, working_set) = traffic(facts, ranks, bytes, in_place);
                hand_off.max(traffic / memory.traffic(working_set / cores))
            }
            // Each rank sends at the rate of a stream, as many at once as there are cores.
            DataPath::Tcp(loopback) => {
                let sent = ((facts.bus_factor)(ranks) * size).max((facts.total_sent)(ranks) * size / cores);
                let sent = if facts.moves_data() { sent / loopback.stream } else { 0.0 };
                loopback.one_way.max(sent)
            }
        }
    }

    /// Returns the lines for the head of the table.
    pub fn describe(&self) -> Vec<String> {
        match &self.path {
            DataPath::Memory { memory, hand_off } => {
                let list = |field: fn(&Point) -> String| memory.points.iter().map(field).collect::<Vec<_>>().join(" ");
                let sizes = list(|point| binary(point.bytes as f64));
                let copy = list(|point| format!("{:.1}", point.copy / 1e9));
                let add = list(|point| format!("{:.1}", point.add / 1e9));
                vec![
                    format!("floor: a cache line from thread to thread {:.2} us", hand_off * 1e6),
                    format!("floor: memory, {} threads with {sizes} each, output in GB/s", memory.threads),
                    format!("       copy {copy}; add {add}"),
                ]
            }
            DataPath::Tcp(loopback) => {
                let (one_way, stream) = (loopback.one_way * 1e6, loopback.stream / 1e9);
                vec![format!("floor: loopback, 8 bytes one way {one_way:.2} us, one stream {stream:.2} GB/s")]
            }
        }
    }
}

/// Returns the bytes that all ranks together read and write in a call with `bytes` bytes, and their working set.
fn traffic(facts: &Facts, ranks: f64, bytes: usize, in_place: bool) -> (f64, f64) {
    let traffic = (facts.traffic)(ranks)[usize::from(in_place)] * bytes as f64;
    // In place an operation reads and writes the same memory: the working set is the buffers.
    (traffic, if in_place { ranks * bytes as f64 } else { traffic })
}

/// Returns the sizes to measure for threads that work on at most `most` bytes each: rates are interpolated.
fn needed(most: f64) -> &'static [usize] {
    let last = SIZES.iter().position(|size| *size as f64 >= most).unwrap_or(SIZES.len() - 1);
    &SIZES[..=last]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::operation::Benchmark;

    fn floors(ranks: f64, cores: usize, path: DataPath) -> Floors {
        Floors { ranks, cores, path }
    }

    #[test]
    fn sizes_are_measured_up_to_the_first_that_holds_the_working_set() {
        for (most, count) in [(0.0, 1), (16384.0, 1), (16385.0, 2), (1e6, 3), (8e6, 4), (9e6, 5), (1e12, 5)] {
            assert_eq!(needed(most), &SIZES[..count], "{most}");
        }
    }

    #[test]
    fn memory_floors_count_bytes_read_and_written() {
        let point = Point { bytes: 1, copy: 10e9, add: 0.0 };
        let memory =
            || DataPath::Memory { memory: Memory { threads: 2, points: vec![Point { ..point }] }, hand_off: 1e-7 };
        let floors = floors(2.0, 2, memory());
        // Two ranks read and write 1 MB each: 4 MB at 20 GB/s.
        let all_reduce = Benchmark::AllReduce.facts();
        assert!((floors.seconds(&all_reduce, 1_000_000, false) - 200e-6).abs() < 1e-12);
        assert_eq!(floors.seconds(&all_reduce, 8, false), 1e-7);
        assert_eq!(floors.seconds(&Benchmark::Barrier.facts(), 0, false), 1e-7);
        // In place only the part for the other rank moves.
        let all_to_all = |in_place| floors.seconds(&Benchmark::AllToAll.facts(), 1_000_000, in_place);
        assert!((all_to_all(false) / all_to_all(true) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn tcp_floors_count_bytes_sent() {
        let tcp = || DataPath::Tcp(Loopback { stream: 1e9, one_way: 2e-6 });
        let all_reduce = |floors: Floors| floors.seconds(&Benchmark::AllReduce.facts(), 1_000_000, false);
        assert!((all_reduce(floors(2.0, 2, tcp())) - 1e-3).abs() < 1e-12);
        assert!((all_reduce(floors(4.0, 4, tcp())) - 1.5e-3).abs() < 1e-12);
        // Four ranks on two cores send 6 MB, two at a time.
        assert!((all_reduce(floors(4.0, 2, tcp())) - 3e-3).abs() < 1e-12);
        assert_eq!(floors(2.0, 2, tcp()).seconds(&Benchmark::Barrier.facts(), 0, false), 2e-6);
    }
}
