//! The prologue of a connection, and the reasons to refuse one.

#![allow(missing_docs, reason = "used by the sibling packages only")]

use std::io;

use super::REMEDY;

/// Version of the protocol between ranks. Any change to a message increments it.
pub(super) const VERSION: u16 = 13;

/// The first bytes of a prologue, which no other protocol uses.
const MAGIC: [u8; 4] = *b"BNFR";
/// The first bytes of an answer. They differ from [`MAGIC`], so that a reflected prologue is not taken for an answer.
const ANSWER: [u8; 4] = *b"BNFA";

/// Length of the head, the first bytes in either direction. The format is the same in all versions, so that either end
/// can name the other's version.
pub(super) const HEAD: usize = 8;

/// The order of the bytes in the numbers of this rank's data, which ranks send as they are in memory.
const BYTE_ORDER: u8 = if cfg!(target_endian = "little") { 1 } else { 2 };

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To rank 0, during the rendezvous. It becomes the control connection of the two ranks.
    Rendezvous = 1,
    /// Control connection between two other ranks.
    Control = 2,
    Data = 3,
    /// To the rank that created a host's shared memory, for its file descriptor.
    Memory = 4,
    /// From a node of burn's collective API to the orchestrator.
    Registration = 5,
    /// From a rank whose connection to the listener has ended, to find out whether the listener lives.
    Probe = 6,
}

impl Purpose {
    pub(super) const ALL: [Purpose; 6] =
        [Purpose::Rendezvous, Purpose::Control, Purpose::Data, Purpose::Memory, Purpose::Registration, Purpose::Probe];
}

/// The prologue of a connection: its purpose and the ranks it connects. With a secret, the handshake authenticates it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prologue {
    pub purpose: Purpose,
    /// Session number of the job; 0 if the dialler does not know it yet and the listener is to send it.
    pub session: u64,
    pub from: u32,
    pub to: u32,
    pub world_size: u32,
    /// Index of a data connection, out of `of`.
    pub number: u8,
    pub of: u8,
}

impl Prologue {
    pub const BYTES: usize = 32;

    pub fn to_bytes(self, secret: bool) -> [u8; Prologue::BYTES] {
        let mut bytes = [0; Prologue::BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        (bytes[6], bytes[7]) = (secret.into(), self.purpose as u8);
        bytes[8..16].copy_from_slice(&self.session.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.from.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.to.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.world_size.to_le_bytes());
        (bytes[28], bytes[29], bytes[30]) = (self.number, self.of, BYTE_ORDER);
        bytes
    }

    /// Decodes a prologue. Returns it and whether the other end has a secret.
    pub fn from_bytes(bytes: &[u8; Prologue::BYTES]) -> Result<(Prologue, bool), Refusal> {
        check_head(bytes, MAGIC)?;
        let four = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let purpose = Purpose::ALL.into_iter().find(|purpose| *purpose as u8 == bytes[7]).ok_or(Refusal::Stranger)?;
        if bytes[6] > 1 || !matches!(bytes[30..], [1 | 2, 0]) {
            return Err(Refusal::Stranger);
        }
        if bytes[30] != BYTE_ORDER {
            return Err(Refusal::ByteOrder);
        }
        let session = u64::from(four(8)) | u64::from(four(12)) << 32;
        let (from, to, world_size) = (four(16), four(20), four(24));
        Ok((Prologue { purpose, session, from, to, world_size, number: bytes[28], of: bytes[29] }, bytes[6] == 1))
    }
}

/// Checks that these are the first bytes of a prologue in this version.
pub(super) fn check_prologue_head(head: &[u8; HEAD]) -> Result<(), Refusal> {
    check_head(head, MAGIC)
}

fn check_head(head: &[u8], magic: [u8; 4]) -> Result<(), Refusal> {
    if head[..4] != magic {
        return Err(Refusal::Stranger);
    }
    match u16::from_le_bytes([head[4], head[5]]) {
        VERSION => Ok(()),
        theirs => Err(Refusal::Version { theirs }),
    }
}

/// Why a connection is refused. In the messages, "it" is the other end.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("it does not speak Bonfire's protocol")]
    Stranger,
    #[error(
        "it speaks version {theirs} of Bonfire's protocol, and this rank version {VERSION}: start all ranks from the \
         same release"
    )]
    Version { theirs: u16 },
    #[error(
        "its processor has another byte order than this rank's, and ranks send numbers as they are in memory: start \
         all ranks on processors of one kind"
    )]
    ByteOrder,
    #[error("it has a secret, and this rank none: {REMEDY}")]
    OnlyTheirs,
    #[error("it has no secret, and this rank has one: {REMEDY}")]
    OnlyOurs,
    #[error("it has another secret than this rank: {REMEDY}")]
    OtherSecret,
    #[error("it did not complete the handshake, as happens when a recorded connection is replayed")]
    Repeated,
    #[error("{0}")]
    Misplaced(String),
}

impl Refusal {
    /// Encodes the head of the listener's answer.
    pub(super) fn answer(refusal: Option<&Refusal>) -> [u8; HEAD] {
        let status = match refusal {
            None => 0,
            Some(Refusal::OnlyTheirs) => 1,
            Some(Refusal::OnlyOurs) => 2,
            Some(Refusal::OtherSecret) => 3,
            Some(Refusal::Misplaced(_)) => 4,
            Some(Refusal::ByteOrder) => 5,
            // Bytes 4 and 5 hold the version.
            Some(_) => 6,
        };
        let mut head = [0; HEAD];
        head[..4].copy_from_slice(&ANSWER);
        head[4..6].copy_from_slice(&VERSION.to_le_bytes());
        head[6] = status;
        head
    }

    /// Decodes the head of the listener's answer. Refusals are turned around, to the dialler's point of view.
    pub(super) fn from_answer(head: &[u8; HEAD]) -> Result<(), Refusal> {
        check_head(head, ANSWER)?;
        match (head[6], head[7]) {
            (0, 0) => Ok(()),
            (1, 0) => Err(Refusal::OnlyOurs),
            (2, 0) => Err(Refusal::OnlyTheirs),
            (3, 0) => Err(Refusal::OtherSecret),
            (4, 0) => Err(Refusal::Misplaced("it expects another job, rank or world size; see its log".into())),
            (5, 0) => Err(Refusal::ByteOrder),
            _ => Err(Refusal::Stranger),
        }
    }

    /// Whether the other end speaks Bonfire's protocol, so that the refusal matters to a user whose rank is missing.
    pub fn is_ours(&self) -> bool {
        !matches!(self, Refusal::Io(_) | Refusal::Stranger)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROLOGUE: Prologue = Prologue {
        purpose: Purpose::Data,
        session: 0x0102_0304_0506_0708,
        from: 7,
        to: 3,
        world_size: u32::MAX,
        number: 1,
        of: 8,
    };

    #[test]
    fn openings_round_trip() {
        for (purpose, secret) in Purpose::ALL.into_iter().flat_map(|purpose| [(purpose, false), (purpose, true)]) {
            let prologue = Prologue { purpose, ..PROLOGUE };
            assert_eq!(Prologue::from_bytes(&prologue.to_bytes(secret)).unwrap(), (prologue, secret));
        }
    }

    #[test]
    fn malformed_openings_are_refused() {
        let read = |change: &[(usize, u8)]| {
            let mut bytes = PROLOGUE.to_bytes(true);
            change.iter().for_each(|(at, byte)| bytes[*at] = *byte);
            Prologue::from_bytes(&bytes)
        };
        for change in [(0, 0), (3, b'A'), (6, 2), (7, 0), (7, 7), (30, 0), (30, 3), (31, 1)] {
            assert!(matches!(read(&[change]), Err(Refusal::Stranger)), "{change:?}");
        }
        assert!(matches!(read(&[(4, 9), (5, 1)]), Err(Refusal::Version { theirs: 265 })));
        assert!(matches!(read(&[(30, 3 - BYTE_ORDER)]), Err(Refusal::ByteOrder)));
    }

    #[test]
    fn answers_mirror_the_refusal() {
        let round_trip = |refusal: Option<Refusal>| Refusal::from_answer(&Refusal::answer(refusal.as_ref()));
        assert!(round_trip(None).is_ok());
        assert!(matches!(round_trip(Some(Refusal::OnlyOurs)), Err(Refusal::OnlyTheirs)));
        assert!(matches!(round_trip(Some(Refusal::OnlyTheirs)), Err(Refusal::OnlyOurs)));
        assert!(matches!(round_trip(Some(Refusal::OtherSecret)), Err(Refusal::OtherSecret)));
        assert!(matches!(round_trip(Some(Refusal::ByteOrder)), Err(Refusal::ByteOrder)));
        assert!(matches!(round_trip(Some(Refusal::Misplaced(String::new()))), Err(Refusal::Misplaced(_))));
        // A reflected prologue is not an answer.
        let mut head = [0; HEAD];
        head.copy_from_slice(&PROLOGUE.to_bytes(true)[..HEAD]);
        assert!(matches!(Refusal::from_answer(&head), Err(Refusal::Stranger)));
    }
}
