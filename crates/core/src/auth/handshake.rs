//! The proof of the secret: the Noise pattern NNpsk0, without I/O.
//!
//! `-> psk, e` and `<- e, ee`. The first message proves the secret to the responder, but not that the message is fresh.
//! The answer proves it to the initiator, and is fresh because it depends on the initiator's `e`. A third, empty
//! message under the transport keys does the same in the other direction. The prologue is the prologue of the pattern:
//! changing any of its bits breaks the proof.
//!
//! # Why this pattern
//! It has no keys besides the secret. Those of XX or KK would have to be derived from the secret, and would prove
//! nothing more. All primitives of `snow` that are compiled in are implemented in Rust.

use snow::{Builder, HandshakeState};

use super::prologue::{Prologue, Refusal};
use super::secret::Secret;

/// Sizes of the three messages in bytes.
pub(super) const FIRST: usize = 32 + TAG;
pub(super) const SECOND: usize = 32 + SESSION + TAG;
pub(super) const THIRD: usize = TAG;

/// Size of the job's session number, which the responder sends.
pub(super) const SESSION: usize = 8;
const TAG: usize = 16;

/// Curve25519, with a cipher and a hash that are fast on every processor.
const NOISE: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// The dialler's side of the proof.
pub(super) struct Initiator(HandshakeState);

/// The listener's side of the proof.
pub(super) struct Responder(HandshakeState);

impl Initiator {
    /// Starts the proof after an encoded prologue. Returns the first message too.
    pub fn new(secret: &Secret, prologue: &[u8; Prologue::BYTES]) -> Result<(Initiator, [u8; FIRST]), Refusal> {
        let mut state = noise(secret, prologue, Builder::build_initiator)?;
        let mut first = [0; FIRST];
        state.write_message(&[], &mut first).map_err(broken)?;
        Ok((Initiator(state), first))
    }

    /// Verifies the second message. Returns the session number of the job and the third message.
    pub fn finish(mut self, second: &[u8; SECOND]) -> Result<(u64, [u8; THIRD]), Refusal> {
        let mut session = [0; SESSION];
        self.0.read_message(second, &mut session).map_err(|_| Refusal::OtherSecret)?;
        let mut third = [0; THIRD];
        let mut keys = self.0.into_transport_mode().map_err(broken)?;
        keys.write_message(&[], &mut third).map_err(broken)?;
        Ok((u64::from_le_bytes(session), third))
    }
}

impl Responder {
    /// Verifies the first message, which follows an encoded prologue.
    pub fn new(secret: &Secret, prologue: &[u8; Prologue::BYTES], first: &[u8; FIRST]) -> Result<Responder, Refusal> {
        let mut state = noise(secret, prologue, Builder::build_responder)?;
        state.read_message(first, &mut []).map_err(|_| Refusal::OtherSecret)?;
        Ok(Responder(state))
    }

    /// Returns the second message.
    pub fn answer(&mut self, session: u64) -> Result<[u8; SECOND], Refusal> {
        let mut second = [0; SECOND];
        self.0.write_message(&session.to_le_bytes(), &mut second).map_err(broken)?;
        Ok(second)
    }

    /// Verifies the third message.
    pub fn finish(self, third: &[u8; THIRD]) -> Result<(), Refusal> {
        let mut keys = self.0.into_transport_mode().map_err(broken)?;
        keys.read_message(third, &mut []).map(drop).map_err(|_| Refusal::Repeated)
    }
}

fn noise<'a>(
    secret: &'a Secret,
    prologue: &'a [u8],
    build: impl FnOnce(Builder<'a>) -> Result<HandshakeState, snow::Error>,
) -> Result<HandshakeState, Refusal> {
    let builder = Builder::new(NOISE.parse().map_err(broken)?);
    builder.psk(0, secret.key()).and_then(|builder| builder.prologue(prologue)).and_then(build).map_err(broken)
}

/// An error that no peer can cause. Most likely the system has no random numbers.
fn broken(e: snow::Error) -> Refusal {
    Refusal::Io(std::io::Error::other(format!("handshake: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::prologue::Purpose;

    const PROLOGUE: Prologue =
        Prologue { purpose: Purpose::Data, session: 7, from: 2, to: 1, world_size: 3, number: 0, of: 1 };

    fn secret(seed: u8) -> Secret {
        Secret::new([seed; 32]).unwrap()
    }

    fn bytes() -> [u8; Prologue::BYTES] {
        PROLOGUE.to_bytes(true)
    }

    /// Runs the first two messages. Returns the responder and all three messages.
    fn halfway() -> (Responder, [u8; FIRST], [u8; SECOND], [u8; THIRD]) {
        let (initiator, first) = Initiator::new(&secret(1), &bytes()).unwrap();
        let mut responder = Responder::new(&secret(1), &bytes(), &first).unwrap();
        let second = responder.answer(99).unwrap();
        let (session, third) = initiator.finish(&second).unwrap();
        assert_eq!(session, 99);
        (responder, first, second, third)
    }

    #[test]
    fn ends_with_the_same_secret_accept_each_other() {
        let (responder, _, _, third) = halfway();
        responder.finish(&third).unwrap();
    }

    #[test]
    fn both_ends_detect_another_secret() {
        let (initiator, first) = Initiator::new(&secret(1), &bytes()).unwrap();
        assert!(matches!(Responder::new(&secret(2), &bytes(), &first), Err(Refusal::OtherSecret)));
        // Nor is a responder accepted that answers anyway, to a first message of its own.
        let (_, other) = Initiator::new(&secret(2), &bytes()).unwrap();
        let second = Responder::new(&secret(2), &bytes(), &other).unwrap().answer(99).unwrap();
        assert!(matches!(initiator.finish(&second), Err(Refusal::OtherSecret)));
    }

    #[test]
    fn every_bit_of_the_messages_and_the_opening_is_authenticated() {
        let flipped = |bytes: &[u8], bit: usize| {
            let mut bytes = bytes.to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            bytes
        };
        let (initiator, first) = Initiator::new(&secret(1), &bytes()).unwrap();
        drop(initiator);
        for bit in 0..Prologue::BYTES * 8 {
            let other = flipped(&bytes(), bit).try_into().unwrap();
            assert!(Responder::new(&secret(1), &other, &first).is_err(), "bit {bit} of the prologue");
        }
        for bit in 0..FIRST * 8 {
            let other = flipped(&first, bit).try_into().unwrap();
            // Curve25519 ignores the highest bit of a point, but the transcript does not.
            assert!(Responder::new(&secret(1), &bytes(), &other).is_err(), "bit {bit} of the first");
        }
        for bit in 0..SECOND * 8 {
            let (initiator, first) = Initiator::new(&secret(1), &bytes()).unwrap();
            let second = Responder::new(&secret(1), &bytes(), &first).unwrap().answer(99).unwrap();
            let other = flipped(&second, bit).try_into().unwrap();
            assert!(initiator.finish(&other).is_err(), "bit {bit} of the second");
        }
        for bit in 0..THIRD * 8 {
            let (responder, _, _, third) = halfway();
            let other = flipped(&third, bit).try_into().unwrap();
            assert!(matches!(responder.finish(&other), Err(Refusal::Repeated)), "bit {bit} of the third");
        }
    }

    #[test]
    fn replayed_messages_are_rejected() {
        let (_, first, second, third) = halfway();
        // To the responder: its answer differs from the recorded one, so the recorded third message does not fit.
        let mut responder = Responder::new(&secret(1), &bytes(), &first).unwrap();
        assert_ne!(responder.answer(99).unwrap(), second);
        assert!(matches!(responder.finish(&third), Err(Refusal::Repeated)));
        // To the initiator.
        let (initiator, _) = Initiator::new(&secret(1), &bytes()).unwrap();
        assert!(matches!(initiator.finish(&second), Err(Refusal::OtherSecret)));
    }

    #[test]
    fn reflected_messages_are_rejected() {
        let (initiator, first) = Initiator::new(&secret(1), &bytes()).unwrap();
        let mut back = [0; SECOND];
        back[..FIRST].copy_from_slice(&first);
        assert!(matches!(initiator.finish(&back), Err(Refusal::OtherSecret)));
        // To the responder, the only candidate for the third message is the tag of its own second one.
        let (responder, _, second, _) = halfway();
        let tail = second[SECOND - THIRD..].try_into().unwrap();
        assert!(matches!(responder.finish(&tail), Err(Refusal::Repeated)));
    }
}
