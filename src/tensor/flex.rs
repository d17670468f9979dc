//! Flex's tensors, whose elements can be read where they are.
//!
//! Handing over a tensor that others hold too means copying it. Here it is reduced from where it is.

use std::any::Any;

use burn::backend::flex::FlexTensor;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Bytes, DType, TensorData, TensorMetadata};
use bytemuck::{cast_slice, cast_slice_mut};
use half::{bf16, f16};

use crate::dtype::{Element, ReduceOp};
use crate::error::Error;
use crate::group::Group;
use crate::tensor::pool;

/// Whether the tensor is one of Flex's that others hold too, in one piece.
pub(crate) fn shared<B: Backend>(tensor: &FloatTensor<B>) -> bool {
    piece::<B>(tensor).is_some_and(|(tensor, _)| !tensor.is_unique())
}

/// The reduction over all ranks as a new tensor; `None` where the tensor is not Flex's, or not in one piece.
pub(crate) fn all_reduce<B: Backend>(
    group: &Group,
    tensor: &FloatTensor<B>,
    op: ReduceOp,
) -> Option<Result<FloatTensor<B>, Error>> {
    let (source, bytes) = piece::<B>(tensor)?;
    let reduced = match source.dtype() {
        DType::F32 => reduced(group, cast_slice::<u8, f32>(bytes), op),
        DType::F64 => reduced(group, cast_slice::<u8, f64>(bytes), op),
        DType::F16 => reduced(group, cast_slice::<u8, f16>(bytes), op),
        DType::BF16 => reduced(group, cast_slice::<u8, bf16>(bytes), op),
        _ => return None,
    };
    let data = |bytes| TensorData { bytes, shape: source.shape(), dtype: source.dtype() };
    Some(reduced.map(|bytes| B::float_from_data(data(bytes), &B::float_device(tensor))))
}

/// A tensor of Flex and its elements' bytes, where they are one slice with the alignment of its elements.
fn piece<B: Backend>(tensor: &FloatTensor<B>) -> Option<(&FlexTensor, &[u8])> {
    let tensor: &dyn Any = tensor;
    let tensor: &FlexTensor = tensor.downcast_ref()?;
    let (start, end) = tensor.layout().contiguous_offsets()?;
    let size = tensor.dtype().size();
    let bytes = tensor.bytes().get(start * size..end * size)?;
    bytes.as_ptr().addr().is_multiple_of(size).then_some((tensor, bytes))
}

fn reduced<T: Element>(group: &Group, input: &[T], op: ReduceOp) -> Result<Bytes, Error> {
    let mut output = pool::bytes(size_of_val(input));
    group.all_reduce_into(input, cast_slice_mut(&mut output), op)?;
    Ok(output)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use burn::backend::{Flex, NdArray};
    use burn::tensor::{Int, Tensor, TensorPrimitive};

    use super::*;

    fn primitive<B: Backend>(tensor: Tensor<B, 2>) -> FloatTensor<B> {
        tensor.into_primitive().tensor()
    }

    #[test]
    fn a_part_of_a_tensor_is_reduced_and_the_tensor_stays_as_it_is() {
        let rank = |group: Group| {
            let device = Default::default();
            let whole = Tensor::<Flex, 1, Int>::arange(0..300_000, &device).float().reshape([3, 100_000]);
            let part = primitive(whole.clone().slice(1..3));
            assert!(shared::<Flex>(&part));
            let sum = all_reduce::<Flex>(&group, &part, ReduceOp::Sum).expect("it is in one piece").unwrap();
            let sum = Tensor::<Flex, 2>::from_primitive(TensorPrimitive::Float(sum));
            assert_eq!(sum.into_data(), whole.clone().slice(1..3).mul_scalar(2.0).into_data());
            let first: Vec<f32> = whole.slice([0..1, 0..3]).into_data().to_vec().unwrap();
            assert_eq!(first, [0.0, 1.0, 2.0]);
        };
        let ranks: Vec<_> = Group::threads(2).unwrap().into_iter().map(|g| thread::spawn(move || rank(g))).collect();
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
    }

    #[test]
    fn what_is_not_in_one_piece_or_not_shared_or_not_of_flex_is_left_to_others() {
        let whole = Tensor::<Flex, 2>::ones([4, 4], &Default::default());
        let group = Group::threads(1).unwrap().remove(0);
        let turned = primitive(whole.clone().transpose());
        assert!(!shared::<Flex>(&turned) && all_reduce::<Flex>(&group, &turned, ReduceOp::Sum).is_none());
        drop(turned);
        assert!(shared::<Flex>(&primitive(whole.clone())));
        assert!(!shared::<Flex>(&primitive(whole)), "held by nobody else now");
        let other = Tensor::<NdArray, 2>::ones([4, 4], &Default::default());
        assert!(!shared::<NdArray>(&primitive(other.clone())));
    }
}
