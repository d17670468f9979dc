//! What the engine needs of tensors and of groups: an adapter for a tensor library implements these traits.
//!
//! A [`Tensor`] is a handle that only its adapter can open. A [`Lane`] runs operations in which several tensors make up
//! one whole. There are three: one in host memory and one for compressed gradients, both here, and one for each kind of
//! device whose memory the adapter can reach, which is the adapter's.

mod host;

use std::any::Any;
use std::sync::Arc;

use bonfire_core::internal::{Ranges, Request};
use bonfire_core::{DType, Error, Group};

pub use self::host::HostLane;

/// A tensor of the adapter's.
pub type Tensor = Arc<dyn Any + Send + Sync>;

/// The adapter of a tensor library, for the parameters of one model. A position is that of a parameter in the list that
/// the engine got. The element type of a tensor is the parameter's own, or a wider one to which the engine has cast it.
pub trait Tensors: Send + Sync {
    /// Whether a tensor has the shape and the element type of the parameter at a position.
    fn fits(&self, position: usize, tensor: &Tensor) -> bool;

    /// Returns the tensor with elements of this type.
    fn cast(&self, position: usize, tensor: Tensor, dtype: DType) -> Tensor;

    /// Multiplies a tensor of elements of this type. 16-bit elements are multiplied in f32.
    fn scale(&self, tensor: Tensor, dtype: DType, factor: f64) -> Tensor;

    /// Adds two tensors of one shape and element type.
    fn add(&self, one: Tensor, other: Tensor) -> Tensor;

    /// Returns the sum of a tensor's elements as a tensor of one: of f64 for elements of f64, otherwise of f32.
    fn sum(&self, tensor: Tensor, dtype: DType) -> Tensor;

    /// Begins to read a tensor to host memory.
    fn read(&self, tensor: Tensor) -> Box<dyn Read>;

    /// Returns initialised memory of unspecified contents for so many elements.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::InvalidArgument`] if there is not so much memory.
    fn memory(&self, dtype: DType, elements: usize) -> Result<Box<dyn Memory>, Error>;

    /// Makes a tensor of this shape and element type, on the device of the parameter at a position.
    fn tensor(&self, position: usize, shape: &[usize], dtype: DType, memory: Box<dyn Memory>) -> Tensor;

    /// Returns the sum of the squares of each tensor's elements, if the tensors' device can add them. Otherwise the
    /// tensors are read and added in f64.
    ///
    /// # Errors
    /// [`Error::Io`] if the device fails.
    fn sums_of_squares(&self, _tensors: &[(Tensor, DType)]) -> Result<Option<Vec<f64>>, Error> {
        Ok(None)
    }

    /// Returns a lane for operations on the tensors' device, if the adapter has one for this group, and waits until the
    /// ranks of the group have agreed on it. Without one the tensors go through host memory.
    ///
    /// # Errors
    /// Those of the agreement.
    fn device_lane(&self, _group: &Group) -> Result<Option<Box<dyn Lane>>, Error> {
        Ok(None)
    }
}

/// Returns the sum of the squares of each tensor's elements.
///
/// # Errors
/// [`Error::Io`] if a device fails.
pub fn sums_of_squares(tensors: &dyn Tensors, of: Vec<(Tensor, DType)>) -> Result<Vec<f64>, Error> {
    if let Some(sums) = tensors.sums_of_squares(&of)? {
        return Ok(sums);
    }
    let sums = of.into_iter().map(|(tensor, dtype)| {
        let elements = tensors.read(tensor).wait()?;
        Ok(host::sum_of_squares(elements.bytes(), dtype))
    });
    sums.collect()
}

/// Host memory of elements, aligned for them.
pub trait Memory: Any + Send {
    /// Returns the bytes.
    fn bytes(&self) -> &[u8];

    /// Returns the bytes.
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// The elements of a tensor in host memory.
pub enum Elements {
    /// No tensor has this memory any more.
    Owned(Box<dyn Memory>),
    /// Other tensors share it.
    Shared(Box<dyn AsRef<[u8]> + Send>),
}

impl Elements {
    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Elements::Owned(memory) => memory.bytes(),
            Elements::Shared(memory) => (**memory).as_ref(),
        }
    }
}

/// A tensor that is being read.
pub trait Read: Send {
    /// Whether [`wait`](Self::wait) would return at once. It does not wait itself.
    fn is_ready(&mut self) -> bool;

    /// Returns the elements.
    ///
    /// # Errors
    /// [`Error::Io`] if the device fails.
    fn wait(self: Box<Self>) -> Result<Elements, Error>;
}

/// What a rank gives to an operation.
pub enum Input {
    /// Zeros: padding, and the gradient of a rank that has none.
    Zeros,
    /// A tensor on its device.
    Tensor(Tensor),
    /// A tensor that is being read, for a lane in [host memory](Lane::is_on_host).
    Host(Box<dyn Read>),
}

impl Input {
    /// Whether a lane could use it without waiting.
    pub(crate) fn is_ready(&mut self) -> bool {
        match self {
            Input::Host(read) => read.is_ready(),
            _ => true,
        }
    }

    /// Waits for the elements in host memory. `None` stands for zeros.
    pub(crate) fn elements(self, tensors: &dyn Tensors) -> Result<Option<Elements>, Error> {
        Ok(match self {
            Input::Host(read) => Some(read.wait()?),
            Input::Tensor(tensor) => Some(tensors.read(tensor).wait()?),
            Input::Zeros => None,
        })
    }
}

/// What a rank gives to an operation, and the bytes of the whole that it is.
pub struct Source {
    /// The position of the parameter.
    pub position: usize,
    /// Its elements.
    pub input: Input,
    /// Where they are in the whole.
    pub ranges: Ranges,
}

/// A tensor that an operation makes.
pub struct Target {
    /// The position of the parameter on whose device it is.
    pub position: usize,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its element type: that of the call, unless the call only moves bytes.
    pub dtype: DType,
    /// The bytes of the whole that it gets.
    pub ranges: Ranges,
}

/// A collective on a whole that tensors of one element type make up.
pub struct Call {
    /// The operation, the element type and the reduction.
    pub request: Request<'static>,
    /// The bytes of the whole.
    pub bytes: usize,
    /// The factor of this rank's elements.
    pub factor: f64,
    /// What this rank gives.
    pub sources: Vec<Source>,
    /// What the operation makes.
    pub targets: Vec<Target>,
}

/// A group, and a way to run operations on tensors over it.
pub trait Lane: Send {
    /// Returns the group.
    fn group(&self) -> &Group;

    /// Whether tensors must be read before they are given to it.
    fn is_on_host(&self) -> bool;

    /// Starts a call. Waits for reads that are not ready, and for no other rank.
    ///
    /// # Errors
    /// Those of [`Read::wait`], [`Tensors::memory`], and of [`Group::allocate`].
    fn start(&mut self, call: Call) -> Result<Box<dyn Pending>, Error>;
}

/// An operation in flight.
pub trait Pending: Send {
    /// Whether [`wait`](Self::wait) would return at once. `None` where that is not known.
    fn is_finished(&self) -> Option<bool>;

    /// Waits for the operation. Returns the tensors of its targets, in their order.
    ///
    /// # Errors
    /// Those of the operation.
    fn wait(self: Box<Self>) -> Result<Vec<Tensor>, Error>;

    /// As [`wait`](Self::wait), but where a device can wait for the operation itself, the tensors are returned once the
    /// operation is launched. They may be used at once, on the device. Whether they are right says the completion.
    ///
    /// # Errors
    /// Those of the launch.
    fn follow(self: Box<Self>) -> Result<(Vec<Tensor>, Completion), Error> {
        Ok((self.wait()?, None))
    }
}

/// Waits until an operation whose tensors are in use already has ended. `None`: it has.
pub type Completion = Option<Box<dyn FnOnce() -> Result<(), Error> + Send>>;

/// An operation whose tensors are in use already. It must be confirmed before anything that lasts is made of them.
#[derive(Default)]
pub(crate) struct Unconfirmed(Completion);

impl Unconfirmed {
    /// Waits until the operation has ended.
    pub fn confirm(&mut self) -> Result<(), Error> {
        self.0.take().map_or(Ok(()), |completion| completion())
    }

    /// Returns the tensors of an operation, whose device waits for it where it can. Waits for the operation before it.
    /// So while the device works, the host finds the next work for it. The operation before comes first: only who waits
    /// for it learns of a peer that was lost in it.
    pub fn follow(&mut self, pending: Box<dyn Pending>) -> Result<Vec<Tensor>, Error> {
        self.confirm()?;
        let (tensors, completion) = pending.follow()?;
        self.0 = completion;
        Ok(tensors)
    }
}

/// Returns the adapter's lane over a group, or one through host memory.
pub(crate) fn lane(tensors: &Arc<dyn Tensors>, group: &Group) -> Result<Box<dyn Lane>, Error> {
    let device = if group.world_size() > 1 { tensors.device_lane(group)? } else { None };
    Ok(device.unwrap_or_else(|| Box::new(HostLane::new(group.clone(), tensors.clone()))))
}

/// Returns a tensor as a lane takes it.
pub(crate) fn input(tensors: &dyn Tensors, lane: &dyn Lane, tensor: Tensor) -> Input {
    if lane.is_on_host() { Input::Host(tensors.read(tensor)) } else { Input::Tensor(tensor) }
}
