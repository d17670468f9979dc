//! Fuzzing of files that may not be traces.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use bonfire::ReduceOp;
use bonfire::trace::{State, Trace};
use bonfire_testing::fuzz::fuzz;
use bonfire_testing::ranks;

use super::diagnosis::Diagnosis;
use super::{read, report};

/// The traces of three ranks after several operations, the last of which one rank called differently.
fn traces() -> Vec<Vec<u8>> {
    let mut traces = ranks(3, |group| {
        group.barrier().unwrap();
        group.all_reduce(&mut [1f32; 8], ReduceOp::Mean).unwrap();
        match group.rank() {
            0 => group.send(&[1u8], 1).unwrap(),
            1 => group.recv(&mut [0u8], 0).unwrap(),
            _ => {}
        }
        group.reduce(&mut vec![1i64; 3 + group.rank() / 2], ReduceOp::Max, 1).unwrap_err();
        serde_json::to_vec(&group.trace()).unwrap()
    });
    // One more trace, of a rank that is still in its last operation.
    let mut open: serde_json::Value = serde_json::from_slice(&traces[1]).unwrap();
    let last = open["operations"].as_array_mut().unwrap().last_mut().unwrap();
    (last["state"], last["ended_ns"]) = ("begun".into(), None::<u64>.into());
    traces.push(open.to_string().into_bytes());
    traces
}

/// Checks what holds for every trace that was read without an error; the report relies on it.
fn check(trace: &Trace) {
    let peers = trace.operations.iter().filter_map(|record| Some(record.message?.peer));
    assert!(peers.chain([trace.rank]).all(|rank| rank < trace.world_size) && trace.world_size <= 1 << 20);
    assert!(trace.operations.len() <= 1024 && trace.operations.is_sorted_by_key(|record| record.number));
    for record in &trace.operations {
        assert_eq!(record.ended_ns.is_none(), record.state == State::Begun);
        assert!(record.ended_ns.is_none_or(|ended| ended >= record.begun_ns));
        assert_eq!(record.message.is_none(), record.call.operation.is_collective());
    }
}

/// Returns everything that is printed for these files.
fn printed(files: &[PathBuf]) -> Result<String, String> {
    let groups = read(files)?;
    let text = |group: &Diagnosis| format!("{}{}", report::text(group, 12), report::object(group, 12));
    Ok(groups.iter().map(|group| text(group) + if group.is_healthy() { "" } else { "\n" }).collect())
}

#[test]
fn fuzz_traces() {
    let folder = tempfile::tempdir().unwrap();
    let (file, other) = (folder.path().join("trace-1.json"), folder.path().join("trace-0.json"));
    // Overwritten in place: a file created anew each time would be written to disk each time.
    let write = |bytes: &[u8]| {
        let mut file = File::options().write(true).create(true).truncate(false).open(&file).unwrap();
        file.write_all(bytes).and_then(|()| file.set_len(bytes.len() as u64)).unwrap();
    };
    let traces = traces();
    fs::write(&other, &traces[0]).unwrap();
    fuzz("trace", traces, |bytes| {
        write(bytes);
        let both = printed(&[file.clone(), other.clone()]);
        let Ok(alone) = printed(std::slice::from_ref(&file)) else { return false };
        for text in [&alone].into_iter().chain(&both) {
            assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?} controls a terminal");
        }
        let trace = Trace::read(&file).unwrap();
        check(&trace);
        write(&serde_json::to_vec(&trace).unwrap());
        assert_eq!(Trace::read(&file).unwrap(), trace, "writing and reading changed a trace");
        true
    });
}
