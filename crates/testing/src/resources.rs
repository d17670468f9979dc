//! What this process holds of the system, for tests of what stays behind, and limits on it.

use std::fs;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// A control group with a limit on memory, of version 1 or 2. It is removed when dropped.
pub struct Limited(PathBuf);

impl Limited {
    /// Creates a group whose processes may use so many bytes together.
    pub fn new(bytes: u64) -> Limited {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let one = PathBuf::from("/sys/fs/cgroup/memory");
        let (mount, limit) = match one.is_dir() {
            true => (one, "memory.limit_in_bytes"),
            false => ("/sys/fs/cgroup".into(), "memory.max"),
        };
        let folder =
            mount.join(format!("bonfire-test-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&folder).expect("permission to create a control group");
        fs::write(folder.join(limit), bytes.to_string()).expect("a group with the memory controller");
        Limited(folder)
    }

    /// A command that enters the group and becomes its arguments.
    pub fn enter(&self) -> [String; 4] {
        let enter = format!("echo $$ >{}/cgroup.procs && exec \"$@\"", self.0.display());
        ["sh", "-c", &enter, "sh"].map(String::from)
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        // The kernel takes a moment to release the memory of the last process.
        while fs::remove_dir(&self.0).is_err_and(|e| e.kind() == ErrorKind::ResourceBusy) {
            thread::yield_now();
        }
    }
}

/// Resources of this process. All but the memory must be the same after what leaves nothing behind.
#[derive(Debug)]
pub struct Resources {
    pub counts: [(&'static str, usize); 4],
    pub mappings: usize,
    /// Resident memory in KiB.
    pub memory: usize,
}

impl Resources {
    /// The resources before the first group: opens what a process opens once and keeps.
    pub fn at_start() -> Resources {
        // tokio's first runtime opens two sockets for signals.
        drop(tokio::runtime::Builder::new_current_thread().enable_all().build());
        Resources::now()
    }

    pub fn now() -> Resources {
        let maps = read("/proc/self/maps");
        let status = read("/proc/self/status");
        let memory =
            status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim_end_matches("kB").trim().parse().ok());
        let counts = [
            ("descriptors", descriptors().len()),
            ("threads", count("/proc/self/task")),
            ("segments", maps.lines().filter(|line| line.contains("memfd:bonfire")).count()),
            ("listening ports", listening().len()),
        ];
        Resources { counts, mappings: maps.lines().count(), memory: memory.unwrap_or(0) }
    }

    /// Returns what there is more of than these, which were taken before.
    pub fn leaks(&self) -> Vec<String> {
        Resources::settle(self).1
    }

    /// Returns what there is more of than before, after giving threads time to end.
    pub fn settle(before: &Resources) -> (Resources, Vec<String>) {
        const TIME: Duration = Duration::from_secs(20);
        let start = Instant::now();
        loop {
            let now = Resources::now();
            let both = before.counts.iter().zip(&now.counts).filter(|(before, now)| now.1 > before.1);
            let more: Vec<_> = both.map(|(before, now)| format!("{} {}, {} before", now.1, now.0, before.1)).collect();
            if more.is_empty() || start.elapsed() > TIME {
                return (now, more);
            }
            thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Returns the addresses at which this process listens. An address of IPv6 is returned as loopback of IPv4, with its
/// port.
pub fn listening() -> Vec<SocketAddr> {
    let files = descriptors();
    let is_own = |inode: &str| files.iter().any(|file| *file == format!("socket:[{inode}]"));
    // Columns: the second is the address, of which the system prints the number as it is in memory; the fourth is the
    // state, 0A if the socket listens; the tenth is the inode.
    let tables = read("/proc/self/net/tcp") + &read("/proc/self/net/tcp6");
    let sockets = tables.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let own = sockets.filter(|socket| socket.get(3) == Some(&"0A") && is_own(socket[9]));
    let address = |socket: Vec<&str>| {
        let (host, port) = socket[1].split_once(':')?;
        let host = u32::from_str_radix(host, 16).map_or(Ipv4Addr::LOCALHOST, |host| host.to_ne_bytes().into());
        Some((host, u16::from_str_radix(port, 16).ok()?).into())
    };
    own.filter_map(address).collect()
}

/// Returns what the descriptors of this process refer to.
fn descriptors() -> Vec<String> {
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    entries.filter_map(|entry| Some(fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned())).collect()
}

fn read(file: &str) -> String {
    fs::read_to_string(file).unwrap_or_default()
}

/// Returns the number of entries in a folder.
pub fn count(folder: &str) -> usize {
    fs::read_dir(folder).map_or(0, Iterator::count)
}

/// Files that groups could leave in `/dev/shm`.
pub fn shared_files() -> Vec<String> {
    let files = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    files.map(|file| file.file_name().to_string_lossy().into_owned()).filter(|name| name.contains("bonfire")).collect()
}
