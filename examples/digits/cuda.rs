//! Assignment of GPUs to ranks.
#![allow(dead_code, reason = "each example uses a part of it")]

use bonfire::CudaDevice;

use crate::Failure;

/// Returns the device of the rank with this number on its host. Ranks share GPUs only where ranks outnumber GPUs.
pub fn device(number: usize) -> Result<CudaDevice, Failure> {
    let gpus = gpus()?;
    let replica = u8::try_from(number / gpus).map_err(|_| format!("{gpus} GPUs are too few for {number} ranks"))?;
    Ok(CudaDevice::new(cubecl::cuda::CudaDevice::new(number % gpus), replica))
}

/// Returns this process's local rank, as set by its launcher, or 0.
pub fn local_rank() -> usize {
    std::env::var("LOCAL_RANK").ok().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Returns the number of GPUs, which is at least 1.
pub fn gpus() -> Result<usize, Failure> {
    // SAFETY: loads only the driver's library, which may be loaded at any time.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        let remedy = "install NVIDIA's driver, or name the folder of libcuda.so in LD_LIBRARY_PATH";
        return Err(format!("there is no CUDA driver on this machine: {remedy}").into());
    }
    match cudarc::driver::CudaContext::device_count() {
        Ok(gpus @ 1..) => Ok(gpus as usize),
        Ok(_) => Err("the CUDA driver finds no GPU: see nvidia-smi, and CUDA_VISIBLE_DEVICES".into()),
        Err(error) => Err(format!("the CUDA driver does not start: {error}; see nvidia-smi").into()),
    }
}
