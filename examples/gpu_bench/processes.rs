//! Ranks in two processes: what the order of their launches costs, and ranks in two containers.

use std::fs::File;
use std::io::Read;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use bonfire::server::DeviceCollectives;
use bonfire::server::cuda::bench::agreement_seconds;
use bonfire::{CollectiveRuntime, CudaDevice, DType, Group, ReduceOp};
use cubecl::Runtime;
use cubecl::cuda::CudaRuntime;

use crate::Failure;
use crate::kernels::Extent;
use crate::paths::Measured;
use crate::report::Report;

const RANKS: usize = 2;
const SIZES: [usize; 3] = [8, 8 << 10, 256 << 10];

/// Returns the seconds of an agreement without the order of launches, of one with it, and of an all-reduce of each size
/// by kernels, as one of the ranks, for so many rounds.
pub fn order_seconds(extent: Extent, rounds: usize) -> Result<Vec<f64>, Failure> {
    let group = Group::from_env()?;
    let mut all = Vec::new();
    for _ in 0..rounds {
        for ordered in [false, true] {
            all.push(agreement_seconds(&group, ordered, extent.calls)?);
        }
        for bytes in SIZES {
            // Processes that share a GPU take milliseconds for each.
            all.push(all_reduce_seconds(&group, bytes, extent.calls.div_ceil(10), false)?);
        }
    }
    Ok(all)
}

/// Returns the seconds of an all-reduce of each size between two containers, as one of the ranks.
pub fn container_seconds(extent: Extent) -> Result<Vec<f64>, Failure> {
    let group = Group::from_env()?;
    SIZES.into_iter().map(|bytes| all_reduce_seconds(&group, bytes, extent.calls.div_ceil(10), true)).collect()
}

/// Returns the seconds of one of `calls` all-reduces, each until its result is there. By kernels: it is an error if
/// data passes through host memory. With `print`, rank 0 prints that the result is right.
fn all_reduce_seconds(group: &Group, bytes: usize, calls: usize, print: bool) -> Result<f64, Failure> {
    let device = CudaDevice::of_rank(group.rank())?;
    let client = CollectiveRuntime::<CudaRuntime>::client(&device);
    let value = |rank: usize, i: usize| ((i * 31 + rank) % 1009) as f32;
    let count = bytes / 4;
    let own: Vec<f32> = (0..count).map(|i| value(group.rank(), i)).collect();
    let (source, target) = (client.create_from_slice(bytemuck::cast_slice(&own)), client.empty(bytes));
    let all_reduce = || client.start_all_reduce(group, &source, &target, DType::F32, ReduceOp::Sum)?.wait();
    (0..3).try_for_each(|_| all_reduce())?;
    group.barrier()?;
    let clock = Instant::now();
    (0..calls).try_for_each(|_| all_reduce())?;
    let seconds = clock.elapsed().as_secs_f64() / calls as f64;
    let counters = device.counters();
    if counters.downloads > 0 {
        return Err("it goes through host memory, for the reason that rank 0 has logged".into());
    }
    let found: Vec<f32> = bytemuck::pod_collect_to_vec(&client.read_one(target).map_err(|e| format!("{e:?}"))?);
    let is_right =
        |(i, found): (usize, &f32)| *found == (0..group.world_size()).map(|rank| value(rank, i)).sum::<f32>();
    if !found.iter().enumerate().all(is_right) {
        return Err(format!("the result of {bytes} bytes is wrong").into());
    }
    if print && group.rank() == 0 {
        eprintln!("  {bytes} bytes: {count} sums are right, by kernels");
    }
    Ok(seconds)
}

/// Measures what the order of launches adds to a call. It is an exchange on the host, so it needs no GPU for each rank.
pub fn order(report: &mut Report, extent: Extent) {
    let address = free_address();
    let ranks = address.and_then(|address| {
        let start = |rank: usize| {
            let mut command = Measured::Order.command(extent, report.rounds())?;
            command.env("BONFIRE_CUDA", "kernels").envs(variables(rank, &address));
            spawn(&mut command)
        };
        slower((0..RANKS).map(start).collect::<Result<Vec<_>, Failure>>()?)
    });
    let ranks = ranks.map_err(|error| error.to_string());
    let rounds = |of_round: &dyn Fn(&[f64]) -> f64| -> Result<Vec<f64>, Failure> {
        Ok(ranks.as_ref().map_err(Clone::clone)?.chunks(2 + SIZES.len()).map(of_round).collect())
    };
    let micros = |place: usize| rounds(&|round: &[f64]| 1e6 * round[place]);
    report.optional_values("2 processes agree on a call".into(), "us", micros(0));
    report.optional_values("  and on the order of launches".into(), "us", micros(1));
    report.optional_values("  which adds".into(), "us", rounds(&|round| 1e6 * (round[1] - round[0])));
    for (place, bytes) in (2..).zip(SIZES) {
        let name = format!("all_reduce of {bytes} bytes between 2 processes, kernels");
        report.optional_values(name, "us", micros(place));
        let part = rounds(&|round| 100.0 * (round[1] - round[0]) / round[place]);
        report.optional_values("  of which the order of launches".into(), "%", part);
    }
}

/// Measures all-reduces by kernels between two processes with namespaces of their own, as containers have them.
pub fn containers(report: &mut Report, extent: Extent) {
    for (namespaces, own) in [
        ("PID and IPC namespaces shared", &["--mount", "--uts"][..]),
        (
            "all namespaces their own",
            &["--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"][..],
        ),
    ] {
        println!("two containers, {namespaces}:");
        let seconds = in_containers(own, extent).map_err(|error| error.to_string());
        for (place, bytes) in SIZES.into_iter().enumerate() {
            let micros = seconds.as_ref().map(|all| vec![1e6 * all[place]]).map_err(|error| error.clone().into());
            report.optional_values(format!("  all_reduce of {bytes} bytes, kernels, {namespaces}"), "us", micros);
        }
    }
}

fn in_containers(own: &[&str], extent: Extent) -> Result<Vec<f64>, Failure> {
    let network = Network::new();
    let address = match &network {
        Ok(network) => network.address(0, 29_400),
        Err(why) => {
            println!("  they share the network: {why}");
            free_address()?
        }
    };
    let mut secret = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut secret)?;
    let secret: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    let start = |rank: usize| {
        let program = Measured::Containers.command(extent, 1)?;
        let mut words: Vec<String> = Vec::new();
        if let Ok(network) = &network {
            words.extend(["ip", "netns", "exec"].map(String::from));
            words.push(network.name(rank));
        }
        words.push("unshare".into());
        words.extend(own.iter().map(|word| (*word).to_owned()));
        words.push("--".into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(program.get_program()).args(program.get_args());
        command.env("BONFIRE_CUDA", "kernels").env("BONFIRE_SECRET", &secret).envs(variables(rank, &address));
        if let Ok(network) = &network {
            command.env("BONFIRE_HOST", network.host(rank));
        }
        spawn(&mut command)
    };
    slower((0..RANKS).map(start).collect::<Result<Vec<_>, Failure>>()?)
}

/// A network of its own for each container, with a link between them. Removed when it is dropped.
struct Network(u32);

impl Network {
    fn new() -> Result<Network, Failure> {
        let network = Network(std::process::id());
        let ip = |words: &str| -> Result<(), Failure> {
            let ended = Command::new("ip").args(words.split(' ')).output().map_err(|error| format!("ip: {error}"))?;
            let why = String::from_utf8_lossy(&ended.stderr).trim().to_owned();
            if ended.status.success() { Ok(()) } else { Err(format!("ip {words}: {why}").into()) }
        };
        let [one, other] = [0, 1].map(|rank| network.name(rank));
        ip(&format!("netns add {one}"))?;
        ip(&format!("netns add {other}"))?;
        ip(&format!("link add bf0 netns {one} type veth peer name bf0 netns {other}"))?;
        for rank in 0..RANKS {
            let name = network.name(rank);
            ip(&format!("-n {name} addr add {}/24 dev bf0", network.host(rank)))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set bf0 up"))?;
        }
        Ok(network)
    }

    fn name(&self, rank: usize) -> String {
        format!("bonfire-{}-{rank}", self.0)
    }

    fn host(&self, rank: usize) -> String {
        format!("10.77.0.{}", rank + 1)
    }

    fn address(&self, rank: usize, port: u16) -> String {
        format!("{}:{port}", self.host(rank))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for rank in 0..RANKS {
            // It may not have been made.
            let _ = Command::new("ip").args(["netns", "del", &self.name(rank)]).output();
        }
    }
}

fn free_address() -> Result<String, Failure> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

fn variables(rank: usize, address: &str) -> [(&'static str, String); 3] {
    [
        ("BONFIRE_RANK", rank.to_string()),
        ("BONFIRE_WORLD_SIZE", RANKS.to_string()),
        ("BONFIRE_ADDRESS", address.to_owned()),
    ]
}

fn spawn(command: &mut Command) -> Result<Child, Failure> {
    let started = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    started.map_err(|error| format!("{}: {error}", command.get_program().display()).into())
}

/// Returns the numbers that the ranks print, the greater one of each. Passes on what rank 0 says.
fn slower(ranks: Vec<Child>) -> Result<Vec<f64>, Failure> {
    let outputs = ranks.into_iter().map(Child::wait_with_output).collect::<Result<Vec<_>, _>>()?;
    eprint!("{}", String::from_utf8_lossy(&outputs[0].stderr));
    let mut all: Vec<f64> = Vec::new();
    for (rank, output) in outputs.iter().enumerate() {
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr);
            let last = why.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it says nothing");
            return Err(format!("rank {rank}: {}", last.trim()).into());
        }
        let numbers = String::from_utf8_lossy(&output.stdout);
        let numbers = numbers.lines().map(str::parse).collect::<Result<Vec<f64>, _>>()?;
        all = if rank == 0 { numbers } else { all.iter().zip(&numbers).map(|(one, other)| one.max(*other)).collect() };
    }
    Ok(all)
}
