//! Tensors on collective devices: reduced through their server, without a detour over burn's host tensors.

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod path;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
use self::path::Path;
use bonfire_core::internal::Request;
use bonfire_core::{Error, Group};

/// Whether the backend's tensors are on collective devices.
#[cfg_attr(
    not(any(feature = "wgpu", feature = "cuda")),
    expect(clippy::extra_unused_type_parameters, reason = "there are no such devices")
)]
pub(crate) fn serves<B: Backend>() -> bool {
    #[cfg(feature = "wgpu")]
    if Path::<cubecl::wgpu::WgpuRuntime>::leads_to::<B>() {
        return true;
    }
    #[cfg(feature = "cuda")]
    if Path::<cubecl::cuda::CudaRuntime>::leads_to::<B>() {
        return true;
    }
    false
}

/// An all-reduce of tensors that was started; called, it waits and gives the results in the tensors' order.
pub(crate) type Waiting<B> = Box<dyn FnOnce() -> Result<Vec<FloatTensor<B>>, Error> + Send>;

/// What became of tensors that were offered to their device.
pub enum Offer<T, R> {
    Taken(Result<R, Error>),
    /// They are not on a collective device.
    Declined(T),
}

/// Starts one all-reduce of several tensors of one element type, that of `request`, where they are on a collective device.
#[cfg_attr(
    not(any(feature = "wgpu", feature = "cuda")),
    expect(unused_variables, reason = "there are no such devices")
)]
pub(crate) fn start_all_reduce<B: Backend>(
    group: &Group,
    tensors: Vec<FloatTensor<B>>,
    request: Request<'static>,
) -> Offer<Vec<FloatTensor<B>>, Waiting<B>> {
    #[cfg(feature = "wgpu")]
    if Path::<cubecl::wgpu::WgpuRuntime>::leads_to::<B>() {
        return Offer::Taken(Path::<cubecl::wgpu::WgpuRuntime>::start::<B>(group, tensors, request));
    }
    #[cfg(feature = "cuda")]
    if Path::<cubecl::cuda::CudaRuntime>::leads_to::<B>() {
        return Offer::Taken(Path::<cubecl::cuda::CudaRuntime>::start::<B>(group, tensors, request));
    }
    Offer::Declined(tensors)
}
