//! Large operations in pieces: while a piece crosses between hosts, the next is worked on within them, so that the links
//! are busy.

use std::sync::mpsc::channel;

use crate::reduce::Scratch;
use crate::types::{Error, Fault};

/// Bytes of a piece. Each waits for the slowest host at every step of its plan, and before the first crosses and after
/// the last has, the links are idle.
const PIECE: usize = 8 << 20;

/// The memory of an operation on one rank. An output that is not used on this rank is empty.
pub(super) struct Whole<'a> {
    /// The number of elements, and the size of one.
    pub count: usize,
    pub size: usize,
    pub input: Option<&'a [u8]>,
    pub output: &'a mut [u8],
}

/// One piece of it.
pub(super) struct Piece<'a> {
    pub count: usize,
    pub input: Option<&'a [u8]>,
    pub output: &'a mut [u8],
    /// Memory for partial results, where the operation asked for it.
    pub carrier: &'a mut [u8],
    pub first: bool,
    pub last: bool,
}

/// Runs `inward` on every piece, then `across` where this rank `speaks`, then `outward`; `inward` and `outward` in the
/// same order on all ranks of a host. Partial results have memory in the scratch, of so many bytes each.
pub(super) fn run<'a>(
    whole: Whole<'a>,
    (scratch, width): (&'a mut Scratch, usize),
    speaks: bool,
    mut inward: impl FnMut(&mut Piece<'a>) -> Result<(), Fault>,
    mut across: impl FnMut(&mut Piece<'a>) -> Result<(), Fault> + Send,
    mut outward: impl FnMut(&mut Piece<'a>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let Whole { count, size, mut input, mut output } = whole;
    let pieces = (count * size).div_ceil(PIECE).max(1);
    let longest = count.div_ceil(pieces);
    let mut cut = |i: usize, carrier: &'a mut [u8]| {
        let count = longest.min(count - (i * longest).min(count));
        let (now, later) = std::mem::take(&mut output).split_at_mut_checked(count * size).unwrap_or_default();
        output = later;
        let input = input.as_mut().map(|input| {
            let (now, later) = input.split_at(count * size);
            *input = later;
            now
        });
        Piece {
            count,
            input,
            output: now,
            carrier: &mut carrier[..count * width],
            first: i == 0,
            last: i + 1 == pieces,
        }
    };
    if pieces == 1 {
        let mut piece = cut(0, scratch.bytes(count * width));
        inward(&mut piece)?;
        if speaks {
            across(&mut piece)?;
        }
        return outward(&mut piece);
    }
    // Two pieces are under way at a time.
    let (one, other) = scratch.bytes(2 * longest * width).split_at_mut(longest * width);
    let mut spare = [Some(one), Some(other)];
    let (crossing, queue) = channel::<Piece<'a>>();
    let (arrived, arrivals) = channel();
    std::thread::scope(|scope| {
        // Owned here, so that the thread ends when this returns.
        let crossing = crossing;
        let cross = move || {
            for mut piece in queue {
                let result = if speaks { across(&mut piece) } else { Ok(()) };
                if arrived.send(result.map(|()| piece)).is_err() {
                    return;
                }
            }
        };
        let spawned = std::thread::Builder::new().name("bonfire-across".into()).spawn_scoped(scope, cross);
        let operation = "crossing between hosts on a thread";
        spawned.map_err(|e| Fault::Failed(Error::io(operation, e)))?;
        let ended = || Fault::Failed(Error::broken(operation, "the thread panicked"));
        for i in 0..=pieces {
            if i < pieces {
                let mut piece = cut(i, spare[i % 2].take().unwrap_or_default());
                inward(&mut piece)?;
                crossing.send(piece).map_err(|_| ended())?;
            }
            if let Some(before) = i.checked_sub(1) {
                let mut piece = arrivals.recv().map_err(|_| ended())??;
                outward(&mut piece)?;
                spare[before % 2] = Some(piece.carrier);
            }
        }
        Ok(())
    })
}
