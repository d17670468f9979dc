//! The memory that the ranks of a host share: what is where in it, and how it comes into being.
//!
//! It is an anonymous file (memfd), which has no name anywhere: it is gone when the last process that has it is,
//! however that ends. Its size is sealed, so that no process can take pages away under the others' feet.
//!
//! A peer may be broken and write anything. So nothing that is read from the segment becomes an index, a length or a
//! pointer; calls are compared with what this rank expects, and everything else is elements, which may have any bits.

use std::cell::UnsafeCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::sleeper::Sleeper;

/// Bytes of one rank's contribution to a small operation that travel in its offer.
pub(super) const INLINE: usize = 32 << 10;

/// Buffers in each rank's window, used in turn.
pub(super) const BUFFERS: usize = 4;

/// The largest block, and the largest buffer, which has a block for each rank: a window then stays in the second-level
/// cache of the core that fills it, also where two ranks share a core.
const BLOCK: usize = 32 << 10;
const BUFFER: usize = 256 << 10;

/// Keeps what it holds on cache lines of its own (two, since processors fetch lines in pairs).
#[repr(C, align(128))]
pub(super) struct Line<T>(pub T);

/// What a rank tells the others. It alone writes it, but for `sleeper`.
#[repr(C)]
pub(super) struct Control {
    /// Used in turn: a fast rank may begin the next operation while a slow one still reads this one's. It cannot get
    /// two ahead, because the operation between needs the slow one.
    pub offers: [Offer; 2],
    /// How far it is in its large operations, see `chunks`.
    pub progress: Line<AtomicU64>,
    /// Where it sleeps and is woken.
    pub sleeper: Line<Sleeper>,
}

/// A call, and its data where they are small. The first bytes are on the line that says that the offer is complete, so
/// a small operation moves one line from each rank to each.
#[repr(C, align(128))]
pub(super) struct Offer {
    /// The number of the operation, counted from 1. Written last, with release.
    pub sequence: AtomicU64,
    /// What is called, as in a [`Tag`](crate::call::Tag).
    pub call: [AtomicU64; 3],
    pub inline: UnsafeCell<[u8; INLINE]>,
}

// SAFETY: only the offer's own rank writes the inline data, before it publishes the offer (release on `sequence`), and
// others read them after they have seen that (acquire), by raw pointers, whose reads give some bytes whatever a broken
// peer does meanwhile. The rank writes the same offer two operations later, which it can begin only after all have
// entered the one between and so have finished reading.
unsafe impl Sync for Offer {}

const PAGE: usize = 4096;
/// Where a rank's window begins, behind its control part.
const CONTROL: usize = size_of::<Control>().next_multiple_of(PAGE);

/// This process's view of the segment.
pub(crate) struct Segment {
    base: NonNull<u8>,
    world_size: usize,
    /// Bytes of a block and of a share.
    block: usize,
    share: usize,
}

// SAFETY: the mapping stays where it is until the segment is dropped; what it holds is atomics, and bytes that are
// accessed as `Offer` and `chunks` say.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// Bytes of a block: one rank's part of a chunk.
const fn block(world_size: usize) -> usize {
    // Whole cache lines, so whole elements too.
    let even = BUFFER / world_size / 64 * 64;
    if even > BLOCK {
        BLOCK
    } else if even < 64 {
        64
    } else {
        even
    }
}

/// Bytes of one rank's share of the segment.
const fn share(world_size: usize) -> usize {
    CONTROL + (BUFFERS * world_size * block(world_size)).next_multiple_of(PAGE)
}

impl Segment {
    /// Makes the memory, all of it: what cannot be had is an error here and not a signal later.
    pub fn create(world_size: usize) -> io::Result<(Segment, OwnedFd)> {
        let bytes = (world_size * share(world_size)) as u64;
        let file = rustix::fs::memfd_create("bonfire", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Segment::map(&file, world_size)?, file))
    }

    /// Takes part in the memory that another rank made.
    pub fn open(file: &OwnedFd, world_size: usize) -> io::Result<Segment> {
        let wrong = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if rustix::fs::fstat(file)?.st_size as u64 != (world_size * share(world_size)) as u64 {
            return wrong("the memory has another size than this program gives it");
        }
        // Where it cannot shrink, no access within its size can fail. Without this a peer could end this process.
        if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return wrong("the memory's size is not sealed");
        }
        Segment::map(file, world_size)
    }

    fn map(file: impl AsFd, world_size: usize) -> io::Result<Segment> {
        let bytes = world_size * share(world_size);
        // Mapped whole at once, so that no operation pays for page faults.
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a mapping at an address that the system chooses changes no memory of this process.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags, file, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Segment { base, world_size, block: block(world_size), share: share(world_size) })
    }

    pub fn world_size(&self) -> usize {
        self.world_size
    }

    fn share_of(&self, rank: usize) -> *mut u8 {
        assert!(rank < self.world_size, "rank {rank} of {}", self.world_size);
        // SAFETY: the mapping has a share for each rank below `world_size`.
        unsafe { self.base.as_ptr().add(rank * self.share) }
    }

    pub(super) fn control(&self, rank: usize) -> &Control {
        // SAFETY: a share begins with its control part, at a page's beginning. All of it are atomics and cells, for
        // which the file's zeros and whatever is written to them are valid values, and it lives as long as `self`.
        unsafe { &*self.share_of(rank).cast::<Control>() }
    }

    /// Bytes of a block: one rank's part of a chunk.
    pub fn block_size(&self) -> usize {
        self.block
    }

    /// The block of `part` in one of the rank's buffers.
    pub fn block(&self, rank: usize, buffer: usize, part: usize) -> *mut u8 {
        assert!(buffer < BUFFERS && part < self.world_size, "block {part} of buffer {buffer}");
        // SAFETY: behind the control part, a share has `BUFFERS` buffers of `world_size` blocks.
        unsafe { self.share_of(rank).add(CONTROL + (buffer * self.world_size + part) * self.block) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size, and nothing that borrows from `self` is left.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.world_size * self.share) };
        if let Err(e) = unmapped {
            log::error!("cannot unmap shared memory: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_whole_lines_apart_from_each_other_and_within_the_segment() {
        for n in [1, 2, 3, 7, 64, 1000] {
            let (segment, file) = Segment::create(n).unwrap();
            let size = rustix::fs::fstat(&file).unwrap().st_size as usize;
            let base = segment.base.as_ptr() as usize;
            let mut end = base;
            for rank in 0..n.min(9) {
                let control: *const Control = segment.control(rank);
                assert!(control as usize >= end && (control as usize).is_multiple_of(128), "{n} ranks");
                end = control as usize + size_of::<Control>();
                for (buffer, part) in (0..BUFFERS).flat_map(|buffer| (0..n).map(move |part| (buffer, part))) {
                    let at = segment.block(rank, buffer, part) as usize;
                    assert!(at >= end && at.is_multiple_of(64), "{n} ranks");
                    end = at + block(n);
                }
            }
            assert!(end <= base + size, "{n} ranks");
        }
    }

    #[test]
    fn the_size_is_sealed_and_what_one_view_writes_the_other_reads() {
        let (mine, file) = Segment::create(3).unwrap();
        let theirs = Segment::open(&file, 3).unwrap();
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
        assert!(Segment::open(&file, 2).is_err(), "another world size");
        mine.control(2).progress.0.store(7, std::sync::atomic::Ordering::Release);
        assert_eq!(theirs.control(2).progress.0.load(std::sync::atomic::Ordering::Acquire), 7);
    }

    #[test]
    fn a_file_that_may_shrink_is_refused() {
        let file = rustix::fs::memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, (2 * share(2)) as u64).unwrap();
        let error = Segment::open(&file, 2).err().expect("it is refused");
        assert!(error.to_string().contains("sealed"), "{error}");
    }
}
