//! Measures the overhead of the collective runtime against a baseline, with both in turn:
//!
//!     cd tests/cubecl && cargo run --release --example overhead

use std::time::{Duration, Instant};

use bonfire::{CollectiveRuntime, WgpuDevice};
use cubecl::bytes::Bytes;
use cubecl::device::Device;
use cubecl::future::block_on;
use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;
use cubecl::server::ReduceOperation;
use cubecl::wgpu::WgpuRuntime;

type Collective = CollectiveRuntime<WgpuRuntime>;

/// Few launches in each of many rounds: the shorter a round, the more similar the machine's load for both sides.
const LAUNCHES: usize = 500;
const LENGTH: usize = 4 << 20;

#[cube(launch)]
fn increment(values: &mut Array<f32>) {
    if ABSOLUTE_POS < values.len() {
        values[ABSOLUTE_POS] += 1.0;
    }
}

fn main() {
    let bare = launches::<WgpuRuntime>(Default::default());
    let collective = launches::<Collective>(WgpuDevice::new(Default::default(), 0));
    compare(&format!("{LAUNCHES} launches"), 401, ("bare", bare), ("collective", collective));
    let (host, all_reduce) = exchanges();
    compare("sum of 16 MiB of f32 on 2 devices", 31, ("on the host", host), ("all_reduce", all_reduce));
}

/// Times both sides in turn. Ratios are within a round, in which both see the same load of the machine.
fn compare(what: &str, rounds: usize, a: (&str, impl FnMut()), b: (&str, impl FnMut())) {
    let ((a_name, mut a), (b_name, mut b)) = (a, b);
    // Warms up: kernels are compiled and buffers allocated once.
    (a(), b());
    let times: Vec<_> = (0..rounds)
        .map(|round| {
            // The order alternates, since the first side of a round finds the caches as the other left them.
            if round % 2 == 0 {
                let a = time(&mut a);
                (a, time(&mut b))
            } else {
                let b = time(&mut b);
                (time(&mut a), b)
            }
        })
        .collect();
    let quartiles = |values: Vec<f64>| {
        let mut values = values;
        values.sort_by(f64::total_cmp);
        [values.len() / 4, values.len() / 2, values.len() * 3 / 4].map(|at| values[at])
    };
    println!("{what}, {rounds} rounds: median [quartiles]");
    for (name, pick) in [(a_name, 0), (b_name, 1)] {
        let times = times.iter().map(|(a, b)| [a, b][pick].as_secs_f64() * 1e3);
        let [low, median, high] = quartiles(times.collect());
        println!("  {name:12} {median:.2} ms [{low:.2} to {high:.2}]");
    }
    let [low, median, high] = quartiles(times.iter().map(|(a, b)| b.as_secs_f64() / a.as_secs_f64()).collect());
    println!("  {b_name} / {a_name}: {median:.3} [{low:.3} to {high:.3}]");
}

fn time(run: &mut impl FnMut()) -> Duration {
    let begin = Instant::now();
    run();
    begin.elapsed()
}

fn launches<R: Runtime>(device: R::Device) -> impl FnMut() {
    let client = R::client(&device);
    let values = client.create_from_slice(&[0; 64 * 4]);
    move || {
        for _ in 0..LAUNCHES {
            // SAFETY: the buffer has 64 elements of 4 bytes.
            let array = unsafe { ArrayArg::from_raw_parts(values.clone(), 64) };
            increment::launch::<R>(&client, CubeCount::new_single(), CubeDim::new_1d(64), array);
        }
        block_on(client.sync()).unwrap();
    }
}

fn exchanges() -> (impl FnMut(), impl FnMut()) {
    let devices = [1, 2].map(|replica| WgpuDevice::new(Default::default(), replica));
    let ids = devices.each_ref().map(Device::to_id).to_vec();
    let clients = devices.each_ref().map(Collective::client);
    let values: Vec<f32> = (0..LENGTH).map(|i| (i % 1000) as f32).collect();
    let sources = clients.each_ref().map(|client| client.create_from_slice(f32::as_bytes(&values)));
    let targets = clients.each_ref().map(|client| client.empty(LENGTH * 4));
    let finish = |clients: &[ComputeClient<Collective>]| {
        let ends: Vec<_> = clients.iter().map(|client| client.sync()).collect();
        ends.into_iter().for_each(|end| block_on(end).unwrap());
    };
    let (host_clients, host_sources) = (clients.clone(), sources.clone());
    let host = move || {
        let reads = [0, 1].map(|i| host_clients[i].read_async(vec![host_sources[i].clone()]));
        let [a, b] = reads.map(|read| block_on(read).unwrap().remove(0));
        let sums = f32::from_bytes(&a).iter().zip(f32::from_bytes(&b)).map(|(a, b)| a + b).collect::<Vec<_>>();
        let results = host_clients.each_ref().map(|client| client.create(Bytes::from_elems(sums.clone())));
        finish(&host_clients);
        drop(results);
    };
    let all_reduce = move || {
        for (client, (source, target)) in clients.iter().zip(sources.iter().zip(&targets)) {
            let mut client = client.clone();
            let f32 = ElemType::Float(FloatKind::F32);
            client.all_reduce(source.clone(), target.clone(), f32, ids.clone(), ReduceOperation::Sum);
            client.sync_collective();
        }
        finish(&clients);
    };
    (host, all_reduce)
}
