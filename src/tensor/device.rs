//! All-reduce of tensors on collective devices, through their server and without burn's host tensors.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod access;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use self::access::DeviceAccess;
use bonfire_core::internal::Request;
use bonfire_core::{Error, Group};

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

/// An all-reduce in flight. The call waits for it and returns the results in the order of the tensors.
pub(crate) type PendingAllReduce<B> = Box<dyn FnOnce() -> Result<Vec<FloatTensor<B>>, Error> + Send>;

/// Whether an operation ran on the tensors' device.
pub enum DeviceOutcome<T, R> {
    Handled(Result<R, Error>),
    /// The tensors, returned to the caller: they are not on a collective device.
    NotHandled(T),
}

/// Starts one all-reduce of several tensors of the element type of `request`, if they are on a collective device.
#[cfg_attr(
    not(any(feature = "wgpu", feature = "cuda")),
    expect(unused_variables, reason = "there are no such devices")
)]
pub(crate) fn start_all_reduce<B: Backend>(
    group: &Group,
    tensors: Vec<FloatTensor<B>>,
    request: Request<'static>,
) -> DeviceOutcome<Vec<FloatTensor<B>>, PendingAllReduce<B>> {
    #[cfg(feature = "wgpu")]
    if DeviceAccess::<cubecl::wgpu::WgpuRuntime>::applies_to::<B>() {
        return DeviceOutcome::Handled(DeviceAccess::<cubecl::wgpu::WgpuRuntime>::start::<B>(group, tensors, request));
    }
    #[cfg(feature = "cuda")]
    if DeviceAccess::<cubecl::cuda::CudaRuntime>::applies_to::<B>() {
        return DeviceOutcome::Handled(DeviceAccess::<cubecl::cuda::CudaRuntime>::start::<B>(group, tensors, request));
    }
    DeviceOutcome::NotHandled(tensors)
}
