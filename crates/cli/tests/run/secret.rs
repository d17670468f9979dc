//! How the launcher handles secrets.

use std::fs;

use super::PRINT_ENVIRONMENT;
use super::harness::*;

#[test]
fn gives_the_ranks_of_one_node_a_fresh_secret() {
    let secrets = || {
        let environments = environments(&bonfire(&["-n", "3"], PRINT_ENVIRONMENT));
        let secrets: Vec<_> = environments.iter().map(|environment| environment["BONFIRE_SECRET"].clone()).collect();
        assert!(secrets.iter().all(|secret| *secret == secrets[0] && secret.len() == 64), "{secrets:?}");
        assert!(secrets[0].bytes().all(|digit| digit.is_ascii_hexdigit()));
        secrets[0].clone()
    };
    assert_ne!(secrets(), secrets());
    // It is no argument of a process, which other users could read.
    let output = bonfire(&["-n", "1"], "cat /proc/$PPID/cmdline /proc/self/cmdline | grep -c $BONFIRE_SECRET");
    assert_eq!(text(&output.stdout), "[0] 0\n", "{output:?}");
}

#[test]
fn passes_on_the_users_secret() {
    let secret = "0123456789abcdef0123456789abcdef";
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), secret).unwrap();
    let path = file.path().to_str().unwrap();
    let nodes = ["--nodes", "2", "--node-rank", "0", "--master", "127.0.0.1:29400"];
    for arguments in [&["-n", "1"][..], &[&["-n", "1"][..], &nodes].concat()] {
        for (variable, value) in [("BONFIRE_SECRET", secret), ("BONFIRE_SECRET_FILE", path)] {
            let mut command = launcher(arguments);
            let output = command.env(variable, value).args(["sh", "-c", PRINT_ENVIRONMENT]).output().unwrap();
            let environment = &environments(&output)[0];
            assert_eq!(environment[variable], value);
            assert_eq!(environment.keys().filter(|name| name.contains("SECRET")).count(), 1, "{environment:?}");
        }
    }
    // Several nodes cannot generate a common secret.
    let output = bonfire(&[&["-n", "1"][..], &nodes].concat(), PRINT_ENVIRONMENT);
    assert!(!environments(&output)[0].contains_key("BONFIRE_SECRET"));
}

#[test]
fn refuses_bad_secrets_before_it_starts_a_rank() {
    let refused = |variables: &[(&str, &str)], named: &str| {
        let output = launcher(&["-n", "1"]).envs(variables.iter().copied()).args(["echo", "started"]).output().unwrap();
        let stderr = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), ""), "{stderr}");
        assert!(stderr.starts_with("error: ") && stderr.contains(named), "{stderr}");
    };
    refused(&[("BONFIRE_SECRET", "short")], "BONFIRE_SECRET has 5 bytes");
    refused(&[("BONFIRE_SECRET_FILE", "no such file")], "cannot be opened");
    refused(&[("BONFIRE_SECRET_FILE", "x"), ("BONFIRE_SECRET", "x")], "both");
}
