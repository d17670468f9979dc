//! Which GPU a rank has.
#![allow(dead_code, reason = "each example uses a part of it")]

use bonfire::CudaDevice;

use crate::Failure;

/// The device of a rank that has this number on its host: a GPU of its own while there are any, then several on each.
pub fn device(number: usize) -> Result<CudaDevice, Failure> {
    let gpus = gpus()?;
    let replica = u8::try_from(number / gpus).map_err(|_| format!("{gpus} GPUs are too few for {number} ranks"))?;
    Ok(CudaDevice::new(cubecl::cuda::CudaDevice::new(number % gpus), replica))
}

/// This process's number on its host, by its launcher.
pub fn local_rank() -> usize {
    std::env::var("LOCAL_RANK").ok().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// How many GPUs there are: at least one.
pub fn gpus() -> Result<usize, Failure> {
    // SAFETY: loads the driver's library and nothing else; it may be loaded at any time.
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
