//! Short benchmarks of this machine: the best rates of memory, of a cache line between threads and of TCP on loopback.

use std::hint::black_box;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// Rates of memory by the bytes that each thread works on: caches are faster than the memory behind them.
pub struct Memory {
    pub threads: usize,
    /// In ascending order of `bytes`; not empty.
    pub points: Vec<Point>,
}

/// Rates in bytes of output per second, of all threads together.
pub struct Point {
    /// Size of each thread's two arrays together.
    pub bytes: usize,
    /// One array copied to the other, by the faster of two methods.
    pub copy: f64,
    /// One array of f32 added to the other.
    pub add: f64,
}

impl Point {
    /// Bytes read and written per second.
    pub fn traffic(&self) -> f64 {
        (2.0 * self.copy).max(3.0 * self.add)
    }
}

impl Memory {
    /// Measures with `threads` threads at once, for each number of bytes per thread in `sizes`.
    pub fn measure(threads: usize, sizes: &[usize]) -> Memory {
        let point = |bytes: &usize| Point {
            bytes: *bytes,
            copy: f64::max(
                rate(threads, *bytes, |from, to| to.copy_from_slice(from)),
                rate(threads, *bytes, copy_non_temporal),
            ),
            add: rate(threads, *bytes, |from, to| to.iter_mut().zip(from).for_each(|(to, from)| *to += from)),
        };
        Memory { threads, points: sizes.iter().map(point).collect() }
    }

    /// Bytes read and written per second by threads that work on `bytes` bytes each. Between two measured sizes the
    /// rates are interpolated, because part of the data is in the faster cache.
    pub fn traffic(&self, bytes: f64) -> f64 {
        let above = self.points.iter().position(|point| point.bytes as f64 >= bytes).unwrap_or(self.points.len() - 1);
        let upper = &self.points[above];
        let lower = &self.points[above.saturating_sub(1)];
        let span = (upper.bytes as f64 / lower.bytes as f64).ln();
        let share = if span > 0.0 { ((bytes / lower.bytes as f64).ln() / span).clamp(0.0, 1.0) } else { 1.0 };
        lower.traffic() * (1.0 - share) + upper.traffic() * share
    }
}

const ROUNDS: usize = 3;
const ROUND: Duration = Duration::from_millis(4);
/// The clock is read after about this many bytes or more, so that reading it does not dominate.
const BATCH: usize = 1 << 18;

/// Returns output bytes per second of the best round: other load on the machine only makes a round slower.
fn rate(threads: usize, bytes: usize, kernel: fn(&[f32], &mut [f32])) -> f64 {
    let elements = bytes / 2 / size_of::<f32>();
    let bytes = elements * size_of::<f32>();
    let barrier = Barrier::new(threads);
    let worker = || {
        let (from, mut to) = (vec![1.0; elements], vec![2.0; elements]);
        let passes = (BATCH / bytes.max(1)).max(1);
        let mut pass = || (0..passes).for_each(|_| kernel(black_box(&from), black_box(&mut to)));
        pass();
        [(); ROUNDS].map(|()| {
            barrier.wait();
            let (start, mut done) = (Instant::now(), 0);
            while start.elapsed() < ROUND {
                pass();
                done += passes;
            }
            (done * bytes) as f64 / start.elapsed().as_secs_f64()
        })
    };
    let rounds: Vec<[f64; ROUNDS]> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
    });
    (0..ROUNDS).map(|round| rounds.iter().map(|rates| rates[round]).sum()).fold(0.0, f64::max)
}

/// Copies with non-temporal stores. They skip the read of the target's cache lines that precedes an ordinary store to
/// a line in no cache. A large `copy_from_slice` does so only where the C library takes the cache to be small.
#[cfg(target_arch = "x86_64")]
fn copy_non_temporal(from: &[f32], to: &mut [f32]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    // SAFETY: every bit pattern is a valid vector, and a vector's bytes are valid f32s.
    let (head, vectors, tail) = unsafe { to.align_to_mut::<__m128i>() };
    let (start, end) = (head.len(), from.len() - tail.len());
    head.copy_from_slice(&from[..start]);
    tail.copy_from_slice(&from[end..]);
    for (to, from) in vectors.iter_mut().zip(from[start..end].chunks_exact(4)) {
        // SAFETY: `from` is as long as a vector, `to` is aligned as one, and SSE2 is part of every x86-64.
        unsafe { _mm_stream_si128(to, _mm_loadu_si128(from.as_ptr().cast())) };
    }
    // SAFETY: SSE is part of every x86-64.
    unsafe { _mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
fn copy_non_temporal(from: &[f32], to: &mut [f32]) {
    to.copy_from_slice(from);
}

/// A number alone on a pair of cache lines, since processors fetch lines in pairs.
#[repr(align(128))]
struct CacheLine(AtomicU64);

/// Returns the seconds from one side to the other: half of the best round trip within `time`, timed in batches of
/// `trips`.
fn best_one_way(time: Duration, trips: u32, mut trip: impl FnMut() -> io::Result<()>) -> io::Result<f64> {
    let (begin, mut best) = (Instant::now(), f64::MAX);
    while begin.elapsed() < time {
        let start = Instant::now();
        for _ in 0..trips {
            trip()?;
        }
        best = best.min(start.elapsed().as_secs_f64() / f64::from(2 * trips));
    }
    Ok(best)
}

/// Returns the seconds until one thread sees what another has written.
pub fn hand_off() -> f64 {
    let (ping, pong) = (CacheLine(AtomicU64::new(0)), CacheLine(AtomicU64::new(0)));
    let near = || {
        pin_to_core(0);
        let mut trip = 0;
        let best = best_one_way(Duration::from_millis(30), 50, || {
            trip += 1;
            ping.0.store(trip, Ordering::Release);
            pong.await_value(trip);
            Ok(())
        });
        ping.0.store(u64::MAX, Ordering::Release);
        best.unwrap_or(f64::MAX)
    };
    let far = || {
        pin_to_core(1);
        let mut trip = 1;
        while ping.await_value(trip) != u64::MAX {
            pong.0.store(trip, Ordering::Release);
            trip += 1;
        }
    };
    thread::scope(|scope| {
        scope.spawn(far);
        scope.spawn(near).join().unwrap_or(f64::MAX)
    })
}

impl CacheLine {
    /// Waits for `value`, or for `u64::MAX`, which ends the measurement. The load acquires what the other side's store
    /// releases, so that the time includes the cost of handing over data.
    fn await_value(&self, value: u64) -> u64 {
        let mut spins = 0;
        loop {
            match self.0.load(Ordering::Acquire) {
                now if now == value || now == u64::MAX => return now,
                // On a single core the other thread must get its turn.
                _ if spins == 1 << 12 => {
                    thread::yield_now();
                    spins = 0;
                }
                _ => spins += 1,
            }
        }
    }
}

/// Pins the calling thread to the process's core number `number`, if it has that many and the system supports it. On a
/// busy machine two threads may share one core for long and would measure the scheduler.
fn pin_to_core(number: usize) {
    #[cfg(target_os = "linux")]
    {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        let Ok(allowed) = sched_getaffinity(None) else { return };
        if let Some(core) = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).nth(number) {
            let mut only = CpuSet::new();
            only.set(core);
            // If this is refused, the scheduler chooses the core.
            let _ = sched_setaffinity(None, &only);
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = number;
}

/// TCP between two threads over 127.0.0.1.
pub struct Loopback {
    /// Bytes per second of one stream in one direction.
    pub stream: f64,
    /// Seconds for a message of 8 bytes, both threads awake.
    pub one_way: f64,
}

impl Loopback {
    pub fn measure() -> io::Result<Loopback> {
        // Small chunks cost more calls, large ones more cache misses: the fastest size depends on the machine.
        Ok(Loopback { one_way: one_way()?, stream: stream_rate(1 << 16)?.max(stream_rate(1 << 18)?) })
    }
}

/// Long enough for any answer from this machine. A firewall that filters loopback must not make the measurement hang.
const TIMEOUT: Duration = Duration::from_secs(1);

fn pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let near = TcpStream::connect_timeout(&listener.local_addr()?, TIMEOUT)?;
    let (far, _) = listener.accept()?;
    for stream in [&near, &far] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
    }
    Ok((near, far))
}

/// A connection that is polled instead of slept on, as a rank polls in short waits: a wake-up would cost more than the
/// wait.
struct Polled<'a>(&'a TcpStream);

impl Polled<'_> {
    fn retry(&self, mut call: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize> {
        let start = Instant::now();
        loop {
            match call(self.0) {
                Err(error) if error.kind() == ErrorKind::WouldBlock && start.elapsed() < TIMEOUT => {
                    thread::yield_now();
                }
                done => return done,
            }
        }
    }
}

impl Read for Polled<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.retry(|mut stream| stream.read(bytes))
    }
}

fn one_way() -> io::Result<f64> {
    let (near, far) = pair()?;
    thread::scope(|scope| {
        let echo = scope.spawn(|| {
            let mut message = [0; 8];
            // Ends when the other side closes the connection.
            while Polled(&far).read_exact(&mut message).is_ok() {
                (&far).write_all(&message)?;
            }
            Ok(())
        });
        let mut message = [0; 8];
        let best = best_one_way(Duration::from_millis(20), 20, || {
            (&near).write_all(&message)?;
            Polled(&near).read_exact(&mut message)
        });
        near.shutdown(Shutdown::Both)?;
        joined(echo)?;
        best
    })
}

fn stream_rate(chunk_bytes: usize) -> io::Result<f64> {
    const ROUND: Duration = Duration::from_millis(20);
    let (near, far) = pair()?;
    thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let (begin, chunk) = (Instant::now(), vec![0; chunk_bytes]);
            while begin.elapsed() < (ROUNDS as u32 + 1) * ROUND {
                Polled(&near).retry(|mut stream| stream.write(&chunk))?;
            }
            near.shutdown(Shutdown::Write)
        });
        let (mut chunk, mut best) = (vec![0; chunk_bytes], 0f64);
        let (mut start, mut bytes) = (Instant::now(), 0);
        while let read @ 1.. = Polled(&far).read(&mut chunk)? {
            bytes += read;
            if start.elapsed() >= ROUND {
                best = best.max(bytes as f64 / start.elapsed().as_secs_f64());
                (start, bytes) = (Instant::now(), 0);
            }
        }
        joined(sender)?;
        Ok(best)
    })
}

fn joined(side: ScopedJoinHandle<'_, io::Result<()>>) -> io::Result<()> {
    side.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(rates: &[(usize, f64)]) -> Memory {
        let point = |&(bytes, copy): &(usize, f64)| Point { bytes, copy, add: 0.0 };
        Memory { threads: 1, points: rates.iter().map(point).collect() }
    }

    #[test]
    fn rates_are_interpolated_between_sizes() {
        let memory = memory(&[(1 << 10, 16.0), (1 << 20, 4.0)]);
        assert_eq!([1.0, 1024.0, 1048576.0, 1e12].map(|bytes| memory.traffic(bytes)), [32.0, 32.0, 8.0, 8.0]);
        assert_eq!(memory.traffic(32768.0), 20.0);
        assert_eq!(self::memory(&[(64, 2.0)]).traffic(1.0), 4.0);
    }

    #[test]
    fn the_better_of_copy_and_add_counts() {
        assert_eq!(Point { bytes: 1, copy: 10.0, add: 6.0 }.traffic(), 20.0);
        assert_eq!(Point { bytes: 1, copy: 10.0, add: 8.0 }.traffic(), 24.0);
    }

    #[test]
    fn a_non_temporal_copy_is_a_copy() {
        let from: Vec<f32> = (0..50).map(|i| i as f32).collect();
        for (start, len) in (0..5).flat_map(|start| [0, 1, 3, 4, 9, 40].map(|len| (start, len))) {
            let mut to = vec![-1.0; 50];
            copy_non_temporal(&from[..len], &mut to[start..start + len]);
            let mut want = vec![-1.0; 50];
            want[start..start + len].copy_from_slice(&from[..len]);
            assert_eq!(to, want, "{len} at {start}");
        }
    }

    #[test]
    fn all_measurements_are_positive() {
        let memory = Memory::measure(2, &[1 << 14, 1 << 20]);
        assert!(memory.points.iter().all(|point| point.copy > 0.0 && point.add > 0.0));
        assert!(hand_off() > 0.0);
        let loopback = Loopback::measure().unwrap();
        assert!(loopback.stream > 0.0 && loopback.one_way > 0.0);
    }
}
