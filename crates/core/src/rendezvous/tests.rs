use std::time::Duration;

use super::env::{Environment, read};
use super::{Settings, TransportKind, well_formed};
use crate::types::Error;

/// Reads an environment that consists of these variables, given without their prefix.
fn from(variables: &[(&str, &str)]) -> Result<Environment, Error> {
    read(|name| {
        let name = name.strip_prefix("BONFIRE_")?;
        variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
    })
}

const COMPLETE: [(&str, &str); 3] = [("RANK", "1"), ("WORLD_SIZE", "4"), ("ADDRESS", "10.0.0.1:29500")];

#[test]
fn a_complete_environment_is_read_as_it_is() {
    let environment = from(&COMPLETE).unwrap();
    let Settings { rank, world_size, address, host, .. } = environment.settings;
    assert_eq!((rank, world_size, &address[..], host), (1, 4, "10.0.0.1:29500", None));
    assert_eq!(environment.deadline, None);
}

#[test]
fn the_host_and_the_deadline_are_optional() {
    let with = |more| from(&[&COMPLETE[..], &[more]].concat()).unwrap();
    assert_eq!(with(("HOST", "10.0.0.2")).settings.host, Some("10.0.0.2".into()));
    assert_eq!(with(("HOST", "")).settings.host, None);
    for (text, seconds) in [("30", 30.0), ("0.5", 0.5), (" 7 ", 7.0)] {
        assert_eq!(with(("DEADLINE", text)).deadline, Some(Duration::from_secs_f64(seconds)));
    }
}

#[test]
fn the_transport_is_chosen_by_name() {
    assert_eq!(from(&COMPLETE).unwrap().settings.kind, TransportKind::Auto);
    for kind in TransportKind::ALL {
        let name = kind.to_string();
        assert_eq!(from(&[&COMPLETE[..], &[("TRANSPORT", &name)]].concat()).unwrap().settings.kind, kind);
    }
}

#[test]
fn the_number_of_connections_is_limited() {
    assert_eq!(from(&COMPLETE).unwrap().settings.connections, super::DEFAULT_CONNECTIONS);
    let several = from(&[&COMPLETE[..], &[("TCP_CONNECTIONS", "4")]].concat()).unwrap();
    assert_eq!(several.settings.connections, 4);
    let endless = from(&[&COMPLETE[..], &[("TCP_CONNECTIONS", "9")]].concat()).unwrap();
    assert!(endless.settings.check().is_err());
}

#[test]
fn a_rank_that_is_alone_needs_no_address() {
    assert_eq!(from(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap().settings.address, "");
}

#[test]
fn missing_variables_are_named() {
    for (missing, _) in COMPLETE {
        let rest: Vec<_> = COMPLETE.into_iter().filter(|(name, _)| *name != missing).collect();
        let settings = from(&rest).unwrap().settings;
        let error = settings.check().unwrap_err();
        let words = format!("BONFIRE_{missing} is not set");
        assert!(matches!(&error, Error::Config(text) if text.contains(&words)), "{error}");
        let lacks = settings.launched().and_then(|launched| launched.missing);
        assert!(lacks.is_some_and(|lacks| lacks.contains(&words)));
    }
    let nothing = from(&[]).unwrap().settings;
    assert_eq!(nothing.launched(), None);
    let error = nothing.check().unwrap_err().to_string();
    for part in ["BONFIRE_RANK is not set", "torchrun", "Slurm", "Open MPI", "MVAPICH2", "Kubeflow", "bonfire run -n"] {
        assert!(error.contains(part) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn malformed_variables_are_named_with_their_values() {
    for (name, values) in [
        ("RANK", &["", "-1", "one", "1.0", "99999999999999999999", "0x1"][..]),
        ("WORLD_SIZE", &["", "-4", "four", "4,"]),
        ("DEADLINE", &["", "0", "-1", "nan", "inf", "1e300", "soon", "5s"]),
        ("TRANSPORT", &["", "rdma", "SHM", "tcp,shm"]),
        ("TCP_CONNECTIONS", &["", "-1", "two"]),
    ] {
        for value in values {
            let others = COMPLETE.iter().filter(|(other, _)| *other != name).copied();
            let variables: Vec<_> = others.chain([(name, *value)]).collect();
            let error = from(&variables).unwrap_err();
            let text = format!("BONFIRE_{name} is '{value}'");
            assert!(matches!(&error, Error::Config(words) if words.contains(&text)), "{name}={value}: {error}");
        }
    }
}

fn settings(rank: usize, world_size: usize, address: &str) -> Settings {
    Settings { rank, world_size, address: address.into(), ..Settings::default() }
}

#[test]
fn settings_that_cannot_work_are_rejected() {
    assert_eq!(settings(0, 1, "").check(), Ok(()));
    assert_eq!(settings(3, 4, "[fe80::1]:29500").check(), Ok(()));
    for (rank, world_size) in [(0, 0), (1, 1), (4, 4), (usize::MAX, 2)] {
        let result = settings(rank, world_size, "host:29500").check();
        assert!(matches!(result, Err(Error::InvalidArgument { .. })), "rank {rank} of {world_size}: {result:?}");
    }
    assert!(matches!(settings(0, 2, "host").check(), Err(Error::Config(_))));
}

#[test]
fn addresses_have_a_host_and_a_port() {
    for right in ["localhost:1", "10.0.0.1:65535", "[::1]:29500", "node-7.cluster:29500"] {
        assert!(well_formed(right), "{right}");
    }
    for wrong in ["", ":", ":1", "host", "host:", "host:0", "host:65536", "host:x", "::1:29500", "[::1]", "a:b:1"] {
        assert!(!well_formed(wrong), "{wrong}");
    }
    for wrong in ["[host]:1", "[]:1", "[::1:1", "[10.0.0.1]:1", "::1]:1"] {
        assert!(!well_formed(wrong), "{wrong}");
    }
}

#[test]
fn a_zone_is_rejected_wherever_an_address_is_given() {
    let error = |result: Result<(), Error>| result.unwrap_err().to_string();
    let zone = "an address with a zone (%) is valid on one host only";
    for address in ["[fe80::1%eth0]:29500", "fe80::1%eth0:29500", "[fe80::1%2]:29500"] {
        let named = error(settings(0, 2, address).check());
        assert!(named.contains(&format!("the address is '{address}': {zone}")), "{named}");
    }
    let host = Settings { host: Some("fe80::1%eth0".into()), ..settings(0, 2, "a:1") };
    assert!(error(host.check()).contains(&format!("the host is 'fe80::1%eth0': {zone}")));
    for text in ["fe80::1%eth0", "[fe80::1%eth0]"] {
        let variables = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1"), ("MASTER_ADDR", text)];
        let read = read(|name| variables.iter().find(|(other, _)| *other == name).map(|(_, text)| (*text).to_owned()));
        let named = error(read.map(|_| ()));
        assert!(named.contains(&format!("MASTER_ADDR is '{text}': {zone}")), "{named}");
    }
}
