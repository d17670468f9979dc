//! Ranks on several hosts, in network namespaces.
#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;

/// Checks every element that crossed the links.
#[test]
#[ignore = "needs root, iproute2 and network namespaces"]
fn an_all_reduce_crosses_links_of_1_gbit_per_second() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let program = env!("CARGO_BIN_EXE_bonfire");
    let output = Command::new("scripts/hosts")
        .args(["-n", "2", "-r", "2", "--", program, "perf", "all_reduce", "--transport", "auto"])
        .args(["-b", "8M", "-e", "8M", "-n", "2", "-w", "1", "--json"])
        .env("BONFIRE", program)
        .current_dir(repository)
        .output()
        .expect("the script starts");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    let line = stdout.lines().last().expect("a line of figures");
    let figures: serde_json::Value = serde_json::from_str(line).expect("JSON");
    assert_eq!((&figures["wrong"], &figures["ranks"]), (&0.into(), &4.into()), "{line}");
}
