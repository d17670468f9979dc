//! Two hosts, which are network namespaces of this machine, with two links between them.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Two hosts. Host `h` (0 or 1) has on link `l` (1 or 2) the addresses `10.78.l.(h + 1)` and `fd78:l::(h + 1)`.
/// Dropping it deletes them.
pub struct Network {
    name: String,
}

impl Network {
    /// Creates the hosts. `names` has each name with its addresses on each host, for their `/etc/hosts`.
    pub fn new(names: &[(String, [Vec<String>; 2])]) -> Network {
        let network = Network { name: format!("bonfire-start-{}", std::process::id()) };
        for h in [0, 1] {
            let host = network.host(h);
            fs::create_dir_all(network.files(h)).expect("root may write to /etc");
            let lines = names
                .iter()
                .flat_map(|(name, addresses)| addresses[h].iter().map(move |address| format!("{address} {name}\n")));
            let lines: String = ["127.0.0.1 localhost\n::1 localhost\n".to_owned()].into_iter().chain(lines).collect();
            fs::write(network.files(h).join("hosts"), lines).expect("root may write to /etc");
            ip(&format!("netns add {host}"));
            ip(&format!("-n {host} link set lo up"));
        }
        let [one, other] = [0, 1].map(|h| network.host(h));
        for l in [1, 2] {
            ip(&format!("link add link{l} netns {one} type veth peer name link{l} netns {other}"));
            for (h, host) in [&one, &other].into_iter().enumerate() {
                ip(&format!("-n {host} addr add 10.78.{l}.{}/24 dev link{l}", h + 1));
                ip(&format!("-n {host} addr add fd78:{l}::{}/64 dev link{l} nodad", h + 1));
                ip(&format!("-n {host} link set link{l} up"));
            }
        }
        network
    }

    /// The prefix of a command that is to run on a host.
    pub fn on(&self, h: usize) -> Vec<String> {
        ["ip", "netns", "exec", &self.host(h)].map(String::from).into()
    }

    fn host(&self, h: usize) -> String {
        format!("{}-{h}", self.name)
    }

    /// `ip netns exec` shows these files to its command in place of those in `/etc`.
    fn files(&self, h: usize) -> PathBuf {
        PathBuf::from("/etc/netns").join(self.host(h))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for h in [0, 1] {
            let _ = Command::new("ip").args(["netns", "del", &self.host(h)]).status();
            let _ = fs::remove_dir_all(self.files(h));
        }
    }
}

/// Runs `ip` with these words.
pub fn ip(words: &str) {
    let output = Command::new("ip").args(words.split_whitespace()).output().expect("iproute2");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}
