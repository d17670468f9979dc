//! A random operation, the input of its ranks, and the result that they must have.

use std::ops::Range;

use bonfire_core::{Call, DType, Operation, ReduceOp, partition};
use bytemuck::{bytes_of, pod_read_unaligned};

use bonfire_testing::oracle::Sample;
use bonfire_testing::transport::Random;

/// Groups that are in use at once.
pub const GROUPS: usize = 3;
const OPERATIONS: [Operation; 10] = [
    Operation::AllReduce,
    Operation::Reduce,
    Operation::Broadcast,
    Operation::AllGather,
    Operation::ReduceScatter,
    Operation::AllToAll,
    Operation::Barrier,
    Operation::Send,
    Operation::Gather,
    Operation::Scatter,
];
/// The period of a rank's input in elements. A prime: no part and no chunk is as long as some repetitions.
const PERIOD: usize = 251;

/// One operation of one group, the same on all its ranks.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub step: usize,
    pub group: usize,
    /// The number of ranks of that group.
    pub ranks: usize,
    pub call: Call,
    /// Whether the buffers are from `Group::allocate`, except on a few ranks.
    pub allocated: bool,
    /// The seed of the ranks' input.
    pub salt: u64,
    /// Barriers of the group so far, this one included.
    pub barriers: usize,
}

pub fn hash(a: u64, b: u64) -> u64 {
    let mut x = a.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ b.wrapping_add(0x2545_f491_4f6c_dd1d);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ x >> 31).max(1)
}

pub fn below(random: &mut Random, end: usize) -> usize {
    (random.next() >> 8) as usize % end
}

/// The ranks of a group. The second and the third are subgroups of the first, and overlap.
pub fn members(group: usize, world_size: usize) -> Range<usize> {
    [0..world_size, 0..world_size - 1, 1..world_size][group].clone()
}

impl Case {
    /// Draws an operation, mostly small, sometimes up to 4 MiB, around powers of two (where algorithms change) or not.
    pub fn draw(random: &mut Random, step: usize, group: usize, world_size: usize) -> Case {
        let operation = OPERATIONS[below(random, OPERATIONS.len())];
        let dtype = DType::ALL[below(random, DType::ALL.len())];
        let power = match below(random, 100) {
            0..75 => below(random, 15),
            75..93 => 14 + below(random, 5),
            _ => 18 + below(random, 5),
        };
        let bytes = match below(random, 4) {
            0 => (1 << power) + below(random, 3) * dtype.size() - dtype.size().min(1 << power),
            _ => below(random, 1 << power),
        };
        let n = members(group, world_size).len();
        let count = match operation {
            Operation::Barrier => 0,
            Operation::AllToAll | Operation::Gather | Operation::Scatter => bytes / dtype.size() / n * n,
            _ => bytes / dtype.size(),
        };
        let (op, rank) = (ReduceOp::ALL[below(random, ReduceOp::ALL.len())], below(random, n));
        let reduces = matches!(operation, Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter);
        let rooted =
            matches!(operation, Operation::Reduce | Operation::Broadcast | Operation::Gather | Operation::Scatter);
        let mut call = Call::new(operation, dtype, count);
        (call.reduction, call.root) = (reduces.then_some(op), rooted.then_some(rank));
        Case { step, group, ranks: n, call, allocated: below(random, 4) == 0, salt: random.next(), barriers: 0 }
    }

    pub fn op(&self) -> ReduceOp {
        self.call.reduction.unwrap_or(ReduceOp::Sum)
    }

    pub fn root(&self) -> usize {
        self.call.root.unwrap_or(0)
    }

    pub fn part(&self, rank: usize) -> Range<usize> {
        partition(self.call.count, self.ranks, rank)
    }

    /// The input of `rank` to a reduction. Integers are arbitrary, and wrap. Floats are such that all results are exact
    /// or rounded once. They are not zero, since a product of zeros has a sign.
    fn numbers(&self, rank: usize) -> impl Iterator<Item = i128> {
        let (dtype, salt) = (self.call.dtype, hash(self.salt, rank as u64));
        (0..PERIOD.min(self.call.count)).map(move |i| {
            let bits = hash(salt, i as u64);
            match dtype {
                DType::F32 | DType::F64 | DType::F16 | DType::BF16 => {
                    // A product of more ranks is a power of two, so that it is exact.
                    let is_power = self.op() == ReduceOp::Product && self.ranks > 4;
                    let magnitude = if is_power { 1 + bits % 12 / 11 } else { bits % 12 + 1 };
                    magnitude as i128 * if bits >> 32 & 1 == 0 { 1 } else { -1 }
                }
                DType::I8 => (bits as i8).into(),
                DType::I16 => (bits as i16).into(),
                DType::I32 => (bits as i32).into(),
                DType::I64 => (bits as i64).into(),
                DType::U8 => (bits as u8).into(),
                DType::U16 => (bits as u16).into(),
                DType::U32 => (bits as u32).into(),
                DType::U64 => bits.into(),
                other => panic!("no case has type {other}"),
            }
        })
    }

    fn repeated<T: Sample>(&self, period: &[T]) -> Vec<T> {
        period.iter().copied().cycle().take(self.call.count).collect()
    }

    /// The input of `rank`. Arbitrary bits where the operation does not compute with them.
    pub fn input<T: Sample>(&self, rank: usize) -> Vec<T> {
        let period: Vec<T> = match self.call.reduction {
            Some(_) => self.numbers(rank).map(T::of).collect(),
            None => {
                let salt = hash(self.salt, rank as u64);
                let bits = (0..PERIOD.min(self.call.count)).map(|i| hash(salt, i as u64));
                bits.map(|bits| pod_read_unaligned(&bytes_of(&bits)[..size_of::<T>()])).collect()
            }
        };
        self.repeated(&period)
    }

    fn reduced<T: Sample>(&self) -> Vec<T> {
        let (op, n) = (self.op(), self.ranks);
        let mut numbers: Vec<i128> = self.numbers(0).collect();
        for rank in 1..n {
            for (all, number) in numbers.iter_mut().zip(self.numbers(rank)) {
                *all = match op {
                    ReduceOp::Sum | ReduceOp::Mean => *all + number,
                    ReduceOp::Max => number.max(*all),
                    ReduceOp::Min => number.min(*all),
                    // The low bits, which are all that an integer type has, are right.
                    ReduceOp::Product => all.wrapping_mul(number),
                    other => panic!("no case has {other}"),
                };
            }
        }
        let period = numbers.into_iter().map(|x| if op == ReduceOp::Mean { T::mean(x, n) } else { T::of(x) });
        self.repeated(&period.collect::<Vec<T>>())
    }

    /// The result that `rank` must have, and its range in a buffer that was used in place.
    pub fn want<T: Sample>(&self, rank: usize) -> (Range<usize>, Vec<T>) {
        let (n, whole) = (self.ranks, 0..self.call.count);
        match self.call.operation {
            Operation::AllReduce => (whole, self.reduced()),
            Operation::Reduce if self.call.root == Some(rank) => (whole, self.reduced()),
            Operation::Reduce => (whole, self.input(rank)),
            Operation::Broadcast => (whole, self.input(self.root())),
            Operation::AllGather => (whole, (0..n).flat_map(|r| self.input(r)[self.part(r)].to_vec()).collect()),
            Operation::ReduceScatter => (self.part(rank), self.reduced()[self.part(rank)].to_vec()),
            Operation::AllToAll => (whole, (0..n).flat_map(|r| self.input(r)[self.part(rank)].to_vec()).collect()),
            Operation::Gather if self.call.root != Some(rank) => (whole, self.input(rank)),
            Operation::Gather => (whole, (0..n).flat_map(|r| self.input(r)[self.part(r)].to_vec()).collect()),
            Operation::Scatter => (self.part(rank), self.input(self.root())[self.part(rank)].to_vec()),
            Operation::Barrier => (0..0, Vec::new()),
            // `Send`, the only other operation that is drawn.
            _ => (whole, self.input((rank + n - 1) % n)),
        }
    }
}
