//! Operations on tensors through host memory.

use std::sync::{Arc, Mutex};

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use half::{bf16, f16};

use super::{Call, Elements, Lane, Memory, Pending, Source, Target, Tensor, Tensors};
use bonfire_core::internal::{ByteOperations, Ranges, lock};
use bonfire_core::{Buffer, DType, Error, Group, Work};

/// Packs tensors into memory that the group has allocated, so that ranks that share memory reduce it without staging
/// copies. A tensor that is the whole of an operation, and is not used elsewhere, is reduced in its own memory.
pub struct HostLane {
    group: Group,
    tensors: Arc<dyn Tensors>,
    pool: Arc<Pool>,
}

/// Unused memory for packed wholes.
#[derive(Default)]
struct Pool {
    /// Whether memory is freed that does not fit the next whole.
    exact: bool,
    /// The most buffers that are kept.
    most: usize,
    unused: Mutex<Vec<Buffer<u64>>>,
}

/// Buffers for wholes that are kept: one is reduced, the next is packed, the previous is unpacked.
const KEPT: usize = 3;

impl HostLane {
    /// A lane whose wholes have similar sizes.
    pub fn new(group: Group, tensors: Arc<dyn Tensors>) -> HostLane {
        HostLane { group, tensors, pool: Arc::new(Pool { exact: false, most: KEPT, unused: Mutex::default() }) }
    }

    /// A lane that keeps no memory for which it has no use at once, and `most` buffers otherwise: that of a large whole
    /// must not stay for small ones.
    pub(crate) fn lean(group: Group, tensors: Arc<dyn Tensors>, most: usize) -> HostLane {
        HostLane { group, tensors, pool: Arc::new(Pool { exact: true, most, unused: Mutex::default() }) }
    }
}

impl Pool {
    /// Returns memory for `bytes` bytes.
    fn take(&self, group: &Group, bytes: usize) -> Result<Buffer<u64>, Error> {
        let words = bytes.div_ceil(size_of::<u64>());
        let mut unused = lock(&self.unused);
        if self.exact {
            unused.retain(|memory| memory.len() >= words && memory.len() / 2 <= words);
        }
        let fitting = (0..unused.len()).filter(|&i| unused[i].len() >= words).min_by_key(|&i| unused[i].len());
        match fitting {
            Some(i) => Ok(unused.swap_remove(i)),
            None => {
                // What is too small for one whole is so for the next.
                unused.clear();
                group.allocate(words)
            }
        }
    }

    fn give_back(&self, memory: Buffer<u64>) {
        let mut unused = lock(&self.unused);
        if unused.len() < self.most {
            unused.push(memory);
        }
    }
}

/// The memory of a whole.
enum Whole {
    /// The only tensor's own.
    Single(Box<dyn Memory>),
    /// Of several tensors, in the first bytes of some memory; the number is their length.
    Packed(Buffer<u64>, usize),
}

impl Whole {
    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Whole::Single(memory) => memory.bytes_mut(),
            Whole::Packed(memory, bytes) => &mut cast_slice_mut(memory)[..*bytes],
        }
    }
}

impl Lane for HostLane {
    fn group(&self) -> &Group {
        &self.group
    }

    fn is_on_host(&self) -> bool {
        true
    }

    #[track_caller]
    fn start(&mut self, call: Call) -> Result<Box<dyn Pending>, Error> {
        let Call { request, bytes, factor, sources, targets } = call;
        let dtype = request.dtype();
        let read =
            sources.into_iter().map(|Source { input, ranges, .. }| Ok((input.elements(&*self.tensors)?, ranges)));
        let mut sources = read.collect::<Result<Vec<_>, Error>>()?;
        let (mut whole, kept) = match own_memory(&mut sources, &targets, bytes) {
            Some(memory) => (Whole::Single(memory), Vec::new()),
            None => {
                let mut whole = Whole::Packed(self.pool.take(&self.group, bytes)?, bytes);
                pack(whole.bytes_mut(), &sources)?;
                (whole, reusable(sources, &targets))
            }
        };
        if factor != 1.0 {
            scale(whole.bytes_mut(), dtype, factor);
        }
        let work = self.group.start_operation(request, bytes / dtype.size(), whole, |whole| Ok(whole.bytes_mut()))?;
        let (tensors, pool) = (self.tensors.clone(), self.pool.clone());
        Ok(Box::new(InFlight { work, kept, targets, tensors, pool }))
    }
}

/// Takes the memory of a tensor that is all of a whole, of which one tensor will be made.
fn own_memory(
    sources: &mut Vec<(Option<Elements>, Ranges)>,
    targets: &[Target],
    bytes: usize,
) -> Option<Box<dyn Memory>> {
    let ([(Some(Elements::Owned(memory)), from)], [to]) = (&sources[..], targets) else { return None };
    let all = Some(0..bytes);
    let aligned = memory.bytes().as_ptr().addr().is_multiple_of(to.dtype.size());
    if from.single() != all || to.ranges.single() != all || memory.bytes().len() != bytes || !aligned {
        return None;
    }
    match sources.pop() {
        Some((Some(Elements::Owned(memory)), _)) => Some(memory),
        _ => None,
    }
}

/// Copies tensors to their places in the whole.
fn pack(whole: &mut [u8], sources: &[(Option<Elements>, Ranges)]) -> Result<(), Error> {
    for (elements, ranges) in sources {
        let elements = elements.as_ref().map(Elements::bytes);
        if elements.is_some_and(|elements| elements.len() != ranges.bytes()) {
            return Err(Error::broken("an operation on tensors", "a tensor has another size than its parameter"));
        }
        for (at, range) in ranges.places() {
            match elements {
                Some(elements) => whole[range.clone()].copy_from_slice(&elements[at..at + range.len()]),
                None => whole[range].fill(0),
            }
        }
    }
    Ok(())
}

/// Returns the sources' own memory, by target: each gets that of a source of its size.
fn reusable(sources: Vec<(Option<Elements>, Ranges)>, targets: &[Target]) -> Vec<Option<Box<dyn Memory>>> {
    let mut sources = sources.into_iter();
    let mut next = |bytes: usize| {
        sources.next().and_then(|(elements, _)| match elements {
            Some(Elements::Owned(memory)) if memory.bytes().len() == bytes => Some(memory),
            _ => None,
        })
    };
    targets.iter().map(|target| next(target.ranges.bytes())).collect()
}

/// An operation in flight.
struct InFlight {
    work: Work<Whole>,
    /// By target, memory for it.
    kept: Vec<Option<Box<dyn Memory>>>,
    targets: Vec<Target>,
    tensors: Arc<dyn Tensors>,
    pool: Arc<Pool>,
}

impl Pending for InFlight {
    fn is_finished(&self) -> Option<bool> {
        Some(self.work.is_finished())
    }

    fn wait(self: Box<Self>) -> Result<Vec<Tensor>, Error> {
        let InFlight { work, kept, targets, tensors, pool } = *self;
        let (memory, bytes) = match work.wait().map_err(|(error, _)| error)? {
            Whole::Single(memory) => {
                let make = |target: &Target| tensors.tensor(target.position, &target.shape, target.dtype, memory);
                return Ok(targets.first().map(make).into_iter().collect());
            }
            Whole::Packed(memory, bytes) => (memory, bytes),
        };
        let whole = &cast_slice::<u64, u8>(&memory)[..bytes];
        let mut kept = kept.into_iter();
        let made = targets.into_iter().map(|Target { position, shape, dtype, ranges }| {
            let mut part = match kept.next().flatten() {
                Some(memory) => memory,
                None => tensors.memory(dtype, ranges.bytes() / dtype.size())?,
            };
            for (at, range) in ranges.places() {
                part.bytes_mut()[at..at + range.len()].copy_from_slice(&whole[range]);
            }
            Ok(tensors.tensor(position, &shape, dtype, part))
        });
        let made = made.collect();
        pool.give_back(memory);
        made
    }
}

/// Multiplies elements by `factor`, 16-bit ones in f32, others in their own type.
fn scale(bytes: &mut [u8], dtype: DType, factor: f64) {
    match dtype {
        DType::F64 => each(bytes, |x: f64| x * factor),
        DType::F16 => each(bytes, |x: f16| f16::from_f32(x.to_f32() * factor as f32)),
        DType::BF16 => each(bytes, |x: bf16| bf16::from_f32(x.to_f32() * factor as f32)),
        _ => each(bytes, |x: f32| x * factor as f32),
    }
}

fn each<T: Pod>(bytes: &mut [u8], f: impl Fn(T) -> T) {
    for x in cast_slice_mut::<u8, T>(bytes) {
        *x = f(*x);
    }
}

/// Returns the sum of the elements' squares, in f64.
pub(super) fn sum_of_squares(bytes: &[u8], dtype: DType) -> f64 {
    fn sum<T: Pod>(bytes: &[u8], f64: impl Fn(T) -> f64) -> f64 {
        cast_slice::<u8, T>(bytes).iter().map(|x| f64(*x)).map(|x| x * x).sum()
    }
    match dtype {
        DType::F64 => sum(bytes, |x: f64| x),
        DType::F16 => sum(bytes, f16::to_f64),
        DType::BF16 => sum(bytes, bf16::to_f64),
        _ => sum(bytes, f64::from as fn(f32) -> f64),
    }
}
