//! All-reduces of random devices, sizes, types and forms, every result compared bit for bit.
//!
//! `BONFIRE_SOAK` is the number of calls. `BONFIRE_SOAK_SEED` selects them.

use std::time::{Duration, Instant};

use crate::cases::{Case, DTYPES, Pending};
use crate::devices::streams;
use crate::{Devices, around};
use bonfire_testing::settings::{number, seed};
use bonfire_testing::transport::Random;

const RANKS: u8 = 4;
/// A device with this many calls in flight must wait for results.
const MAX_IN_FLIGHT: usize = 50;

/// Draws a case and its members, the same on all ranks.
fn draw(random: &mut Random, number: usize) -> (Case, Vec<usize>) {
    let mut below = |end: usize| (random.next() >> 8) as usize % end;
    let members = 1 + below((1 << RANKS) - 1);
    let members = (0..usize::from(RANKS)).filter(|rank| members >> rank & 1 == 1).collect();
    let dtype = DTYPES[below(DTYPES.len())];
    // Mostly small; around powers of two, where algorithms change, or between.
    let power = if below(100) < 90 { below(15) } else { 15 + below(5) };
    let length = match below(3) {
        0 => below((2 << power) + 1),
        _ => (1 << power) + below(5).saturating_sub(2),
    };
    let (mean, in_place, around) = (below(2) == 0, below(2) == 0, around(dtype)[below(4)]);
    (Case { number, dtype, mean, in_place, length, around }, members)
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn random_all_reduces() {
    let (calls, seed) = (number("BONFIRE_SOAK").unwrap_or(100_000) as usize, seed("BONFIRE_SOAK_SEED"));
    println!("BONFIRE_SOAK={calls} BONFIRE_SOAK_SEED={seed}");
    let devices = Devices::new(67, RANKS);
    devices.all.iter().for_each(|device| device.set_deadline(Duration::from_secs(60)));
    let begin = Instant::now();
    devices.run(|rank, client| {
        let (mut shared, mut own) = (Random(seed), Random(seed.rotate_left(17 + rank as u32) | 1));
        let mut streams = streams(&client, rank);
        let mut in_flight: Vec<Pending> = Vec::new();
        for number in 0..calls {
            let (case, members) = draw(&mut shared, number);
            if let Some(position) = members.iter().position(|member| *member == rank) {
                let ids = members.iter().map(|member| devices.ids[*member]).collect();
                in_flight.push(case.call(position, &mut streams, ids));
            }
            // At random moments: a rank waits for calls that its peers have made, or make without waiting for it.
            let draw = own.next() >> 8;
            if in_flight.len() >= MAX_IN_FLIGHT || draw % 8 == 0 || number + 1 == calls {
                streams[(draw >> 3) as usize % 2].sync_collective();
                in_flight.drain(..).for_each(|call| call.check(&streams));
            }
            if rank == 0 && (number + 1) % 5_000 == 0 {
                println!("{} of {calls} after {:.0?}", number + 1, begin.elapsed());
            }
        }
    });
    assert!(devices.all.iter().all(|device| device.failure().is_none()));
}
