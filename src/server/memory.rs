//! Host memory with results, from which several devices are written.

use bytes::Bytes as Shared;
use cubecl::bytes::{AllocationProperty, Bytes};

/// The memory, of which parts can be handed out.
pub(super) fn shared(memory: Bytes) -> Shared {
    struct Owner(Bytes);

    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    Shared::from_owner(Owner(memory))
}

/// A part as a server takes it.
pub(super) fn writable(part: Shared) -> Bytes {
    Bytes::from_shared(part, AllocationProperty::Native)
}
