//! The memory that the ranks of a host share: how it comes into being, and what is where in it.
//!
//! It is an anonymous file (memfd), which has no name anywhere: it is gone when the last process that has it is,
//! however that ends. Its size is sealed, so that no process can take pages away under the others' feet.
//!
//! Behind the shares, which operations use, each rank has an arena, for buffers that live here from the start. Arenas are
//! addresses without memory until some is asked for.
//!
//! A peer may be broken and write anything. So nothing that is read from the segment becomes an index, a length or a
//! pointer; calls are compared with what this rank expects, and everything else is elements, which may have any bits.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};

use super::control::Control;

/// Operations of at most so many bytes travel in the offers wherever their buffers are. Larger ones go straight between
/// buffers in the arenas: that takes a second hand-off, but copies nothing on the way.
pub(super) const TINY: usize = 1 << 10;

/// Buffers in each rank's window, used in turn.
pub(super) const BUFFERS: usize = 4;

/// The largest block between two ranks and between more, and the largest buffer, which has a block for each rank: a window
/// then stays in the second-level cache of the core that fills it, also where two ranks share a core.
const PAIR_BLOCK: usize = 128 << 10;
const BLOCK: usize = 32 << 10;
const BUFFER: usize = 256 << 10;

const PAGE: usize = 4096;

/// What is in an arena begins and ends at multiples of this, and so does every arena: the largest page that systems with
/// small pages have.
pub(super) const GRAIN: usize = 64 << 10;

/// Addresses for all arenas together. A process has 128 times as many, and may have a mapping for each of its ranks.
const ARENAS: u64 = 1 << 40;

/// Where a rank's window begins, behind its control part.
const CONTROL: usize = size_of::<Control>().next_multiple_of(PAGE);

/// This process's view of the segment.
pub(crate) struct Segment {
    base: NonNull<u8>,
    world_size: usize,
    /// Bytes of a block, of a share and of an arena.
    block: usize,
    share: usize,
    arena: usize,
    /// Arenas get their memory by it.
    file: OwnedFd,
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
    let most = if world_size == 2 { PAIR_BLOCK } else { BLOCK };
    if even > most {
        most
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

/// Bytes of all shares, and so where the arenas begin.
const fn shares(world_size: usize) -> usize {
    (world_size * share(world_size)).next_multiple_of(GRAIN)
}

/// Bytes of an arena: a power of two, less where this process may have few addresses or may make small files only, or 0.
fn arena(world_size: usize) -> usize {
    let limit = |resource| getrlimit(resource).current.unwrap_or(u64::MAX) / 4;
    let each = ARENAS.min(limit(Resource::As)).min(limit(Resource::Fsize)) as usize / world_size;
    if each < GRAIN { 0 } else { 1 << each.ilog2() }
}

impl Segment {
    /// Makes the shares' memory, all of it: what cannot be had is an error here and not a signal later.
    pub fn create(world_size: usize) -> io::Result<(Segment, OwnedFd)> {
        let file = rustix::fs::memfd_create("bonfire", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let arena = arena(world_size);
        rustix::fs::ftruncate(&file, (shares(world_size) + world_size * arena) as u64)?;
        rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, shares(world_size) as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Segment::map(&file, world_size, arena)?, file))
    }

    /// Takes part in the memory that another rank made.
    pub fn open(file: &OwnedFd, world_size: usize) -> io::Result<Segment> {
        let wrong = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        // The rank that made it decided on the arenas. No other layout leaves a power of two for each.
        let size = usize::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
        let arenas = size.checked_sub(shares(world_size)).filter(|arenas| arenas.is_multiple_of(world_size));
        let arena = arenas.map(|arenas| arenas / world_size);
        let Some(arena) = arena.filter(|arena| *arena == 0 || *arena >= GRAIN && arena.is_power_of_two()) else {
            return wrong("the memory has another size than this program gives it");
        };
        // Where it cannot shrink, no access within its size can fail. Without this a peer could end this process.
        if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return wrong("the memory's size is not sealed");
        }
        Segment::map(file, world_size, arena)
    }

    fn map(file: &OwnedFd, world_size: usize, arena: usize) -> io::Result<Segment> {
        let bytes = shares(world_size) + world_size * arena;
        // What can fail for want of descriptors comes before what would then be left.
        let file = file.try_clone()?;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a mapping at an address that the system chooses changes no memory of this process.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, flags, &file, 0)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let segment = Segment { base, world_size, block: block(world_size), share: share(world_size), arena, file };
        // The shares' pages at once, so that no operation pays for page faults.
        let flags = flags | MapFlags::POPULATE | MapFlags::FIXED;
        // SAFETY: the shares' part of the mapping that was just made is replaced by the same, and nobody uses it yet.
        unsafe { rustix::mm::mmap(base.as_ptr().cast(), shares(world_size), access, flags, &segment.file, 0)? };
        if arena > 0 {
            // SAFETY: advice that changes no memory; the arenas are behind the shares in the mapping.
            unsafe {
                let arenas = base.as_ptr().add(shares(world_size)).cast();
                // A dump of this process's memory would otherwise fill all of it with pages.
                rustix::mm::madvise(arenas, world_size * arena, Advice::LinuxDontDump)?;
            }
        }
        Ok(segment)
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

    /// Bytes of each rank's arena.
    pub fn arena_size(&self) -> usize {
        self.arena
    }

    /// The byte `at` of the rank's arena, or its end.
    pub fn arena(&self, rank: usize, at: usize) -> NonNull<u8> {
        assert!(rank < self.world_size && at <= self.arena, "byte {at} of arena {rank}");
        // SAFETY: behind the shares, the mapping has an arena for each rank below `world_size`.
        unsafe { self.base.add(self.offset(rank, at)) }
    }

    fn offset(&self, rank: usize, at: usize) -> usize {
        shares(self.world_size) + rank * self.arena + at
    }

    /// Puts pages where this range of the rank's arena has none. All of them at once: what cannot be had is an error
    /// here and not a signal later.
    pub fn back(&self, rank: usize, range: &Range<usize>) -> io::Result<()> {
        // The system would look for pages until it has to end some process.
        if let Some(available) = available().filter(|available| range.len() > *available) {
            let reason = format!("the system has {} MiB of memory to spare", available >> 20);
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, reason));
        }
        let offset = self.offset(rank, range.start) as u64;
        rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, range.len() as u64)?;
        // SAFETY: the range is within the arena, and the advice changes nothing in it.
        unsafe {
            let at = self.arena(rank, range.start).as_ptr().cast();
            // Many faults at once are cheaper. Systems before Linux 5.14 cannot, and have them one by one later.
            let _ = rustix::mm::madvise(at, range.len(), Advice::LinuxPopulateWrite);
        }
        Ok(())
    }

    /// Takes the pages from a range of the rank's own arena that no buffer has.
    pub fn clear(&self, rank: usize, range: &Range<usize>) {
        let (offset, len) = (self.offset(rank, range.start) as u64, range.len() as u64);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(e) = rustix::fs::fallocate(&self.file, punch, offset, len) {
            log::warn!("cannot give back {len} bytes of shared memory: {e}");
        }
        // A range that was detached has pages of its own.
        // SAFETY: the range is within the arena, and nobody uses what is in it.
        let _ = unsafe {
            rustix::mm::madvise(self.arena(rank, range.start).as_ptr().cast(), range.len(), Advice::LinuxDontNeed)
        };
    }

    /// Puts pages of this process's own in the place of a range of the rank's own arena, with the same contents: what
    /// peers write there from now on is not seen here any more.
    ///
    /// # Safety
    /// The range begins and ends at multiples of [`GRAIN`], and meanwhile nobody in this process accesses it.
    pub unsafe fn detach(&self, rank: usize, range: &Range<usize>) {
        let (at, len) = (self.arena(rank, range.start).as_ptr(), range.len());
        assert!(range.end <= self.arena, "{range:?} of an arena");
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: the new mapping is at an address that the system chooses and as long as the range, so the copy is
        // within both; then it replaces the range, which nobody here accesses, as the caller vouches for.
        let replaced = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, access, flags).and_then(|fresh| {
                std::ptr::copy_nonoverlapping(at, fresh.cast(), len);
                rustix::mm::mremap_fixed(fresh, len, len, MremapFlags::MAYMOVE, at.cast())
            })
        };
        if let Err(e) = replaced {
            log::error!("cannot take {len} bytes back from a peer that may still write to them: {e}");
            // As wherever there is no memory and no way to go on: the caller must not have them.
            std::alloc::handle_alloc_error(std::alloc::Layout::new::<Control>());
        }
    }
}

/// Bytes of memory that the system says a new program could have.
fn available() -> Option<usize> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let text = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    text.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size, and nothing that borrows from `self` is left. Where a
        // range was detached, it goes too.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.offset(self.world_size, 0)) };
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
        assert!([1, 2, 4].iter().all(|n| Segment::open(&file, *n).is_err()), "another world size");
        mine.control(2).progress.0.store(7, std::sync::atomic::Ordering::Release);
        assert_eq!(theirs.control(2).progress.0.load(std::sync::atomic::Ordering::Acquire), 7);
    }

    #[test]
    fn a_file_that_may_shrink_is_refused() {
        let file = rustix::fs::memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, shares(2) as u64).unwrap();
        let error = Segment::open(&file, 2).err().expect("it is refused");
        assert!(error.to_string().contains("sealed"), "{error}");
    }
}
