//! The output of the ranks: read by lines, printed with the rank as prefix.

use std::collections::VecDeque;
use std::env;
use std::io::{self, IsTerminal};
use std::mem;

use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::layout::Layout;
use super::sink::{Sinks, Stream};

/// Longer lines are split, so that memory is bounded.
const LONGEST_LINE: usize = 64 * 1024;
/// Most bytes to read from a pipe that outlived its rank. What the rank itself wrote is in the pipe by then, and a pipe
/// holds at most this much unless its owner is privileged (pipe(7)).
const LONGEST_REST: usize = 1024 * 1024;
/// Capacity of the printer's own queue, in lines. It only fills while that of a stream is full ([`Sinks`]).
const QUEUE: usize = 256;
const LAST_LINES: usize = 20;

pub enum PrinterMessage {
    Line {
        /// The local rank.
        local: u32,
        stream: Stream,
        text: Vec<u8>,
    },
    /// A line from the launcher itself.
    Note(String),
    /// How all ranks ended, and what is known about the cause. The printer adds the last lines of the rank with the
    /// local rank `local`, with which the last of `what` ends.
    Failure { ends: Vec<String>, what: Vec<String>, local: u32 },
}

/// Starts the printer task. It ends when all senders are dropped and everything was written or dropped.
pub fn start_printer(layout: &Layout, prefixed: bool) -> io::Result<(mpsc::Sender<PrinterMessage>, JoinHandle<()>)> {
    let (sender, messages) = mpsc::channel(QUEUE);
    let printer = Printer::new(layout, prefixed, Sinks::start()?);
    Ok((sender, tokio::spawn(printer.print(messages))))
}

/// Sends each line of `pipe` to the printer until the pipe ends or, once `cut` is true, until it has nothing to read.
pub async fn forward(
    mut pipe: impl AsyncRead + Unpin,
    local: u32,
    stream: Stream,
    printer: mpsc::Sender<PrinterMessage>,
    mut cut: watch::Receiver<bool>,
) {
    let mut lines = Lines::default();
    let mut chunk = vec![0; 16 * 1024];
    let mut rest = LONGEST_REST;
    while rest > 0 {
        let read = tokio::select! {
            biased;
            read = pipe.read(&mut chunk) => read,
            _ = cut.wait_for(|cut| *cut) => break,
        };
        let length = match read {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) => {
                log::warn!("cannot read the output of local rank {local}: {error}");
                break;
            }
        };
        if *cut.borrow() {
            rest = rest.saturating_sub(length);
        }
        for text in lines.split(&chunk[..length]) {
            // The printer outlives its senders.
            let _ = printer.send(PrinterMessage::Line { local, stream, text }).await;
        }
    }
    if let Some(text) = lines.last() {
        let _ = printer.send(PrinterMessage::Line { local, stream, text }).await;
    }
}

/// Splits a stream into lines, which end in `\n`, `\r\n` or `\r`.
#[derive(Default)]
struct Lines {
    line: Vec<u8>,
    /// Whether the last byte was `\r`: a `\n` then belongs to it.
    returned: bool,
}

impl Lines {
    /// Returns the lines that `bytes` completes, without their ends.
    fn split(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut done = Vec::new();
        for &byte in bytes {
            match byte {
                b'\n' if self.returned => {}
                // Progress bars write `\r` before and after each state: the empty lines in between are no output.
                b'\r' if self.line.is_empty() => {}
                b'\n' | b'\r' => done.push(mem::take(&mut self.line)),
                _ => {
                    self.line.push(byte);
                    if self.line.len() == LONGEST_LINE {
                        done.push(mem::take(&mut self.line));
                    }
                }
            }
            self.returned = byte == b'\r';
        }
        done
    }

    /// Returns the line that the end of the stream completes, if there is one.
    fn last(self) -> Option<Vec<u8>> {
        (!self.line.is_empty()).then_some(self.line)
    }
}

struct Printer {
    /// By local rank, for standard output and standard error.
    prefixes: Vec<[Vec<u8>; 2]>,
    last_lines: Vec<VecDeque<Vec<u8>>>,
    sinks: Sinks,
}

impl Printer {
    fn new(layout: &Layout, prefixed: bool, sinks: Sinks) -> Self {
        let allowed = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let stdout = allowed && io::stdout().is_terminal();
        let stderr = stdout && io::stderr().is_terminal();
        let width = (layout.world_size - 1).to_string().len();
        let prefixes = |local| {
            let rank = layout.first_rank + local;
            [stdout, stderr].map(|colour| if prefixed { prefix(rank, width, colour) } else { Vec::new() })
        };
        let ranks = 0..layout.local_world_size;
        let last_lines = ranks.clone().map(|_| VecDeque::new()).collect();
        Self { last_lines, prefixes: ranks.map(prefixes).collect(), sinks }
    }

    async fn print(mut self, mut messages: mpsc::Receiver<PrinterMessage>) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                count = messages.recv_many(&mut batch, QUEUE), if !self.sinks.is_full() => {
                    if count == 0 {
                        break;
                    }
                    batch.drain(..).for_each(|message| self.render(message));
                }
                () = self.sinks.progress(), if !self.sinks.is_idle() => {}
            }
        }
        self.sinks.finish().await;
    }

    fn render(&mut self, message: PrinterMessage) {
        let (stream, mut bytes) = (message.stream(), Vec::new());
        match message {
            PrinterMessage::Line { local, stream, text } => {
                bytes.extend_from_slice(&self.prefixes[local as usize][stream as usize]);
                bytes.extend_from_slice(&text);
                bytes.push(b'\n');
                let last = &mut self.last_lines[local as usize];
                if last.len() == LAST_LINES {
                    last.pop_front();
                }
                last.push_back(text);
            }
            PrinterMessage::Note(text) => bytes.extend_from_slice(format!("bonfire: {text}\n").as_bytes()),
            PrinterMessage::Failure { ends, what, local } => {
                if !ends.is_empty() {
                    bytes.extend_from_slice(b"bonfire: the ranks ended in these ways:\n");
                    ends.iter().for_each(|end| bytes.extend_from_slice(format!("bonfire:   {end}\n").as_bytes()));
                }
                let what = what.join("\nbonfire: ");
                let last = &self.last_lines[local as usize];
                let lines = match last.len() {
                    0 => "it printed nothing".to_owned(),
                    1 => "its last line:".to_owned(),
                    count => format!("its last {count} lines:"),
                };
                bytes.extend_from_slice(format!("bonfire: {what}; {lines}\n").as_bytes());
                for line in last {
                    bytes.extend_from_slice(b"  | ");
                    bytes.extend_from_slice(line);
                    bytes.push(b'\n');
                }
            }
        }
        self.sinks.push(stream, &bytes);
    }
}

impl PrinterMessage {
    fn stream(&self) -> Stream {
        match self {
            Self::Line { stream, .. } => *stream,
            Self::Note(_) | Self::Failure { .. } => Stream::Stderr,
        }
    }
}

fn prefix(rank: u32, width: usize, colour: bool) -> Vec<u8> {
    // No red, which suggests an error.
    const COLOURS: [u8; 5] = [36, 32, 33, 35, 34];
    let text = format!("[{rank:>width$}] ");
    if colour {
        let colour = COLOURS[rank as usize % COLOURS.len()];
        format!("\x1b[{colour}m{text}\x1b[0m").into_bytes()
    } else {
        text.into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(chunks: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut lines = Lines::default();
        let mut done: Vec<_> = chunks.iter().flat_map(|c| lines.split(c)).collect();
        done.extend(lines.last());
        done
    }

    #[test]
    fn lines_end_in_newlines_and_returns() {
        assert_eq!(lines(&[b"a\nb\r\nc\rd"]), [b"a", b"b", b"c", b"d"]);
        assert_eq!(lines(&[b"a\r", b"\nb", b"c\n"]), [&b"a"[..], b"bc"]);
        assert_eq!(lines(&[b"\r10%\r\r20%\r\n"]), [b"10%", b"20%"]);
        assert_eq!(lines(&[b"\n\na\n\n"]), [&b""[..], b"", b"a", b""]);
        assert_eq!(lines(&[b"\xff\xfe\n"]), [b"\xff\xfe"]);
        assert!(lines(&[b""]).is_empty());
    }

    #[test]
    fn a_line_without_end_is_split() {
        let parts = lines(&[&vec![b'x'; LONGEST_LINE + 1]]);
        let lengths: Vec<_> = parts.iter().map(Vec::len).collect();
        assert_eq!(lengths, [LONGEST_LINE, 1]);
    }

    #[test]
    fn prefixes_are_aligned() {
        assert_eq!(prefix(2, 1, false), b"[2] ");
        assert_eq!(prefix(2, 2, false), b"[ 2] ");
        assert_eq!(prefix(11, 2, true), b"\x1b[32m[11] \x1b[0m");
    }
}
