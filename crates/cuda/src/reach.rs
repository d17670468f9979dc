//! Which GPUs can access each other's memory, and which support our kernels, as far as trying can tell.

use std::sync::Arc;

use cudarc::driver::sys;

use super::address::Copy;
use super::choice::Link;
use super::driver::{Gpu, Stream};
use super::memory::{HostWords, Memory, word};
use bonfire_core::Error;
use bonfire_core::internal::lock;

/// Returns how these GPUs, which are distinct and reach each other, are connected.
pub(crate) fn link(gpus: &[&Gpu]) -> Link {
    let nvlink = |i: usize| gpus[..i].iter().all(|other| gpus[i].has_nvlink(other.ordinal));
    match gpus.len() {
        0 | 1 => Link::OneGpu,
        count if (1..count).all(nvlink) => Link::Nvlink,
        _ => Link::Pcie,
    }
}

/// What a GPU needs for our kernels, and its driver.
pub(crate) const KERNELS_NEED: &str =
    "compute capability 7.0 or higher, streams that wait for words in memory, and memory pools";

impl Gpu {
    /// Whether kernels on this GPU can access the memory of `other`. Enables the access.
    pub fn reaches(&self, other: &Gpu) -> Result<bool, Error> {
        if self.ordinal == other.ordinal {
            return Ok(true);
        }
        let mut reached = lock(&self.reached);
        if let Some(reached) = reached.get(&other.ordinal) {
            return Ok(*reached);
        }
        let found = self.enable_access(other)?;
        reached.insert(other.ordinal, found);
        Ok(found)
    }

    /// Whether kernels can run on this GPU. Older ones lack the memory orders and scopes of `kernels/ptx.cuh`.
    pub fn runs_kernels(&self) -> Result<bool, Error> {
        Ok(self.architecture >= 70 && self.orders_streams()?)
    }

    /// Whether NVLink connects this GPU to the one with ordinal `other`, as far as the driver tells: atomic operations
    /// of one GPU on the other's memory pass over NVLink, not over PCIe.
    pub fn has_nvlink(&self, other: usize) -> bool {
        let atomics = sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        let mut supported = 0;
        // SAFETY: `supported` receives the result. The driver refuses ordinals that do not exist.
        let asked = unsafe { sys::cuDeviceGetP2PAttribute(&mut supported, atomics, self.ordinal as i32, other as i32) };
        let known = self.check("asking how GPUs are connected", asked);
        known.inspect_err(|error| log::warn!("{error}; taking PCIe")).is_ok() && supported == 1
    }

    fn enable_access(&self, other: &Gpu) -> Result<bool, Error> {
        let mut can = 0;
        // SAFETY: both ordinals are valid: `of` found both devices.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can, self.ordinal as i32, other.ordinal as i32) };
        self.check("asking for peer access", asked)?;
        if can == 0 {
            return Ok(false);
        }
        let _entered = self.enter()?;
        // SAFETY: the context lives as long as the process.
        match unsafe { sys::cuCtxEnablePeerAccess(other.context, 0) } {
            sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            enabled => self.check("enabling peer access", enabled)?,
        }
        self.share_pool(other)?;
        self.verify_access(other)
    }

    /// Whether the driver has streams that wait for and write words in memory, and stream-ordered allocation.
    fn orders_streams(&self) -> Result<bool, Error> {
        let try_out = || -> Result<(), Error> {
            let stream = Arc::new(Stream::new(self)?);
            // A pool may be missing, and kernels' memory comes from it.
            Memory::zeroed(&stream, size_of::<u64>())?;
            for word in [word(&stream)?, HostWords::zeroed(self, 1)?.word(0)] {
                stream.write(word, 1)?;
                stream.wait_for(word, 1)?;
            }
            stream.synchronize()
        };
        if let Some(known) = self.stream_ordering.get() {
            return Ok(*known);
        }
        match try_out() {
            // It says nothing about the driver.
            Err(error @ Error::OutOfMemory { .. }) => Err(error),
            tried => {
                let tried = tried.inspect_err(|error| log::warn!("{error}"));
                Ok(*self.stream_ordering.get_or_init(|| tried.is_ok()))
            }
        }
    }

    /// Gives this GPU access to the tensors of `other`, which are allocated from that device's current memory pool.
    fn share_pool(&self, other: &Gpu) -> Result<(), Error> {
        /// The driver's CUmemAccessDesc. Its declaration differs between versions of the header, its layout does not.
        #[repr(C)]
        struct Access {
            kind: i32,
            device: i32,
            flags: i32,
        }
        let access = Access {
            kind: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE as i32,
            device: self.ordinal as i32,
            flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as i32,
        };
        let mut pool = std::ptr::null_mut();
        // SAFETY: nothing replaces or destroys a device's pool. `access` lives for the call.
        let shared = unsafe {
            let found = sys::cuDeviceGetMemPool(&mut pool, other.ordinal as i32);
            other.check("finding the memory pool", found)?;
            sys::cuMemPoolSetAccess(pool, (&raw const access).cast(), 1)
        };
        other.check("sharing the memory pool", shared)
    }

    /// Whether this GPU can read a word in pool memory of `other`, and write it to another place there. Drivers have
    /// claimed access that did not work.
    fn verify_access(&self, other: &Gpu) -> Result<bool, Error> {
        const WORD: u32 = 0x600d_c0de;
        let (theirs, ours) = (Arc::new(Stream::new(other)?), Stream::new(self)?);
        let words = Memory::zeroed(&theirs, 4)?;
        words.fill(WORD)?;
        theirs.synchronize()?;
        let second = Memory::zeroed(&theirs, 4)?;
        // SAFETY: both have 4 bytes, and live longer than the copy, which ends here.
        let copied = unsafe { ours.copy(&Copy::of(words.address, second.address, 4)) };
        let outcome = copied.and_then(|()| ours.synchronize());
        let read = second.read(0, 1)?;
        let verified = outcome.is_ok() && read[0] == WORD;
        if !verified {
            log::warn!(
                "GPU {} claims access to GPU {}, but a copy there did not arrive: {outcome:?}",
                self.ordinal,
                other.ordinal
            );
        }
        Ok(verified)
    }
}
