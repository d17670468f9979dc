//! Spans of device memory, and host memory from which several devices are written.

use bytes::Bytes as Shared;
use cubecl::bytes::{AllocationProperty, Bytes};
use cubecl::server::Binding;

/// The bytes of an allocation that a binding refers to.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Span {
    memory: Option<u64>,
    /// In bytes.
    start: u64,
    end: u64,
}

impl Span {
    pub fn of(binding: &Binding) -> Span {
        let start = binding.offset_start.unwrap_or(0);
        Span { memory: memory_id(binding), start, end: start + binding.size_in_used() }
    }

    pub fn overlaps(&self, other: &Span) -> bool {
        self.start < other.end && other.start < self.end && self.memory.is_some() && self.memory == other.memory
    }
}

/// cubecl shows a memory's id only in its debug output; a test detects if that changes.
fn memory_id(binding: &Binding) -> Option<u64> {
    let text = format!("{:?}", binding.memory);
    let digits = text.split("value: ").nth(1)?;
    digits.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Shares host memory, so that slices of it can be handed out.
pub(super) fn shared(memory: Bytes) -> Shared {
    struct Owner(Bytes);

    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    Shared::from_owner(Owner(memory))
}

/// Converts a slice to what a server writes from.
pub(super) fn writable(part: Shared) -> Bytes {
    Bytes::from_shared(part, AllocationProperty::Native)
}

#[cfg(test)]
mod tests {
    use cubecl::server::Handle;
    use cubecl::stream_id::StreamId;

    use super::*;

    #[test]
    fn spans_overlap_only_within_the_same_memory() {
        let handle = Handle::new(StreamId { value: 0 }, 64);
        let part = |start, end| handle.clone().offset_start(start).offset_end(end).binding();
        let other = Handle::new(StreamId { value: 0 }, 64).binding();
        let overlap = |a: &Binding, b: &Binding| Span::of(a).overlaps(&Span::of(b));
        assert!(memory_id(&other).is_some());
        assert!(!overlap(&part(0, 0), &other));
        assert!(overlap(&part(0, 0), &part(0, 0)));
        assert!(overlap(&part(0, 32), &part(16, 0)));
        assert!(!overlap(&part(0, 32), &part(32, 0)));
    }
}
