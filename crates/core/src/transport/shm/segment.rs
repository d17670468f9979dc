//! The segment: creation and layout of the memory that the ranks of a host share.
//!
//! It is an anonymous file (memfd) without a name, so it disappears with the last process that has it, however that
//! process ends. Nothing stays in /dev/shm, and the size of that file system (64 MiB in Docker) does not matter. The
//! size of the segment is sealed, so no process can take away pages that others access.
//!
//! The segment begins with one share per rank, which operations use. Behind the shares each rank has an arena, for
//! buffers that are allocated in shared memory. Arenas are address ranges without pages until a buffer needs some.
//!
//! A peer may be broken and write anything. So nothing that is read from the segment is used unchecked as an index, a
//! length or a pointer. Calls are compared with the one that this rank expects, and counters only end waits. All else
//! is elements, with any bits.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::retry_on_intr;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};
use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};

use super::control::Control;
use crate::machine::spare_memory;

/// Operations of at most this many bytes use the exchange slots, wherever their buffers are. Larger ones go straight
/// between buffers in the arenas where they can. That takes a second hand-off, but no intermediate copy.
pub(super) const SLOT_BYTES: usize = 1 << 10;

/// Buffers in each rank's window, used in turn.
pub(super) const BUFFERS: usize = 4;

/// The largest block between two ranks, the largest block between more, and the largest buffer, which has one block per
/// rank. With these limits a window stays in the second-level cache of its core, even if two ranks share the core. A
/// share has 1.0 MiB with two ranks and with eight or more, less in between.
///
/// Between two ranks, blocks of 128 KiB were 3 to 15 % faster than blocks of 32 KiB. Between three or four ranks on two
/// cores, blocks of 64 KiB were 10 to 15 % slower in place.
const PAIR_BLOCK: usize = 128 << 10;
const BLOCK: usize = 32 << 10;
const BUFFER: usize = 256 << 10;

/// The smallest page of any system. Where pages are larger, neighbours in the layout have parts of one.
const PAGE: usize = 4096;

/// Arenas and ranges in them begin and end at multiples of this: the largest page on systems with small pages.
pub(super) const ALIGNMENT: usize = 64 << 10;

/// Address space of all arenas together, in bytes. A process has 128 times as much, and may map one segment per rank.
const ARENAS: u64 = 1 << 40;

/// Bytes that are allocated at a time. An interrupted allocation begins again, so a signal every millisecond, as from a
/// profiler, must leave time for one.
const STEP: u64 = 1 << 20;

/// Bytes between two checks that there is memory: the ranks of a host may all allocate at once.
const CHECKED: u64 = 64 << 20;

/// Bytes that are left to the rest of the program.
const RESERVE: u64 = 16 << 20;

/// Bytes of shares up to which each rank takes the page faults of all: those of about 60 ranks. If each of 256 ranks
/// takes those of all 265 MiB, that lasts 5 s on two cores.
const POPULATED: usize = 64 << 20;

/// Offset of a rank's window in its share, behind the control part.
const CONTROL: usize = size_of::<Control>().next_multiple_of(PAGE);

/// This process's view of the segment.
pub(crate) struct Segment {
    base: NonNull<u8>,
    world_size: usize,
    /// Bytes of a block, of a share and of an arena.
    block: usize,
    share: usize,
    arena: usize,
    /// Kept to allocate the arenas' pages.
    file: OwnedFd,
}

// SAFETY: the mapping stays at its address until the segment is dropped. It holds atomics, and bytes that are accessed
// under the rules of `Offer` and `chunks`.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// Bytes of a block, which holds one part's piece of a chunk.
const fn block(world_size: usize) -> usize {
    // Whole cache lines, and therefore whole elements.
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

/// Bytes of all shares, which is the offset of the first arena.
const fn shares(world_size: usize) -> usize {
    (world_size * share(world_size)).next_multiple_of(ALIGNMENT)
}

/// Bytes of an arena: a power of two, or 0. Less where resource limits on address space or file size require it.
fn arena(world_size: usize) -> usize {
    let limit = |resource| getrlimit(resource).current.unwrap_or(u64::MAX) / 4;
    let each = ARENAS.min(limit(Resource::As)).min(limit(Resource::Fsize)) as usize / world_size;
    if each < ALIGNMENT { 0 } else { 1 << each.ilog2() }
}

impl Segment {
    /// Creates a segment and allocates all memory of the shares: a lack of memory is an error here, not a signal later.
    pub fn create(world_size: usize) -> io::Result<(Segment, OwnedFd)> {
        let file = rustix::fs::memfd_create("bonfire", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let arena = arena(world_size);
        retry_on_intr(|| rustix::fs::ftruncate(&file, (shares(world_size) + world_size * arena) as u64))?;
        allocate(&file, 0..shares(world_size) as u64)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok((Segment::map(&file, world_size, arena)?, file))
    }

    /// Maps a segment that another rank created.
    pub fn open(file: &OwnedFd, world_size: usize) -> io::Result<Segment> {
        let invalid = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        // The creator chose the size of the arenas. Only the same layout leaves a power of two for each.
        let size = usize::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0);
        let arenas = size.checked_sub(shares(world_size)).filter(|arenas| arenas.is_multiple_of(world_size));
        let arena = arenas.map(|arenas| arenas / world_size);
        let Some(arena) = arena.filter(|arena| *arena == 0 || *arena >= ALIGNMENT && arena.is_power_of_two()) else {
            return invalid("the shared memory has another layout than here: run the same program on all ranks");
        };
        // If the file cannot shrink, no access within its size can fail. Otherwise a peer could kill this process.
        if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return invalid("the size of the shared memory is not sealed");
        }
        Segment::map(file, world_size, arena)
    }

    fn map(file: &OwnedFd, world_size: usize, arena: usize) -> io::Result<Segment> {
        let bytes = shares(world_size) + world_size * arena;
        // This can fail for lack of descriptors, so it comes before the mapping, which would leak.
        let file = file.try_clone()?;
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: a mapping at an address that the system chooses changes no memory of this process.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, flags, &file, 0)? };
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        let segment = Segment { base, world_size, block: block(world_size), share: share(world_size), arena, file };
        if arena > 0 {
            // SAFETY: advice that changes no memory; the arenas are behind the shares in the mapping.
            unsafe {
                let arenas = base.as_ptr().add(shares(world_size)).cast();
                // Otherwise a core dump would fill all of the arenas with pages.
                rustix::mm::madvise(arenas, world_size * arena, Advice::LinuxDontDump)?;
            }
        }
        Ok(segment)
    }

    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Takes the page faults of `rank` now, so that operations do not pay for them: of all shares where they are few,
    /// else of those parts that every operation uses. The shares of hundreds of ranks are hundreds of MiB, and as many
    /// ranks would each take the faults of all.
    pub fn populate(&self, rank: usize) {
        let populate = |at: *mut u8, bytes: usize| {
            // Advice begins at a page of this system.
            let before = at.addr() % page_size();
            // SAFETY: advice that changes nothing in the shares; the ranges below are within them, and so is the page
            // that each begins in, because the mapping begins at a page. Before Linux 5.14 it fails, and the faults
            // come one by one later.
            let _ = unsafe { rustix::mm::madvise(at.sub(before).cast(), before + bytes, Advice::LinuxPopulateWrite) };
        };
        if shares(self.world_size) <= POPULATED {
            return populate(self.share_of(0), shares(self.world_size));
        }
        (0..self.world_size).for_each(|peer| populate(self.share_of(peer), CONTROL));
        populate(self.share_of(rank), self.share);
    }

    fn share_of(&self, rank: usize) -> *mut u8 {
        assert!(rank < self.world_size, "rank {rank} of {}", self.world_size);
        // SAFETY: the mapping has a share for each rank below `world_size`.
        unsafe { self.base.as_ptr().add(rank * self.share) }
    }

    pub(super) fn control(&self, rank: usize) -> &Control {
        // SAFETY: a share begins with its control part, aligned to a page. It consists of atomics and cells, for which
        // the file's zeros and all that peers may write are valid values. It lives as long as `self`.
        unsafe { &*self.share_of(rank).cast::<Control>() }
    }

    /// Bytes of a block, which holds one part's piece of a chunk.
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

    /// The address of byte `at` of the rank's arena. `at` may be the arena's end.
    pub fn arena(&self, rank: usize, at: usize) -> NonNull<u8> {
        assert!(rank < self.world_size && at <= self.arena, "byte {at} of arena {rank}");
        // SAFETY: behind the shares, the mapping has an arena for each rank below `world_size`.
        unsafe { self.base.add(self.offset(rank, at)) }
    }

    fn offset(&self, rank: usize, at: usize) -> usize {
        shares(self.world_size) + rank * self.arena + at
    }

    /// Allocates the missing pages of this range of the arena: a lack of memory is an error here, not a signal later.
    pub fn back(&self, rank: usize, range: &Range<usize>) -> io::Result<()> {
        allocate(&self.file, self.offset(rank, range.start) as u64..self.offset(rank, range.end) as u64)?;
        // SAFETY: the range is within the arena, and the advice changes nothing in it.
        unsafe {
            let at = self.arena(rank, range.start).as_ptr().cast();
            // Many faults at once are cheaper. Before Linux 5.14 this fails, and the faults come one by one later.
            let _ = rustix::mm::madvise(at, range.len(), Advice::LinuxPopulateWrite);
        }
        Ok(())
    }

    /// Frees the pages of a range of the rank's own arena that no buffer uses.
    pub fn clear(&self, rank: usize, range: &Range<usize>) {
        let (offset, len) = (self.offset(rank, range.start) as u64, range.len() as u64);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(e) = retry_on_intr(|| rustix::fs::fallocate(&self.file, punch, offset, len)) {
            log::warn!("cannot free {len} bytes of shared memory: {e}");
        }
        // A detached range has private pages, which the hole does not free.
        // SAFETY: the range is within the arena, and nothing uses its contents.
        let _ = unsafe {
            rustix::mm::madvise(self.arena(rank, range.start).as_ptr().cast(), range.len(), Advice::LinuxDontNeed)
        };
    }

    /// Replaces a range of the rank's own arena by private pages with the same contents. This process no longer sees
    /// what peers write there from now on.
    ///
    /// # Safety
    /// The range begins and ends at multiples of [`ALIGNMENT`]. Nothing in this process accesses it during the call.
    pub unsafe fn detach(&self, rank: usize, range: &Range<usize>) {
        let (at, len) = (self.arena(rank, range.start).as_ptr(), range.len());
        assert!(range.end <= self.arena, "{range:?} of an arena");
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: the new mapping is at an address that the system chooses and as long as the range, so the copy is
        // within both. It then replaces the range, which nothing in this process accesses, as the caller ensures.
        let replaced = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, access, flags).and_then(|fresh| {
                std::ptr::copy_nonoverlapping(at, fresh.cast(), len);
                rustix::mm::mremap_fixed(fresh, len, len, MremapFlags::MAYMOVE, at.cast())
            })
        };
        if let Err(e) = replaced {
            log::error!("cannot take {len} bytes back from a peer that may still write to them: {e}");
            // The caller must not get these bytes back, and there is no way to continue without memory.
            std::alloc::handle_alloc_error(std::alloc::Layout::new::<Control>());
        }
    }
}

/// Allocates the missing pages of a range of the file.
fn allocate(file: &OwnedFd, range: Range<u64>) -> io::Result<()> {
    for at in range.clone().step_by(STEP as usize) {
        if (at - range.start).is_multiple_of(CHECKED) {
            // The system would allocate pages until it has to kill some process.
            let (wanted, spare) = (range.end - at + RESERVE, spare_memory(Path::new("/")));
            if let Some(spare) = spare.filter(|spare| wanted > *spare) {
                let reason = format!(
                    "the machine, or the control group (container) of this process, has {} MiB of memory to spare and \
                     {} MiB are needed",
                    spare >> 20,
                    wanted.div_ceil(1 << 20)
                );
                return Err(io::Error::new(io::ErrorKind::OutOfMemory, reason));
            }
        }
        let len = STEP.min(range.end - at);
        retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), at, len))?;
    }
    Ok(())
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size, and nothing borrows from `self` any more. Detached
        // ranges are within it and are unmapped too.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.offset(self.world_size, 0)) };
        if let Err(e) = unmapped {
            log::error!("cannot unmap shared memory: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::iter;

    use super::*;

    #[test]
    fn blocks_are_aligned_disjoint_and_within_the_segment() {
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

    /// Bytes of the shares that this process has in its page tables.
    fn resident(segment: &Segment) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = format!("{:x}-", segment.base.as_ptr() as usize);
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&begin));
        let kib = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        kib.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    #[test]
    fn a_rank_takes_the_page_faults_of_all_shares_only_if_they_are_few() {
        // With pages of 16 KiB every share of 80 ranks begins at one, and most of 90 ranks do not.
        for n in [3, 80, 90] {
            let (segment, _file) = Segment::create(n).unwrap();
            assert!(resident(&segment) < share(n), "{n} ranks");
            segment.populate(2);
            let few = shares(n) <= POPULATED;
            assert_eq!(n == 3, few);
            let controls = (0..n).map(|peer| peer * share(n)..peer * share(n) + CONTROL);
            let more = if few { 0..shares(n) } else { 2 * share(n)..3 * share(n) };
            let pages = |range: Range<usize>| range.start / page_size()..range.end.div_ceil(page_size());
            let pages: BTreeSet<usize> = controls.chain(iter::once(more)).flat_map(pages).collect();
            assert_eq!(resident(&segment), pages.len() * page_size(), "{n} ranks");
        }
    }

    #[test]
    fn the_size_is_sealed_and_two_mappings_share_memory() {
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
