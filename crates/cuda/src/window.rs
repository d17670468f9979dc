//! Windows: GPU memory that the ranks of several processes share.
//!
//! Each rank whose peers are in other processes has one: its control block, words by which ranks get to know each
//! other, and staging memory. The kernels of all ranks access these windows as they access tensors of one process;
//! `rounds` says how tensors pass through them. Tensors themselves cannot be shared: they come from CUDA's memory pool,
//! for which the driver gives no handles.
//!
//! # When a window is free again
//! CUDA leaves undefined what happens to a process that has opened a window which its owner frees. So windows are never
//! freed, and used again for later groups. A rank that drops its group has no kernel in flight any more. It then writes
//! to each peer's window that it has left, and closes that window. An owner uses its window again when all peers have
//! left, or their processes have ended. A peer that stays, such as one that is stopped, keeps a window from being used
//! again, and the owner allocates another one.

mod connect;
mod process;

use std::sync::{Arc, LazyLock, Mutex};

use cudarc::driver::sys;

use self::process::ProcessId;
use super::address::{Address, Copy};
use super::control::{CONTROL_BYTES, MAX_RANKS};
use super::driver::{Gpu, Stream};
use bonfire_core::Error;
use bonfire_core::internal::lock;

/// The offset and the size of a window's staging memory.
const STAGING: usize = 2 << 20;
pub(crate) const STAGING_BYTES: usize = 8 << 20;
/// Whole blocks of CUDA's allocator, so that no other allocation shares the last block: a handle exposes whole blocks.
const WINDOW_BYTES: usize = STAGING + STAGING_BYTES;

/// Words of 4 bytes after the control block, as indices: a number that identifies the window, and for each rank what it
/// has written there to try its access, and whether it has left.
const NUMBER: usize = 0;
const TRIED: usize = 1;
const LEFT: usize = TRIED + MAX_RANKS;
const WORDS: usize = LEFT + MAX_RANKS;
const _: () = assert!(CONTROL_BYTES.is_multiple_of(4) && CONTROL_BYTES + 4 * WORDS <= STAGING);

/// The windows of this process that no group uses.
static RETIRED: LazyLock<Mutex<Vec<Retired>>> = LazyLock::new(Mutex::default);

struct Retired {
    window: Window,
    /// The ranks that may still access it.
    peers: Vec<(usize, Option<ProcessId>)>,
}

/// The windows of all ranks of a group, as one rank accesses them.
pub(crate) struct Windows {
    rank: usize,
    stream: Arc<Stream>,
    own: Window,
    opened: Vec<Peer>,
    /// The ranks that may access this rank's window, and their processes, if they can be found.
    peers: Vec<(usize, Option<ProcessId>)>,
}

/// A window of this process, of [`WINDOW_BYTES`]. It is never freed.
#[derive(Clone)]
struct Window {
    gpu: Arc<Gpu>,
    address: Address,
}

/// A peer's window, which is open until [`Windows::leave`].
struct Peer {
    rank: usize,
    address: Address,
    /// It belongs to another process: it is closed in the end.
    foreign: bool,
}

impl Window {
    /// Returns a window of this GPU whose control block and words are zero.
    fn take(gpu: &Arc<Gpu>, stream: &Stream) -> Result<Window, Error> {
        let window = match Window::retired(gpu, stream) {
            Some(window) => window,
            None => {
                let address = gpu.allocate("allocating memory that other processes can open", WINDOW_BYTES)?;
                Window { gpu: gpu.clone(), address }
            }
        };
        // SAFETY: windows begin with the control block and these words.
        unsafe { stream.fill(window.address, 0, CONTROL_BYTES / 4 + WORDS) }?;
        // Before any peer gets to know it.
        stream.synchronize()?;
        Ok(window)
    }

    /// Takes a window that no rank accesses any more.
    fn retired(gpu: &Gpu, stream: &Stream) -> Option<Window> {
        let mut retired = lock(&RETIRED);
        let unused = |Retired { window, peers }: &Retired| {
            let left = |rank: usize| {
                // SAFETY: windows have this word.
                let word = unsafe { stream.read(word(window.address, LEFT + rank), 1) };
                word.is_ok_and(|word| word[0] != 0)
            };
            let gone =
                |(rank, process): &(usize, Option<ProcessId>)| process.is_some_and(ProcessId::has_ended) || left(*rank);
            window.gpu.ordinal == gpu.ordinal && peers.iter().all(gone)
        };
        let found = retired.iter().position(unused)?;
        Some(retired.swap_remove(found).window)
    }
}

/// The address of one of the words of the window that begins at `window`.
fn word(window: Address, index: usize) -> Address {
    window + (CONTROL_BYTES + 4 * index)
}

impl Windows {
    /// The addresses of all ranks' windows, which begin with their control blocks, in rank order.
    pub fn addresses(&self) -> Vec<Address> {
        let mut all: Vec<_> = self.opened.iter().map(|peer| (peer.rank, peer.address)).collect();
        all.push((self.rank, self.own.address));
        all.sort_unstable();
        all.into_iter().map(|(_, address)| address).collect()
    }

    /// The address of this rank's staging memory.
    pub fn staging(&self) -> Address {
        self.own.address + STAGING
    }

    /// Tells the peers that this rank has left, and closes their windows.
    fn leave(&mut self) -> Result<(), Error> {
        // The driver may have unmapped the window of a process that has ended.
        let ended = |rank: usize| {
            self.peers.iter().any(|(peer, process)| *peer == rank && process.is_some_and(ProcessId::has_ended))
        };
        for peer in self.opened.iter().filter(|peer| !ended(peer.rank)) {
            // The owner looks for any number but 0.
            let copy = Copy::of(word(peer.address, NUMBER), word(peer.address, LEFT + self.rank), 4);
            // SAFETY: the window has both words, and stays open until the copy has ended, below.
            unsafe { self.stream.copy(&copy) }?;
        }
        self.stream.synchronize()?;
        let foreign = self.opened.drain(..).filter(|peer| peer.foreign);
        // SAFETY: `open` returned the address, and no work in flight uses it: that of this stream has ended, and the
        // group's kernels before it.
        foreign.into_iter().try_for_each(|peer| unsafe { self.own.gpu.close(peer.address) })
    }
}

impl Drop for Windows {
    /// No kernel of this rank may access the windows any more.
    fn drop(&mut self) {
        // Without the words, this rank's windows remain open, and are not used again.
        if let Err(error) = self.leave() {
            log::warn!("leaving the windows of a group: {error}");
            return;
        }
        let peers = std::mem::take(&mut self.peers);
        lock(&RETIRED).push(Retired { window: self.own.clone(), peers });
    }
}

/// What names a window to another process.
type Handle = [u8; 64];

impl Window {
    fn handle(&self) -> Result<Handle, Error> {
        let _entered = self.gpu.enter()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: a window is an allocation of this context that is never freed.
        let exported = unsafe { sys::cuIpcGetMemHandle(&mut handle, self.address.get()) };
        self.gpu.check("exporting memory to other processes", exported)?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }
}

impl Gpu {
    /// Opens the window of another process, also if its GPU is not visible here. Returns its address in this process.
    fn open(&self, handle: Handle) -> Result<Address, Error> {
        let _entered = self.enter()?;
        let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as _) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: `address` receives the result. The driver checks the handle, and `connect` what is there.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) };
        self.check("opening the memory of another process", opened).map(|()| address.into())
    }

    /// Closes the window of another process.
    ///
    /// # Safety
    /// `open` must have returned the address, and nothing use the memory any more.
    unsafe fn close(&self, address: Address) -> Result<(), Error> {
        let _entered = self.enter()?;
        // SAFETY: guaranteed by the caller.
        self.check("closing the memory of another process", unsafe { sys::cuIpcCloseMemHandle(address.get()) })
    }
}
