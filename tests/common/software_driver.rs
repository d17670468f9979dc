//! The software driver (`kernels/check --driver`): how tests start it, what it records, and what it does on request.
#![allow(dead_code, reason = "each test target uses a part of it")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int};

use bonfire::Error;

/// These variables, and those for this many GPUs, for a process on the software driver.
pub fn with_gpus<'a>(gpus: usize, variables: &[(&'a str, &str)]) -> Vec<(&'a str, String)> {
    let gpus = gpus.to_string();
    let counts = [("SHIM_GPUS", &gpus[..]), ("BONFIRE_TEST_GPUS", &gpus[..])];
    counts.iter().chain(variables).map(|(name, value)| (*name, (*value).to_owned())).collect()
}

/// Returns the GPU that an error says has the fault of `SHIM_FAULT`, and the ranks that use it.
pub fn faulty_gpu(error: &Error) -> (usize, &[usize]) {
    let Error::Gpu { gpu, ranks, reason, .. } = error else { panic!("{error}") };
    assert!(reason.starts_with("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
    assert!(error.to_string().contains("restart the job"), "{error}");
    (*gpu, ranks)
}

/// The software driver, as this process has loaded it.
pub struct SoftwareDriver(libloading::Library);

impl SoftwareDriver {
    /// Fails the test on another driver, which would show nothing.
    pub fn loaded() -> SoftwareDriver {
        // SAFETY: the library is loaded already, or is a driver, whose initialisers have no requirements.
        let driver = unsafe { libloading::Library::new("libcuda.so.1") }.expect("a driver");
        // SAFETY: the symbol is only looked up.
        let found = unsafe { driver.get::<unsafe extern "C" fn() -> u64>(b"shimHostFunctions") }.is_ok();
        assert!(found, "this test needs the software driver");
        SoftwareDriver(driver)
    }

    /// The calls of `cuLaunchHostFunc` so far.
    pub fn host_functions(&self) -> u64 {
        // SAFETY: the type is that in `kernels/shim/driver/stream.cpp`.
        unsafe { self.0.get::<unsafe extern "C" fn() -> u64>(b"shimHostFunctions").unwrap()() }
    }

    /// The bytes that copies have moved from GPUs to the host so far, and those from the host to GPUs.
    pub fn copied(&self) -> [u64; 2] {
        // SAFETY: the types are those in `kernels/shim/driver/memory.cpp`.
        let count = |name: &[u8]| unsafe { self.0.get::<unsafe extern "C" fn() -> u64>(name).unwrap()() };
        [count(b"shimDownloaded"), count(b"shimUploaded")]
    }

    /// The calls of each function of the driver so far.
    pub fn calls(&self) -> BTreeMap<String, u64> {
        let mut text = vec![0u8; 1 << 16];
        // SAFETY: the type is that in `kernels/shim/driver/gpu.cpp`; the text has this many bytes.
        let length = unsafe {
            let symbol = self.0.get::<unsafe extern "C" fn(*mut u8, u64) -> u64>(b"shimCalls").unwrap();
            symbol(text.as_mut_ptr(), text.len() as u64)
        };
        assert!((length as usize) < text.len(), "the table of calls has {length} bytes");
        let lines = std::str::from_utf8(&text[..length as usize]).expect("names of functions");
        let pairs = lines.lines().map(|line| line.split_once(' ').expect("a name and a number"));
        pairs.map(|(name, calls)| (name.to_owned(), calls.parse().expect("a number"))).collect()
    }

    /// The blocks of the last launch of this kernel, in all of its grid.
    pub fn blocks(&self, kernel: &str) -> u64 {
        let name = CString::new(kernel).unwrap();
        // SAFETY: the type is that in `kernels/shim/driver/module.cpp`; the name is a C string.
        unsafe { self.0.get::<unsafe extern "C" fn(*const c_char) -> u64>(b"shimBlocks").unwrap()(name.as_ptr()) }
    }

    /// The launches of this kernel so far.
    pub fn launches(&self, kernel: &str) -> u64 {
        let name = CString::new(kernel).unwrap();
        // SAFETY: the type is that in `kernels/shim/driver/module.cpp`; the name is a C string.
        unsafe { self.0.get::<unsafe extern "C" fn(*const c_char) -> u64>(b"shimLaunches").unwrap()(name.as_ptr()) }
    }

    /// From now on launches of this kernel do not run, and those of the kernel that was held before do.
    pub fn hold(&self, kernel: &str) {
        let name = CString::new(kernel).unwrap();
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(*const c_char)>(b"shimHold").unwrap()(name.as_ptr()) }
    }

    /// From now on this GPU has no memory left, or has some again.
    pub fn exhaust(&self, gpu: c_int, exhausted: bool) {
        // SAFETY: the type is that in `kernels/shim/driver/memory.cpp`.
        unsafe {
            self.0.get::<unsafe extern "C" fn(c_int, c_int)>(b"shimExhaust").unwrap()(gpu, c_int::from(exhausted))
        }
    }

    /// The priority of the least urgent stream on which this kernel was launched so far. Smaller numbers come first.
    pub fn least_priority(&self, kernel: &str) -> i32 {
        let (name, symbol) = (CString::new(kernel).unwrap(), b"shimLeastPriority");
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(*const c_char) -> c_int>(symbol).unwrap()(name.as_ptr()) }
    }
}
