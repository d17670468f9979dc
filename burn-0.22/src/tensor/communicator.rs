//! A communicator on tensors with the interface of vLLM's device communicator.

mod experts;
mod routing;

use std::fmt;
use std::sync::Mutex;

use burn::module::Module;
use burn::tensor::kind::{Basic as Kind, Numeric};
use burn::tensor::{Bytes, DType, Device, Tensor, TensorCreationOptions};

pub use self::routing::Routing;
use super::host::{Source, memory};
use super::operation;
use bonfire_core::{Error, Group, ReduceOp};
use bonfire_tensor::{Axis, Part, Sizes, common_axis};

/// Collectives on a model's tensors with the interface of vLLM's device communicator.
///
/// Use it for expert parallelism or to port code from vLLM; otherwise use [`operation`].
/// Tensors are sent on one group. Metadata, such as sizes that the caller does not pass, are sent on another group of
/// the same ranks. The only reduction is the sum. Results are new tensors: no operation modifies its input. `None` for
/// a dimension means vLLM's default: the last dimension, or the first for [`all_gather_v`](Self::all_gather_v) and
/// [`all_gather_v_list`](Self::all_gather_v_list). A negative dimension counts from the end.
///
/// # Differences from vLLM's
/// Arguments are checked. `all_reduce` never writes to its input. `reduce_scatter` of tensors with three and more
/// dimensions returns the part along the dimension; the original permutes it. The name serves only errors: no
/// communicator guesses from it what it is for.
///
/// # Errors
/// Unless it says otherwise, a method returns the errors of the function with the same name in
/// [`operation`](crate::tensor::operation#errors), and [`Error::InvalidArgument`] after [`destroy`](Self::destroy).
///
/// # Example
/// ```
/// use bonfire::{DeviceCommunicator, Group};
/// use burn::tensor::{Device, Tensor, TensorData};
///
/// let ranks = Group::threads(2)?.into_iter().map(|group| {
///     std::thread::spawn(move || {
///         let communicator = DeviceCommunicator::new(group.clone(), Device::flex(), None, "tp")?;
///         let own = Tensor::<2>::full([1, 1], group.rank() as f32, &Device::flex());
///         Ok::<_, bonfire::Error>(communicator.all_gather(own, None)?.into_data())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     assert_eq!(rank.join().expect("no panic")?, TensorData::from([[0f32, 1.0]]));
/// }
/// # Ok::<(), bonfire::Error>(())
/// ```
pub struct DeviceCommunicator {
    name: String,
    device: Device,
    /// `None` once the communicator is destroyed.
    groups: Option<Groups>,
    /// The number of rows of each rank in the last dispatch, indexed by `is_sequence_parallel`.
    dispatched: Mutex<[Option<Vec<usize>>; 2]>,
}

struct Groups {
    metadata: Group,
    tensors: Group,
    data_parallel: Option<Group>,
}

impl DeviceCommunicator {
    /// Makes a communicator that sends metadata on `cpu_group` and tensors on `device_group`; with `None`, both on
    /// `cpu_group`. Does not communicate. Tensors that it creates, in [`recv`](Self::recv), are on `device`. Errors
    /// name it `unique_name`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if this rank or the world size differs between the groups.
    pub fn new(
        cpu_group: Group,
        device: Device,
        device_group: Option<Group>,
        unique_name: &str,
    ) -> Result<Self, Error> {
        let tensors = device_group.unwrap_or_else(|| cpu_group.clone());
        if (tensors.rank(), tensors.world_size()) != (cpu_group.rank(), cpu_group.world_size()) {
            let describe = |group: &Group| format!("rank {} of {}", group.rank(), group.world_size());
            let reason = format!(
                "this is {} for metadata and {} for tensors: pass two groups of the same ranks",
                describe(&cpu_group),
                describe(&tensors)
            );
            return Err(Error::argument(format!("communicator `{unique_name}`"), reason));
        }
        Ok(DeviceCommunicator {
            name: unique_name.into(),
            device,
            groups: Some(Groups { metadata: cpu_group, tensors, data_parallel: None }),
            dispatched: Mutex::default(),
        })
    }

    /// Drops the groups. Every later call returns an error. Tensors remain valid, and so does a [`Routing`], which
    /// keeps its group.
    pub fn destroy(&mut self) {
        self.groups = None;
    }

    /// Returns the element-wise sum of the ranks' tensors, on every rank.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn all_reduce<const D: usize, K: Numeric>(&self, tensor: Tensor<D, K>) -> Result<Tensor<D, K>, Error> {
        operation::all_reduce(tensor, ReduceOp::Sum, self.tensors()?)
    }

    /// Concatenates the ranks' tensors along `dim` in rank order, on every rank. All have the same shape.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn all_gather<const D: usize, K: Kind>(
        &self,
        tensor: Tensor<D, K>,
        dim: Option<isize>,
    ) -> Result<Tensor<D, K>, Error> {
        operation::all_gather(tensor, dim.unwrap_or(-1), self.tensors()?)
    }

    /// Variable-size [`all_gather`](Self::all_gather), along the first dimension if `dim` is `None`: rank `r`'s tensor
    /// has length `sizes[r]` along it. With `sizes` `None`, the ranks exchange their sizes on the metadata group first.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn all_gather_v<const D: usize, K: Kind>(
        &self,
        tensor: Tensor<D, K>,
        dim: Option<isize>,
        sizes: Option<&[usize]>,
    ) -> Result<Tensor<D, K>, Error> {
        let (group, dim) = (self.tensors()?, dim.unwrap_or(0));
        let sizes = self.sizes(&Axis::new("all_gather", &tensor.shape(), dim)?, sizes)?;
        operation::all_gather_v(tensor, dim, Some(&sizes), group)
    }

    /// [`all_gather_v`](Self::all_gather_v) of several tensors in one operation. A rank's tensors have the same length
    /// along `dim`. Their other dimensions and element types may differ.
    ///
    /// # Errors
    /// As [`all_gather_v`](Self::all_gather_v). [`Error::InvalidArgument`] also if the tensors differ in length along
    /// `dim`.
    #[track_caller]
    pub fn all_gather_v_list<const D: usize, K: Kind>(
        &self,
        tensors: Vec<Tensor<D, K>>,
        dim: Option<isize>,
        sizes: Option<&[usize]>,
    ) -> Result<Vec<Tensor<D, K>>, Error> {
        let (group, dim) = (self.tensors()?, dim.unwrap_or(0));
        let inputs = tensors.into_iter().map(|tensor| GatherInput::read(tensor, dim));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let Some(axis) = GatherInput::axis(&inputs)? else { return Ok(Vec::new()) };
        let sizes = self.sizes(axis, sizes)?;
        let wholes = GatherInput::all_gather(&inputs, group, &sizes)?;
        Ok(inputs.iter().zip(wholes).map(|(input, whole)| input.whole(whole, &sizes)).collect())
    }

    /// Sums the ranks' tensors element-wise, splits the sum along `dim` into equal parts, and returns part `r` on rank
    /// `r`.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn reduce_scatter<const D: usize, K: Numeric>(
        &self,
        tensor: Tensor<D, K>,
        dim: Option<isize>,
    ) -> Result<Tensor<D, K>, Error> {
        self.reduce_scatter_v(tensor, dim, None)
    }

    /// Variable-size [`reduce_scatter`](Self::reduce_scatter): the part of rank `r` has length `sizes[r]` along `dim`.
    /// With `sizes` `None`, parts are equal.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn reduce_scatter_v<const D: usize, K: Numeric>(
        &self,
        tensor: Tensor<D, K>,
        dim: Option<isize>,
        sizes: Option<&[usize]>,
    ) -> Result<Tensor<D, K>, Error> {
        let (group, dim) = (self.tensors()?, dim.unwrap_or(-1));
        match sizes {
            Some(sizes) => operation::reduce_scatter_v(tensor, ReduceOp::Sum, dim, sizes, group),
            None => operation::reduce_scatter(tensor, ReduceOp::Sum, dim, group),
        }
    }

    /// Concatenates the ranks' tensors along `dim` in rank order on rank `dst`, or on rank 0 if that is `None`. Returns
    /// `None` on the other ranks. All tensors have the same shape.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn gather<const D: usize, K: Kind>(
        &self,
        tensor: Tensor<D, K>,
        dst: Option<usize>,
        dim: Option<isize>,
    ) -> Result<Option<Tensor<D, K>>, Error> {
        operation::gather(tensor, dst.unwrap_or(0), dim.unwrap_or(-1), self.tensors()?)
    }

    /// Sends the tensor to rank `dst`, or to the next rank of the ring if that is `None`.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn send<const D: usize, K: Kind>(&self, tensor: Tensor<D, K>, dst: Option<usize>) -> Result<(), Error> {
        let group = self.tensors()?;
        let next = (group.rank() + 1) % group.world_size();
        operation::send(tensor, dst.unwrap_or(next), group)
    }

    /// Receives the tensor of shape `size` that rank `src` sends, or the previous rank of the ring if that is `None`.
    /// The result is on the communicator's device. Its element type is `dtype`, or the device's default if that is
    /// `None`.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn recv<const D: usize, K: Kind>(
        &self,
        size: [usize; D],
        dtype: Option<DType>,
        src: Option<usize>,
    ) -> Result<Tensor<D, K>, Error> {
        let group = self.tensors()?;
        let n = group.world_size();
        let before = (group.rank() + n - 1) % n;
        let options = TensorCreationOptions { device: self.device.clone(), dtype };
        operation::recv(size, src.unwrap_or(before), options, group)
    }

    /// Returns the model unchanged. On burn 0.21 this moves the parameters of models on Flex to memory that the ranks
    /// share, so that large operations between processes of one host need no staging copy.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] after [`destroy`](Self::destroy). The model is lost then.
    pub fn prepare_communication_buffer_for_model<M: Module>(&mut self, model: M) -> Result<M, Error> {
        self.groups().map(|_| model)
    }

    fn groups(&self) -> Result<&Groups, Error> {
        self.groups.as_ref().ok_or_else(|| destroyed(&self.name))
    }

    fn tensors(&self) -> Result<&Group, Error> {
        Ok(&self.groups()?.tensors)
    }

    #[track_caller]
    fn sizes(&self, axis: &Axis, sizes: Option<&[usize]>) -> Result<Vec<usize>, Error> {
        let metadata = &self.groups()?.metadata;
        sizes.map_or(Sizes::Exchanged, Sizes::Given).resolve(metadata, "all_gather", axis)
    }
}

fn destroyed(name: &str) -> Error {
    Error::argument(format!("communicator `{name}`"), "it was destroyed: make a new one")
}

impl fmt::Debug for DeviceCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors = self.groups.as_ref().map(|groups| &groups.tensors);
        f.debug_struct("DeviceCommunicator").field("name", &self.name).field("group", &tensors).finish_non_exhaustive()
    }
}

/// One of several tensors of any kinds that are gathered in one operation.
struct GatherInput {
    source: Source,
    axis: Axis,
}

impl GatherInput {
    const OPERATION: &str = "all_gather";

    fn read<const D: usize, K: Kind>(tensor: Tensor<D, K>, dim: isize) -> Result<GatherInput, Error> {
        let axis = Axis::new(Self::OPERATION, &tensor.shape(), dim)?;
        Ok(GatherInput { source: Source::read(Self::OPERATION, tensor)?, axis })
    }

    /// Returns the axis of the first tensor. All have the same length along theirs.
    fn axis(inputs: &[GatherInput]) -> Result<Option<&Axis>, Error> {
        common_axis(Self::OPERATION, inputs.iter().map(|input| &input.axis))
    }

    #[track_caller]
    fn all_gather(inputs: &[GatherInput], group: &Group, sizes: &[usize]) -> Result<Vec<Bytes>, Error> {
        let parts = inputs.iter().map(|GatherInput { source, axis }| {
            let (bytes, dtype) = (&source.bytes[..], source.spec.carrier);
            Part { bytes, dtype, axis }
        });
        let parts: Vec<_> = parts.collect();
        memory(group).all_gather_together(&parts, sizes)
    }

    /// Returns the tensor of these elements of all ranks.
    fn whole<const D: usize, K: Kind>(&self, bytes: Bytes, sizes: &[usize]) -> Tensor<D, K> {
        self.source.spec.of_kind(bytes, self.axis.shape(sizes.iter().sum()))
    }
}
