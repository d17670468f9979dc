//! `bonfire perf` and `bonfire doctor`, run as programs.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn bonfire(arguments: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bonfire")).args(arguments.split_whitespace()).output().unwrap()
}

/// Returns the standard output of a run that must succeed.
fn succeeds(arguments: &str) -> String {
    let output = bonfire(arguments);
    let (stdout, stderr) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{arguments}: {stdout}{stderr}");
    stdout
}

fn objects(arguments: &str) -> Vec<Value> {
    succeeds(arguments).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_operation_is_measured_between_threads_and_between_processes() {
    let operations = [
        "all_reduce",
        "reduce",
        "broadcast",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
        "all_gather_v",
        "reduce_scatter_v",
        "all_to_all_v",
        "send_recv",
    ];
    for transport in ["local", "tcp", "shm"] {
        for operation in operations {
            let what = format!("{operation} --transport {transport} --ranks 3 -d f16 -o max -r 2");
            let rows = objects(&format!("perf {what} -b 24 -e 1K -f 16 -n 3 -w 1 --json"));
            let sizes: Vec<_> = rows.iter().map(|row| row["bytes"].as_u64().unwrap()).collect();
            assert_eq!(sizes, [24, 384], "{operation}");
            for row in &rows {
                assert_eq!((row["wrong"].as_u64(), row["dtype"].as_str()), (Some(0), Some("f16")), "{row}");
                for key in ["time_us", "median_us", "p99_us", "min_us", "floor_percent", "algbw_gbps"] {
                    assert!(row[key].as_f64().unwrap() > 0.0, "{key} in {row}");
                }
                let in_place = operation != "send_recv" && !operation.ends_with("_v");
                assert_eq!(row["in_place"]["wrong"].as_u64(), in_place.then_some(0), "{row}");
            }
        }
        let rows = objects(&format!("perf barrier --transport {transport} -n 3 --json"));
        assert_eq!((rows.len(), &rows[0]["bytes"], &rows[0]["op"]), (1, &Value::from(0), &Value::Null));
    }
}

#[test]
fn a_training_step_is_measured_between_threads_and_between_processes() {
    let shapes = [("local", "--layers 3 --width 16"), ("tcp", "--layers 70 --width 8"), ("shm", "--busy --width 64")];
    for (transport, sizes) in shapes {
        let what = format!("{sizes} --transport {transport} --compute-ms 5 --steps 2");
        let rows = objects(&format!("perf step {what} --ranks 3 --json"));
        assert_eq!((rows.len(), &rows[0]["wrong"], &rows[0]["ranks"]), (1, &Value::from(0), &Value::from(3)));
        for key in ["bytes", "alone_s", "exchange_s", "both_s", "sync_s"] {
            assert!(rows[0][key].as_f64().unwrap() > 0.0, "{key} in {}", rows[0]);
        }
        assert!(rows[0]["alone_s"].as_f64().unwrap() >= 0.005, "the pauses are there: {}", rows[0]);
    }
    let rows = objects("perf step --sharding full --layers 5 --width 10 --ranks 3 --compute-ms 6 --steps 2 --json");
    assert_eq!((rows.len(), &rows[0]["wrong"], &rows[0]["sync_s"]), (1, &Value::from(0), &Value::Null));
    assert!(rows[0]["alone_s"].as_f64().unwrap() >= 0.006, "the pauses are in both passes: {}", rows[0]);
    let table = succeeds("perf step --layers 2 --width 8 --compute-ms 0 --steps 1 --bucket-bytes 100");
    assert!(table.contains("of the exchange exposed") && table.contains("0     wrong elements"), "{table}");
    let refused = bonfire("perf step --layers 0");
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn every_operation_is_measured_on_registered_and_ordinary_buffers() {
    for operation in
        ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"]
    {
        for (flag, registered) in [("", true), ("-R 0", false)] {
            let rows =
                objects(&format!("perf {operation} --transport shm --ranks 3 --sizes 600K -n 3 -w 1 {flag} --json"));
            let (row, zero) = (&rows[0], Value::from(0));
            assert_eq!((&row["wrong"], &row["in_place"]["wrong"]), (&zero, &zero));
            assert_eq!(row["registered"], Value::from(registered));
        }
    }
    assert_eq!(bonfire("perf all_reduce -R 2").status.code(), Some(2));
}

#[test]
fn the_table_ends_with_a_summary() {
    for arguments in ["perf all_reduce -e 512 -n 2", "perf all_reduce -e 512 -n 2 --level tensor"] {
        let table = succeeds(arguments);
        let lines: Vec<&str> = table.lines().collect();
        let rows = lines.iter().filter(|line| !line.starts_with('#')).count();
        assert_eq!(rows, 4, "{table}");
        // A line on floors that were beaten may follow.
        let end = lines.iter().position(|line| line.starts_with("# Wrong")).unwrap_or_else(|| panic!("{table}"));
        assert_eq!(lines[end], "# Wrong elements    : 0 OK");
        assert!(lines[end + 1].starts_with("# Avg bus bandwidth : "), "{table}");
    }
    assert!(succeeds("perf all_reduce -e 8 -n 2 -c 0").contains("not checked"));
}

#[test]
fn algorithms_can_be_given_and_are_shown() {
    let default = [("local", "native:0-"), ("shm", "native:0-"), ("tcp", "tree:0-262143;ring:262144-")];
    let table = "native:0-63;ring:64-";
    for (transport, want) in default {
        let row = |more: &str| {
            let what = format!("perf reduce --transport {transport} --ranks 3 --sizes 24,300 -n 2 -w 1 --json {more}");
            let rows = objects(&what);
            let figures: Vec<_> = rows.iter().map(|row| (row["bytes"].as_u64(), row["wrong"].as_u64())).collect();
            assert_eq!(figures, [(Some(24), Some(0)), (Some(300), Some(0))], "{what}");
            rows[0]["algorithms"].as_str().unwrap().to_owned()
        };
        assert_eq!(row(""), format!("reduce={want}"));
        let want = if transport == "tcp" { "tree:0-63;ring:64-" } else { table };
        assert_eq!(row(&format!("--algorithms reduce={table}")), format!("reduce={want}"));
    }
    assert!(succeeds("perf all_gather -e 64 -n 2").contains("# algorithms: all_gather=native:0-"));
    assert!(succeeds("perf send_recv -e 64 -n 2").contains("# algorithms: none to choose"));
}

#[test]
fn a_plot_is_an_svg_on_every_transport() {
    let directory = tempfile::tempdir().unwrap();
    for transport in ["local", "tcp", "shm"] {
        let file = directory.path().join(transport).with_extension("svg");
        succeeds(&format!("perf all_gather --transport {transport} -e 512 -n 2 --plot {}", file.display()));
        assert!(std::fs::read_to_string(file).unwrap().contains("all_gather, 2 ranks"));
    }
}

#[test]
fn bad_arguments_are_exit_status_2() {
    for arguments in ["perf", "perf sum", "perf all_reduce -b 1X", "perf reduce -r 7", "perf send_recv --ranks 1"] {
        let output = bonfire(arguments);
        assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(2), true), "{arguments}");
        assert!(!output.stderr.is_empty(), "{arguments}");
    }
    assert!(String::from_utf8(bonfire("perf").stderr).unwrap().contains("Usage"));
}

#[test]
fn the_version_is_that_of_the_program() {
    let version = format!("bonfire {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(succeeds("--version"), version);
}

#[test]
fn closed_output_ends_the_run() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bonfire"));
    let arguments = ["perf", "all_reduce", "-e", "1K", "-n", "2"];
    let mut child = command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("cannot print") && !error.contains("panicked"), "{error}");
}

#[test]
fn the_doctor_describes_this_machine() {
    let text = succeeds("doctor");
    for word in ["processors", "cores", "hand-off", "memory", "network", "loopback", "open files", "GPUs", "problems"] {
        assert!(text.contains(word), "{word} in {text}");
    }
    let found = &objects("doctor --json")[0];
    assert_eq!(found["runs"], true);
    assert!(found["facts"]["processors"]["cores"]["usable"].as_u64().unwrap() > 0);
    assert!(found["facts"]["network"]["loopback"]["stream_gbps"].as_f64().unwrap() > 0.0);
}

#[test]
fn ranks_that_a_launcher_started_are_measured() {
    let program = env!("CARGO_BIN_EXE_bonfire");
    let what = format!("{program} perf all_gather --transport auto -b 24 -e 24 -n 2 --json");
    let rows = objects(&format!("run -n 3 --no-prefix -- {what}"));
    let (ranks, wrong, floor) = (&rows[0]["ranks"], &rows[0]["wrong"], &rows[0]["floor_percent"]);
    assert_eq!((rows.len(), ranks, wrong, floor), (1, &3.into(), &0.into(), &Value::Null));
}
