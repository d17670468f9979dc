//! Network interfaces and the speed of loopback.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde_json::json;

use super::findings::Findings;
use crate::floor::Loopback;
use crate::machine::Machine;

const AREA: &str = "network";

pub fn interfaces(machine: &Machine, findings: &mut Findings) {
    let attribute = |name: &str, file: &str| machine.read(&format!("sys/class/net/{name}/{file}"));
    // Not every entry is an interface.
    let names = machine.list("sys/class/net").into_iter().filter(|name| attribute(name, "mtu").is_some());
    let mut interfaces: BTreeMap<String, Vec<IpAddr>> = names.map(|name| (name, Vec::new())).collect();
    match if_addrs::get_if_addrs() {
        Ok(found) => {
            for interface in found {
                interfaces.entry(interface.name.clone()).or_default().push(interface.ip());
            }
            judge(&interfaces, findings);
        }
        Err(error) => findings.warn(
            format!("cannot list the addresses of the network interfaces: {error}"),
            "find the address for `bonfire run --host` by other means",
        ),
    }
    for (name, addresses) in interfaces {
        let mtu: Option<u64> = attribute(&name, "mtu").and_then(|text| text.parse().ok());
        // Virtual interfaces have no speed, or -1.
        let speed: Option<u64> = attribute(&name, "speed").and_then(|text| text.parse().ok());
        let state = attribute(&name, "operstate");
        let list: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        let mut text = if list.is_empty() { "no address".into() } else { list.join(", ") };
        text += &mtu.map_or(String::new(), |mtu| format!("; mtu {mtu}"));
        text += &speed.map_or(String::new(), |speed| format!("; {speed} Mbit/s"));
        if state.as_deref() == Some("down") {
            text += "; down";
        }
        let value = json!({ "addresses": list, "mtu": mtu, "mbit_per_second": speed, "state": state });
        findings.fact(AREA, &name, text, value);
    }
}

fn judge(interfaces: &BTreeMap<String, Vec<IpAddr>>, findings: &mut Findings) {
    if !interfaces.values().flatten().any(|address| !address.is_loopback()) {
        findings.warn(
            "no interface but loopback has an address, so all ranks must be on this machine",
            "for several machines bring an interface up (ip link, ip addr); for a container: docker run --network",
        );
    }
}

pub fn loopback(findings: &mut Findings) {
    match Loopback::measure() {
        Ok(Loopback { stream, one_way }) => {
            let text = format!("{:.2} GB/s in one stream, {:.2} us for 8 bytes one way", stream / 1e9, one_way * 1e6);
            findings.fact(AREA, "loopback", text, json!({ "stream_gbps": stream / 1e9, "one_way_us": one_way * 1e6 }));
        }
        Err(error) => findings.fail(
            format!("a TCP connection over 127.0.0.1 failed, so processes cannot find each other: {error}"),
            "bring loopback up (ip link set lo up), and allow it in firewalls and sandboxes",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_alone_is_a_problem() {
        let judged = |addresses: &[&str]| {
            let mut findings = Findings::default();
            let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
            judge(&BTreeMap::from([("lo".into(), addresses)]), &mut findings);
            findings.problems.len()
        };
        assert_eq!([judged(&["127.0.0.1", "::1"]), judged(&[]), judged(&["::1", "10.0.0.1"])], [1, 1, 0]);
    }
}
