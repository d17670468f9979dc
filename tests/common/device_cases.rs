//! Collectives of devices on any runtime, compared with results of the host. All sums are exact, so results must be
//! equal.
#![allow(dead_code, reason = "each test target uses a part of it")]

use bonfire::server::{DeviceTransport, copy};
use cubecl::device::DeviceId;
use cubecl::ir::{ElemType, FloatKind, IntKind, UIntKind};
use cubecl::server::{Handle, ReduceOperation};
use half::{bf16, f16};

use crate::devices::{Client, Devices, F32, create, read, streams};

/// The element types. To a device buffers are only bytes, so it may lack arithmetic for some of these.
pub const DTYPES: [ElemType; 10] = [
    ElemType::Float(FloatKind::F16),
    ElemType::Float(FloatKind::BF16),
    F32,
    ElemType::Float(FloatKind::F64),
    ElemType::Int(IntKind::I8),
    ElemType::Int(IntKind::I32),
    ElemType::Int(IntKind::I64),
    ElemType::UInt(UIntKind::U8),
    ElemType::UInt(UIntKind::U32),
    ElemType::UInt(UIntKind::U64),
];

fn encode(dtype: ElemType, values: &[i64]) -> Vec<u8> {
    fn all<const SIZE: usize>(values: &[i64], bytes: impl Fn(i64) -> [u8; SIZE]) -> Vec<u8> {
        values.iter().flat_map(|value| bytes(*value)).collect()
    }
    match dtype {
        ElemType::Float(FloatKind::F16) => all(values, |value| f16::from_f64(value as f64).to_ne_bytes()),
        ElemType::Float(FloatKind::BF16) => all(values, |value| bf16::from_f64(value as f64).to_ne_bytes()),
        ElemType::Float(FloatKind::F32) => all(values, |value| (value as f32).to_ne_bytes()),
        ElemType::Float(FloatKind::F64) => all(values, |value| (value as f64).to_ne_bytes()),
        ElemType::Int(IntKind::I8) | ElemType::UInt(UIntKind::U8) => all(values, |value| (value as u8).to_ne_bytes()),
        ElemType::Int(IntKind::I32) | ElemType::UInt(UIntKind::U32) => {
            all(values, |value| (value as i32).to_ne_bytes())
        }
        _ => all(values, i64::to_ne_bytes),
    }
}

/// One all-reduce of the matrix.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub number: usize,
    pub dtype: ElemType,
    pub mean: bool,
    pub in_place: bool,
    pub length: usize,
    /// Bytes before and after the elements in their memory.
    pub around: (usize, usize),
}

impl Case {
    /// The elements of a rank: multiples of the number of devices, so that means are whole, and small enough for a sum
    /// in i8 and bf16.
    pub fn input(&self, rank: usize, devices: usize) -> Vec<i64> {
        let signed = !matches!(self.dtype, ElemType::UInt(_));
        let shift = if signed { 2 } else { 0 };
        (0..self.length)
            .map(|i| ((i * 7 + rank * 3 + self.number) % 5) as i64 - shift)
            .map(|v| v * devices as i64)
            .collect()
    }

    fn output(&self, devices: usize) -> Vec<u8> {
        let inputs: Vec<_> = (0..devices).map(|rank| self.input(rank, devices)).collect();
        let divisor = if self.mean { devices as i64 } else { 1 };
        let sums = (0..self.length).map(|i| inputs.iter().map(|input| input[i]).sum::<i64>() / divisor);
        encode(self.dtype, &sums.collect::<Vec<_>>())
    }

    pub fn operation(&self) -> ReduceOperation {
        if self.mean { ReduceOperation::Mean } else { ReduceOperation::Sum }
    }
}

/// Returns all cases of these lengths, with the paddings that `around` returns for each type.
pub fn cases(lengths: &[usize], around: fn(ElemType) -> [(usize, usize); 4]) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in DTYPES {
        for mean in [false, true] {
            for in_place in [false, true] {
                for &length in lengths {
                    for around in around(dtype) {
                        cases.push(Case { number: cases.len(), dtype, mean, in_place, length, around });
                    }
                }
            }
        }
    }
    cases
}

/// The padding around the elements, which must not change.
const AROUND: u8 = 0xa5;

impl Case {
    fn buffer(&self, elements: &[u8]) -> Vec<u8> {
        [&vec![AROUND; self.around.0][..], elements, &vec![AROUND; self.around.1][..]].concat()
    }

    fn inside(&self, buffer: &Handle) -> Handle {
        buffer.clone().offset_start(self.around.0 as u64).offset_end(self.around.1 as u64)
    }

    /// Makes the call as one rank of these devices. Which streams it uses depends on the rank and the case.
    pub fn call<R: DeviceTransport>(self, rank: usize, streams: &mut [Client<R>; 2], ids: Vec<DeviceId>) -> Pending {
        let stream = |bit: usize| (self.number + rank) >> bit & 1;
        let data = self.buffer(&encode(self.dtype, &self.input(rank, ids.len())));
        let source = streams[stream(0)].create_from_slice(&data);
        let target = if self.in_place {
            source.clone()
        } else {
            streams[stream(1)].create_from_slice(&vec![AROUND; data.len()])
        };
        let (from, to) = (self.inside(&source), self.inside(&target));
        let (ranks, op) = (ids.len(), self.operation());
        streams[stream(2)].all_reduce(from, to, self.dtype, ids, op);
        Pending { case: self, rank, ranks, source, data, target }
    }
}

/// A call whose result is still to be checked.
pub struct Pending {
    case: Case,
    rank: usize,
    ranks: usize,
    source: Handle,
    data: Vec<u8>,
    target: Handle,
}

impl Pending {
    /// Checks the result, after `sync_collective`.
    pub fn check<R: DeviceTransport>(self, streams: &[Client<R>; 2]) {
        let Pending { case, rank, ranks, source, data, target } = self;
        let reader = &streams[(case.number + rank) >> 3 & 1];
        let expected = case.buffer(&case.output(ranks));
        let actual = reader.read_one(target).unwrap();
        assert!(actual[..] == expected[..], "{case:?} on rank {rank} of {ranks}{}", difference(&actual, &expected));
        if !case.in_place {
            assert!(reader.read_one(source).unwrap()[..] == data[..], "source of {case:?} on rank {rank} of {ranks}");
        }
    }
}

fn difference(actual: &[u8], expected: &[u8]) -> String {
    match actual.iter().zip(expected).position(|(a, b)| a != b) {
        Some(at) => format!(": byte {at} of {} is {} and must be {}", expected.len(), actual[at], expected[at]),
        None => format!(": {} bytes of {}", actual.len(), expected.len()),
    }
}

pub fn all_reduces<R: DeviceTransport>(devices: &Devices<R>, cases: &[Case]) {
    devices.run(|rank, client| {
        let mut streams = streams(&client, rank);
        // Each device may list the devices in an order of its own.
        let mut ids = devices.ids.clone();
        ids.rotate_left(rank);
        if rank % 2 == 1 {
            ids.reverse();
        }
        let calls: Vec<_> = cases.iter().map(|case| case.call(rank, &mut streams, ids.clone())).collect();
        streams[0].sync_collective();
        calls.into_iter().for_each(|call| call.check(&streams));
    });
    assert!(devices.all.iter().all(|device| device.failure().is_none()));
}

/// Reductions of results that are still pending.
pub fn chained_all_reduces<R: DeviceTransport>(sets: [(u8, u8); 2]) {
    for (first, count) in sets {
        let devices = Devices::<R>::new(first, count);
        let results = devices.run(|rank, mut client| {
            let mut reduce = |source: &Handle, target: &Handle, op| {
                client.all_reduce(source.clone(), target.clone(), F32, devices.ids.clone(), op);
            };
            let [a, b, c] = [1.0, 0.0, 0.0].map(|value| create(&devices.client(rank), &[value, rank as f32]));
            reduce(&a, &a, ReduceOperation::Sum);
            // Rank 0 takes a buffer that is ready, the others a pending result.
            reduce(if rank == 0 { &c } else { &a }, &b, ReduceOperation::Sum);
            reduce(&b, &b, ReduceOperation::Sum);
            reduce(&a, &a, ReduceOperation::Mean);
            reduce(&a, &a, ReduceOperation::Sum);
            client.sync_collective();
            [a, b, c].map(|handle| read(&client, &handle))
        });
        let n = f32::from(count);
        let ranks = n * (n - 1.0) / 2.0;
        let a = vec![n * n, n * ranks];
        let b = vec![(n - 1.0) * n * n, (n - 1.0) * ranks * n];
        for (rank, result) in results.into_iter().enumerate() {
            assert_eq!(result, [a.clone(), b.clone(), vec![0.0, rank as f32]]);
        }
    }
}

/// Every pair, also a device and itself.
fn pairs<R: DeviceTransport>(devices: &Devices<R>) -> impl Iterator<Item = (usize, usize)> + use<R> {
    let count = devices.ids.len();
    (0..count * count).map(move |pair| (pair / count, pair % count))
}

/// cubecl's own copies, between all pairs.
pub fn transfers<R: DeviceTransport>(sets: [(u8, u8); 4]) {
    for (first, count) in sets {
        let devices = Devices::<R>::new(first, count);
        for (number, (from, to)) in pairs(&devices).enumerate() {
            // cubecl's client uses the caller's stream for both halves.
            let sources = streams(&devices.client(from), 0);
            let targets = streams(&devices.client(to), 0);
            for length in [0, 1, 4, 7, 4099] {
                let data: Vec<u8> = (0..length + 12).map(|i| (i * 31 + number) as u8).collect();
                let stream = (number + length) & 1;
                let handle = sources[length & 1].create_from_slice(&data).offset_start(8).offset_end(4);
                let mut source = sources[stream].clone();
                let whole = source.to_client(handle.clone(), &targets[stream], ElemType::UInt(UIntKind::U8));
                let tensor = handle.copy_descriptor([length].into(), [1].into(), 1);
                let tensor = source.to_client_tensor(tensor, &targets[stream], ElemType::UInt(UIntKind::U8));
                for received in [whole, tensor] {
                    let received = targets[number & 1].read_one(received).unwrap();
                    assert!(received[..] == data[8..8 + length], "{length} bytes from {from} to {to}");
                }
            }
        }
    }
}

/// The elements of a tensor in row-major order, by its definition.
fn elements(data: &[u8], shape: &[usize], strides: &[usize], size: usize) -> Vec<u8> {
    let mut packed = Vec::new();
    for number in 0..shape.iter().product::<usize>() {
        let (mut rest, mut at) = (number, 0);
        for (length, stride) in shape.iter().zip(strides).rev() {
            at += rest % length * stride;
            rest /= length;
        }
        packed.extend_from_slice(&data[at * size..(at + 1) * size]);
    }
    packed
}

/// Copies of tensors of all layouts between all pairs.
pub fn copies<R: DeviceTransport>(sets: [(u8, u8); 4]) {
    let layouts: [(&[usize], &[usize]); 10] = [
        (&[13], &[1]),
        (&[3, 5], &[8, 1]),
        (&[5, 3], &[1, 5]),
        (&[2, 3, 4], &[1, 2, 6]),
        (&[2, 3, 4], &[16, 5, 1]),
        (&[4, 6], &[0, 1]),
        (&[6, 4], &[1, 0]),
        (&[3, 0, 2], &[1, 1, 1]),
        (&[2, 1, 3], &[3, 77, 1]),
        (&[], &[]),
    ];
    for (first, count) in sets {
        let devices = Devices::<R>::new(first, count);
        for (number, (from, to)) in pairs(&devices).enumerate() {
            let (sources, targets) = (streams(&devices.client(from), 1), streams(&devices.client(to), 2));
            for (layout, (shape, strides)) in layouts.into_iter().enumerate() {
                let size = [1, 2, 4, 8][(layout + number) % 4];
                let offset = 4 * (layout % 3);
                let data: Vec<u8> = (0..offset + 64 * size).map(|i| (i * 13 + number) as u8).collect();
                let handle = sources[layout & 1].create_from_slice(&data).offset_start(offset as u64);
                let tensor = handle.copy_descriptor(shape.into(), strides.into(), size);
                let copied = copy(&sources[number & 1], tensor, &targets[layout >> 1 & 1]).unwrap();
                let copied = targets[number & 1].read_one(copied).unwrap();
                let expected = elements(&data[offset..], shape, strides, size);
                assert!(copied[..] == expected[..], "{shape:?} with {strides:?} from {from} to {to}");
            }
        }
    }
}
