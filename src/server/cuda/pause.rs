//! How the host waits for what GPUs do: nothing wakes it, so it looks again and again.

use std::thread;
use std::time::{Duration, Instant};

use bonfire_core::{Deadline, Error};

/// Between two looks: at first as long as a small call takes, or NCCL to put an operation on its stream. Then, as after
/// seconds in which NCCL connects ranks, so long that looking is little work for the processor.
#[derive(Default)]
pub(super) struct Pause(Option<Instant>);

impl Pause {
    pub fn once(&mut self) {
        let waited = self.0.get_or_insert_with(Instant::now).elapsed();
        if waited < Duration::from_millis(2) {
            thread::yield_now();
        } else {
            thread::sleep((waited / 10).min(Duration::from_micros(500)));
        }
    }
}

/// Waits until streams are idle, after a failure. What is on them waits for words, which kernels write that were
/// launched before; where such a launch failed, which cubecl does not say, nobody does, so in the end they are
/// released.
pub(super) fn settle(idle: impl Fn() -> bool, release: impl Fn()) -> Result<(), Error> {
    const GRACE: Duration = Duration::from_secs(10);
    let deadline = Deadline::after(2 * GRACE);
    let mut pause = Pause::default();
    while !idle() {
        if deadline.passed() {
            let reason = format!("it goes on after {:.0?}; its memory is not given back", deadline.elapsed());
            return Err(Error::broken("waiting for what failed on the GPU", reason));
        }
        if deadline.elapsed() > GRACE {
            // Again and again: a kernel that is late may write the word after this.
            release();
        }
        pause.once();
    }
    Ok(())
}
