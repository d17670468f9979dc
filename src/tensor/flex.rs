//! Flex's tensors, whose elements can be read where they are.
//!
//! Handing over a tensor that others hold too means copying it. Here it is read from where it is.

use std::any::{Any, TypeId};

use burn::backend::flex::FlexTensor;
use burn::tensor::Bytes;
use burn::tensor::backend::Backend;
#[cfg(unix)]
use burn::tensor::ops::FloatTensor;
use burn::tensor::ops::IntTensor;

/// Whether the backend's tensors are Flex's.
pub(crate) fn is<B: Backend>() -> bool {
    TypeId::of::<IntTensor<B>>() == TypeId::of::<FlexTensor>()
}

/// Whether the tensor is one of Flex's that others hold too, in one piece.
#[cfg(unix)]
pub(crate) fn shared<B: Backend>(tensor: &FloatTensor<B>) -> bool {
    piece(tensor).is_some_and(|(tensor, _)| !tensor.is_unique())
}

/// A tensor of Flex and its elements' bytes, where they are one slice with the alignment of its elements.
pub(crate) fn piece(tensor: &dyn Any) -> Option<(&FlexTensor, &[u8])> {
    let tensor: &FlexTensor = tensor.downcast_ref()?;
    let (start, end) = tensor.layout().contiguous_offsets()?;
    let size = tensor.dtype().size();
    let bytes = tensor.bytes().get(start * size..end * size)?;
    bytes.as_ptr().addr().is_multiple_of(size).then_some((tensor, bytes))
}

/// The memory of a tensor that nobody else holds and that has all of it.
pub(crate) fn whole(tensor: FlexTensor) -> Result<Bytes, FlexTensor> {
    let all = piece(&tensor).is_some_and(|(tensor, bytes)| bytes.len() == tensor.bytes().len());
    if all && tensor.is_unique() { Ok(tensor.into_data().bytes) } else { Err(tensor) }
}

#[cfg(all(test, unix))]
mod tests {
    use burn::backend::{Flex, NdArray};
    use burn::tensor::Tensor;

    use super::*;

    fn primitive<B: Backend>(tensor: Tensor<B, 2>) -> FloatTensor<B> {
        tensor.into_primitive().tensor()
    }

    #[test]
    fn what_is_not_in_one_piece_or_not_shared_or_not_of_flex_is_left_to_others() {
        let whole_one = Tensor::<Flex, 2>::ones([4, 4], &Default::default());
        let turned = primitive(whole_one.clone().transpose());
        assert!(!shared::<Flex>(&turned) && piece(&turned).is_none());
        drop(turned);
        let part = primitive(whole_one.clone().slice([1..3, 0..4]));
        assert_eq!(piece(&part).expect("it is in one piece").1.len(), 32);
        let part = whole(part).expect_err("others hold it");
        drop(whole_one);
        assert!(whole(part).is_err(), "it has not all of the memory");
        let whole_one = Tensor::<Flex, 2>::ones([4, 4], &Default::default());
        assert!(shared::<Flex>(&primitive(whole_one.clone())));
        let alone = primitive(whole_one);
        assert!(!shared::<Flex>(&alone), "held by nobody else now");
        let place = piece(&alone).expect("it is in one piece").1.as_ptr();
        assert_eq!(whole(alone).expect("nobody else holds it").as_ptr(), place);
        let other = Tensor::<NdArray, 2>::ones([4, 4], &Default::default());
        assert!(!shared::<NdArray>(&primitive(other.clone())));
        assert!(is::<Flex>() && !is::<NdArray>());
    }
}
