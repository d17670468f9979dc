//! What a connection says first, and why it is turned away.

#![allow(missing_docs, reason = "seen by the packages beside this one only")]

use std::io;

use super::REMEDY;

/// Changes with anything that ranks say to each other.
pub(super) const VERSION: u16 = 8;

/// How a connection begins: nobody else's does.
const MAGIC: [u8; 4] = *b"BNFR";
/// How an answer begins: what was sent is not taken for one when it comes back.
const ANSWER: [u8; 4] = *b"BNFA";

/// The first bytes in either direction. Their form is the same in all versions, so that any two can name each other's.
pub(super) const HEAD: usize = 8;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To rank 0, which knows nobody yet: it becomes the control connection of the two.
    Rendezvous = 1,
    /// Between two other ranks.
    Control = 2,
    Data = 3,
    /// To the rank that made a host's shared memory, for its descriptor.
    Memory = 4,
    /// From a node of burn's collective API to the orchestrator.
    Registration = 5,
}

impl Purpose {
    const ALL: [Purpose; 5] =
        [Purpose::Rendezvous, Purpose::Control, Purpose::Data, Purpose::Memory, Purpose::Registration];
}

/// What a connection says of itself. With a secret it is proved as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    pub purpose: Purpose,
    /// Of the job; 0 where the listener is about to say it.
    pub session: u64,
    pub from: u32,
    pub to: u32,
    pub world_size: u32,
    /// Which of how many connections for data.
    pub number: u8,
    pub of: u8,
}

impl Opening {
    pub const BYTES: usize = 32;

    pub fn to_bytes(self, secret: bool) -> [u8; Opening::BYTES] {
        let mut bytes = [0; Opening::BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        (bytes[6], bytes[7]) = (secret.into(), self.purpose as u8);
        bytes[8..16].copy_from_slice(&self.session.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.from.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.to.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.world_size.to_le_bytes());
        (bytes[28], bytes[29]) = (self.number, self.of);
        bytes
    }

    /// The opening, and whether the other end has a secret.
    pub fn from_bytes(bytes: &[u8; Opening::BYTES]) -> Result<(Opening, bool), Refusal> {
        checked(bytes, MAGIC)?;
        let four = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let purpose = Purpose::ALL.into_iter().find(|purpose| *purpose as u8 == bytes[7]).ok_or(Refusal::Stranger)?;
        if bytes[6] > 1 || bytes[30..] != [0; 2] {
            return Err(Refusal::Stranger);
        }
        let session = u64::from(four(8)) | u64::from(four(12)) << 32;
        let (from, to, world_size) = (four(16), four(20), four(24));
        Ok((Opening { purpose, session, from, to, world_size, number: bytes[28], of: bytes[29] }, bytes[6] == 1))
    }
}

/// Whether these are the first bytes of an opening in this version.
pub(super) fn opens(head: &[u8; HEAD]) -> Result<(), Refusal> {
    checked(head, MAGIC)
}

fn checked(head: &[u8], magic: [u8; 4]) -> Result<(), Refusal> {
    if head[..4] != magic {
        return Err(Refusal::Stranger);
    }
    match u16::from_le_bytes([head[4], head[5]]) {
        VERSION => Ok(()),
        theirs => Err(Refusal::Version { theirs }),
    }
}

/// Why a connection is turned away. What it says is said of the other end.
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
    #[error("it has a secret, and this rank none: {REMEDY}")]
    OnlyTheirs,
    #[error("it has no secret, and this rank has one: {REMEDY}")]
    OnlyOurs,
    #[error("it has another secret than this rank: {REMEDY}")]
    OtherSecret,
    #[error("it did not end its proof, as a connection does that was recorded and is repeated")]
    Repeated,
    #[error("{0}")]
    Misplaced(String),
}

impl Refusal {
    /// What the listener says: the first bytes of its answer.
    pub(super) fn answer(refusal: Option<&Refusal>) -> [u8; HEAD] {
        let status = match refusal {
            None => 0,
            Some(Refusal::OnlyTheirs) => 1,
            Some(Refusal::OnlyOurs) => 2,
            Some(Refusal::OtherSecret) => 3,
            Some(Refusal::Misplaced(_)) => 4,
            // The version stands beside it.
            Some(_) => 5,
        };
        let mut head = [0; HEAD];
        head[..4].copy_from_slice(&ANSWER);
        head[4..6].copy_from_slice(&VERSION.to_le_bytes());
        head[6] = status;
        head
    }

    /// What the listener's answer means to the end that dialled.
    pub(super) fn told(head: &[u8; HEAD]) -> Result<(), Refusal> {
        checked(head, ANSWER)?;
        match (head[6], head[7]) {
            (0, 0) => Ok(()),
            (1, 0) => Err(Refusal::OnlyOurs),
            (2, 0) => Err(Refusal::OnlyTheirs),
            (3, 0) => Err(Refusal::OtherSecret),
            (4, 0) => Err(Refusal::Misplaced("it expects another job, rank or world size; look at its log".into())),
            _ => Err(Refusal::Stranger),
        }
    }

    /// Whether the other end is Bonfire, so that a user who waits for a rank wants to hear of it.
    pub fn is_ours(&self) -> bool {
        !matches!(self, Refusal::Io(_) | Refusal::Stranger)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPENING: Opening = Opening {
        purpose: Purpose::Data,
        session: 0x0102_0304_0506_0708,
        from: 7,
        to: 3,
        world_size: u32::MAX,
        number: 1,
        of: 8,
    };

    #[test]
    fn openings_come_back() {
        for (purpose, secret) in Purpose::ALL.into_iter().flat_map(|purpose| [(purpose, false), (purpose, true)]) {
            let opening = Opening { purpose, ..OPENING };
            assert_eq!(Opening::from_bytes(&opening.to_bytes(secret)).unwrap(), (opening, secret));
        }
    }

    #[test]
    fn other_bytes_are_strangers_or_other_versions() {
        let read = |change: &[(usize, u8)]| {
            let mut bytes = OPENING.to_bytes(true);
            change.iter().for_each(|(at, byte)| bytes[*at] = *byte);
            Opening::from_bytes(&bytes)
        };
        for change in [(0, 0), (3, b'A'), (6, 2), (7, 0), (7, 6), (30, 1), (31, 1)] {
            assert!(matches!(read(&[change]), Err(Refusal::Stranger)), "{change:?}");
        }
        assert!(matches!(read(&[(4, 9), (5, 1)]), Err(Refusal::Version { theirs: 265 })));
    }

    #[test]
    fn both_ends_name_the_same_reason() {
        let told = |refusal: Option<Refusal>| Refusal::told(&Refusal::answer(refusal.as_ref()));
        assert!(told(None).is_ok());
        assert!(matches!(told(Some(Refusal::OnlyOurs)), Err(Refusal::OnlyTheirs)));
        assert!(matches!(told(Some(Refusal::OnlyTheirs)), Err(Refusal::OnlyOurs)));
        assert!(matches!(told(Some(Refusal::OtherSecret)), Err(Refusal::OtherSecret)));
        assert!(matches!(told(Some(Refusal::Misplaced(String::new()))), Err(Refusal::Misplaced(_))));
        // An opening that comes back is no answer.
        let mut head = [0; HEAD];
        head.copy_from_slice(&OPENING.to_bytes(true)[..HEAD]);
        assert!(matches!(Refusal::told(&head), Err(Refusal::Stranger)));
    }
}
