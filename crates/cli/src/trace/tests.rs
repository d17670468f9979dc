//! Diagnoses of synthetic traces.

use bonfire::trace::{State, Trace};
use serde_json::{Value, json};

use super::diagnosis::Diagnosis;
use super::report;

/// Makes a trace on host `host` of operations that `record` or `message` made.
fn trace(rank: usize, world_size: usize, host: &str, operations: &[Value]) -> Trace {
    let collectives = operations.iter().filter(|o| o["message"].is_null()).map(|o| o["sequence"].as_u64().unwrap() + 1);
    let operations: Vec<Value> = operations
        .iter()
        .enumerate()
        .map(|(number, operation)| {
            let mut operation = operation.clone();
            operation["number"] = number.into();
            operation
        })
        .collect();
    serde_json::from_value(json!({
        "bonfire_trace": 1, "group": "g", "rank": rank, "world_size": world_size, "host": host, "process": 1,
        "clock": host, "resolution_ns": 4_000_000, "taken_ns": 10_000_000_000u64, "taken_unix": 5, "failure": null,
        "collectives": collectives.max().unwrap_or(0), "operations": operations,
    }))
    .unwrap()
}

fn record(sequence: u64, count: usize, state: State, begun: u64, ended: Option<u64>) -> Value {
    json!({
        "number": 0, "sequence": sequence, "state": state, "begun_ns": begun, "ended_ns": ended, "at": "a.rs:1",
        "call": { "operation": "AllReduce", "dtype": "F32", "count": count, "reduction": "Sum", "root": null },
        "message": null,
    })
}

fn message(sequence: u64, count: usize, state: State, peer: usize, sends: bool) -> Value {
    let mut record = record(sequence, count, state, 5, (state != State::Begun).then_some(6));
    record["call"] = json!({ "operation": "Send", "dtype": "F32", "count": count, "reduction": null, "root": null });
    record["message"] = json!({ "peer": peer, "sends": sends });
    record
}

fn done(sequence: u64, begun: u64) -> Value {
    record(sequence, 8, State::Done, begun, Some(begun + 1000))
}

#[test]
fn a_job_with_all_operations_done_is_healthy() {
    let traces = (0..3).map(|rank| trace(rank, 3, "a", &[done(0, 10), done(1, 20)])).collect();
    let group = Diagnosis::new(traces);
    assert!(group.is_healthy());
    let text = report::text(&group, 10);
    assert!(text.contains("group g: traces of 3 of 3 ranks") && !text.contains("missing"), "{text}");
}

#[test]
fn the_group_with_the_most_traces_comes_first() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, group: &str, rank| {
        let mut trace = trace(rank, 2, "a", &[done(0, 10)]);
        trace.group = Some(group.into());
        std::fs::write(folder.path().join(name), serde_json::to_vec(&trace).unwrap()).unwrap();
    };
    write("trace-1.json", "a", 0);
    write("trace-2.json", "b", 0);
    write("trace-3.json", "b", 1);
    let groups = super::read(&[folder.path().to_path_buf()]).unwrap();
    let texts: Vec<_> = groups.iter().map(|group| report::text(group, 10)).collect();
    assert!(texts[0].contains("group b: traces of 2 of 2 ranks"), "{}", texts[0]);
    assert!(texts[1].contains("group a: traces of 1 of 2 ranks"), "{}", texts[1]);
}

#[test]
fn ranks_that_are_absent_behind_or_late_are_missing() {
    let failed = |begun| record(1, 8, State::Failed, begun, Some(begun + 50));
    let group = Diagnosis::new(vec![
        trace(0, 5, "a", &[done(0, 10), failed(100)]),
        trace(1, 5, "a", &[done(0, 10)]),
        trace(2, 5, "a", &[done(0, 10), failed(180)]),
        // The clock of another host cannot be compared.
        trace(4, 5, "b", &[done(0, 10), failed(9000)]),
    ]);
    assert!(!group.is_healthy());
    let object = report::object(&group, 10);
    assert_eq!(object["absent"], json!([3]));
    let unfinished = &object["unfinished"];
    assert_eq!(unfinished["sequence"], 1);
    assert_eq!(unfinished["behind"][0]["rank"], 1);
    assert_eq!(unfinished["late"], json!([{ "rank": 2, "after_ns": 30 }]));
    let text = report::text(&group, 10);
    for words in ["rank 3 has no trace; at #1 ranks 0, 2, 4 called all_reduce(f32 x 8, sum)", "rank 2 called 30 ns"] {
        assert!(text.contains(words), "{words} is not in {text}");
    }
}

#[test]
fn the_job_stalls_at_the_first_unfinished_operation() {
    // Rank 1 learned of the failure in the operation after the one in which rank 0 waited.
    let group = Diagnosis::new(vec![
        trace(0, 3, "a", &[record(0, 8, State::Failed, 1, Some(2))]),
        trace(1, 3, "a", &[done(0, 1), record(1, 8, State::Failed, 1500, Some(1600))]),
    ]);
    assert_eq!(group.stall.as_ref().unwrap().sequence, 0);
    assert_eq!(group.absent, [2]);
}

#[test]
fn different_calls_are_listed_with_their_ranks() {
    let other = |sequence| record(sequence, 9, State::Failed, 20, Some(30));
    let group = Diagnosis::new(vec![
        trace(0, 3, "a", &[done(0, 10), other(1)]),
        trace(1, 3, "b", &[done(0, 10), record(1, 8, State::Failed, 20, Some(30))]),
        trace(2, 3, "c", &[done(0, 10), other(1)]),
    ]);
    let calls = &report::object(&group, 10)["disagreements"];
    assert_eq!(calls[0]["sequence"], 1);
    assert_eq!(calls[0]["calls"][0], json!({ "call": "all_reduce(f32 x 9, sum)", "ranks": [0, 2] }));
    assert_eq!(calls[0]["calls"][1], json!({ "call": "all_reduce(f32 x 8, sum)", "ranks": [1] }));
    let text = report::text(&group, 10);
    assert!(text.contains("slow      unknown"), "{text}");
}

#[test]
fn sends_and_receives_are_matched() {
    let group = Diagnosis::new(vec![
        trace(0, 3, "a", &[message(0, 4, State::Done, 1, true), message(1, 5, State::Done, 1, true)]),
        trace(
            1,
            3,
            "a",
            &[
                message(0, 4, State::Done, 0, false),
                message(1, 6, State::Failed, 0, false),
                message(0, 1, State::Begun, 2, false),
            ],
        ),
        trace(2, 3, "a", &[]),
    ]);
    let object = report::object(&group, 10);
    assert_eq!(
        (&object["disagreements"][0]["from_to"], &object["disagreements"][0]["sequence"]),
        (&json!([0, 1]), &json!(1))
    );
    assert_eq!(
        object["messages"],
        json!([{ "rank": 1, "call": "recv(f32 x 1) from rank 2", "sequence": 0, "missing": 2 }])
    );
    assert_eq!(object["operations"].as_array().unwrap().len(), 5);
}

#[test]
fn a_straggler_costs_the_time_that_others_waited_for_it() {
    // Rank 2 begins 70 units after the last but one each time, and rank 0 once 2.
    let times = [[0, 10, 80], [100, 110, 180], [202, 200, 199]];
    let paces = |unit: u64| {
        let of = |rank: usize| (0..3).map(|i| done(i as u64, 1000 + times[i][rank] * unit)).collect::<Vec<_>>();
        let mut traces: Vec<_> = (0..3).map(|rank| trace(rank, 4, "a", &of(rank))).collect();
        traces.push(trace(3, 4, "elsewhere", &[done(0, 1)]));
        report::object(&Diagnosis::new(traces), 10)["paces"].clone()
    };
    for unit in [10_000, 1_000_000] {
        let pace = paces(unit);
        assert_eq!(pace.as_array().unwrap().len(), 1);
        assert_eq!((&pace[0]["compared"], &pace[0]["span_ns"]), (&json!(3), &json!(202 * unit)));
        let cost = |rank: usize| [&pace[0]["ranks"][rank]["last"], &pace[0]["ranks"][rank]["cost_ns"]];
        assert_eq!(cost(0), [&json!(1), &json!(2 * unit)]);
        assert_eq!(cost(1), [&json!(0), &json!(0)]);
        assert_eq!(cost(2), [&json!(2), &json!(140 * unit)]);
        // 1.4 ms may be chance, though it is 69 % of the time. 140 ms are not.
        assert_eq!(pace[0]["slow"], if unit == 10_000 { json!([]) } else { json!([2]) });
    }
}

#[test]
fn the_last_operations_are_shown_in_their_order() {
    let operations = |rank: usize| {
        let mut operations: Vec<Value> = (0..20).map(|i| done(i, i * 10)).collect();
        let at = if rank == 0 { 20 } else { 19 };
        operations.insert(at, message(0, 4, State::Done, 1 - rank, rank == 0));
        operations
    };
    let group = Diagnosis::new(vec![trace(0, 2, "a", &operations(0)), trace(1, 2, "a", &operations(1))]);
    let object = report::object(&group, 4);
    let calls: Vec<_> = object["operations"].as_array().unwrap().iter().map(|o| o["call"].as_str().unwrap()).collect();
    let reduce = "all_reduce(f32 x 8, sum)";
    assert_eq!(calls, [reduce, "recv(f32 x 4) from rank 0", reduce, "send(f32 x 4) to rank 1"]);
    assert_eq!(object["operations"][2]["done"], json!([0, 1]));
}
