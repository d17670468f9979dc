//! Everything that devices do together, compared with what the host computes. All sums are exact, so it must be equal.

#[path = "common/devices.rs"]
mod devices;

use bonfire::server::copy;
use cubecl::ir::{ElemType, FloatKind, IntKind, UIntKind};
use cubecl::server::{Handle, ReduceOperation};
use cubecl::stream_id::StreamId;
use half::{bf16, f16};

use devices::{Client, Devices, create, read};

const F32: ElemType = ElemType::Float(FloatKind::F32);

/// To a device buffers are only bytes, so it may lack arithmetic for some of these.
const DTYPES: [ElemType; 10] = [
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
    let bytes = |value: i64| match dtype {
        ElemType::Float(FloatKind::F16) => f16::from_f64(value as f64).to_ne_bytes().to_vec(),
        ElemType::Float(FloatKind::BF16) => bf16::from_f64(value as f64).to_ne_bytes().to_vec(),
        ElemType::Float(FloatKind::F32) => (value as f32).to_ne_bytes().to_vec(),
        ElemType::Float(FloatKind::F64) => (value as f64).to_ne_bytes().to_vec(),
        ElemType::Int(IntKind::I8) => (value as i8).to_ne_bytes().to_vec(),
        ElemType::UInt(UIntKind::U8) => (value as u8).to_ne_bytes().to_vec(),
        ElemType::Int(IntKind::I32) | ElemType::UInt(UIntKind::U32) => (value as i32).to_ne_bytes().to_vec(),
        _ => value.to_ne_bytes().to_vec(),
    };
    values.iter().flat_map(|value| bytes(*value)).collect()
}

/// One all-reduce of the matrix.
#[derive(Clone, Copy, Debug)]
struct Case {
    number: usize,
    dtype: ElemType,
    mean: bool,
    in_place: bool,
    length: usize,
    /// Bytes before and after the elements in their memory.
    around: (usize, usize),
}

impl Case {
    /// Multiples of the number of devices, so that means are whole, and small enough for a sum in i8 and bf16.
    fn input(&self, rank: usize, devices: usize) -> Vec<i64> {
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

    fn operation(&self) -> ReduceOperation {
        if self.mean { ReduceOperation::Mean } else { ReduceOperation::Sum }
    }
}

fn cases(lengths: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for dtype in DTYPES {
        for mean in [false, true] {
            for in_place in [false, true] {
                for &length in lengths {
                    for around in [(0, 0), (12, 0), (0, 5), (32, 11)] {
                        cases.push(Case { number: cases.len(), dtype, mean, in_place, length, around });
                    }
                }
            }
        }
    }
    cases
}

/// What is around the elements, and must stay.
const AROUND: u8 = 0xa5;

fn buffer(case: &Case, elements: &[u8]) -> Vec<u8> {
    [&vec![AROUND; case.around.0][..], elements, &vec![AROUND; case.around.1][..]].concat()
}

fn inside(case: &Case, buffer: &Handle) -> Handle {
    buffer.clone().offset_start(case.around.0 as u64).offset_end(case.around.1 as u64)
}

/// The same device on this thread's stream and on another one.
fn streams(client: &Client, rank: usize) -> [Client; 2] {
    let mut other = client.clone();
    // SAFETY: the stream is this thread's own.
    unsafe { other.set_stream(StreamId { value: (1 << 40) + rank as u64 }) };
    [client.clone(), other]
}

fn all_reduces(devices: &Devices, cases: &[Case]) {
    let count = devices.ids.len();
    devices.run(|rank, client| {
        let mut streams = streams(&client, rank);
        // The order of the list is this device's own affair.
        let mut ids = devices.ids.clone();
        ids.rotate_left(rank);
        if rank % 2 == 1 {
            ids.reverse();
        }
        let mut results = Vec::new();
        for case in cases {
            let stream = |bit: usize| (case.number + rank) >> bit & 1;
            let data = buffer(case, &encode(case.dtype, &case.input(rank, count)));
            let source = streams[stream(0)].create_from_slice(&data);
            let target = if case.in_place {
                source.clone()
            } else {
                streams[stream(1)].create_from_slice(&vec![AROUND; data.len()])
            };
            let (from, to) = (inside(case, &source), inside(case, &target));
            streams[stream(2)].all_reduce(from, to, case.dtype, ids.clone(), case.operation());
            results.push((source, data, target));
        }
        client.sync_collective();
        for (case, (source, data, target)) in cases.iter().zip(results) {
            let reader = &streams[(case.number + rank) >> 3 & 1];
            let expected = buffer(case, &case.output(count));
            let actual = reader.read_one(target).unwrap();
            assert_eq!(actual[..], expected[..], "{case:?} on device {rank}");
            if !case.in_place {
                assert!(reader.read_one(source).unwrap()[..] == data[..], "source of {case:?} on device {rank}");
            }
        }
    });
    assert!(devices.all.iter().all(|device| device.failure().is_none()));
}

#[test]
fn all_reduce_on_one_device() {
    all_reduces(&Devices::new(0, 1), &cases(&[0, 1, 7]));
}

#[test]
fn all_reduce_on_two_devices() {
    all_reduces(&Devices::new(1, 2), &cases(&[0, 1, 7, 1001]));
}

#[test]
fn all_reduce_on_three_devices() {
    all_reduces(&Devices::new(3, 3), &cases(&[0, 1, 7]));
}

#[test]
fn all_reduce_on_five_devices() {
    all_reduces(&Devices::new(6, 5), &cases(&[0, 1, 33]));
}

#[test]
fn all_reduce_of_large_buffers() {
    // More than one round's worth, less, and one that ends inside a word.
    let case = |number, dtype, length, around| Case { number, dtype, mean: false, in_place: true, length, around };
    let f16 = ElemType::Float(FloatKind::F16);
    let cases = [case(0, F32, 7 << 20, (0, 0)), case(1, F32, 1 << 20, (8, 4)), case(2, f16, (1 << 18) + 1, (0, 2))];
    all_reduces(&Devices::new(11, 2), &cases);
}

#[test]
fn reductions_of_results_that_are_not_there_yet() {
    for (first, count) in [(13, 2), (15, 3)] {
        let devices = Devices::new(first, count);
        let results = devices.run(|rank, mut client| {
            let mut reduce = |source: &Handle, target: &Handle, op| {
                client.all_reduce(source.clone(), target.clone(), F32, devices.ids.clone(), op);
            };
            let [a, b, c] = [1.0, 0.0, 0.0].map(|value| create(&devices.client(rank), &[value, rank as f32]));
            reduce(&a, &a, ReduceOperation::Sum);
            // Some take what is pending, some what is there.
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

/// Every pair, also of a device with itself.
fn pairs(devices: &Devices) -> impl Iterator<Item = (usize, usize)> {
    let count = devices.ids.len();
    (0..count * count).map(move |pair| (pair / count, pair % count))
}

#[test]
fn transfers_between_all_pairs() {
    for (first, count) in [(18, 1), (19, 2), (21, 3), (24, 5)] {
        let devices = Devices::new(first, count);
        for (number, (from, to)) in pairs(&devices).enumerate() {
            // cubecl's client takes both halves for the caller's stream.
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

#[test]
fn copies_between_all_pairs() {
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
    for (first, count) in [(29, 1), (30, 2), (32, 3), (35, 5)] {
        let devices = Devices::new(first, count);
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
