//! What a rank knows of one of its peers.

use std::net::TcpStream;

use crate::auth::LostPackets;
use crate::types::{Fault, Site, Whereabouts};

/// A peer of this rank.
#[derive(Default)]
pub(super) struct Peer {
    /// Data connections that the peer has opened and no thread has taken yet. `None` for those that are still missing.
    pub data_streams: Vec<Option<TcpStream>>,
    /// On data connections that the peer has opened.
    pub lost_packets: LostPackets,
    pub presence: Presence,
    /// The last call that the peer reported.
    pub last_call: Option<Site>,
    /// Whether the peer asked about an operation that this rank has not begun.
    pub awaits_call: bool,
    /// Where the peer was when it was asked last.
    pub whereabouts: Option<Whereabouts>,
    /// Whether the peer has called `shrink`: it takes part in no operation any more.
    pub shrinking: bool,
}

/// Whether the peer is in the group.
#[derive(Default, Clone)]
pub(super) enum Presence {
    #[default]
    Present,
    /// It left in order after it had begun so many collectives.
    Left(u64),
    Lost(String),
}

impl Peer {
    /// A call may arrive on two ways, so an earlier one may come later.
    pub fn set_last_call(&mut self, site: Site) {
        if self.last_call.is_none_or(|last| last.sequence <= site.sequence) {
            self.last_call = Some(site);
        }
    }

    /// How many collectives it had begun when it left in order, if it has.
    pub fn left(&self) -> Option<u64> {
        match self.presence {
            Presence::Left(begun) => Some(begun),
            _ => None,
        }
    }

    /// Whether it has left in order before it began this collective.
    pub fn has_missed(&self, tag: &Site) -> bool {
        tag.call.operation.is_collective() && self.left().is_some_and(|begun| begun <= tag.sequence)
    }

    /// Whether all data connections that it opens have arrived.
    pub fn has_data_streams(&self) -> bool {
        !self.data_streams.is_empty() && self.data_streams.iter().all(Option::is_some)
    }

    /// Why it will not answer, if it is gone. `rank`: its own.
    pub fn absence(&self, rank: usize) -> Option<Fault> {
        match &self.presence {
            Presence::Present => None,
            Presence::Left(_) => Some(Fault::Left { peer: rank }),
            Presence::Lost(reason) => Some(Fault::Lost { peer: rank, reason: reason.clone() }),
        }
    }
}
