//! Tells loom of accesses to plain memory, so that one that is not ordered after an earlier one of another thread fails
//! the model. Or, of memory that may be overwritten while others read it, whether they may have read too late.
//!
//! Loom runs all threads of a model in turns on one thread of the system, so what is known here is thread-local.

use std::cell::RefCell;
use std::ops::Range;

use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static PIECES: RefCell<Vec<Piece>> = const { RefCell::new(Vec::new()) };
}

/// Memory that is accessed as a whole.
struct Piece {
    addresses: Range<usize>,
    access: Access,
}

#[derive(Clone)]
enum Access {
    InTurns(Rc<UnsafeCell<()>>),
    /// Set where it is overwritten. What is read meanwhile is as good as this says.
    Spoilt(Rc<AtomicBool>),
}

/// Watches memory, cut into pieces of `bytes` bytes, until the model's next run.
pub fn watch<T>(memory: *const [T], bytes: usize) {
    let start = memory.cast::<T>().addr();
    let end = start + memory.len() * size_of::<T>();
    PIECES.with_borrow_mut(|pieces| {
        for at in (start..end).step_by(bytes) {
            let addresses = at..end.min(at + bytes);
            // Memory that was freed in this run may be had again.
            pieces.retain(|piece| !overlap(&piece.addresses, &addresses));
            pieces.push(Piece { addresses, access: Access::InTurns(Default::default()) });
        }
    });
}

/// Memory that its owner may come to overwrite while others read it.
pub fn lend<T>(memory: &[T]) {
    leave(memory.as_ptr().cast(), size_of_val(memory));
    let addresses = memory.as_ptr().addr()..memory.as_ptr().addr() + size_of_val(memory);
    PIECES.with_borrow_mut(|pieces| pieces.push(Piece { addresses, access: Access::Spoilt(Default::default()) }));
}

/// Its owner overwrites it.
pub fn spoil<T>(memory: &[T]) {
    for access in touched(memory.as_ptr().cast(), size_of_val(memory)) {
        if let Access::Spoilt(flag) = access {
            flag.store(true, Ordering::Relaxed);
        }
    }
}

/// Watches this memory no more.
pub fn leave(at: *const u8, bytes: usize) {
    let left = at.addr()..at.addr() + bytes;
    PIECES.with_borrow_mut(|pieces| pieces.retain(|piece| !overlap(&piece.addresses, &left)));
}

/// Forgets all: cells live for one run.
pub fn forget() {
    PIECES.with_borrow_mut(Vec::clear);
}

/// Gives whether what was read may have been overwritten before.
pub fn read(at: *const u8, bytes: usize) -> bool {
    let mut spoilt = false;
    for access in touched(at, bytes) {
        match access {
            Access::InTurns(cell) => cell.with(|_| ()),
            Access::Spoilt(flag) => spoilt |= flag.load(Ordering::Relaxed),
        }
    }
    spoilt
}

pub fn write(at: *const u8, bytes: usize) {
    for access in touched(at, bytes) {
        if let Access::InTurns(cell) = access {
            cell.with_mut(|_| ());
        }
    }
}

fn touched(at: *const u8, bytes: usize) -> Vec<Access> {
    let accessed = at.addr()..at.addr() + bytes;
    PIECES.with_borrow(|pieces| {
        pieces.iter().filter(|piece| overlap(&piece.addresses, &accessed)).map(|piece| piece.access.clone()).collect()
    })
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}
