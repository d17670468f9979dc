//! The output of the ranks: read by lines, printed with the rank as prefix.

use std::collections::VecDeque;
use std::env;
use std::io::{self, IsTerminal};
use std::mem;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::layout::Layout;

/// Longer lines are split, so that memory is bounded.
const LONGEST_LINE: usize = 64 * 1024;
/// Most bytes to read from a pipe that outlived its rank. What the rank itself wrote is in the pipe by then, and a pipe
/// holds at most this much unless its owner is privileged (pipe(7)).
const LONGEST_REST: usize = 1024 * 1024;
/// Capacity of the printer's queue. While it is full, the launcher reads nothing and the ranks' writes eventually block
/// (backpressure).
const QUEUE: usize = 256;
const LAST_LINES: usize = 20;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stream {
    Stdout,
    Stderr,
}

pub enum PrinterMessage {
    Line {
        /// The local rank.
        local: u32,
        stream: Stream,
        text: Vec<u8>,
    },
    /// A line from the launcher itself.
    Note(String),
    /// How all ranks ended, and how the one that failed first did. The printer adds that rank's last lines.
    Failure { ends: Vec<String>, local: u32, what: String },
}

/// Starts the printer task. It ends when all senders are dropped, or with an error if it cannot print.
pub fn start_printer(layout: &Layout, prefixed: bool) -> (mpsc::Sender<PrinterMessage>, JoinHandle<io::Result<()>>) {
    let (sender, messages) = mpsc::channel(QUEUE);
    let printer = Printer::new(layout, prefixed);
    (sender, tokio::spawn(printer.print(messages)))
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
            // If the printer is gone, the launcher is about to end the ranks. Reading continues, because SIGPIPE would
            // prevent them from ending gracefully.
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
}

impl Printer {
    fn new(layout: &Layout, prefixed: bool) -> Self {
        let allowed = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let stdout = allowed && io::stdout().is_terminal();
        let stderr = stdout && io::stderr().is_terminal();
        let width = (layout.world_size - 1).to_string().len();
        let prefixes = |local| {
            let rank = layout.first_rank + local;
            [stdout, stderr].map(|colour| if prefixed { prefix(rank, width, colour) } else { Vec::new() })
        };
        let ranks = 0..layout.local_world_size;
        Self { last_lines: ranks.clone().map(|_| VecDeque::new()).collect(), prefixes: ranks.map(prefixes).collect() }
    }

    async fn print(mut self, mut messages: mpsc::Receiver<PrinterMessage>) -> io::Result<()> {
        let mut batch = Vec::new();
        let mut bytes = Vec::new();
        while messages.recv_many(&mut batch, QUEUE).await > 0 {
            let mut current = Stream::Stdout;
            for message in batch.drain(..) {
                let stream = message.stream();
                // Both streams may be one terminal or file, so their relative order is kept.
                if stream != current {
                    write(current, &mut bytes).await?;
                    current = stream;
                }
                self.render(message, &mut bytes);
            }
            write(current, &mut bytes).await?;
        }
        Ok(())
    }

    fn render(&mut self, message: PrinterMessage, bytes: &mut Vec<u8>) {
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
            PrinterMessage::Failure { ends, local, what } => {
                if !ends.is_empty() {
                    bytes.extend_from_slice(b"bonfire: the ranks ended in these ways:\n");
                    ends.iter().for_each(|end| bytes.extend_from_slice(format!("bonfire:   {end}\n").as_bytes()));
                }
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

/// Writes whole lines at once, so that none is interleaved with other output. tokio writes on another thread, so the
/// launcher still handles signals while no process reads its output.
async fn write(stream: Stream, bytes: &mut Vec<u8>) -> io::Result<()> {
    let mut target: Box<dyn AsyncWrite + Send + Unpin> = match stream {
        Stream::Stdout => Box::new(tokio::io::stdout()),
        Stream::Stderr => Box::new(tokio::io::stderr()),
    };
    target.write_all(bytes).await?;
    target.flush().await?;
    bytes.clear();
    Ok(())
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
