//! Reports accesses to plain memory to loom: one that is not ordered after an earlier one of another thread fails the
//! model. For memory that its owner may overwrite while others read it, tracks whether they may have read too late.
//!
//! Loom runs all threads of a model in turns on one OS thread, so the state here is thread-local.

use std::cell::RefCell;
use std::ops::Range;

use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static REGIONS: RefCell<Vec<Region>> = const { RefCell::new(Vec::new()) };
}

/// A range of memory that is accessed as a whole.
struct Region {
    addresses: Range<usize>,
    access: Access,
}

#[derive(Clone)]
enum Access {
    Ordered(Rc<UnsafeCell<()>>),
    /// Set once the owner overwrites the region. Data read after that are invalid.
    Lent(Rc<AtomicBool>),
}

/// Watches memory, divided into regions of `bytes` bytes, until the model's next run.
pub fn watch<T>(memory: *const [T], bytes: usize) {
    let start = memory.cast::<T>().addr();
    let end = start + memory.len() * size_of::<T>();
    REGIONS.with_borrow_mut(|regions| {
        for at in (start..end).step_by(bytes) {
            let addresses = at..end.min(at + bytes);
            // Memory that was freed in this run may be allocated again.
            regions.retain(|region| !overlap(&region.addresses, &addresses));
            regions.push(Region { addresses, access: Access::Ordered(Default::default()) });
        }
    });
}

/// Watches memory that its owner may overwrite while others read it.
pub fn lend<T>(memory: &[T]) {
    unwatch(memory.as_ptr().cast(), size_of_val(memory));
    let addresses = memory.as_ptr().addr()..memory.as_ptr().addr() + size_of_val(memory);
    REGIONS.with_borrow_mut(|regions| regions.push(Region { addresses, access: Access::Lent(Default::default()) }));
}

/// Marks lent memory as overwritten by its owner.
pub fn mark_overwritten<T>(memory: &[T]) {
    for access in touched(memory.as_ptr().cast(), size_of_val(memory)) {
        if let Access::Lent(flag) = access {
            flag.store(true, Ordering::Relaxed);
        }
    }
}

/// Stops watching this memory.
pub fn unwatch(at: *const u8, bytes: usize) {
    let unwatched = at.addr()..at.addr() + bytes;
    REGIONS.with_borrow_mut(|regions| regions.retain(|region| !overlap(&region.addresses, &unwatched)));
}

/// Stops watching all memory: cells live for one run.
pub fn reset() {
    REGIONS.with_borrow_mut(Vec::clear);
}

/// Reports a read. Returns whether the data may have been overwritten before.
pub fn read(at: *const u8, bytes: usize) -> bool {
    let mut overwritten = false;
    for access in touched(at, bytes) {
        match access {
            Access::Ordered(cell) => cell.with(|_| ()),
            Access::Lent(flag) => overwritten |= flag.load(Ordering::Relaxed),
        }
    }
    overwritten
}

pub fn write(at: *const u8, bytes: usize) {
    for access in touched(at, bytes) {
        if let Access::Ordered(cell) = access {
            cell.with_mut(|_| ());
        }
    }
}

fn touched(at: *const u8, bytes: usize) -> Vec<Access> {
    let accessed = at.addr()..at.addr() + bytes;
    REGIONS.with_borrow(|regions| {
        regions
            .iter()
            .filter(|region| overlap(&region.addresses, &accessed))
            .map(|region| region.access.clone())
            .collect()
    })
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}
