use std::sync::{Arc, Mutex};

use super::*;

type Text = Arc<Mutex<String>>;

fn append(text: &Text, bytes: &[u8]) {
    text.lock().unwrap().push_str(std::str::from_utf8(bytes).unwrap());
}

/// Streams that append to this text, in the order in which they write.
fn working(text: &Text) -> Write {
    let text = text.clone();
    Box::new(move |bytes| {
        append(&text, bytes);
        (bytes.len(), Ok(()))
    })
}

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

#[test]
fn the_order_of_lines_is_kept_across_streams() {
    run(async {
        let text = Text::default();
        let mut sinks = Sinks::new(Limits::DEFAULT, [working(&text), working(&text)]).unwrap();
        let mut expected = String::new();
        for i in 0..1000 {
            let line = format!("{i}\n");
            sinks.push(Stream::BOTH[i * i % 7 % 2], line.as_bytes());
            expected.push_str(&line);
        }
        sinks.finish().await;
        assert_eq!(*text.lock().unwrap(), expected);
    });
}

#[test]
fn what_cannot_be_written_is_counted_where_it_is_missing_and_said_on_the_other_stream() {
    run(async {
        let (out, err) = (Text::default(), Text::default());
        let full = out.clone();
        // The disk has room for five bytes, then none twice, then enough.
        let mut rooms = vec![0, 0, 5];
        let stdout = Box::new(move |bytes: &[u8]| match rooms.pop() {
            None => {
                append(&full, bytes);
                (bytes.len(), Ok(()))
            }
            Some(room) => {
                append(&full, &bytes[..room]);
                (room, Err(io::ErrorKind::StorageFull.into()))
            }
        });
        let mut sinks = Sinks::new(Limits::DEFAULT, [stdout, working(&err)]).unwrap();
        for line in ["one\ntwo\n", "three\n", "four\n", "five\n"] {
            sinks.push(Stream::Stdout, line.as_bytes());
            sinks.drain().await;
        }
        sinks.finish().await;
        let why = io::Error::from(io::ErrorKind::StorageFull);
        let missing = format!("bonfire: here 3 lines (14 bytes) could not be written: {why}");
        assert_eq!(*out.lock().unwrap(), format!("one\nt\n{missing}\nfive\n"));
        let said = format!(
            "bonfire: cannot write to standard output ({why}): lines for it are dropped, and the ranks go on\n"
        );
        assert_eq!(*err.lock().unwrap(), said);
    });
}

#[test]
fn what_was_lost_to_the_end_is_said_at_the_end() {
    run(async {
        let out = Text::default();
        let broken = || -> Write { Box::new(|_| (0, Err(io::ErrorKind::BrokenPipe.into()))) };
        let mut sinks = Sinks::new(Limits::DEFAULT, [working(&out), broken()]).unwrap();
        sinks.push(Stream::Stderr, b"one\ntwo\n");
        sinks.push(Stream::Stdout, b"three\n");
        sinks.push(Stream::Stderr, b"four\n");
        sinks.finish().await;
        let why = io::Error::from(io::ErrorKind::BrokenPipe);
        let said = format!(
            "three\nbonfire: cannot write to standard error ({why}): lines for it are dropped, and the ranks go \
             on\nbonfire: 3 lines (13 bytes) for standard error could not be written: {why}\n"
        );
        assert_eq!(*out.lock().unwrap(), said);
        // Where neither works, nothing waits.
        let mut sinks = Sinks::new(Limits::DEFAULT, [broken(), broken()]).unwrap();
        sinks.push(Stream::Stdout, b"one\n");
        sinks.finish().await;
    });
}

#[test]
fn a_stream_that_is_not_read_loses_what_its_queue_cannot_hold_and_nothing_else() {
    run(async {
        let (out, err) = (Text::default(), Text::default());
        let (read, reads) = mpsc::channel::<()>();
        let paused = out.clone();
        let stdout = Box::new(move |bytes: &[u8]| {
            // Fails from the end of the pause on.
            let _ = reads.recv();
            append(&paused, bytes);
            (bytes.len(), Ok(()))
        });
        let limits = Limits { queue: 12, stall: Duration::from_millis(10) };
        let mut sinks = Sinks::new(limits, [stdout, working(&err)]).unwrap();
        sinks.push(Stream::Stdout, b"in flight\n");
        for line in ["queued\n", "queued\n"] {
            assert!(!sinks.is_full());
            sinks.push(Stream::Stdout, line.as_bytes());
        }
        // Nothing is dropped while the reader may just be slow.
        assert!(sinks.is_full());
        sinks.progress().await;
        assert!(!sinks.is_full());
        for line in ["lost\n", "lost as well\n"] {
            sinks.push(Stream::Stdout, line.as_bytes());
        }
        // The other stream does not wait.
        sinks.push(Stream::Stderr, b"an error\n");
        while sinks.sinks[1].in_flight.is_some() {
            sinks.progress().await;
        }
        drop(read);
        sinks.drain().await;
        sinks.push(Stream::Stdout, b"the end\n");
        sinks.finish().await;
        let missing = "bonfire: here 2 lines (18 bytes) could not be written: it was not read\n";
        assert_eq!(*out.lock().unwrap(), format!("in flight\nqueued\nqueued\n{missing}the end\n"));
        let said = "bonfire: standard output is not read, and 0 KiB wait for it: further lines for it are dropped \
                    until it is, and the ranks go on\nan error\n";
        assert_eq!(*err.lock().unwrap(), said);
    });
}
