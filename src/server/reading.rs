//! Device-to-host copies under way.

use cubecl::bytes::Bytes;
use cubecl::future::{DynFut, block_on};
use cubecl::server::ServerError;

use crate::error::Error;

/// A device-to-host copy of some buffers that was started.
pub(super) struct Reading(Option<DynFut<Result<Vec<Bytes>, ServerError>>>);

impl Reading {
    pub fn new(reading: DynFut<Result<Vec<Bytes>, ServerError>>) -> Reading {
        Reading(Some(reading))
    }

    /// Waits for the device; gives the buffers in their order.
    pub fn wait(mut self, operation: &str) -> Result<Vec<Bytes>, Error> {
        let Some(reading) = self.0.take() else { return Ok(Vec::new()) };
        block_on(reading).map_err(|e| Error::io(operation, e))
    }

    /// Waits for the device to deliver a single buffer.
    pub fn wait_one(self, operation: &str) -> Result<Bytes, Error> {
        self.wait(operation)?.pop().ok_or_else(|| Error::io(operation, "the device gave no data"))
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        // wgpu gives a staging buffer back to its pool still mapped where its future is dropped before it is done, and
        // the next use of that buffer panics (seen with cubecl-wgpu 0.10).
        if let Some(reading) = self.0.take() {
            let _ = block_on(reading);
        }
    }
}
