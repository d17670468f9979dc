//! Operations on tensors of collective devices, through their server and without burn's host tensors.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod access;

use burn::tensor::Shape;
use burn::tensor::backend::Backend;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use self::access::DeviceAccess;
use bonfire_core::internal::{Peers, Ranges, Request};
use bonfire_core::{Call, Error, Group};

/// Whether the backend's tensors are on collective devices.
#[cfg_attr(
    not(any(feature = "wgpu", feature = "cuda")),
    expect(clippy::extra_unused_type_parameters, reason = "there are no such devices")
)]
pub(crate) fn uses_collective_devices<B: Backend>() -> bool {
    #[cfg(feature = "wgpu")]
    if DeviceAccess::<cubecl::wgpu::WgpuRuntime>::applies_to::<B>() {
        return true;
    }
    #[cfg(feature = "cuda")]
    if DeviceAccess::<cubecl::cuda::CudaRuntime>::applies_to::<B>() {
        return true;
    }
    false
}

/// Waits until the ranks of the group have agreed on how they exchange data on their devices, if this backend's do, and
/// returns whether they do so without host memory. All ranks call it. Else their first operation on devices waits,
/// which it must not in a backward pass.
#[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "no such devices agree"))]
pub(crate) fn connect<B: Backend>(group: &Group, device: &B::Device) -> Result<bool, Error> {
    #[cfg(feature = "cuda")]
    if DeviceAccess::<cubecl::cuda::CudaRuntime>::applies_to::<B>() {
        use crate::server::DeviceTransport;
        use burn::tensor::backend::DeviceOps;
        return cubecl::cuda::CudaRuntime::route(group, device.id()).map(|route| route.is_some());
    }
    Ok(false)
}

/// Whether the ranks of the group, if they have agreed on a path, run this collective without host memory.
#[cfg_attr(
    not(feature = "cuda"),
    expect(clippy::extra_unused_type_parameters, unused_variables, reason = "no such devices agree")
)]
pub(crate) fn supports<B: Backend>(group: &Group, call: &Call) -> bool {
    #[cfg(feature = "cuda")]
    if DeviceAccess::<cubecl::cuda::CudaRuntime>::applies_to::<B>() {
        use crate::server::DeviceTransport;
        return cubecl::cuda::CudaRuntime::agreed_route(group).is_some_and(|route| route.supports(call));
    }
    false
}

/// Whether messages between the ranks of the group pass from device to device. The ranks have to agree on a path first:
/// their first collective on devices does that, which sender and receiver make before the message or after it. Until
/// then, messages pass through host memory.
#[cfg_attr(
    not(feature = "cuda"),
    expect(clippy::extra_unused_type_parameters, unused_variables, reason = "no such devices agree")
)]
pub(crate) fn passes_messages<B: Backend>(group: &Group) -> bool {
    #[cfg(feature = "cuda")]
    if DeviceAccess::<cubecl::cuda::CudaRuntime>::applies_to::<B>() {
        use crate::server::DeviceTransport;
        return cubecl::cuda::CudaRuntime::agreed_route(group).is_some_and(|route| route.messages().is_some());
    }
    false
}

/// An operation on the memory of a device, in the element type of the request. `T` is a backend's primitive tensor.
pub struct DeviceCall<T> {
    pub(crate) request: Request<'static>,
    /// What this rank gives: tensors, and the bytes of the operation's whole that they are.
    pub(crate) sources: Vec<(T, Ranges)>,
    pub(crate) targets: Vec<Target<T>>,
    /// Bytes of the whole. Of a message, those that are sent, if any are.
    pub(crate) bytes: usize,
    /// The ranks at the other ends of a message.
    pub(crate) peers: Peers,
}

/// A tensor that an operation makes.
pub(crate) struct Target<T> {
    /// A tensor of the same device, element type and kind.
    pub like: T,
    pub shape: Shape,
    /// The bytes of the operation's whole that it gets.
    pub ranges: Ranges,
}

impl<T> DeviceCall<T> {
    /// A collective on a whole of so many bytes.
    pub(crate) fn collective(
        request: Request<'static>,
        bytes: usize,
        sources: Vec<(T, Ranges)>,
        targets: Vec<Target<T>>,
    ) -> DeviceCall<T> {
        DeviceCall { request, sources, targets, bytes, peers: Peers::default() }
    }

    /// Returns the same call on primitive tensors of another form, if all of them have that.
    pub(crate) fn map<U>(self, form: impl Fn(T) -> Option<U>) -> Option<DeviceCall<U>> {
        let sources = self.sources.into_iter().map(|(tensor, ranges)| Some((form(tensor)?, ranges)));
        let targets = self
            .targets
            .into_iter()
            .map(|Target { like, shape, ranges }| Some(Target { like: form(like)?, shape, ranges }));
        Some(DeviceCall {
            request: self.request,
            sources: sources.collect::<Option<_>>()?,
            targets: targets.collect::<Option<_>>()?,
            bytes: self.bytes,
            peers: self.peers,
        })
    }
}

/// How burn's fusion server finds a tensor. Backends without fusion do not distinguish the kinds.
#[derive(Clone, Copy)]
pub(crate) enum TensorKind {
    Float,
    Int,
}

/// An operation in flight, and the tensors that it makes, in the order of the targets.
pub struct PendingTensors<T> {
    /// None: there is nothing to wait for.
    transfer: Option<Box<dyn Transfer>>,
    made: Box<dyn FnOnce() -> Result<Vec<T>, Error> + Send>,
}

/// Waits until an operation whose tensors are in use already has ended. After an error their contents are unspecified.
pub(crate) type Completion = Box<dyn FnOnce() -> Result<(), Error> + Send>;

/// The data of an operation in flight.
trait Transfer: Send {
    fn wait(self: Box<Self>) -> Result<(), Error>;

    /// Orders all later work on the device after the operation.
    fn follow(self: Box<Self>) -> Result<Completion, Error>;
}

impl<T> PendingTensors<T> {
    /// Waits for the tensors.
    pub(crate) fn wait(self) -> Result<Vec<T>, Error> {
        self.transfer.map_or(Ok(()), Transfer::wait)?;
        (self.made)()
    }

    /// Returns the tensors once the operation is launched, where its device can wait for the rest. They may be used at
    /// once. See [`Transfer::follow`](crate::server::Transfer::follow).
    pub(crate) fn follow(self) -> Result<(Vec<T>, Option<Completion>), Error> {
        let completion = self.transfer.map(Transfer::follow).transpose()?;
        Ok(((self.made)()?, completion))
    }

    /// Returns the same operation with tensors of another form.
    pub(crate) fn map<U>(self, form: impl Fn(T) -> U + Send + 'static) -> PendingTensors<U>
    where
        T: 'static,
    {
        let made = self.made;
        PendingTensors { transfer: self.transfer, made: Box::new(move || Ok(made()?.into_iter().map(form).collect())) }
    }
}

/// Starts an operation on tensors of a backend that [uses collective devices](uses_collective_devices).
#[cfg_attr(
    not(any(feature = "wgpu", feature = "cuda")),
    expect(clippy::extra_unused_type_parameters, unused_variables, reason = "there are no such devices")
)]
pub(crate) fn start<B: Backend, T: Send + 'static>(
    group: &Group,
    kind: TensorKind,
    call: DeviceCall<T>,
) -> Result<PendingTensors<T>, Error> {
    #[cfg(feature = "wgpu")]
    if DeviceAccess::<cubecl::wgpu::WgpuRuntime>::applies_to::<B>() {
        return DeviceAccess::<cubecl::wgpu::WgpuRuntime>::start(group, kind, call);
    }
    #[cfg(feature = "cuda")]
    if DeviceAccess::<cubecl::cuda::CudaRuntime>::applies_to::<B>() {
        return DeviceAccess::<cubecl::cuda::CudaRuntime>::start(group, kind, call);
    }
    Err(Error::broken("an operation on a device", "its tensors are not on a collective device"))
}
