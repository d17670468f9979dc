//! How the ranks of a group open each other's windows.
//!
//! CUDA's handles work between processes of one host whose GPUs can access each other, and not between all containers
//! of a host. No question to the driver tells, so ranks try: each opens all windows, compares the number that it finds
//! in each with what the owner said, copies the number to another word there, and the owner compares what has arrived.
//! A handle could also open a window of another process by mistake, since it is made of numbers that containers give
//! out independently.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Handle, NUMBER, Peer, ProcessId, TRIED, Window, Windows, word};
use crate::address::Copy;
use crate::driver::{Gpu, Stream};
use bonfire_core::internal::{AgreedOperations, process_number, random};
use bonfire_core::{Error, Group};

/// What a rank tells the others about its window.
#[derive(Serialize, Deserialize)]
struct Offer {
    handle: Vec<u8>,
    /// What its word `NUMBER` holds.
    number: u32,
    /// A number unique to the process. Within one, windows have one address.
    process: u64,
    address: u64,
    /// The GPU's ordinal in its process.
    gpu: usize,
    process_id: Option<ProcessId>,
}

impl Windows {
    /// Opens the windows of all ranks on each. All ranks call it, each with its GPU. `Ok(Err(why))` on all ranks if one
    /// of them cannot: `why` names it. An error is the group's.
    pub fn connect(group: &Group, gpu: &Arc<Gpu>) -> Result<Result<Windows, String>, Error> {
        let text = |error: Error| error.to_string();
        let made = Windows::alone(group.rank(), gpu).map_err(text);
        let offer = match &made {
            Ok((windows, number)) => windows.offer(*number).map_err(text),
            Err(why) => Err(why.clone()),
        };
        let offers = match all(gather(group, offer)?) {
            Ok(offers) => offers,
            Err(why) => return Ok(Err(why)),
        };
        // A rank without windows has reported that.
        let (mut windows, number) = match made {
            Ok(made) => made,
            Err(why) => return Ok(Err(why)),
        };
        let processes = offers.iter().map(|offer| offer.process_id.filter(|process| !process.has_ended()));
        windows.peers = processes.enumerate().filter(|(rank, _)| *rank != windows.rank).collect();
        let opened = windows.open_all(&offers).or_else(|error| {
            windows.leave()?;
            Err(error)
        });
        let opened = gather(group, opened.map_err(text))?;
        // The others have closed what they opened.
        windows.peers.retain(|(rank, _)| opened[*rank].is_ok());
        if let Err(why) = all(opened) {
            return Ok(Err(why));
        }
        let arrived = windows.check_arrived(number).map_err(text);
        Ok(all(gather(group, arrived)?).map(|_| windows))
    }

    /// This rank's window, and the number that it holds.
    fn alone(rank: usize, gpu: &Arc<Gpu>) -> Result<(Windows, u32), Error> {
        let stream = Arc::new(Stream::new(gpu)?);
        let own = Window::take(gpu, &stream)?;
        let windows = Windows { rank, stream, own, opened: Vec::new(), peers: Vec::new() };
        // Not 0, the value of a word before the first write to it.
        let number = random()? as u32 | 1;
        // SAFETY: windows have this word.
        unsafe { windows.stream.fill(word(windows.own.address, NUMBER), number, 1) }?;
        windows.stream.synchronize()?;
        Ok((windows, number))
    }

    fn offer(&self, number: u32) -> Result<Offer, Error> {
        let Window { gpu, address } = &self.own;
        Ok(Offer {
            handle: self.own.handle()?.to_vec(),
            number,
            process: process_number()?,
            address: address.get(),
            gpu: gpu.ordinal,
            process_id: ProcessId::own(),
        })
    }

    /// Opens the windows of all peers, and writes to each.
    fn open_all(&mut self, offers: &[Offer]) -> Result<(), Error> {
        let own = process_number()?;
        for (rank, offer) in offers.iter().enumerate().filter(|(rank, _)| *rank != self.rank) {
            let refused = |why: &str| Error::broken(format!("opening the memory of rank {rank}"), why);
            let foreign = offer.process != own;
            let address = match foreign {
                true => {
                    let handle = Handle::try_from(&offer.handle[..]).map_err(|_| refused("its handle is malformed"))?;
                    self.own.gpu.open(handle).map_err(|error| refused(&error.to_string()))?
                }
                false if self.own.gpu.reaches(&*Gpu::of(offer.gpu)?)? => offer.address.into(),
                false => return Err(refused("its GPU cannot be accessed")),
            };
            self.opened.push(Peer { rank, address, foreign });
            // SAFETY: windows have these words. What has been opened is one of this size, if by mistake not the peer's;
            // a window of this process is never freed.
            if unsafe { self.stream.read(word(address, NUMBER), 1) }?[0] != offer.number {
                return Err(refused("it is the memory of something else"));
            }
            // SAFETY: as above, and it stays open until the copy has ended, below or in `leave`.
            unsafe { self.stream.copy(&Copy::of(word(address, NUMBER), word(address, TRIED + self.rank), 4)) }?;
        }
        self.stream.synchronize()
    }

    /// Checks that what the peers have written is in this rank's window.
    fn check_arrived(&self, number: u32) -> Result<(), Error> {
        for (rank, _) in &self.peers {
            // SAFETY: windows have this word.
            if unsafe { self.stream.read(word(self.own.address, TRIED + rank), 1) }?[0] != number {
                let reason = format!("a write of rank {rank} to the memory of rank {} did not arrive", self.rank);
                return Err(Error::broken("sharing memory between processes", reason));
            }
        }
        Ok(())
    }
}

type Gathered<T> = Vec<Result<T, String>>;

/// Gathers a value, or why there is none, from every rank.
fn gather<T: Serialize + DeserializeOwned>(group: &Group, own: Result<T, String>) -> Result<Gathered<T>, Error> {
    group.all_gather_results(Ok(own))
}

/// The values of all ranks, or the reason of the lowest rank that has none.
fn all<T>(results: Gathered<T>) -> Result<Vec<T>, String> {
    let named = |(rank, result): (usize, Result<T, String>)| result.map_err(|why| format!("rank {rank}: {why}"));
    results.into_iter().enumerate().map(named).collect()
}
