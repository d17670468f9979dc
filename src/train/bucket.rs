//! Buckets: which gradients are reduced together, and the memory for that.

use std::collections::VecDeque;
use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Bytes, FloatDType, Scalar, Tensor, TensorPrimitive};
use bytemuck::{Pod, cast_slice, cast_slice_mut};
use half::{bf16, f16};

use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{Buffer, DType, Error, Group, Operation, ReduceOp, Work};

/// How large buckets are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// The most bytes in the first bucket.
    pub first: usize,
    /// The most bytes in each later bucket.
    pub next: usize,
    /// A tensor of at least this many bytes gets a bucket of its own and is reduced in its own memory, which saves two
    /// copies.
    pub alone: usize,
}

impl Limits {
    /// For gradients that are all there at the start. The first bucket is small, so that its reduction starts while
    /// the rest is being packed.
    pub const ON_HOST: Limits = Limits { first: 1 << 20, next: 25 << 20, alone: 256 << 10 };

    /// The same on collective devices. An operation there costs the host 50 to 150 us (an estimate for CUDA), in which
    /// a device copies 25 MiB several times: packing always pays.
    const ON_DEVICES: Limits = Limits { alone: 25 << 20, ..Limits::ON_HOST };

    pub fn of(on_devices: bool) -> Limits {
        if on_devices { Limits::ON_DEVICES } else { Limits::ON_HOST }
    }
}

/// The parameters' positions in each bucket, in the order in which buckets are sent.
pub(crate) type BucketTable = Arc<[Vec<usize>]>;

/// Buckets in flight at a time: one is reduced, the next is packed, the previous is unpacked.
const WINDOW: usize = 3;

/// Removes the oldest bucket in flight if the window is full: it must be finished before another one is started.
pub(crate) fn pop_if_full<T>(in_flight: &mut VecDeque<T>) -> Option<T> {
    if in_flight.len() >= WINDOW { in_flight.pop_front() } else { None }
}

/// A gradient's properties that determine its bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Item {
    /// The position of its parameter.
    pub position: usize,
    pub dtype: DType,
    pub bytes: usize,
}

/// Splits gradients into buckets of one element type each. Returns the positions in each bucket, and the buckets in the
/// order in which they fill up. Depends on the arguments only, so all ranks get the same buckets.
pub(crate) fn buckets(items: impl Iterator<Item = Item>, limits: Limits) -> Vec<Vec<usize>> {
    let mut full: Vec<Vec<usize>> = Vec::new();
    let mut open: Vec<(DType, usize, Vec<usize>)> = Vec::new();
    for item in items {
        if item.bytes >= limits.alone {
            full.push(vec![item.position]);
            continue;
        }
        let limit = if full.is_empty() { limits.first } else { limits.next };
        let at = open.iter().position(|(dtype, ..)| *dtype == item.dtype).unwrap_or_else(|| {
            open.push((item.dtype, 0, Vec::new()));
            open.len() - 1
        });
        let (_, bytes, positions) = &mut open[at];
        if *bytes + item.bytes > limit && !positions.is_empty() {
            full.push(std::mem::take(positions));
            *bytes = 0;
        }
        *bytes += item.bytes;
        positions.push(item.position);
    }
    full.extend(open.into_iter().map(|(.., positions)| positions).filter(|positions| !positions.is_empty()));
    full
}

/// The memory of a bucket.
pub(crate) enum Bucket {
    /// A single tensor's own bytes.
    Single(Bytes),
    /// Several tensors one after the other, in the first bytes of memory that is reused from step to step; the number
    /// is their length. The group allocates the memory, so that ranks that share memory reduce it without staging
    /// copies.
    Packed(Buffer<u64>, usize),
}

impl Bucket {
    /// Takes a tensor's memory as a bucket of its own. Returns `None` if it is not aligned for the elements.
    pub fn single(bytes: &mut Bytes, dtype: DType) -> Option<Bucket> {
        let aligned = bytes.as_ptr().addr().is_multiple_of(dtype.size());
        aligned.then(|| Bucket::Single(std::mem::replace(bytes, Bytes::from_bytes_vec(Vec::new()))))
    }

    /// Makes a bucket of `bytes` bytes in `memory`, or in new memory if that is too small.
    pub fn packed(group: &Group, memory: Option<Buffer<u64>>, bytes: usize) -> Result<Bucket, Error> {
        let words = bytes.div_ceil(size_of::<u64>());
        let memory = match memory.filter(|memory| memory.len() >= words) {
            Some(memory) => memory,
            None => group.allocate(words)?,
        };
        Ok(Bucket::Packed(memory, bytes))
    }

    /// Fills the bucket with tensors of these lengths in bytes, one after the other. `None` is filled with zeros.
    pub fn fill<'a>(mut self, tensors: impl Iterator<Item = (Option<&'a [u8]>, usize)>) -> Bucket {
        let mut rest = self.bytes();
        for (tensor, bytes) in tensors {
            let (part, after) = rest.split_at_mut(bytes);
            match tensor {
                Some(tensor) => part.copy_from_slice(tensor),
                None => part.fill(0),
            }
            rest = after;
        }
        self
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        match self {
            Bucket::Single(bytes) => bytes,
            Bucket::Packed(memory, bytes) => &mut cast_slice_mut(memory)[..*bytes],
        }
    }

    /// Returns the memory of a packed bucket for reuse.
    pub fn into_memory(self) -> Option<Buffer<u64>> {
        match self {
            Bucket::Single(_) => None,
            Bucket::Packed(memory, _) => Some(memory),
        }
    }

    /// Starts an operation on the bucket's elements.
    #[track_caller]
    pub fn start(self, group: &Group, dtype: DType, op: BucketOp) -> Result<Work<Bucket>, Error> {
        self.start_request(group, op.request(dtype))
    }

    /// As [`start`](Self::start), with a request for which more must agree.
    #[track_caller]
    pub fn start_request(mut self, group: &Group, request: Request<'static>) -> Result<Work<Bucket>, Error> {
        let count = self.bytes().len() / request.dtype().size();
        group.start_operation(request, count, self, |bucket| Ok(bucket.bytes()))
    }
}

/// An operation on a bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) enum BucketOp {
    /// The reduction over all ranks, on every rank.
    AllReduce(ReduceOp),
    /// Each rank's part of the reduction, on that rank.
    ReduceScatter(ReduceOp),
    /// All ranks' parts, on every rank.
    AllGather,
}

impl BucketOp {
    pub fn request(self, dtype: DType) -> Request<'static> {
        let request = |operation| Request::new(operation, dtype);
        match self {
            BucketOp::AllReduce(op) => request(Operation::AllReduce).reduction(op),
            BucketOp::ReduceScatter(op) => request(Operation::ReduceScatter).reduction(op),
            BucketOp::AllGather => request(Operation::AllGather),
        }
    }
}

/// How a rank's gradients enter the mean over the samples of all ranks.
///
/// A weight is at most 1, and the ranks' weights add up to 1. So neither a product nor a sum of products exceeds the
/// largest gradient: what has a mean in the range of the element type stays in that range on the way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Weighting {
    /// All ranks have equally many samples: the mean over ranks.
    Equal,
    /// The sum over ranks, each with its gradients times this part of the samples.
    Share(f64),
}

impl Weighting {
    /// The factor of this rank's gradients before the reduction.
    pub fn factor(self) -> f64 {
        match self {
            Weighting::Equal => 1.0,
            Weighting::Share(share) => share,
        }
    }

    pub fn reduction(self) -> ReduceOp {
        match self {
            Weighting::Equal => ReduceOp::Mean,
            Weighting::Share(_) => ReduceOp::Sum,
        }
    }

    /// The element type in which gradients of type `dtype` are multiplied and reduced. The range of f16 ends at 6e-8,
    /// near the gradients of many models, so their products need more. They are rounded once, after the reduction.
    pub fn carrier(self, dtype: DType) -> DType {
        match (self, dtype) {
            (Weighting::Share(_), DType::F16) => DType::F32,
            _ => dtype,
        }
    }
}

/// Multiplies elements by `factor`, 16-bit ones in f32, others in their own type.
pub(crate) fn scale(bytes: &mut [u8], dtype: DType, factor: f64) {
    match dtype {
        DType::F64 => each(bytes, |x: f64| x * factor),
        DType::F16 => each(bytes, |x: f16| f16::from_f32(x.to_f32() * factor as f32)),
        DType::BF16 => each(bytes, |x: bf16| bf16::from_f32(x.to_f32() * factor as f32)),
        _ => each(bytes, |x: f32| x * factor as f32),
    }
}

/// Does what [`scale`] does, on the tensor's device.
pub(crate) fn scale_tensor<B: Backend>(tensor: FloatTensor<B>, dtype: DType, factor: f64) -> FloatTensor<B> {
    let factor = Scalar::from(factor);
    let narrow = match dtype {
        DType::F16 => FloatDType::F16,
        DType::BF16 => FloatDType::BF16,
        _ => return B::float_mul_scalar(tensor, factor),
    };
    B::float_cast(B::float_mul_scalar(B::float_cast(tensor, FloatDType::F32), factor), narrow)
}

/// Returns the sum of the elements' squares, computed on the tensors' device and read at once. Those of one tensor are
/// added in f32, unless they are f64.
pub(crate) fn sum_of_squares_on_device<B: Backend>(tensors: Vec<FloatTensor<B>>) -> Result<f64, Error> {
    let sums = tensors.into_iter().map(|tensor| {
        let tensor = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(tensor));
        let wide = if tensor.dtype() == burn::tensor::DType::F64 { tensor } else { tensor.cast(FloatDType::F32) };
        (wide.clone() * wide).sum()
    });
    // One read for all of one type.
    let (double, single): (Vec<_>, Vec<_>) = sums.partition(|sum| sum.dtype() == burn::tensor::DType::F64);
    let mut total = 0.0;
    for sums in [double, single].into_iter().filter(|sums| !sums.is_empty()) {
        let data = Tensor::cat(sums, 0).try_into_data().map_err(|e| Error::io("reading a norm of gradients", e))?;
        total += data.iter::<f64>().sum::<f64>();
    }
    Ok(total)
}

/// Returns the sum of the elements' squares, in f64.
pub(crate) fn sum_of_squares(bytes: &[u8], dtype: DType) -> f64 {
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

fn each<T: Pod>(bytes: &mut [u8], f: impl Fn(T) -> T) {
    for x in cast_slice_mut::<u8, T>(bytes) {
        *x = f(*x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(items: &[(DType, usize)]) -> Vec<Vec<usize>> {
        split_with(Limits::ON_HOST, items)
    }

    fn split_with(limits: Limits, items: &[(DType, usize)]) -> Vec<Vec<usize>> {
        let items = items.iter().enumerate().rev();
        buckets(items.map(|(position, &(dtype, bytes))| Item { position, dtype, bytes }), limits)
    }

    const KIB: usize = 1 << 10;
    const MIB: usize = 1 << 20;

    #[test]
    fn the_first_bucket_takes_1_mib_and_the_next_ones_25_mib_in_the_given_order() {
        let sizes = vec![(DType::F32, 128 * KIB); 8 + 200 + 3];
        let buckets = split(&sizes);
        assert_eq!(buckets.iter().map(Vec::len).collect::<Vec<_>>(), [8, 200, 3]);
        assert_eq!(buckets.concat(), (0..211).rev().collect::<Vec<_>>());
    }

    #[test]
    fn a_bucket_has_one_element_type() {
        let sizes = [(DType::F32, 8), (DType::F16, 8), (DType::F32, 8), (DType::F16, 8)];
        assert_eq!(split(&sizes), [vec![3, 1], vec![2, 0]]);
    }

    #[test]
    fn large_tensors_get_a_bucket_of_their_own() {
        let sizes = [(DType::F32, 8), (DType::F32, 256 * KIB), (DType::F32, 8), (DType::F64, 30 * MIB)];
        assert_eq!(split(&sizes), [vec![3], vec![1], vec![2, 0]]);
        assert!(split(&[]).is_empty());
    }

    /// 150 tensors of a model of 100 MiB are few operations: on the host each would be its own.
    #[test]
    fn on_devices_large_tensors_are_packed_too() {
        let sizes = vec![(DType::F32, 700 * KIB); 150];
        assert_eq!(split(&sizes).len(), 150);
        let buckets = split_with(Limits::of(true), &sizes);
        assert_eq!(buckets.iter().map(Vec::len).collect::<Vec<_>>(), [1, 36, 36, 36, 36, 5]);
        assert_eq!(split_with(Limits::of(true), &[(DType::F32, 8), (DType::F32, 25 * MIB)]), [vec![1], vec![0]]);
    }

    #[test]
    fn sixteen_bit_elements_are_scaled_in_f32() {
        // 1.5 * (1 + 2^-9) needs the wide factor: the factor itself rounds to 1 in bf16.
        let mut data = [bf16::from_f32(1.5)];
        scale(bytemuck::cast_slice_mut(&mut data), DType::BF16, 1.0 + 2f64.powi(-7));
        assert_eq!(data[0], bf16::from_f32(1.5 * (1.0 + 2f32.powi(-7))));
        let mut data = [1.0f64, 3.0];
        scale(bytemuck::cast_slice_mut(&mut data), DType::F64, 1.0 / 3.0);
        assert_eq!(data, [1.0 / 3.0, 3.0 * (1.0 / 3.0)]);
    }

    #[cfg(not(feature = "ddp"))]
    #[test]
    fn tensors_are_scaled_as_bytes_are() {
        use burn::backend::Flex;
        use burn::tensor::{Tensor, TensorData};

        let narrow = [(DType::BF16, 1.0 + 2f64.powi(-7)), (DType::F16, 2f64.powi(-20))];
        for (dtype, factor) in [(DType::F32, 1.0 / 3.0)].into_iter().chain(narrow) {
            let burn = match dtype {
                DType::BF16 => burn::tensor::DType::BF16,
                DType::F16 => burn::tensor::DType::F16,
                _ => burn::tensor::DType::F32,
            };
            let data = TensorData::from([1.5f32, -7.0, 0.1, 300.0]).convert_dtype(burn);
            let mut bytes = data.bytes.to_vec();
            scale(&mut bytes, dtype, factor);
            let tensor = Tensor::<Flex, 1>::from_data(data, (&Default::default(), burn));
            let tensor = scale_tensor::<Flex>(tensor.into_primitive().tensor(), dtype, factor);
            let tensor = Tensor::<Flex, 1>::from_primitive(burn::tensor::TensorPrimitive::Float(tensor));
            assert_eq!(tensor.into_data().bytes[..], bytes[..], "{dtype}");
        }
    }

    #[test]
    fn packed_memory_is_reused_and_grows() {
        let group = Group::threads(1).unwrap().remove(0);
        let mut small = group.allocate(1).unwrap();
        small[0] = 7;
        let mut bucket = Bucket::packed(&group, Some(small), 24).unwrap();
        assert_eq!(bucket.bytes(), [0; 24]);
        assert_eq!(bucket.bytes().len(), 24);
        bucket.bytes().fill(1);
        let Bucket::Packed(memory, _) = bucket else { unreachable!() };
        assert_eq!(Bucket::packed(&group, Some(memory), 8).unwrap().bytes(), [1; 8]);
    }
}
