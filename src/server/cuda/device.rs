//! Which GPU a rank uses.

use cubecl::cuda::CudaRuntime;

use crate::server::CollectiveDevice;
use bonfire_core::Error;

impl CollectiveDevice<CudaRuntime> {
    /// Returns the number of GPUs that this process sees, which is at least 1.
    ///
    /// # Errors
    /// [`Error::Library`] if the driver is missing, does not start, or is too old; [`Error::Io`] if there is no GPU.
    pub fn gpus() -> Result<usize, Error> {
        bonfire_cuda::gpus()
    }

    /// Returns the device of the rank with this number on its host. Ranks take the GPUs in turn, and share one, each
    /// with a logical device of its own, only where ranks outnumber GPUs.
    ///
    /// # Errors
    /// Those of [`gpus`](Self::gpus); [`Error::InvalidArgument`] for more than 256 ranks on a GPU.
    pub fn of_rank(number: usize) -> Result<Self, Error> {
        let gpus = Self::gpus()?;
        let reason = || format!("{gpus} GPUs are too few for rank {number} of a host: start fewer ranks");
        let replica = u8::try_from(number / gpus).map_err(|_| Error::argument("choosing a GPU", reason()))?;
        Ok(CollectiveDevice::new(cubecl::cuda::CudaDevice::new(number % gpus), replica))
    }
}
