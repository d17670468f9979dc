//! A communicator on tensors with the interface of vLLM's device communicator.

mod buffers;
mod experts;
mod routing;

use std::fmt;
use std::sync::Mutex;

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Numeric, Shape, Tensor, TensorCreationOptions};

pub use self::routing::Routing;
use super::host::{Context, Kind};
use super::operation::fused::{self, GatherInput};
use super::operation::{carry, dtype_and_device};
#[cfg(feature = "flex")]
use super::pool::GroupPool;
use bonfire_core::{Error, Group, ReduceOp};
use bonfire_tensor::{Axis, Sizes};

/// Collectives on a model's tensors with the interface of vLLM's device communicator.
///
/// Use it for expert parallelism or to port code from vLLM; otherwise use [`operation`](crate::tensor::operation).
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
/// use burn::backend::Flex;
/// use burn::tensor::{Tensor, TensorData};
///
/// let ranks = Group::threads(2)?.into_iter().map(|group| {
///     std::thread::spawn(move || {
///         let communicator = DeviceCommunicator::<Flex>::new(group.clone(), Default::default(), None, "tp")?;
///         let own = Tensor::<Flex, 2>::full([1, 1], group.rank() as f32, &Default::default());
///         Ok::<_, bonfire::Error>(communicator.all_gather(own, None)?.into_data())
///     })
/// });
/// for rank in ranks.collect::<Vec<_>>() {
///     assert_eq!(rank.join().expect("no panic")?, TensorData::from([[0f32, 1.0]]));
/// }
/// # Ok::<(), bonfire::Error>(())
/// ```
pub struct DeviceCommunicator<B: Backend> {
    name: String,
    device: B::Device,
    /// `None` once the communicator is destroyed.
    groups: Option<Groups>,
    /// Memory for results, once a model's buffers have been prepared.
    #[cfg(feature = "flex")]
    memory: Option<GroupPool>,
    /// The number of rows of each rank in the last dispatch, indexed by `is_sequence_parallel`.
    dispatched: Mutex<[Option<Vec<usize>>; 2]>,
}

struct Groups {
    metadata: Group,
    tensors: Group,
    data_parallel: Option<Group>,
}

impl<B: Backend> DeviceCommunicator<B> {
    /// Makes a communicator that sends metadata on `cpu_group` and tensors on `device_group`; with `None`, both on
    /// `cpu_group`. Does not communicate. Tensors that it creates, in [`recv`](Self::recv), are on `device`. Errors
    /// name it `unique_name`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if this rank or the world size differs between the groups.
    pub fn new(
        cpu_group: Group,
        device: B::Device,
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
            #[cfg(feature = "flex")]
            memory: None,
            dispatched: Mutex::default(),
        })
    }

    /// Drops the groups. Every later call returns an error. Tensors remain valid, and so does a [`Routing`], which
    /// keeps its group.
    pub fn destroy(&mut self) {
        self.groups = None;
        #[cfg(feature = "flex")]
        {
            self.memory = None;
        }
    }

    /// Returns the element-wise sum of the ranks' tensors, on every rank.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn all_reduce<const D: usize, K: Kind<B> + Numeric<B>>(
        &self,
        tensor: Tensor<B, D, K>,
    ) -> Result<Tensor<B, D, K>, Error> {
        carry::all_reduce::<B, K>(self.ctx()?, tensor.into_primitive(), ReduceOp::Sum).map(Tensor::from_primitive)
    }

    /// Concatenates the ranks' tensors along `dim` in rank order, on every rank. All have the same shape.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn all_gather<const D: usize, K: Kind<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: Option<isize>,
    ) -> Result<Tensor<B, D, K>, Error> {
        let dim = dim.unwrap_or(-1);
        carry::all_gather::<B, K>(self.ctx()?, tensor.into_primitive(), dim, Sizes::Even).map(Tensor::from_primitive)
    }

    /// Variable-size [`all_gather`](Self::all_gather), along the first dimension if `dim` is `None`: rank `r`'s tensor
    /// has length `sizes[r]` along it. With `sizes` `None`, the ranks exchange their sizes on the metadata group first.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn all_gather_v<const D: usize, K: Kind<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: Option<isize>,
        sizes: Option<&[usize]>,
    ) -> Result<Tensor<B, D, K>, Error> {
        let (ctx, dim) = (self.ctx()?, dim.unwrap_or(0));
        let sizes = self.sizes(&Axis::new("all_gather", &tensor.shape(), dim)?, sizes)?;
        let whole = carry::all_gather::<B, K>(ctx, tensor.into_primitive(), dim, Sizes::Given(&sizes))?;
        Ok(Tensor::from_primitive(whole))
    }

    /// [`all_gather_v`](Self::all_gather_v) of several tensors in one operation. A rank's tensors have the same length
    /// along `dim`. Their other dimensions and element types may differ.
    ///
    /// # Errors
    /// As [`all_gather_v`](Self::all_gather_v). [`Error::InvalidArgument`] also if the tensors differ in length along
    /// `dim`.
    #[track_caller]
    pub fn all_gather_v_list<const D: usize, K: Kind<B>>(
        &self,
        tensors: Vec<Tensor<B, D, K>>,
        dim: Option<isize>,
        sizes: Option<&[usize]>,
    ) -> Result<Vec<Tensor<B, D, K>>, Error> {
        let (ctx, dim) = (self.ctx()?, dim.unwrap_or(0));
        let inputs = tensors.into_iter().map(|tensor| GatherInput::read::<B, K>(tensor.into_primitive(), dim));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let Some(axis) = fused::axis(&inputs)? else { return Ok(Vec::new()) };
        let gathered = fused::all_gather::<B>(ctx, inputs, &self.sizes(&axis, sizes)?)?;
        Ok(gathered.into_iter().map(|whole| Tensor::from_primitive(whole.tensor::<B, K>())).collect())
    }

    /// Sums the ranks' tensors element-wise, splits the sum along `dim` into equal parts, and returns part `r` on rank
    /// `r`.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn reduce_scatter<const D: usize, K: Kind<B> + Numeric<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: Option<isize>,
    ) -> Result<Tensor<B, D, K>, Error> {
        self.reduce_scatter_v(tensor, dim, None)
    }

    /// Variable-size [`reduce_scatter`](Self::reduce_scatter): the part of rank `r` has length `sizes[r]` along `dim`.
    /// With `sizes` `None`, parts are equal.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn reduce_scatter_v<const D: usize, K: Kind<B> + Numeric<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: Option<isize>,
        sizes: Option<&[usize]>,
    ) -> Result<Tensor<B, D, K>, Error> {
        let dim = dim.unwrap_or(-1);
        let part = carry::reduce_scatter::<B, K>(self.ctx()?, tensor.into_primitive(), ReduceOp::Sum, dim, sizes)?;
        Ok(Tensor::from_primitive(part))
    }

    /// Concatenates the ranks' tensors along `dim` in rank order on rank `dst`, or on rank 0 if that is `None`. Returns
    /// `None` on the other ranks. All tensors have the same shape.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn gather<const D: usize, K: Kind<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dst: Option<usize>,
        dim: Option<isize>,
    ) -> Result<Option<Tensor<B, D, K>>, Error> {
        let (dst, dim) = (dst.unwrap_or(0), dim.unwrap_or(-1));
        let whole = carry::gather::<B, K>(self.ctx()?, tensor.into_primitive(), dst, dim, Sizes::Even)?;
        Ok(whole.map(Tensor::from_primitive))
    }

    /// Sends the tensor to rank `dst`, or to the next rank of the ring if that is `None`.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn send<const D: usize, K: Kind<B>>(&self, tensor: Tensor<B, D, K>, dst: Option<usize>) -> Result<(), Error> {
        let ctx = self.ctx()?;
        let next = (ctx.group.rank() + 1) % ctx.group.world_size();
        carry::send::<B, K>(ctx, tensor.into_primitive(), dst.unwrap_or(next))
    }

    /// Receives the tensor of shape `size` that rank `src` sends, or the previous rank of the ring if that is `None`.
    /// The result is on the communicator's device. Its element type is `dtype`, or the device's default if that is
    /// `None`.
    ///
    /// # Errors
    /// See [errors](DeviceCommunicator#errors).
    #[track_caller]
    pub fn recv<const D: usize, K: Kind<B>>(
        &self,
        size: [usize; D],
        dtype: Option<burn::tensor::DType>,
        src: Option<usize>,
    ) -> Result<Tensor<B, D, K>, Error> {
        let ctx = self.ctx()?;
        let n = ctx.group.world_size();
        let before = (ctx.group.rank() + n - 1) % n;
        let options = TensorCreationOptions { device: self.device.clone(), dtype };
        let (dtype, device) = dtype_and_device::<B, D, K>("recv", options)?;
        let (size, src) = (Shape::from(size), src.unwrap_or(before));
        carry::recv::<B, K>(ctx, size, (dtype, &device), src).map(Tensor::from_primitive)
    }

    /// Moves a model's parameters to memory of the communicator's group, which ranks share where they can, and returns
    /// the model. From then on results are allocated there too. Large operations on such tensors between processes of
    /// one host need no staging copy. This has an effect only if all ranks call it. Tensors of backends other than Flex
    /// and tracked tensors are not moved.
    ///
    /// # Errors
    /// [`Error::Broken`] if memory runs out, [`Error::InvalidArgument`] after [`destroy`](Self::destroy). The model is
    /// lost then.
    pub fn prepare_communication_buffer_for_model<M: Module<B>>(&mut self, model: M) -> Result<M, Error> {
        #[cfg(feature = "flex")]
        if self.memory.is_none() && self.groups.is_some() {
            self.memory = Some(GroupPool::default());
        }
        buffers::move_parameters(self.ctx()?, model)
    }

    fn groups(&self) -> Result<&Groups, Error> {
        self.groups.as_ref().ok_or_else(|| destroyed(&self.name))
    }

    fn ctx(&self) -> Result<Context<'_>, Error> {
        Ok(Context {
            group: &self.groups()?.tensors,
            #[cfg(feature = "flex")]
            memory: self.memory.as_ref(),
        })
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

impl<B: Backend> fmt::Debug for DeviceCommunicator<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors = self.groups.as_ref().map(|groups| &groups.tensors);
        f.debug_struct("DeviceCommunicator").field("name", &self.name).field("group", &tensors).finish_non_exhaustive()
    }
}
