//! What this machine does at best, measured in a moment: what nothing can be faster than.

use std::hint::black_box;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// The rates of memory, by how many bytes each thread works on: caches are faster than what is behind them.
pub struct Memory {
    pub threads: usize,
    /// In ascending order, and not empty.
    pub points: Vec<Point>,
}

/// Rates in bytes of output per second, of all threads together.
pub struct Point {
    /// Bytes of each thread, in two arrays.
    pub bytes: usize,
    /// One array copied to the other, in the faster of two ways.
    pub copy: f64,
    /// One array of f32 added to the other.
    pub add: f64,
}

impl Point {
    /// Bytes read and written per second.
    pub fn touched(&self) -> f64 {
        (2.0 * self.copy).max(3.0 * self.add)
    }
}

impl Memory {
    /// Measures with `threads` threads at once, each with so many bytes.
    pub fn measure(threads: usize, sizes: &[usize]) -> Memory {
        let point = |bytes: &usize| Point {
            bytes: *bytes,
            copy: f64::max(
                rate(threads, *bytes, |from, to| to.copy_from_slice(from)),
                rate(threads, *bytes, copy_past_cache),
            ),
            add: rate(threads, *bytes, |from, to| to.iter_mut().zip(from).for_each(|(to, from)| *to += from)),
        };
        Memory { threads, points: sizes.iter().map(point).collect() }
    }

    /// Bytes read and written per second by threads with so many bytes each: between two measured sizes a mixture, as
    /// part of the data is in the faster cache.
    pub fn touched(&self, bytes: f64) -> f64 {
        let above = self.points.iter().position(|point| point.bytes as f64 >= bytes).unwrap_or(self.points.len() - 1);
        let upper = &self.points[above];
        let lower = &self.points[above.saturating_sub(1)];
        let span = (upper.bytes as f64 / lower.bytes as f64).ln();
        let share = if span > 0.0 { ((bytes / lower.bytes as f64).ln() / span).clamp(0.0, 1.0) } else { 1.0 };
        lower.touched() * (1.0 - share) + upper.touched() * share
    }
}

const ROUNDS: usize = 3;
const ROUND: Duration = Duration::from_millis(4);
/// The clock is read after this many bytes at least, lest it be what is measured.
const BATCH: usize = 1 << 18;

/// Output bytes per second of the best round: others of the machine's users only ever make it slower.
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

/// Copies without reading the target's lines first, as an ordinary store does to lines that are in no cache. A large
/// `copy_from_slice` does so only where the C library thinks that the cache is small.
#[cfg(target_arch = "x86_64")]
fn copy_past_cache(from: &[f32], to: &mut [f32]) {
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
fn copy_past_cache(from: &[f32], to: &mut [f32]) {
    to.copy_from_slice(from);
}

/// A cache line of its own, and the next, since processors fetch lines in pairs.
#[repr(align(128))]
struct Line(AtomicU64);

/// Seconds from one side to the other: half of the best round trip in `time`. `trips` are timed together.
fn best_way(time: Duration, trips: u32, mut trip: impl FnMut() -> io::Result<()>) -> io::Result<f64> {
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

/// Seconds until what one thread has written is seen by another.
pub fn hand_off() -> f64 {
    let (there, back) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    let near = || {
        stay_on_core(0);
        let mut trip = 0;
        let best = best_way(Duration::from_millis(30), 50, || {
            trip += 1;
            there.0.store(trip, Ordering::Release);
            back.await_value(trip);
            Ok(())
        });
        there.0.store(u64::MAX, Ordering::Release);
        best.unwrap_or(f64::MAX)
    };
    let far = || {
        stay_on_core(1);
        let mut trip = 1;
        while there.await_value(trip) != u64::MAX {
            back.0.store(trip, Ordering::Release);
            trip += 1;
        }
    };
    thread::scope(|scope| {
        scope.spawn(far);
        scope.spawn(near).join().unwrap_or(f64::MAX)
    })
}

impl Line {
    /// Waits for `value`, or for the largest number, which ends the measurement. Acquire, beside the other side's
    /// release: what counts is the price of handing over data.
    fn await_value(&self, value: u64) -> u64 {
        let mut spins = 0;
        loop {
            match self.0.load(Ordering::Acquire) {
                now if now == value || now == u64::MAX => return now,
                // With a single core the other thread must get its turn.
                _ if spins == 1 << 12 => {
                    thread::yield_now();
                    spins = 0;
                }
                _ => spins += 1,
            }
        }
    }
}

/// Keeps the calling thread on the process's first, second ... core, where the system can and has it: on a busy machine
/// two threads may share one core for long, and would measure the scheduler.
fn stay_on_core(number: usize) {
    #[cfg(target_os = "linux")]
    {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        let Ok(allowed) = sched_getaffinity(None) else { return };
        if let Some(core) = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).nth(number) {
            let mut only = CpuSet::new();
            only.set(core);
            // Where it is refused, the thread runs where the system likes.
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
        // Which pieces go fastest depends on caches: small ones make more calls, and large ones more misses.
        Ok(Loopback { one_way: one_way()?, stream: stream(1 << 16)?.max(stream(1 << 18)?) })
    }
}

/// Long enough for any answer from this machine: whoever filters loopback must not make the measurement hang.
const PATIENCE: Duration = Duration::from_secs(1);

fn pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let near = TcpStream::connect_timeout(&listener.local_addr()?, PATIENCE)?;
    let (far, _) = listener.accept()?;
    for stream in [&near, &far] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
    }
    Ok((near, far))
}

/// A connection that is used without sleeping, as a rank does that waits for a short time: waking would cost more than
/// what is waited for.
struct Awake<'a>(&'a TcpStream);

impl Awake<'_> {
    fn retry(&self, mut call: impl FnMut(&TcpStream) -> io::Result<usize>) -> io::Result<usize> {
        let start = Instant::now();
        loop {
            match call(self.0) {
                Err(error) if error.kind() == ErrorKind::WouldBlock && start.elapsed() < PATIENCE => {
                    thread::yield_now();
                }
                done => return done,
            }
        }
    }
}

impl Read for Awake<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.retry(|mut stream| stream.read(bytes))
    }
}

fn one_way() -> io::Result<f64> {
    let (near, far) = pair()?;
    thread::scope(|scope| {
        let echo = scope.spawn(|| {
            let mut message = [0; 8];
            // Ends with the other side's closing.
            while Awake(&far).read_exact(&mut message).is_ok() {
                (&far).write_all(&message)?;
            }
            Ok(())
        });
        let mut message = [0; 8];
        let best = best_way(Duration::from_millis(20), 20, || {
            (&near).write_all(&message)?;
            Awake(&near).read_exact(&mut message)
        });
        near.shutdown(Shutdown::Both)?;
        joined(echo)?;
        best
    })
}

fn stream(piece: usize) -> io::Result<f64> {
    const ROUND: Duration = Duration::from_millis(20);
    let (near, far) = pair()?;
    thread::scope(|scope| {
        let sender = scope.spawn(move || {
            let (begin, chunk) = (Instant::now(), vec![0; piece]);
            while begin.elapsed() < (ROUNDS as u32 + 1) * ROUND {
                Awake(&near).retry(|mut stream| stream.write(&chunk))?;
            }
            near.shutdown(Shutdown::Write)
        });
        let (mut chunk, mut best) = (vec![0; piece], 0f64);
        let (mut start, mut bytes) = (Instant::now(), 0);
        while let read @ 1.. = Awake(&far).read(&mut chunk)? {
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
    fn rates_between_sizes_are_between_rates() {
        let memory = memory(&[(1 << 10, 16.0), (1 << 20, 4.0)]);
        assert_eq!([1.0, 1024.0, 1048576.0, 1e12].map(|bytes| memory.touched(bytes)), [32.0, 32.0, 8.0, 8.0]);
        assert_eq!(memory.touched(32768.0), 20.0);
        assert_eq!(self::memory(&[(64, 2.0)]).touched(1.0), 4.0);
    }

    #[test]
    fn the_better_of_copy_and_add_counts() {
        assert_eq!(Point { bytes: 1, copy: 10.0, add: 6.0 }.touched(), 20.0);
        assert_eq!(Point { bytes: 1, copy: 10.0, add: 8.0 }.touched(), 24.0);
    }

    #[test]
    fn a_copy_past_the_cache_is_a_copy() {
        let from: Vec<f32> = (0..50).map(|i| i as f32).collect();
        for (start, len) in (0..5).flat_map(|start| [0, 1, 3, 4, 9, 40].map(|len| (start, len))) {
            let mut to = vec![-1.0; 50];
            copy_past_cache(&from[..len], &mut to[start..start + len]);
            let mut want = vec![-1.0; 50];
            want[start..start + len].copy_from_slice(&from[..len]);
            assert_eq!(to, want, "{len} at {start}");
        }
    }

    #[test]
    fn everything_can_be_measured() {
        let memory = Memory::measure(2, &[1 << 14, 1 << 20]);
        assert!(memory.points.iter().all(|point| point.copy > 0.0 && point.add > 0.0));
        assert!(hand_off() > 0.0);
        let loopback = Loopback::measure().unwrap();
        assert!(loopback.stream > 0.0 && loopback.one_way > 0.0);
    }
}
