//! Tests for transports: implementations of [`Transport`] by which a group's ranks exchange messages.
//!
//! | test | what it shows |
//! |---|---|
//! | [`every_operation`] | every operation in every form, with every algorithm and element type, on 1 to 5 ranks |
//! | [`every_lost_message`] | each message of each operation is lost once: all ranks return an error, and none waits |
//! | [`check_group`] | every operation of a group that exists already, such as one of processes |
//!
//! Results are compared with exact arithmetic: elements are small whole numbers ([`oracle`]). A test fails by a panic,
//! whose text names operation, element type, length and rank.
//!
//! ```
//! # use std::sync::mpsc::{Receiver, Sender, channel};
//! # use std::sync::Mutex;
//! # use bonfire_core::{Deadline, Fault, Transport, error::Site};
//! # struct Channels { rank: usize, to: Vec<Sender<(Site, Vec<u8>)>>, from: Vec<Mutex<Receiver<(Site, Vec<u8>)>>> }
//! # impl Channels {
//! #     fn ends(n: usize) -> Vec<Channels> {
//! #         let mut ends: Vec<_> = (0..n).map(|rank| Channels { rank, to: vec![], from: vec![] }).collect();
//! #         for (from, to) in (0..n).flat_map(|from| (0..n).map(move |to| (from, to))) {
//! #             let (sender, receiver) = channel();
//! #             ends[from].to.push(sender);
//! #             ends[to].from.push(Mutex::new(receiver));
//! #         }
//! #         ends
//! #     }
//! # }
//! # impl Transport for Channels {
//! #     fn rank(&self) -> usize { self.rank }
//! #     fn world_size(&self) -> usize { self.to.len() }
//! #     fn send(&self, tag: &Site, to: usize, bytes: &[u8], _: &Deadline) -> Result<(), Fault> {
//! #         self.to[to].send((*tag, bytes.to_vec())).map_err(|_| Fault::Left { peer: to })
//! #     }
//! #     fn recv(&self, tag: &Site, from: usize, bytes: &mut [u8], deadline: &Deadline) -> Result<(), Fault> {
//! #         let next = self.from[from].lock().unwrap().recv_timeout(deadline.remaining());
//! #         let (theirs, payload) = next.map_err(|_| Fault::Left { peer: from })?;
//! #         if theirs != *tag || payload.len() != bytes.len() {
//! #             return Err(Fault::Unexpected { peer: from, site: theirs });
//! #         }
//! #         bytes.copy_from_slice(&payload);
//! #         Ok(())
//! #     }
//! #     fn exchange(
//! #         &self, tag: &Site, (to, out): (usize, &[u8]), (from, into): (usize, &mut [u8]), deadline: &Deadline,
//! #     ) -> Result<(), Fault> {
//! #         self.send(tag, to, out, deadline)?;
//! #         self.recv(tag, from, into, deadline)
//! #     }
//! # }
//! // `Channels::ends(n)` connects `n` ranks and returns their ends.
//! bonfire_conformance::every_operation(Channels::ends);
//! ```

#![warn(missing_docs)]

pub mod faults;
mod lost_messages;
mod operations;
pub mod oracle;
mod variable_size;

use bonfire_core::{Algorithm, Builder, Group, Transport};
use half::f16;

pub use self::lost_messages::{Losses, every_lost_message};
pub use self::operations::{check, check_all_types, check_negative, lengths};
pub use self::variable_size::{check as check_variable_sizes, check_batch, check_sizes};

/// Runs every operation on a group: in every form, on all element types, with lengths around the number of ranks and of
/// several chunks of 256 KiB, and in batches. All ranks of the group call this.
///
/// # Panics
/// If a result is wrong, or an operation fails.
pub fn check_group(group: &Group) {
    check_all_types(group, &lengths(group.world_size()));
    check::<f32>(group, 200_003);
    check_variable_sizes::<f32>(group, 100_003);
    check::<f16>(group, 300_001);
    check_negative(group);
    [0, 3, 1000].into_iter().for_each(|len| check_batch(group, len));
}

/// As [`check_group`], on groups of 1 to 5 ranks, and by each algorithm. `connect` returns the ends of so many ranks,
/// by rank.
///
/// # Panics
/// If a result is wrong, or an operation fails.
pub fn every_operation<T: Transport + 'static>(connect: impl Fn(usize) -> Vec<T>) {
    for n in 1..=5 {
        faults::run(connect(n), |builder| builder, |_| faults::Faults::default(), |group| check_group(&group));
        for algorithm in Algorithm::ALL.iter().copied() {
            faults::run(
                connect(n),
                |builder: Builder| builder.algorithms(algorithm),
                |_| faults::Faults::default(),
                |group| {
                    check_all_types(&group, &[0, 1, 5, 6, 1000]);
                    check::<f32>(&group, 100_000);
                    check_negative(&group);
                },
            );
        }
    }
}
