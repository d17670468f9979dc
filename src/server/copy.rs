//! Copies between devices, for clients. Each cubecl server has a thread of its own.
//!
//! A copy brings its own channel, so that nothing has to be matched as in cubecl's `send` and `recv`. Through host
//! memory, it reads the tensor's span with its gaps and packs the elements on the host.

use std::sync::mpsc::{Receiver, channel};

use cubecl::Runtime;
use cubecl::bytes::Bytes;
use cubecl::client::ComputeClient;
use cubecl::device::DeviceId;
use cubecl::device_handle::DeviceHandle;
use cubecl::server::{Binding, CopyDescriptor, Handle};
use cubecl::stream_id::StreamId;

use super::DeviceTransport;
use super::compute::CollectiveServer;
use super::download::catch_panic;
use super::mailbox::Payload;
use super::runtime::CollectiveRuntime;
use bonfire_core::internal::Rows;
use bonfire_core::{Deadline, Error};

/// Runtimes whose devices can copy from each other: the collective ones.
pub trait CopyBetweenDevices: Runtime {
    /// Copies a tensor to another device: see [`copy`].
    #[doc(hidden)]
    fn copy_between(
        _source: &ComputeClient<Self>,
        _tensor: CopyDescriptor,
        _destination: &ComputeClient<Self>,
    ) -> Result<Handle, Error> {
        let runtime = std::any::type_name::<Self>();
        let reason = format!(
            "the servers of {runtime} do not communicate; wrap it in `bonfire::CollectiveRuntime`, as `bonfire::Wgpu` \
             (feature `wgpu`) and `bonfire::Cuda` (feature `cuda`) do"
        );
        Err(Error::argument("copy", reason))
    }
}

#[cfg(feature = "wgpu")]
impl CopyBetweenDevices for cubecl::wgpu::WgpuRuntime {}

#[cfg(feature = "cuda")]
impl CopyBetweenDevices for cubecl::cuda::CudaRuntime {}

/// Copies a tensor from one device to another, bit for bit. Returns new memory there, in row-major order without
/// padding. Shape and strides of `tensor` are in elements and count from the start of its handle.
///
/// The copy is asynchronous: it reads what was queued before on the source's stream, and work queued afterwards at the
/// destination sees it. If it fails later, the destination is poisoned: see [the module's page](crate::server#errors).
///
/// # Errors
/// [`Error::InvalidArgument`] if shape and strides do not fit the memory, or if the runtime is not a collective one.
pub fn copy<R: CopyBetweenDevices>(
    source: &ComputeClient<R>,
    tensor: CopyDescriptor,
    destination: &ComputeClient<R>,
) -> Result<Handle, Error> {
    R::copy_between(source, tensor, destination)
}

impl<R: DeviceTransport> CopyBetweenDevices for CollectiveRuntime<R> {
    fn copy_between(
        source: &ComputeClient<Self>,
        tensor: CopyDescriptor,
        destination: &ComputeClient<Self>,
    ) -> Result<Handle, Error> {
        let layout = TensorLayout::of(&tensor)?;
        let stream = stream_of(source);
        let target = destination.empty(layout.bytes());
        let binding = target.clone().binding();

        let from = DeviceHandle::<CollectiveServer<R>>::new(source.info().device);
        let to = DeviceHandle::<CollectiveServer<R>>::new(destination.info().device);
        let (sender, receiver) = channel();
        let (span, in_rows, receiving) = (layout.span, layout.rows().is_some(), destination.info().device);
        from.submit(move |server| {
            // A receiver that timed out is poisoned already.
            let _ = sender.send(server.payload(tensor.handle, span, in_rows, stream, receiving));
        });
        to.submit(move |server| server.receive_copy(receiver, layout, binding));
        // Flushes both, so that neither half waits in a partly filled queue for the other.
        from.flush_queue();
        to.flush_queue();
        Ok(target)
    }
}

/// A client's stream, which cubecl shows only on new memory. The copy must see what was queued for the tensor there,
/// even if the tensor's memory belongs to another stream.
pub(super) fn stream_of<R: Runtime>(client: &ComputeClient<R>) -> StreamId {
    client.empty(1).stream
}

impl<R: DeviceTransport> CollectiveServer<R> {
    /// Makes the first bytes of some memory available to device `to`, as the work queued so far leaves them. `in_rows`
    /// is whether the tensor consists of rows, which an engine can copy.
    pub(super) fn payload(
        &mut self,
        memory: Binding,
        bytes: usize,
        in_rows: bool,
        stream: StreamId,
        to: DeviceId,
    ) -> Result<Payload, Error> {
        self.drop_failed_calls();
        if let Some(error) = self.status.reported() {
            return Err(error);
        }
        let mut both = vec![self.device, to];
        both.sort();
        both.dedup();
        if let Some(engine) = &mut self.engine
            && in_rows
            && engine.takes(&both)
        {
            return catch_panic("copy", || engine.lend(&mut self.inner, memory, bytes, stream))
                .map(Payload::PeerBuffer);
        }
        self.snapshot(vec![(memory, bytes)], stream).map(Payload::PendingRead)
    }

    /// Copies a payload to memory of this device, packed as the layout says.
    pub(super) fn deliver(
        &mut self,
        operation: &str,
        payload: Payload,
        layout: &TensorLayout,
        target: Binding,
    ) -> Result<(), Error> {
        match (payload, &mut self.engine, layout.rows()) {
            (Payload::PendingRead(reading), ..) => {
                self.write_all(vec![(target, layout.pack(reading.wait_one(operation)?))])
            }
            (Payload::PeerBuffer(lent), Some(engine), Some(rows)) => {
                catch_panic(operation, || engine.copy(&mut self.inner, lent, rows, target))
            }
            (Payload::PeerBuffer(_), ..) => Err(Error::broken(operation, "the devices disagree on how to copy")),
        }
    }

    fn receive_copy(&mut self, data: Receiver<Result<Payload, Error>>, layout: TensorLayout, target: Binding) {
        let deadline = Deadline::after(self.status.deadline());
        let sent = data.recv_timeout(deadline.remaining());
        let sent = sent.map_err(|e| Error::broken("copy", format!("the source did not deliver: {e}")));
        let copied = sent.and_then(|data| data).and_then(|data| self.deliver("copy", data, &layout, target));
        self.status.record(copied);
    }
}

/// Where a tensor's elements are, in elements from its start.
pub(super) struct TensorLayout {
    shape: Vec<usize>,
    strides: Vec<usize>,
    /// Size of one element in bytes.
    element: usize,
    /// Bytes from the first element to the end of the last.
    span: usize,
}

impl TensorLayout {
    /// The layout of this many contiguous bytes.
    pub fn packed(bytes: usize) -> TensorLayout {
        TensorLayout { shape: vec![bytes], strides: vec![1], element: 1, span: bytes }
    }

    /// The tensor as equidistant rows, if it is laid out so.
    pub fn rows(&self) -> Option<Rows> {
        let Some(outer) = self.shape.len().checked_sub(1) else {
            return Some(Rows { count: 1, bytes: self.element, pitch: self.element });
        };
        let (length, bytes) = (self.shape[outer], self.shape[outer] * self.element);
        if self.bytes() == 0 {
            return Some(Rows { count: 0, bytes: 0, pitch: 0 });
        }
        let mut dimensions = self.shape[..outer].iter().zip(&self.strides[..outer]).rev().filter(|(n, _)| **n > 1);
        let Some((&innermost, &pitch)) = dimensions.next() else {
            return (length == 1 || self.strides[outer] == 1).then_some(Rows { count: 1, bytes, pitch: bytes });
        };
        let mut next = innermost * pitch;
        let mut count = innermost;
        for (&number, &stride) in dimensions {
            if stride != next {
                return None;
            }
            next *= number;
            count *= number;
        }
        let rows = Rows { count, bytes, pitch: pitch * self.element };
        let fits = (length == 1 || self.strides[outer] == 1) && pitch >= length && rows.can_be_copied();
        fits.then_some(rows)
    }

    fn of(tensor: &CopyDescriptor) -> Result<TensorLayout, Error> {
        let (shape, strides) = (tensor.shape.to_vec(), tensor.strides.to_vec());
        let unfit = |reason: String| Err(Error::argument("copy", reason));
        if shape.len() != strides.len() {
            return unfit(format!("shape {shape:?} and strides {strides:?} have different ranks"));
        }
        let last = shape.iter().zip(&strides).try_fold(0usize, |last, (&length, &stride)| {
            last.checked_add(length.saturating_sub(1).checked_mul(stride)?)
        });
        let empty = shape.contains(&0);
        let span =
            if empty { Some(0) } else { last.and_then(|last| last.checked_add(1)?.checked_mul(tensor.elem_size)) };
        let available = tensor.handle.size_in_used();
        match span.filter(|&span| span as u64 <= available) {
            Some(span) => Ok(TensorLayout { shape, strides, element: tensor.elem_size, span }),
            None => unfit(format!(
                "shape {shape:?} with strides {strides:?} and elements of {} bytes does not fit the memory's \
                 {available} bytes",
                tensor.elem_size
            )),
        }
    }

    /// Size in bytes without gaps.
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.element
    }

    /// Packs the elements in row-major order, without gaps.
    fn pack(&self, data: Bytes) -> Bytes {
        let mut run = self.element;
        let mut outer = self.shape.len();
        // Trailing contiguous dimensions are copied as one run.
        while outer > 0 && (self.strides[outer - 1] * self.element == run || self.shape[outer - 1] == 1) {
            run *= self.shape[outer - 1];
            outer -= 1;
        }
        if outer == 0 || self.bytes() == 0 {
            return data;
        }
        let mut packed = Vec::with_capacity(self.bytes());
        let mut index = vec![0; outer];
        loop {
            let at: usize = index.iter().zip(&self.strides).map(|(i, stride)| i * stride).sum::<usize>() * self.element;
            packed.extend_from_slice(&data[at..at + run]);
            let Some(dimension) = (0..outer).rev().find(|&dimension| index[dimension] + 1 < self.shape[dimension])
            else {
                return Bytes::from_bytes_vec(packed);
            };
            index[dimension] += 1;
            index[dimension + 1..].fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use cubecl::stream_id::StreamId;

    use super::*;

    fn pack(data: &[u8], offset: u64, shape: &[usize], strides: &[usize], element: usize) -> Result<Vec<u8>, Error> {
        let handle = Handle::new(StreamId { value: 0 }, data.len() as u64).offset_start(offset);
        let tensor = handle.copy_descriptor(shape.into(), strides.into(), element);
        let layout = TensorLayout::of(&tensor)?;
        let start = offset as usize;
        let packed = layout.pack(Bytes::from_bytes_vec(data[start..start + layout.span].to_vec()));
        assert_eq!(packed.len(), layout.bytes());
        Ok(packed.to_vec())
    }

    #[test]
    fn packing_yields_row_major_order() -> Result<(), Error> {
        let data: Vec<u8> = (0..24).collect();
        assert_eq!(pack(&data, 0, &[24], &[1], 1)?, data);
        // A transposed matrix of three rows and two columns, elements of two bytes.
        assert_eq!(pack(&data, 0, &[2, 3], &[1, 2], 2)?, [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]);
        // Rows of three, padded to four, from the second row on.
        assert_eq!(pack(&data, 4, &[2, 3], &[4, 1], 1)?, [4, 5, 6, 8, 9, 10]);
        // A row that is read twice, a dimension of one with a stride of its own, and nothing at all.
        assert_eq!(pack(&data, 0, &[2, 3], &[0, 1], 1)?, [0, 1, 2, 0, 1, 2]);
        assert_eq!(pack(&data, 0, &[2, 1, 2], &[2, 99, 1], 1)?, [0, 1, 2, 3]);
        assert_eq!(pack(&data, 24, &[2, 0], &[7, 7], 4)?, [0u8; 0]);
        assert_eq!(pack(&data, 3, &[], &[], 1)?, [3]);
        Ok(())
    }

    #[test]
    fn equidistant_rows_are_recognised() {
        let rows = |shape: &[usize], strides: &[usize]| {
            let handle = Handle::new(StreamId { value: 0 }, 1 << 40);
            let layout = TensorLayout::of(&handle.copy_descriptor(shape.into(), strides.into(), 4)).unwrap();
            layout.rows().map(|rows| (rows.count, rows.bytes, rows.pitch))
        };
        assert_eq!(rows(&[24], &[1]), Some((1, 96, 96)));
        assert_eq!(rows(&[], &[]), Some((1, 4, 4)));
        assert_eq!(rows(&[2, 3], &[3, 1]), Some((2, 12, 12)));
        assert_eq!(rows(&[2, 5, 3], &[20, 4, 1]), Some((10, 12, 16)));
        assert_eq!(rows(&[2, 1, 3], &[8, 99, 1]), Some((2, 12, 32)));
        assert_eq!(rows(&[1, 3], &[77, 1]), Some((1, 12, 12)));
        assert_eq!(rows(&[4, 1], &[9, 5]), Some((4, 4, 36)));
        assert_eq!(rows(&[2, 0], &[7, 7]), Some((0, 0, 0)));
        assert_eq!(rows(&[2, 1 << 30], &[1 << 30, 1]), Some((2, 4 << 30, 4 << 30)));
        // Transposed, read twice, with a gap between groups of rows, every second element, too far apart.
        let irregular: [(&[usize], &[usize]); 5] =
            [(&[2, 3], &[1, 2]), (&[2, 3], &[0, 1]), (&[2, 5, 3], &[21, 4, 1]), (&[3], &[2]), (&[2, 3], &[1 << 30, 1])];
        for (shape, strides) in irregular {
            assert_eq!(rows(shape, strides), None, "{shape:?} {strides:?}");
        }
    }

    #[test]
    fn layouts_beyond_the_memory_are_refused() {
        let refused = |shape: &[usize], strides: &[usize]| pack(&[0; 8], 0, shape, strides, 4).unwrap_err().to_string();
        assert!(refused(&[3], &[1]).contains("does not fit the memory's 8 bytes"));
        assert!(refused(&[2, 2], &[1]).contains("different ranks"));
        assert!(refused(&[2], &[usize::MAX]).contains("does not fit"));
    }
}
