//! What a test needs from the machine: commands that it may not allow, a clock that can be set, hosts and links.

use std::process::Command;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use rustix::time::ClockId;

/// Offset of this process's wall clock in seconds.
static CLOCK_OFFSET: AtomicI64 = AtomicI64::new(0);

pub fn set_clock(seconds: i64) {
    CLOCK_OFFSET.store(seconds, Ordering::SeqCst);
}

/// Returns an error where [`set_clock`] has no effect.
pub fn has_own_clock() -> Result<(), String> {
    let has = cfg!(all(target_os = "linux", target_pointer_width = "64"));
    if has { Ok(()) } else { Err("this test replaces the C library's clock on 64-bit Linux only".into()) }
}

/// `struct timespec` on 64-bit Linux.
#[repr(C)]
pub struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

/// Replaces the C library's function of this name in the whole process: all code in it that reads the wall clock reads
/// the wrong time. Other processes are not affected.
///
/// # Safety
/// `time` must be valid for writes, as that function requires.
#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: i32, time: *mut Timespec) -> i32 {
    let (clock, offset) = match clock {
        0 => (ClockId::Realtime, CLOCK_OFFSET.load(Ordering::SeqCst)),
        1 => (ClockId::Monotonic, 0),
        5 => (ClockId::RealtimeCoarse, CLOCK_OFFSET.load(Ordering::SeqCst)),
        6 => (ClockId::MonotonicCoarse, 0),
        7 => (ClockId::Boottime, 0),
        // No code here uses the other clocks.
        _ => return -1,
    };
    let now = rustix::time::clock_gettime(clock);
    // SAFETY: the caller ensures that `time` is valid for writes.
    unsafe { time.write(Timespec { seconds: now.tv_sec + offset, nanoseconds: now.tv_nsec }) };
    0
}

/// Checks whether this machine allows a command that runs others. The error says why not.
pub fn try_out(command: &[String]) -> Result<(), String> {
    run(&[command, &["true".into()]].concat())
}

fn run(words: &[String]) -> Result<(), String> {
    let output = Command::new(&words[0]).args(&words[1..]).output();
    let output = output.map_err(|e| format!("{} cannot be started: {e}", words[0]))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("`{}` failed: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

/// Runs a command that is given as one line.
fn command(line: &str) -> Result<(), String> {
    run(&line.split_whitespace().map(String::from).collect::<Vec<_>>())
}

/// Hosts: network namespaces, each linked to a switch. Dropping it deletes them.
pub struct Network {
    name: String,
    hosts: usize,
}

impl Network {
    /// Creates the hosts. The error says why this machine does not allow it.
    pub fn new(hosts: usize) -> Result<Network, String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            return Err("network namespaces need root".into());
        }
        let name = format!("bonfire-chaos-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let network = Network { name, hosts };
        let switch = network.switch();
        command(&format!("ip netns add {switch}"))?;
        command(&format!("ip -n {switch} link add switch type bridge"))?;
        command(&format!("ip -n {switch} link set switch up"))?;
        for i in 0..hosts {
            let host = network.host(i);
            command(&format!("ip netns add {host}"))?;
            command(&format!("ip link add bf0 netns {host} type veth peer name port{i} netns {switch}"))?;
            command(&format!("ip -n {host} addr add {}/24 dev bf0", Network::address(i)))?;
            command(&format!("ip -n {host} link set lo up"))?;
            command(&format!("ip -n {host} link set bf0 up"))?;
            command(&format!("ip -n {switch} link set port{i} master switch"))?;
            command(&format!("ip -n {switch} link set port{i} up"))?;
        }
        Ok(network)
    }

    fn host(&self, i: usize) -> String {
        format!("{}-{i}", self.name)
    }

    fn switch(&self) -> String {
        format!("{}-s", self.name)
    }

    pub fn address(i: usize) -> String {
        format!("10.77.0.{}", i + 1)
    }

    /// The prefix of a command that is to run on a host.
    pub fn on(&self, i: usize) -> Vec<String> {
        ["ip", "netns", "exec", &self.host(i)].map(String::from).into()
    }

    /// Sets the link of a host up or down.
    pub fn set_link(&self, i: usize, state: &str) -> Result<(), String> {
        command(&format!("ip -n {} link set port{i} {state}", self.switch()))
    }

    /// Drops all packets that reach host `to` from host `from`.
    pub fn cut(&self, from: usize, to: usize) -> Result<(), String> {
        let rule = format!("-A INPUT -s {} -j DROP", Network::address(from));
        command(&format!("{} iptables {rule}", self.on(to).join(" ")))
    }

    /// Undoes all cuts and drops.
    pub fn heal(&self) -> Result<(), String> {
        (0..self.hosts).try_for_each(|host| command(&format!("{} iptables -F INPUT", self.on(host).join(" "))))
    }

    /// Drops one in `one_of` packets that reach a host.
    pub fn drop_packets(&self, i: usize, one_of: usize) -> Result<(), String> {
        let rule = format!("-A INPUT -i bf0 -m statistic --mode random --probability {:.4}", 1.0 / one_of as f64);
        command(&format!("{} iptables {rule} -j DROP", self.on(i).join(" ")))
    }

    /// Limits the rate at which a host sends.
    pub fn throttle(&self, i: usize, rate: &str) -> Result<(), String> {
        let shape = format!("qdisc replace dev bf0 root tbf rate {rate} burst 128kb latency 50ms");
        command(&format!("{} tc {shape}", self.on(i).join(" ")))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for name in (0..self.hosts).map(|i| self.host(i)).chain([self.switch()]) {
            // Fails for namespaces that were never created, because creating them failed.
            let _ = command(&format!("ip netns del {name}"));
        }
    }
}
