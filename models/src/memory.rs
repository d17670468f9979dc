//! Tells loom of accesses to plain memory, so that one that is not ordered after an earlier one of another thread fails
//! the model.
//!
//! Loom runs all threads of a model in turns on one thread of the system, so what is known here is thread-local.

use std::cell::RefCell;
use std::ops::Range;

use loom::cell::UnsafeCell;

thread_local! {
    static PIECES: RefCell<Vec<Piece>> = const { RefCell::new(Vec::new()) };
}

/// Memory that is accessed as a whole.
struct Piece {
    addresses: Range<usize>,
    cell: std::rc::Rc<UnsafeCell<()>>,
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
            pieces.push(Piece { addresses, cell: Default::default() });
        }
    });
}

/// Forgets all: cells live for one run.
pub fn forget() {
    PIECES.with_borrow_mut(Vec::clear);
}

pub fn read(at: *const u8, bytes: usize) {
    touched(at, bytes).iter().for_each(|cell| cell.with(|_| ()));
}

pub fn write(at: *const u8, bytes: usize) {
    touched(at, bytes).iter().for_each(|cell| cell.with_mut(|_| ()));
}

fn touched(at: *const u8, bytes: usize) -> Vec<std::rc::Rc<UnsafeCell<()>>> {
    let accessed = at.addr()..at.addr() + bytes;
    PIECES.with_borrow(|pieces| {
        pieces.iter().filter(|piece| overlap(&piece.addresses, &accessed)).map(|piece| piece.cell.clone()).collect()
    })
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}
