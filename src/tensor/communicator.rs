//! A communicator on tensors, as vLLM's workers have one for each of their groups.

mod buffers;
mod experts;
mod routing;

use std::fmt;
use std::sync::Mutex;

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Numeric, Shape, Tensor, TensorCreationOptions};

pub use self::routing::Routing;
use super::host::{Kind, Via};
use super::operation::axis::Axis;
use super::operation::fused::{self, Piece};
use super::operation::sizes::Sizes;
use super::operation::{carry, place};
#[cfg(feature = "flex")]
use super::pool::Suited;
use bonfire_core::{Error, Group, ReduceOp};

/// Collectives on a model's tensors: vLLM's device communicator, on burn.
///
/// Metadata, such as sizes that nobody gave, travel on one group, and tensors on another, which has the same ranks. Ranks
/// are those of the group. Sums are the only reductions. Results are new tensors: no operation alters its input. A
/// dimension that is `None` is the one that vLLM takes: the last, and the first for [`all_gather_v`](Self::all_gather_v).
/// Negative ones count from the end.
///
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
    /// Until it is destroyed.
    groups: Option<Groups>,
    /// Where results go, once a model's buffers are there.
    #[cfg(feature = "flex")]
    memory: Option<Suited>,
    /// The rows that each rank brought to the last dispatch, by whether it was sequence parallel.
    dispatched: Mutex<[Option<Vec<usize>>; 2]>,
}

struct Groups {
    metadata: Group,
    tensors: Group,
    data_parallel: Option<Group>,
}

impl<B: Backend> DeviceCommunicator<B> {
    /// A communicator whose metadata travel on `cpu_group`, and tensors on `device_group`, or on the first, too. What it
    /// makes by itself is on `device`; errors name it `unique_name`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where this rank or the number of ranks differs between the groups.
    pub fn new(
        cpu_group: Group,
        device: B::Device,
        device_group: Option<Group>,
        unique_name: &str,
    ) -> Result<Self, Error> {
        let tensors = device_group.unwrap_or_else(|| cpu_group.clone());
        if (tensors.rank(), tensors.world_size()) != (cpu_group.rank(), cpu_group.world_size()) {
            let place = |group: &Group| format!("rank {} of {}", group.rank(), group.world_size());
            let reason = format!(
                "this is {} for metadata and {} for tensors: give two groups of the same ranks",
                place(&cpu_group),
                place(&tensors)
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

    /// Lets go of the groups; every later call gives an error. Tensors that it made stay, and so does a [`Routing`], with its
    /// group.
    pub fn destroy(&mut self) {
        self.groups = None;
        #[cfg(feature = "flex")]
        {
            self.memory = None;
        }
    }

    /// The sum of the ranks' tensors, on every rank.
    ///
    /// # Errors
    /// Those of [`operation::all_reduce`](super::operation::all_reduce); after [`destroy`](Self::destroy),
    /// [`Error::InvalidArgument`].
    pub fn all_reduce<const D: usize, K: Kind<B> + Numeric<B>>(
        &self,
        tensor: Tensor<B, D, K>,
    ) -> Result<Tensor<B, D, K>, Error> {
        carry::all_reduce::<B, K>(self.via()?, tensor.into_primitive(), ReduceOp::Sum).map(Tensor::from_primitive)
    }

    /// The ranks' tensors, of one shape, along `dim`: the last if it is `None`.
    ///
    /// # Errors
    /// Those of [`operation::all_gather`](super::operation::all_gather); after [`destroy`](Self::destroy),
    /// [`Error::InvalidArgument`].
    pub fn all_gather<const D: usize, K: Kind<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: Option<isize>,
    ) -> Result<Tensor<B, D, K>, Error> {
        let dim = dim.unwrap_or(-1);
        carry::all_gather::<B, K>(self.via()?, tensor.into_primitive(), dim, Sizes::Even).map(Tensor::from_primitive)
    }

    /// The ranks' tensors along `dim`, the first if it is `None`, as long there as `sizes` says, by rank. Without sizes the
    /// ranks tell each other, on the group of the metadata.
    ///
    /// # Errors
    /// Those of [`operation::all_gather_v`](super::operation::all_gather_v); after [`destroy`](Self::destroy),
    /// [`Error::InvalidArgument`].
    pub fn all_gather_v<const D: usize, K: Kind<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: Option<isize>,
        sizes: Option<&[usize]>,
    ) -> Result<Tensor<B, D, K>, Error> {
        let (via, dim) = (self.via()?, dim.unwrap_or(0));
        let sizes = self.sizes(&Axis::new("all_gather", tensor.shape(), dim)?, sizes)?;
        let whole = carry::all_gather::<B, K>(via, tensor.into_primitive(), dim, Sizes::Given(&sizes))?;
        Ok(Tensor::from_primitive(whole))
    }

    /// As [`all_gather_v`](Self::all_gather_v), of several tensors in one operation. They are equally long along `dim`; their
    /// other dimensions and element types may differ.
    ///
    /// # Errors
    /// As [`all_gather_v`](Self::all_gather_v); also where the tensors are not equally long.
    pub fn all_gather_v_list<const D: usize, K: Kind<B>>(
        &self,
        tensors: Vec<Tensor<B, D, K>>,
        dim: Option<isize>,
        sizes: Option<&[usize]>,
    ) -> Result<Vec<Tensor<B, D, K>>, Error> {
        let (via, dim) = (self.via()?, dim.unwrap_or(0));
        let pieces = tensors.into_iter().map(|tensor| Piece::read::<B, K>(tensor.into_primitive(), dim));
        let pieces = pieces.collect::<Result<Vec<_>, _>>()?;
        let Some(axis) = fused::axis(&pieces)? else { return Ok(Vec::new()) };
        let gathered = fused::all_gather::<B>(via, pieces, &self.sizes(&axis, sizes)?)?;
        Ok(gathered.into_iter().map(|whole| Tensor::from_primitive(whole.tensor::<B, K>())).collect())
    }

    /// The sum of the ranks' tensors, cut along `dim`, the last if it is `None`, into equal parts, of which rank `r` gets
    /// the `r`-th.
    ///
    /// # Errors
    /// Those of [`operation::reduce_scatter`](super::operation::reduce_scatter); after [`destroy`](Self::destroy),
    /// [`Error::InvalidArgument`].
    pub fn reduce_scatter<const D: usize, K: Kind<B> + Numeric<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: Option<isize>,
    ) -> Result<Tensor<B, D, K>, Error> {
        self.reduce_scatter_v(tensor, dim, None)
    }

    /// As [`reduce_scatter`](Self::reduce_scatter), with parts as long as `sizes` says, by rank; without sizes, equal ones.
    ///
    /// # Errors
    /// Those of [`operation::reduce_scatter_v`](super::operation::reduce_scatter_v); after [`destroy`](Self::destroy),
    /// [`Error::InvalidArgument`].
    pub fn reduce_scatter_v<const D: usize, K: Kind<B> + Numeric<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dim: Option<isize>,
        sizes: Option<&[usize]>,
    ) -> Result<Tensor<B, D, K>, Error> {
        let dim = dim.unwrap_or(-1);
        let part = carry::reduce_scatter::<B, K>(self.via()?, tensor.into_primitive(), ReduceOp::Sum, dim, sizes)?;
        Ok(Tensor::from_primitive(part))
    }

    /// The ranks' tensors, of one shape, along `dim`, the last if it is `None`, on rank `dst`, 0 if it is `None`. The others
    /// get `None`.
    ///
    /// # Errors
    /// Those of [`operation::gather`](super::operation::gather); after [`destroy`](Self::destroy),
    /// [`Error::InvalidArgument`].
    pub fn gather<const D: usize, K: Kind<B>>(
        &self,
        tensor: Tensor<B, D, K>,
        dst: Option<usize>,
        dim: Option<isize>,
    ) -> Result<Option<Tensor<B, D, K>>, Error> {
        let (dst, dim) = (dst.unwrap_or(0), dim.unwrap_or(-1));
        let whole = carry::gather::<B, K>(self.via()?, tensor.into_primitive(), dst, dim, Sizes::Even)?;
        Ok(whole.map(Tensor::from_primitive))
    }

    /// Sends the tensor to rank `dst`: the next one, around the ring, if it is `None`.
    ///
    /// # Errors
    /// Those of [`operation::send`](super::operation::send); after [`destroy`](Self::destroy),
    /// [`Error::InvalidArgument`].
    pub fn send<const D: usize, K: Kind<B>>(&self, tensor: Tensor<B, D, K>, dst: Option<usize>) -> Result<(), Error> {
        let via = self.via()?;
        let next = (via.group.rank() + 1) % via.group.world_size();
        carry::send::<B, K>(via, tensor.into_primitive(), dst.unwrap_or(next))
    }

    /// The tensor of this shape that rank `src` sends, the one before this, around the ring, if it is `None`. It is on the
    /// communicator's device, with elements of `dtype`, or what the device takes by default.
    ///
    /// # Errors
    /// Those of [`operation::recv`](super::operation::recv); after [`destroy`](Self::destroy),
    /// [`Error::InvalidArgument`].
    pub fn recv<const D: usize, K: Kind<B>>(
        &self,
        size: [usize; D],
        dtype: Option<burn::tensor::DType>,
        src: Option<usize>,
    ) -> Result<Tensor<B, D, K>, Error> {
        let via = self.via()?;
        let n = via.group.world_size();
        let before = (via.group.rank() + n - 1) % n;
        let options = TensorCreationOptions { device: self.device.clone(), dtype };
        let (dtype, device) = place::<B, D, K>(options);
        let (size, src) = (Shape::from(size), src.unwrap_or(before));
        carry::recv::<B, K>(via, size, (dtype, &device), src).map(Tensor::from_primitive)
    }

    /// Moves a model's parameters to memory that the ranks of the communicator reach, where they share some, and gives the
    /// model back. From then on results are there, too. Large operations between processes of one host on such tensors need
    /// no staging: nothing is copied on the way. It must be called on all ranks to be of use. Tensors of backends other than
    /// Flex, and tracked ones, stay where they are.
    ///
    /// # Errors
    /// [`Error::Io`] where there is not so much memory; after [`destroy`](Self::destroy), [`Error::InvalidArgument`].
    pub fn prepare_communication_buffer_for_model<M: Module<B>>(&mut self, model: M) -> Result<M, Error> {
        #[cfg(feature = "flex")]
        if self.memory.is_none() && self.groups.is_some() {
            self.memory = Some(Suited::default());
        }
        buffers::move_parameters(self.via()?, model)
    }

    fn groups(&self) -> Result<&Groups, Error> {
        self.groups.as_ref().ok_or_else(|| destroyed(&self.name))
    }

    fn via(&self) -> Result<Via<'_>, Error> {
        Ok(Via {
            group: &self.groups()?.tensors,
            #[cfg(feature = "flex")]
            memory: self.memory.as_ref(),
        })
    }

    fn sizes(&self, axis: &Axis, sizes: Option<&[usize]>) -> Result<Vec<usize>, Error> {
        let metadata = &self.groups()?.metadata;
        sizes.map_or(Sizes::Exchanged, Sizes::Given).resolve(metadata.into(), "all_gather", axis)
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
