//! What the launcher prints of its ranks' output, and what happens if it cannot.

use std::fs;
use std::io::{self, Read};

use rustix::process::Signal;

use super::harness::*;

#[test]
fn prefixes_lines_on_their_own_streams() {
    let script = "printf 'one\\ntwo\\r\\n50%%\\r99%%\\rend'; printf 'error' >&2";
    let output = bonfire(&["-n", "1"], script);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(text(&output.stdout), "[0] one\n[0] two\n[0] 50%\n[0] 99%\n[0] end\n");
    assert_eq!(text(&output.stderr), "[0] error\n");
}

#[test]
fn aligns_prefixes() {
    let output = bonfire(&["-n", "11"], "echo x");
    let mut lines: Vec<_> = text(&output.stdout).lines().collect();
    lines.sort_unstable();
    assert_eq!(lines.len(), 11);
    assert_eq!(lines[0], "[ 0] x");
    assert_eq!(lines[10], "[10] x");
}

#[test]
fn passes_bytes_through() {
    let output = bonfire(&["-n", "1"], "printf '\\377\\376 \\000x\\n'");
    assert_eq!(output.stdout, b"[0] \xff\xfe \0x\n");
}

#[test]
fn keeps_lines_whole() {
    let script = "i=0; while [ $i -lt 500 ]; do echo \"$RANK a long enough line $i\"; \
                  i=$((i + 1)); done";
    let output = bonfire(&["-n", "4"], script);
    for rank in 0..4 {
        let prefix = format!("[{rank}] ");
        let of_rank = text(&output.stdout).lines();
        let of_rank: Vec<_> = of_rank.filter_map(|l| l.strip_prefix(&prefix)).collect();
        let expected: Vec<_> = (0..500).map(|line| format!("{rank} a long enough line {line}")).collect();
        assert_eq!(of_rank, expected);
    }
    assert_eq!(text(&output.stdout).lines().count(), 2000);
}

#[test]
fn ends_while_its_output_is_not_read() {
    let mut run = Running::start(&["-n", "1", "--grace", "0"], "echo ready; exec yes");
    run.expect("ready", 1);
    // `yes` now fills the pipe, which no process empties.
    run.signal(Signal::TERM);
    assert_eq!(run.wait().code(), Some(128 + 15));
}

#[test]
fn ranks_outlive_a_reader_of_their_output() {
    let fifo = Fifo::new();
    let script = format!("echo ready; read x <{}; echo lost; echo an error >&2; exit 5", fifo.path());
    let mut run = Running::start(&["-n", "1"], &script);
    run.expect("ready", 1);
    drop(run.stdout.take());
    fs::write(fifo.path(), "\n").unwrap();
    assert_eq!(run.wait().code(), Some(5));
    let (stderr, why) = (run.stderr(), "Broken pipe (os error 32)");
    for wanted in [
        "[0] an error\n",
        &format!("bonfire: cannot write to standard output ({why}): lines for it are dropped, and the ranks go on\n"),
        &format!("bonfire: 1 line (9 bytes) for standard output could not be written: {why}\n"),
    ] {
        assert!(stderr.contains(wanted), "{stderr}");
    }
}

#[test]
fn ranks_end_with_their_status_if_standard_error_is_broken() {
    let broken = || {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        writer
    };
    let run = |arguments: &[&str], script: &str| {
        launcher(arguments).args(["sh", "-c", script]).stderr(broken()).output().unwrap()
    };
    let output = run(&["-n", "1"], "echo out; echo an error >&2; exit 3");
    assert_eq!(output.status.code(), Some(3));
    let stdout = text(&output.stdout);
    assert!(stdout.contains("[0] out\n"), "{stdout}");
    assert!(stdout.contains("bonfire: cannot write to standard error (Broken pipe"), "{stdout}");
    assert_eq!(run(&["-n", "0"], "exit 3").status.code(), Some(2));
}

#[test]
#[cfg(target_os = "linux")]
fn ranks_end_with_their_status_on_a_full_disk() {
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let output = launcher(&["-n", "2"]).args(["sh", "-c", "echo one; echo two; exit 0"]).stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let (stderr, why) = (text(&output.stderr), "No space left on device (os error 28)");
    assert_eq!(stderr.matches(&format!("cannot write to standard output ({why})")).count(), 1, "{stderr}");
    let lost = format!("bonfire: 4 lines (32 bytes) for standard output could not be written: {why}\n");
    assert!(stderr.contains(&lost), "{stderr}");
}

#[test]
fn a_slow_reader_of_a_non_blocking_pipe_loses_nothing() {
    let (mut reader, writer) = io::pipe().unwrap();
    // It holds for the launcher's end too: that is the same open file.
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    let fifo = Fifo::new();
    let script = format!("exec 3>{}; seq 100000; echo printed >&3; exit 4", fifo.path());
    let mut command = launcher(&["-n", "1", "--no-prefix"]);
    let mut run = command.args(["sh", "-c", &script]).stdout(writer).spawn().unwrap();
    // Its end of the pipe.
    drop(command);
    // Nothing is read before the rank has printed all of it, which is more than a pipe holds.
    assert_eq!(fs::read_to_string(fifo.path()).unwrap(), "printed\n");
    let mut output = String::new();
    reader.read_to_string(&mut output).unwrap();
    let expected: String = (1..=100_000).map(|line| format!("{line}\n")).collect();
    assert!(output == expected, "{} bytes", output.len());
    assert_eq!(run.wait().unwrap().code(), Some(4));
}

#[test]
fn a_paused_reader_does_not_stop_the_ranks() {
    const LINES: usize = 500_000;
    let line = "0123456789".repeat(5);
    let fifo = Fifo::new();
    let script = format!("exec 3>{}; yes {line} | head -n {LINES}; echo printed >&3; exit 0", fifo.path());
    let mut run = Running::start(&["-n", "1", "--no-prefix"], &script);
    assert_eq!(fs::read_to_string(fifo.path()).unwrap(), "printed\n");
    let mut output = String::new();
    run.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    let (mut printed, mut lost) = (0, 0);
    for found in output.lines() {
        let count: Option<usize> =
            found.strip_prefix("bonfire: here ").and_then(|rest| rest.split_once(" lines (")?.0.parse().ok());
        match count {
            Some(count) => lost += count,
            None => {
                assert_eq!(found, line);
                printed += 1;
            }
        }
    }
    assert_eq!((printed + lost, printed > (16 << 20) / (line.len() + 1), lost > 0), (LINES, true, true));
    assert_eq!(run.wait().code(), Some(0));
    let stderr = run.stderr();
    assert!(stderr.starts_with("bonfire: standard output is not read, and 16 MiB wait for it"), "{stderr}");
}
