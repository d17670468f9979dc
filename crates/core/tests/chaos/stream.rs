//! The stream: mixed operations, drawn alike on all ranks, each checked against an oracle.

use std::ops::Range;

use bonfire_core::{DType, Element, Error, Group, ReduceOp, Work, partition};
use half::{bf16, f16};

use bonfire_testing::oracle::{Sample, parcel, reduced, value};
use bonfire_testing::transport::Random;

/// The failure of a step.
pub enum StepError {
    Failed(Error),
    Wrong(String),
}

impl From<Error> for StepError {
    fn from(error: Error) -> StepError {
        StepError::Failed(error)
    }
}

#[derive(Clone, Copy, Debug)]
enum StepKind {
    AllReduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    AllToAll,
    Reduce,
    Barrier,
    /// Several started operations that are waited for in a different order.
    Several,
    /// Each rank sends to the next one.
    Ring,
}

impl StepKind {
    /// The first 6 are drawn where a step must be a collective operation.
    const ALL: [StepKind; 9] = [
        StepKind::AllReduce,
        StepKind::Broadcast,
        StepKind::AllGather,
        StepKind::ReduceScatter,
        StepKind::AllToAll,
        StepKind::Reduce,
        StepKind::Barrier,
        StepKind::Several,
        StepKind::Ring,
    ];
}

/// The form of a call, which each rank chooses for itself.
#[derive(Clone, Copy, Debug)]
enum Form {
    InPlace,
    Into,
    Started,
    /// In place, in a buffer from `Group::allocate`.
    Allocated,
}

/// One step of the stream.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    what: StepKind,
    form: Form,
    dtype: DType,
    len: usize,
    root: usize,
    op: ReduceOp,
    /// Offset into the oracle's numbers, so that data left by an earlier step is wrong here.
    salt: usize,
}

/// Returns a generator that is seeded with all these numbers.
pub fn random(numbers: &[u64]) -> Random {
    let mixed = numbers.iter().fold(0x243f_6a88_85a3_08d3, |sum: u64, number| {
        (sum ^ number.wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
    });
    let mut random = Random(mixed | 1);
    for _ in 0..4 {
        random.next();
    }
    random
}

impl Step {
    /// Draws step `number` of a stream for this rank of `group`, of at most `2^largest` bytes. With `collective`, the
    /// operation is one that takes all ranks.
    pub fn draw((seed, number): (u64, u64), largest: usize, group: &Group, collective: bool) -> Step {
        let (mut all, mut own) = (random(&[seed, number]), random(&[seed, number, group.rank() as u64]));
        let mut below = |n: usize| (all.next() >> 16) as usize % n;
        let what = StepKind::ALL[below(if collective { 6 } else { StepKind::ALL.len() })];
        let dtype = DType::ALL[below(DType::ALL.len())];
        // Small sizes are as frequent as large ones.
        let exponent = below(largest + 1);
        let len = below((1 << exponent) + 1) / dtype.size();
        let (root, op) = (below(group.world_size()), ReduceOp::ALL[below(ReduceOp::ALL.len())]);
        let form = [Form::InPlace, Form::Into, Form::Started, Form::Allocated][(own.next() >> 16) as usize % 4];
        Step { what, form, dtype, len, root, op, salt: below(1 << 20) }
    }

    pub fn run(&self, group: &Group) -> Result<(), StepError> {
        match self.dtype {
            DType::F32 => self.typed::<f32>(group),
            DType::F64 => self.typed::<f64>(group),
            DType::F16 => self.typed::<f16>(group),
            DType::BF16 => self.typed::<bf16>(group),
            DType::I8 => self.typed::<i8>(group),
            DType::I16 => self.typed::<i16>(group),
            DType::I32 => self.typed::<i32>(group),
            DType::I64 => self.typed::<i64>(group),
            DType::U8 => self.typed::<u8>(group),
            DType::U16 => self.typed::<u16>(group),
            DType::U32 => self.typed::<u32>(group),
            DType::U64 => self.typed::<u64>(group),
            other => panic!("no step has type {other}"),
        }
    }

    fn typed<T: Sample>(&self, group: &Group) -> Result<(), StepError> {
        let Step { len, root, op, salt, .. } = *self;
        let (rank, n) = (group.rank(), group.world_size());
        let own = partition(len, n, rank);
        let of = |rank: usize| -> Vec<T> { (salt..salt + len).map(|i| T::of(value(rank, i))).collect() };
        let total = || -> Vec<T> { (salt..salt + len).map(|i| reduced(op, n, i)).collect() };
        let mine = of(rank);
        match self.what {
            StepKind::AllReduce => self.call(
                group,
                (mine.clone(), &mine, 0..len, total()),
                |data| group.all_reduce(data, op),
                |input, output| group.all_reduce_into(input, output, op),
                |data| group.start_all_reduce(data, op),
            ),
            StepKind::Broadcast => self.call(
                group,
                (mine.clone(), &mine, 0..len, of(root)),
                |data| group.broadcast(data, root),
                |input, output| group.broadcast_into((rank == root).then_some(input), output, root),
                |data| group.start_broadcast(data, root),
            ),
            StepKind::AllGather => {
                let mut data = vec![T::zeroed(); len];
                data[own.clone()].copy_from_slice(&mine[own.clone()]);
                let want = (0..n).flat_map(|r| of(r)[partition(len, n, r)].to_vec()).collect();
                self.call(
                    group,
                    (data, &mine[own], 0..len, want),
                    |data| group.all_gather(data),
                    |input, output| group.all_gather_into(input, output),
                    |data| group.start_all_gather(data),
                )
            }
            StepKind::ReduceScatter => self.call(
                group,
                (mine.clone(), &mine, own, total()),
                |data| group.reduce_scatter(data, op),
                |input, output| group.reduce_scatter_into(input, output, op),
                |data| group.start_reduce_scatter(data, op),
            ),
            StepKind::AllToAll => {
                let part = len / n;
                let parts = |of: &dyn Fn(usize, usize) -> T| -> Vec<T> {
                    (0..n).flat_map(|other| (salt..salt + part).map(move |i| of(other, i))).collect()
                };
                let mine = parts(&|to, i| parcel(rank, to, i));
                self.call(
                    group,
                    (mine.clone(), &mine, 0..mine.len(), parts(&|from, i| parcel(from, rank, i))),
                    |data| group.all_to_all(data),
                    |input, output| group.all_to_all_into(input, output),
                    |data| group.start_all_to_all(data),
                )
            }
            StepKind::Reduce => self.call(
                group,
                (mine.clone(), &mine, if rank == root { 0..len } else { 0..0 }, total()),
                |data| group.reduce(data, op, root),
                |input, output| group.reduce_into(input, output, op, root),
                |data| group.start_reduce(data, op, root),
            ),
            StepKind::Barrier => match self.form {
                Form::Started => Ok(group.start_barrier()?.wait().map_err(|(error, ())| error)?),
                _ => Ok(group.barrier()?),
            },
            StepKind::Several => {
                let [first, second] = [0, 1].map(|_| group.start_all_reduce(mine.clone(), op));
                let barrier = group.start_barrier()?;
                let second = second?.wait();
                let first = first?.wait();
                barrier.wait().map_err(|(error, ())| error)?;
                let want = total();
                for result in [first, second] {
                    self.compare(&result.map_err(|(error, _)| error)?, &want)?;
                }
                Ok(())
            }
            StepKind::Ring => {
                let (next, previous) = ((rank + 1) % n, (rank + n - 1) % n);
                let mut data = vec![T::zeroed(); len];
                // The ranks never wait for each other in a cycle: an odd rank receives first.
                if rank % 2 == 0 {
                    group.send(&mine, next)?;
                    group.recv(&mut data, previous)?;
                } else {
                    group.recv(&mut data, previous)?;
                    group.send(&mine, next)?;
                }
                self.compare(&data, &of(previous))
            }
        }
    }

    /// Calls the operation in the step's form. The tuple has the data of a call in place, the input of one out of
    /// place, the range of the result, and the expected elements.
    fn call<T: Sample>(
        &self,
        group: &Group,
        (mut data, input, promised, want): (Vec<T>, &[T], Range<usize>, Vec<T>),
        in_place: impl FnOnce(&mut [T]) -> Result<(), Error>,
        into: impl FnOnce(&[T], &mut [T]) -> Result<(), Error>,
        start: impl FnOnce(Vec<T>) -> Result<Work<Vec<T>>, Error>,
    ) -> Result<(), StepError> {
        let want = &want[promised.clone()];
        match self.form {
            Form::InPlace => {
                in_place(&mut data)?;
                self.compare(&data[promised], want)
            }
            Form::Allocated => {
                let mut own = group.allocate::<T>(data.len())?;
                own.copy_from_slice(&data);
                in_place(&mut own)?;
                self.compare(&own[promised], want)
            }
            Form::Started => {
                let data = start(data)?.wait().map_err(|(error, _)| error)?;
                self.compare(&data[promised], want)
            }
            Form::Into => {
                let before = input.to_vec();
                let mut output = vec![T::zeroed(); promised.len()];
                let result = into(input, &mut output);
                if bytes(input) != bytes(&before) {
                    return Err(StepError::Wrong(format!("{self:?} changed its input, and returned {result:?}")));
                }
                result?;
                self.compare(&output, want)
            }
        }
    }

    fn compare<T: Element>(&self, got: &[T], want: &[T]) -> Result<(), StepError> {
        if bytes(got) == bytes(want) {
            return Ok(());
        }
        let at = got.iter().zip(want).position(|(got, want)| bytes(&[*got]) != bytes(&[*want]));
        Err(StepError::Wrong(format!("{self:?} has a wrong result at {at:?}")))
    }
}

fn bytes<T: Element>(elements: &[T]) -> &[u8] {
    bytemuck::cast_slice(elements)
}
