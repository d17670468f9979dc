//! Writes to standard output and standard error.

use std::fmt::Display;
use std::io;

use crate::failure::Failure;

/// How many of the bytes were written, and why no more.
#[cfg(unix)]
pub type Written = (usize, io::Result<()>);

/// Prints to standard output.
pub fn print(text: &str) -> Result<(), Failure> {
    #[cfg(unix)]
    let printed = write(&io::stdout(), text.as_bytes()).1;
    #[cfg(not(unix))]
    let printed = io::Write::write_all(&mut io::stdout(), text.as_bytes());
    printed.map_err(|error| Failure::with(1)(format!("cannot print: {error}")))
}

/// Prints a line to standard error, if that works: `eprintln!` would panic, and change the exit status.
pub fn complain(line: impl Display) {
    let line = format!("{line}\n");
    #[cfg(unix)]
    let _ = write(&io::stderr(), line.as_bytes());
    #[cfg(not(unix))]
    let _ = io::Write::write_all(&mut io::stderr(), line.as_bytes());
}

/// Writes all bytes. Waits where another program has made the stream non-blocking. The stream must have no bytes
/// buffered in this process.
#[cfg(unix)]
pub fn write(stream: &impl std::os::fd::AsFd, bytes: &[u8]) -> Written {
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::io::Errno;

    let mut count = 0;
    while count < bytes.len() {
        let failed = match rustix::io::write(stream, &bytes[count..]) {
            Ok(0) => return (count, Err(io::ErrorKind::WriteZero.into())),
            Ok(more) => {
                count += more;
                continue;
            }
            Err(Errno::AGAIN) => poll(&mut [PollFd::new(stream, PollFlags::OUT)], None).err(),
            Err(error) => Some(error),
        };
        match failed {
            None | Some(Errno::INTR) => {}
            Some(error) => return (count, Err(error.into())),
        }
    }
    (count, Ok(()))
}

#[cfg(all(test, unix))]
mod tests {
    use std::io::Read;
    use std::thread;

    use super::*;

    #[test]
    fn a_non_blocking_pipe_is_waited_for() {
        let (mut reader, writer) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&writer, true).unwrap();
        let expected: Vec<u8> = (0..1 << 20).map(|i| (i % 251) as u8).collect();
        let bytes = expected.clone();
        let writing = thread::spawn(move || write(&writer, &bytes));
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        let (count, result) = writing.join().unwrap();
        assert_eq!((count, result.is_ok()), (expected.len(), true));
        assert!(read == expected);
    }

    #[test]
    fn a_closed_pipe_is_an_error_and_what_was_written_counts() {
        let (reader, writer) = io::pipe().unwrap();
        assert!(matches!(write(&writer, b"one"), (3, Ok(()))));
        drop(reader);
        let (count, result) = write(&writer, b"two");
        assert_eq!((count, result.unwrap_err().kind()), (0, io::ErrorKind::BrokenPipe));
    }
}
