//! Measures an all_reduce through burn's collective API on Flex, to compare with the same call on slices.

use bonfire::{CollectiveConfig, DType, Group, PeerId, ReduceOp, all_reduce, finish_collective, register};
use bonfire_core::internal::oracle::Sample;
use burn::backend::Flex;
use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{Bytes, DType as BurnDType, TensorData, try_read_sync};

use super::oracle::{Case, wrong};
use super::timing::{RankError, Workload};

type Primitive = FloatTensor<Flex>;

/// Returns the element type of burn's floating-point tensors that corresponds to `dtype`, if there is one.
pub fn element(dtype: DType) -> Option<BurnDType> {
    match dtype {
        DType::F32 => Some(BurnDType::F32),
        DType::F64 => Some(BurnDType::F64),
        DType::F16 => Some(BurnDType::F16),
        DType::BF16 => Some(BurnDType::BF16),
        _ => None,
    }
}

/// A rank registered with burn's collective API.
pub struct Peer(PeerId);

impl Peer {
    /// Registers a rank. Blocks until all ranks of the process have called this.
    pub fn register(group: &Group) -> Result<Peer, RankError> {
        let id = PeerId::from(group.rank() as u32);
        register::<Flex>(id, Default::default(), CollectiveConfig::default().with_num_devices(group.world_size()))?;
        Ok(Peer(id))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        if let Err(error) = finish_collective::<Flex>(self.0) {
            log::warn!("cannot deregister {}: {error}", self.0);
        }
    }
}

pub struct Tensors<'a, T> {
    peer: &'a Peer,
    case: Case<T>,
    dtype: BurnDType,
    /// None in place: the call then consumes the only handle, so that the result may reuse the input's memory.
    input: Option<Primitive>,
    output: Option<Primitive>,
    in_place: bool,
}

impl<'a, T: Sample> Tensors<'a, T> {
    /// `T` must be one of the types for which [`element`] returns one.
    pub fn new(peer: &'a Peer, group: &Group, op: ReduceOp, count: usize, in_place: bool) -> Self {
        let dtype = element(T::DTYPE).unwrap_or(BurnDType::F32);
        let case = Case::new(true, op, [group.world_size(), group.rank(), 0], count);
        Tensors { peer, case, dtype, input: None, output: None, in_place }
    }

    fn fresh_input(&self) -> Primitive {
        let Case { count, rank, .. } = self.case;
        let elements: Vec<T> = (0..count).map(|i| self.case.input(rank, i)).collect();
        let data = TensorData::from_bytes(Bytes::from_elems(elements), [count], self.dtype);
        <Flex>::float_from_data(data, &Default::default())
    }
}

impl<T: Sample> Workload for Tensors<'_, T> {
    fn reset(&mut self) {
        let fresh_input = Some(self.fresh_input());
        (self.input, self.output) = if self.in_place { (None, fresh_input) } else { (fresh_input, None) };
    }

    fn call(&mut self) -> Result<(), RankError> {
        let given = self.input.clone().or_else(|| self.output.take()).unwrap_or_else(|| self.fresh_input());
        self.output = Some(all_reduce::<Flex>(self.peer.0, given, self.case.op)?);
        Ok(())
    }

    fn wrong(&mut self) -> Result<u64, RankError> {
        let data = self.output.take().map(|output| try_read_sync(<Flex>::float_into_data(output)));
        let Some(Some(Ok(data))) = data else { return Ok(self.case.count as u64) };
        let output: Vec<T> = bytemuck::pod_collect_to_vec(&data.bytes);
        Ok(wrong(&output, |i| Some(self.case.reduced(i))) + self.case.count.abs_diff(output.len()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::perf::oracle::POISON;

    /// The only test that uses Flex's collective session, of which a process has one.
    #[test]
    fn all_reduce_of_tensors_is_correct_and_a_wrong_element_is_found() {
        fn check<T: Sample>(group: &Group, peer: &Peer, in_place: bool) {
            let mut tensors = Tensors::<T>::new(peer, group, ReduceOp::Mean, 1000, in_place);
            for wrong in 0..2 {
                tensors.reset();
                tensors.call().unwrap();
                // The second result gets a wrong element.
                if wrong == 1 {
                    let data = try_read_sync(<Flex>::float_into_data(tensors.output.take().unwrap())).unwrap().unwrap();
                    let mut elements: Vec<T> = bytemuck::pod_collect_to_vec(&data.bytes);
                    elements[999] = T::of(POISON);
                    let data = TensorData::from_bytes(Bytes::from_elems(elements), [1000], tensors.dtype);
                    tensors.output = Some(<Flex>::float_from_data(data, &Default::default()));
                }
                assert_eq!(tensors.wrong().unwrap(), wrong, "in place: {in_place}");
            }
        }
        bonfire_testing::ranks(3, |group| {
            let peer = Peer::register(&group).unwrap();
            for in_place in [false, true] {
                check::<f32>(&group, &peer, in_place);
                check::<f16>(&group, &peer, in_place);
            }
        });
    }
}
