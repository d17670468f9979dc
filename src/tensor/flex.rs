//! Access to the elements of Flex's tensors in place.
//!
//! burn-flex 0.21 copies the elements of a shared tensor twice when they are exported, each time to fresh memory, whose
//! pages the system clears. This module reads them without a copy.

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

/// Whether the tensor is a contiguous tensor of Flex that shares its memory.
#[cfg(unix)]
pub(crate) fn shared<B: Backend>(tensor: &FloatTensor<B>) -> bool {
    contiguous_bytes(tensor).is_some_and(|(tensor, _)| !tensor.is_unique())
}

/// Returns a tensor of Flex and the bytes of its elements, if they are contiguous and aligned for the elements.
pub(crate) fn contiguous_bytes(tensor: &dyn Any) -> Option<(&FlexTensor, &[u8])> {
    let tensor: &FlexTensor = tensor.downcast_ref()?;
    let (start, end) = tensor.layout().contiguous_offsets()?;
    let size = tensor.dtype().size();
    let bytes = tensor.bytes().get(start * size..end * size)?;
    bytes.as_ptr().addr().is_multiple_of(size).then_some((tensor, bytes))
}

/// Returns the memory of a tensor that does not share it and whose elements fill it, otherwise the tensor.
pub(crate) fn into_memory(tensor: FlexTensor) -> Result<Bytes, FlexTensor> {
    let all = contiguous_bytes(&tensor).is_some_and(|(tensor, bytes)| bytes.len() == tensor.bytes().len());
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
    fn only_contiguous_tensors_of_flex_are_accessed_in_place() {
        let matrix = Tensor::<Flex, 2>::ones([4, 4], &Default::default());
        let transposed = primitive(matrix.clone().transpose());
        assert!(!shared::<Flex>(&transposed) && contiguous_bytes(&transposed).is_none());
        drop(transposed);
        let rows = primitive(matrix.clone().slice([1..3, 0..4]));
        assert_eq!(contiguous_bytes(&rows).expect("contiguous").1.len(), 32);
        let rows = into_memory(rows).expect_err("shared");
        drop(matrix);
        assert!(into_memory(rows).is_err(), "its elements do not fill the memory");
        let matrix = Tensor::<Flex, 2>::ones([4, 4], &Default::default());
        assert!(shared::<Flex>(&primitive(matrix.clone())));
        let unique = primitive(matrix);
        assert!(!shared::<Flex>(&unique), "no longer shared");
        let address = contiguous_bytes(&unique).expect("contiguous").1.as_ptr();
        assert_eq!(into_memory(unique).expect("not shared").as_ptr(), address);
        let other = Tensor::<NdArray, 2>::ones([4, 4], &Default::default());
        assert!(!shared::<NdArray>(&primitive(other.clone())));
        assert!(is::<Flex>() && !is::<NdArray>());
    }
}
