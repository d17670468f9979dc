//! Pipelines large operations (all_reduce, reduce and broadcast) in segments: while one segment crosses between hosts,
//! hosts work on the next, so the links are busy.
//!
//! A second thread, which lives as long as the operation, carries segments across. All ranks process the segments in
//! the same order, and no other thread uses the data connections meanwhile.
//!
//! An error of a crossing comes back in the place of its segment. An error on a host drops the queue; the second thread
//! then finishes the crossing that it is in, by the operation's deadline at the latest.

use std::sync::mpsc::channel;

use crate::reduce::Scratch;
use crate::types::{Error, Fault};

/// Bytes of a segment. Each segment waits for the slowest host at every step of its plan, which favours large segments.
/// Before the first crosses and after the last has, the links are idle, which favours small ones.
const SEGMENT: usize = 8 << 20;

/// The buffers of an operation on one rank. An output that is not used on this rank is empty.
pub(super) struct Whole<'a> {
    /// The number of elements, and the size of one.
    pub count: usize,
    pub size: usize,
    pub input: Option<&'a [u8]>,
    pub output: &'a mut [u8],
}

/// One segment of the whole.
pub(super) struct Segment<'a> {
    pub count: usize,
    pub input: Option<&'a [u8]>,
    pub output: &'a mut [u8],
    /// Memory for partial results, if the operation asked for it.
    pub partials: &'a mut [u8],
    pub first: bool,
    pub last: bool,
}

/// Runs `to_leaders` on every segment, then `cross` if this rank is a leader, then `from_leaders`. All ranks of a host
/// call `to_leaders` and `from_leaders` in the same order. `scratch` holds partial results, `width` bytes each.
pub(super) fn run<'a>(
    whole: Whole<'a>,
    (scratch, width): (&'a mut Scratch, usize),
    is_leader: bool,
    mut to_leaders: impl FnMut(&mut Segment<'a>) -> Result<(), Fault>,
    mut cross: impl FnMut(&mut Segment<'a>) -> Result<(), Fault> + Send,
    mut from_leaders: impl FnMut(&mut Segment<'a>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let Whole { count, size, mut input, mut output } = whole;
    let segments = (count * size).div_ceil(SEGMENT).max(1);
    let longest = count.div_ceil(segments);
    let mut cut = |i: usize, partials: &'a mut [u8]| {
        let count = longest.min(count - (i * longest).min(count));
        let (now, later) = std::mem::take(&mut output).split_at_mut_checked(count * size).unwrap_or_default();
        output = later;
        let input = input.as_mut().map(|input| {
            let (now, later) = input.split_at(count * size);
            *input = later;
            now
        });
        Segment {
            count,
            input,
            output: now,
            partials: &mut partials[..count * width],
            first: i == 0,
            last: i + 1 == segments,
        }
    };
    if segments == 1 {
        let mut segment = cut(0, scratch.bytes(count * width)?);
        to_leaders(&mut segment)?;
        if is_leader {
            cross(&mut segment)?;
        }
        return from_leaders(&mut segment);
    }
    // Two segments are in flight at a time.
    let (one, other) = scratch.bytes(2 * longest * width)?.split_at_mut(longest * width);
    let mut spare = [Some(one), Some(other)];
    let (outgoing, queue) = channel::<Segment<'a>>();
    let (crossed, results) = channel();
    std::thread::scope(|scope| {
        // Moved here, so that the thread ends when this returns.
        let outgoing = outgoing;
        let run_cross = move || {
            for mut segment in queue {
                let result = if is_leader { cross(&mut segment) } else { Ok(()) };
                if crossed.send(result.map(|()| segment)).is_err() {
                    return;
                }
            }
        };
        let spawned = std::thread::Builder::new().name("bonfire-across".into()).spawn_scoped(scope, run_cross);
        let operation = "crossing between hosts on a thread";
        spawned.map_err(|e| Fault::Failed(Error::io(operation, e)))?;
        let panicked = || Fault::Failed(Error::broken(operation, "the thread panicked"));
        for i in 0..=segments {
            if i < segments {
                let mut segment = cut(i, spare[i % 2].take().unwrap_or_default());
                to_leaders(&mut segment)?;
                outgoing.send(segment).map_err(|_| panicked())?;
            }
            if let Some(before) = i.checked_sub(1) {
                let mut segment = results.recv().map_err(|_| panicked())??;
                from_leaders(&mut segment)?;
                spare[before % 2] = Some(segment.partials);
            }
        }
        Ok(())
    })
}
