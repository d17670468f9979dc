//! The launcher's standard output and standard error. Whatever happens to them, the ranks go on.
//!
//! A thread for each stream writes, so the launcher handles signals while no process reads its output. Both streams may
//! be one terminal or file, so at most one of the threads has something to write, and the order of lines is kept.
//!
//! What has not been written is queued. While a stream's queue is full, the launcher reads nothing from the ranks, and
//! their writes eventually block (backpressure): a slow reader loses nothing. A stream that takes nothing for some time
//! is *stalled*. The other stream then no longer waits for it, and lines for which its queue has no room are dropped.
//! So are lines that cannot be written, to a full disk or a closed pipe. That lines are dropped is said on the other
//! stream, and how many where they are missing.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;
use std::future::pending;
use std::io;
use std::mem;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep_until};

use crate::stream::{Written, write};
use crate::text::size;

/// Most bytes of several lines that are written at once. A pipe takes as much as a whole (`PIPE_BUF` on Linux), so no
/// line is interleaved with other output, and a slow reader shows itself soon.
const CHUNK: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stream {
    Stdout,
    Stderr,
}

impl Stream {
    const BOTH: [Stream; 2] = [Stream::Stdout, Stream::Stderr];

    fn other(self) -> Stream {
        match self {
            Stream::Stdout => Stream::Stderr,
            Stream::Stderr => Stream::Stdout,
        }
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stream::Stdout => "standard output",
            Stream::Stderr => "standard error",
        })
    }
}

/// How much may wait for a stream, and how long.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Bytes in the queue of each stream.
    pub queue: usize,
    /// The time without progress after which a stream is stalled.
    pub stall: Duration,
}

impl Limits {
    pub const DEFAULT: Limits = Limits { queue: 16 << 20, stall: Duration::from_secs(10) };
}

/// Writes bytes to a stream.
type Write = Box<dyn FnMut(&[u8]) -> Written + Send>;

/// Both streams, and what waits for them.
pub struct Sinks {
    limits: Limits,
    sinks: [Sink; 2],
    /// In the order in which it was pushed.
    queue: VecDeque<Chunk>,
    done: UnboundedReceiver<Done>,
}

struct Sink {
    /// To the thread that writes.
    writer: mpsc::Sender<Vec<u8>>,
    /// What the thread is writing, if it is.
    in_flight: Option<InFlight>,
    stalled: bool,
    /// Bytes in the queue.
    queued: usize,
    /// What could not be written before the first chunk in the queue, and why.
    unwritten: Lost,
    /// Why the last chunk could not be written.
    failure: Option<String>,
    /// Whether the last line that was written lacks its end.
    in_line: bool,
    /// What found no room after the last chunk in the queue.
    overflow: Lost,
}

struct InFlight {
    since: Instant,
    /// What the first bytes say that is missing, and how many bytes say it.
    notice: (Lost, usize),
}

/// Whole lines.
struct Chunk {
    stream: Stream,
    bytes: Vec<u8>,
}

/// The thread of a stream has written a chunk, or has failed to.
struct Done {
    stream: Stream,
    bytes: Vec<u8>,
    written: Written,
}

#[derive(Clone, Copy, Default)]
struct Lost {
    lines: u64,
    bytes: usize,
}

impl Sinks {
    /// Starts to write to this process's own streams.
    pub fn start() -> io::Result<Self> {
        let (stdout, stderr) = (io::stdout(), io::stderr());
        Self::new(
            Limits::DEFAULT,
            [Box::new(move |bytes| write(&stdout, bytes)), Box::new(move |bytes| write(&stderr, bytes))],
        )
    }

    fn new(limits: Limits, [stdout, stderr]: [Write; 2]) -> io::Result<Self> {
        let (sender, done) = unbounded_channel();
        let sinks =
            [Sink::start(Stream::Stdout, stdout, sender.clone())?, Sink::start(Stream::Stderr, stderr, sender)?];
        Ok(Self { limits, sinks, queue: VecDeque::new(), done })
    }

    /// Queues whole lines, each with its end, or drops them if their stream is stalled and its queue is full.
    pub fn push(&mut self, stream: Stream, lines: &[u8]) {
        let sink = &mut self.sinks[stream as usize];
        if sink.stalled && sink.queued >= self.limits.queue {
            let first = sink.overflow.lines == 0;
            sink.overflow.add(lines);
            if first {
                let queued = size(sink.queued as u64);
                self.say(
                    stream.other(),
                    &format!(
                        "{stream} is not read, and {queued} wait for it: further lines for it are dropped until it is, \
                         and the ranks go on"
                    ),
                );
            }
            return;
        }
        self.end_overflow(stream);
        self.queue(stream, lines);
        self.hand_over();
    }

    /// Whether nothing more should be pushed for now.
    pub fn is_full(&self) -> bool {
        self.sinks.iter().any(|sink| !sink.stalled && sink.queued >= self.limits.queue)
    }

    /// Whether there is nothing to write.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.sinks.iter().all(|sink| sink.in_flight.is_none())
    }

    /// Waits until a chunk was written or a stream has stalled. Only while there is something to write. Cancel safe.
    pub async fn progress(&mut self) {
        let running = self.sinks.iter().filter(|sink| !sink.stalled).filter_map(|sink| sink.in_flight.as_ref());
        let stalls = running.map(|in_flight| in_flight.since + self.limits.stall).min();
        let stalled = async {
            match stalls {
                Some(instant) => sleep_until(instant).await,
                None => pending().await,
            }
        };
        tokio::select! {
            // Progress counts, however late this task sees it.
            biased;
            // The threads hold senders, and end only with this value.
            Some(done) = self.done.recv() => self.settle(done),
            () = stalled => {
                let late = |in_flight: &InFlight| Some(in_flight.since + self.limits.stall) <= stalls;
                self.sinks.iter_mut().for_each(|sink| sink.stalled |= sink.in_flight.as_ref().is_some_and(late));
            }
        }
        self.hand_over();
    }

    /// Writes all that is queued, and then says what was lost and has no place where it is missing.
    pub async fn finish(mut self) {
        Stream::BOTH.into_iter().for_each(|stream| self.end_overflow(stream));
        self.hand_over();
        self.drain().await;
        for stream in Stream::BOTH {
            let sink = &mut self.sinks[stream as usize];
            let (lost, why) = (mem::take(&mut sink.unwritten), sink.failure.clone().unwrap_or_default());
            if lost.lines > 0 {
                self.say(stream.other(), &format!("{lost} for {stream} could not be written: {why}"));
            }
        }
        self.drain().await;
    }

    async fn drain(&mut self) {
        while !self.is_idle() {
            self.progress().await;
        }
    }

    /// Queues a line of the launcher's own.
    fn say(&mut self, stream: Stream, text: &str) {
        self.push(stream, format!("bonfire: {text}\n").as_bytes());
    }

    /// Queues what is to be read where lines found no room, before the next ones.
    fn end_overflow(&mut self, stream: Stream) {
        let lost = mem::take(&mut self.sinks[stream as usize].overflow);
        if lost.lines > 0 {
            self.queue(stream, lost.notice("it was not read").as_bytes());
        }
    }

    fn queue(&mut self, stream: Stream, lines: &[u8]) {
        self.sinks[stream as usize].queued += lines.len();
        match self.queue.back_mut() {
            Some(last) if last.stream == stream && last.bytes.len() + lines.len() <= CHUNK => {
                last.bytes.extend_from_slice(lines);
            }
            _ => self.queue.push_back(Chunk { stream, bytes: lines.to_vec() }),
        }
    }

    /// Hands the next chunk to its thread, unless a thread is writing. A stalled stream counts as none.
    fn hand_over(&mut self) {
        while !self.sinks.iter().any(|sink| sink.in_flight.is_some() && !sink.stalled) {
            let is_free = |chunk: &Chunk| self.sinks[chunk.stream as usize].in_flight.is_none();
            let Some(chunk) = self.queue.iter().position(is_free).and_then(|at| self.queue.remove(at)) else { return };
            self.sinks[chunk.stream as usize].write(chunk.bytes);
        }
    }

    fn settle(&mut self, Done { stream, bytes, written: (count, result) }: Done) {
        let sink = &mut self.sinks[stream as usize];
        let Some(InFlight { notice: (announced, length), .. }) = sink.in_flight.take() else { return };
        sink.stalled = false;
        let Err(error) = result else {
            (sink.failure, sink.in_line) = (None, false);
            return;
        };
        if let Some(last) = bytes[..count].last() {
            sink.in_line = *last != b'\n';
        }
        if count < length {
            sink.unwritten = announced;
        }
        sink.unwritten.add(&bytes[count.max(length)..]);
        let first = sink.failure.is_none();
        sink.failure = Some(error.to_string());
        if first {
            let text = format!("cannot write to {stream} ({error}): lines for it are dropped, and the ranks go on");
            self.say(stream.other(), &text);
        }
    }
}

impl Sink {
    fn start(stream: Stream, mut write: Write, done: UnboundedSender<Done>) -> io::Result<Self> {
        let (writer, chunks) = mpsc::channel::<Vec<u8>>();
        let run = move || {
            for bytes in chunks {
                let written = write(&bytes);
                if done.send(Done { stream, bytes, written }).is_err() {
                    return;
                }
            }
        };
        thread::Builder::new().name(format!("bonfire {stream}")).spawn(run)?;
        Ok(Self {
            writer,
            in_flight: None,
            stalled: false,
            queued: 0,
            unwritten: Lost::default(),
            failure: None,
            in_line: false,
            overflow: Lost::default(),
        })
    }

    /// Hands `lines` to the thread, after what is missing before them.
    fn write(&mut self, lines: Vec<u8>) {
        self.queued -= lines.len();
        let lost = mem::take(&mut self.unwritten);
        let notice = match &self.failure {
            Some(why) if lost.lines > 0 => format!("{}{}", if self.in_line { "\n" } else { "" }, lost.notice(why)),
            _ => String::new(),
        };
        self.in_flight = Some(InFlight { since: Instant::now(), notice: (lost, notice.len()) });
        // Fails only if the thread has panicked: then nothing can be written.
        let _ = self.writer.send(if notice.is_empty() { lines } else { [notice.as_bytes(), &lines].concat() });
    }
}

impl Lost {
    fn add(&mut self, lines: &[u8]) {
        self.lines += lines.iter().filter(|byte| **byte == b'\n').count() as u64;
        self.bytes += lines.len();
    }

    /// Returns the line that stands for what is missing.
    fn notice(self, why: &str) -> String {
        format!("bonfire: here {self} could not be written: {why}\n")
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = if self.lines == 1 { "line" } else { "lines" };
        write!(f, "{} {lines} ({} bytes)", self.lines, self.bytes)
    }
}
