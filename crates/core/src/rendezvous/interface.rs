//! Chooses the address of this machine that other hosts can reach.

use std::net::IpAddr;

use if_addrs::{Interface, get_if_addrs};

use super::Settings;
use crate::types::Error;

/// Returns the address of the configured interface, if one is configured.
pub(super) fn chosen(settings: &Settings) -> Result<Option<IpAddr>, Error> {
    let Some(wanted) = &settings.interface else { return Ok(None) };
    let interfaces = interfaces()?;
    match named(wanted, &interfaces) {
        Some(ip) => Ok(Some(ip)),
        None => Err(Error::Config(format!(
            "BONFIRE_IFACE is '{wanted}', and no interface with an address for other hosts has this name or prefix: \
             give one of {}",
            listed(&interfaces)
        ))),
    }
}

/// Returns the address of the first interface that is up.
pub(super) fn any(settings: &Settings) -> Result<IpAddr, Error> {
    let interfaces = interfaces()?;
    let up = interfaces.iter().filter(|interface| interface.is_oper_up()).map(Interface::ip);
    best(up).ok_or_else(|| {
        Error::Config(format!(
            "the ranks are on several hosts, and rank {} finds no interface of its machine that they can reach: set \
             BONFIRE_HOST to an address of it, or BONFIRE_IFACE to one of {}",
            settings.rank,
            listed(&interfaces)
        ))
    })
}

/// Returns the interfaces with addresses that other hosts can use, in the system's order.
fn interfaces() -> Result<Vec<Interface>, Error> {
    let all = get_if_addrs().map_err(|e| Error::io("listing the network interfaces", e))?;
    Ok(all.into_iter().filter(|interface| !interface.is_loopback() && !interface.is_link_local()).collect())
}

/// Returns the address for the first of the comma-separated names in `wanted` that an interface has, or else begins
/// with.
fn named(wanted: &str, interfaces: &[Interface]) -> Option<IpAddr> {
    let names = || wanted.split(',').map(str::trim).filter(|name| !name.is_empty());
    let with_name = |fits: &dyn Fn(&str) -> bool| best(interfaces.iter().filter(|i| fits(&i.name)).map(Interface::ip));
    names().find_map(|name| with_name(&|other| other == name).or_else(|| with_name(&|other| other.starts_with(name))))
}

/// Returns the first IPv4 address, or else the first address.
fn best(addresses: impl Iterator<Item = IpAddr> + Clone) -> Option<IpAddr> {
    addresses.clone().find(IpAddr::is_ipv4).or_else(|| addresses.clone().next())
}

fn listed(interfaces: &[Interface]) -> String {
    let all: Vec<_> = interfaces.iter().map(|interface| format!("{} ({})", interface.name, interface.ip())).collect();
    if all.is_empty() { "none: only loopback has an address".into() } else { all.join(", ") }
}

#[cfg(test)]
mod tests {
    use if_addrs::{IfAddr, IfOperStatus, Ifv4Addr, Ifv6Addr};

    use super::*;

    fn interface(name: &str, ip: &str) -> Interface {
        let addr = match ip.parse().unwrap() {
            IpAddr::V4(ip) => IfAddr::V4(Ifv4Addr { ip, netmask: ip, prefixlen: 24, broadcast: None }),
            IpAddr::V6(ip) => IfAddr::V6(Ifv6Addr { ip, netmask: ip, prefixlen: 64, broadcast: None }),
        };
        Interface { name: name.into(), addr, index: None, oper_status: IfOperStatus::Up, is_p2p: false }
    }

    #[test]
    fn interfaces_are_chosen_by_name_and_then_by_prefix() {
        let all = [
            interface("eth10", "10.0.0.10"),
            interface("eth1", "fd00::1"),
            interface("eth1", "10.0.0.1"),
            interface("ib0", "fd00::2"),
            interface("ib1", "10.1.0.1"),
        ];
        let cases = [
            ("eth1", Some("10.0.0.1")),
            ("eth", Some("10.0.0.10")),
            ("ib0", Some("fd00::2")),
            ("ib", Some("10.1.0.1")),
            ("wlan, ib0 ,eth1", Some("fd00::2")),
            ("wlan,e", Some("10.0.0.10")),
            ("th1", None),
            ("", None),
            (",", None),
            ("^eth", None),
        ];
        for (wanted, expected) in cases {
            assert_eq!(named(wanted, &all), expected.map(|ip| ip.parse().unwrap()), "{wanted}");
        }
    }

    #[test]
    fn an_unknown_interface_is_an_error_that_lists_the_known_ones() {
        let wanting = |interface: &str| Settings { interface: Some(interface.into()), ..Settings::default() };
        let error = chosen(&wanting("no-such-interface")).unwrap_err().to_string();
        assert!(error.contains("BONFIRE_IFACE is 'no-such-interface'") && error.contains("give one of"), "{error}");
        assert_eq!(chosen(&Settings::default()), Ok(None));
        // Loopback does not reach other hosts.
        assert!(chosen(&wanting("lo")).is_err());
    }
}
