//! The proof of the secret: Noise's pattern NNpsk0, without I/O.
//!
//! `-> psk, e` and `<- e, ee`. The first message proves the secret to the end that listens, and says nothing about when it
//! was made; the answer proves it to the end that dials, for it depends on that end's `e`. A third, empty message under
//! the keys that came out does the same in the other direction. The opening is the prologue: whoever changes a bit of it
//! breaks the proof.

use snow::{Builder, HandshakeState};

use super::opening::{Opening, Refusal};
use super::secret::Secret;

/// Sizes of the three messages.
pub(super) const FIRST: usize = 32 + TAG;
pub(super) const SECOND: usize = 32 + SESSION + TAG;
pub(super) const THIRD: usize = TAG;

/// The number of the job, which the end that listens says.
pub(super) const SESSION: usize = 8;
const TAG: usize = 16;

/// Curve25519, and what is fast on every processor.
const NOISE: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// The end that dials, with a secret.
pub(super) struct Dialler(HandshakeState);

/// The end that listens, with a secret.
pub(super) struct Listener(HandshakeState);

impl Dialler {
    /// The first message, after an opening of these bytes.
    pub fn new(secret: &Secret, opening: &[u8; Opening::BYTES]) -> Result<(Dialler, [u8; FIRST]), Refusal> {
        let mut state = noise(secret, opening, Builder::build_initiator)?;
        let mut first = [0; FIRST];
        state.write_message(&[], &mut first).map_err(broken)?;
        Ok((Dialler(state), first))
    }

    /// Takes the second message; gives the number of the job, and the third.
    pub fn end(mut self, second: &[u8; SECOND]) -> Result<(u64, [u8; THIRD]), Refusal> {
        let mut session = [0; SESSION];
        self.0.read_message(second, &mut session).map_err(|_| Refusal::OtherSecret)?;
        let mut third = [0; THIRD];
        let mut keys = self.0.into_transport_mode().map_err(broken)?;
        keys.write_message(&[], &mut third).map_err(broken)?;
        Ok((u64::from_le_bytes(session), third))
    }
}

impl Listener {
    /// Takes the first message, after an opening of these bytes.
    pub fn new(secret: &Secret, opening: &[u8; Opening::BYTES], first: &[u8; FIRST]) -> Result<Listener, Refusal> {
        let mut state = noise(secret, opening, Builder::build_responder)?;
        state.read_message(first, &mut []).map_err(|_| Refusal::OtherSecret)?;
        Ok(Listener(state))
    }

    /// The second message.
    pub fn answer(&mut self, session: u64) -> Result<[u8; SECOND], Refusal> {
        let mut second = [0; SECOND];
        self.0.write_message(&session.to_le_bytes(), &mut second).map_err(broken)?;
        Ok(second)
    }

    /// Takes the third message.
    pub fn end(self, third: &[u8; THIRD]) -> Result<(), Refusal> {
        let mut keys = self.0.into_transport_mode().map_err(broken)?;
        keys.read_message(third, &mut []).map(drop).map_err(|_| Refusal::Repeated)
    }
}

fn noise<'a>(
    secret: &'a Secret,
    opening: &'a [u8],
    build: impl FnOnce(Builder<'a>) -> Result<HandshakeState, snow::Error>,
) -> Result<HandshakeState, Refusal> {
    let builder = Builder::new(NOISE.parse().map_err(broken)?);
    builder.psk(0, secret.key()).and_then(|builder| builder.prologue(opening)).and_then(build).map_err(broken)
}

/// What no peer can cause: the system has no random numbers, most likely.
fn broken(e: snow::Error) -> Refusal {
    Refusal::Io(std::io::Error::other(format!("the handshake: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::opening::Purpose;

    const OPENING: Opening =
        Opening { purpose: Purpose::Data, session: 7, from: 2, to: 1, world_size: 3, number: 0, of: 1 };

    fn secret(seed: u8) -> Secret {
        Secret::new([seed; 32]).unwrap()
    }

    fn bytes() -> [u8; Opening::BYTES] {
        OPENING.to_bytes(true)
    }

    /// Both ends after two messages, and the third.
    fn halfway() -> (Listener, [u8; FIRST], [u8; SECOND], [u8; THIRD]) {
        let (dialler, first) = Dialler::new(&secret(1), &bytes()).unwrap();
        let mut listener = Listener::new(&secret(1), &bytes(), &first).unwrap();
        let second = listener.answer(99).unwrap();
        let (session, third) = dialler.end(&second).unwrap();
        assert_eq!(session, 99);
        (listener, first, second, third)
    }

    #[test]
    fn ends_with_one_secret_prove_it_to_each_other() {
        let (listener, _, _, third) = halfway();
        listener.end(&third).unwrap();
    }

    #[test]
    fn another_secret_is_found_out_by_both_ends() {
        let (dialler, first) = Dialler::new(&secret(1), &bytes()).unwrap();
        assert!(matches!(Listener::new(&secret(2), &bytes(), &first), Err(Refusal::OtherSecret)));
        // Nor does a listener get by that answers anyhow, to a first message of its own making.
        let (_, other) = Dialler::new(&secret(2), &bytes()).unwrap();
        let second = Listener::new(&secret(2), &bytes(), &other).unwrap().answer(99).unwrap();
        assert!(matches!(dialler.end(&second), Err(Refusal::OtherSecret)));
    }

    #[test]
    fn every_bit_of_every_message_and_of_the_opening_counts() {
        let flipped = |bytes: &[u8], bit: usize| {
            let mut bytes = bytes.to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            bytes
        };
        let (dialler, first) = Dialler::new(&secret(1), &bytes()).unwrap();
        drop(dialler);
        for bit in 0..Opening::BYTES * 8 {
            let other = flipped(&bytes(), bit).try_into().unwrap();
            assert!(Listener::new(&secret(1), &other, &first).is_err(), "bit {bit} of the opening");
        }
        for bit in 0..FIRST * 8 {
            let other = flipped(&first, bit).try_into().unwrap();
            // Curve25519 ignores the highest bit of a point, but the transcript does not.
            assert!(Listener::new(&secret(1), &bytes(), &other).is_err(), "bit {bit} of the first");
        }
        for bit in 0..SECOND * 8 {
            let (dialler, first) = Dialler::new(&secret(1), &bytes()).unwrap();
            let second = Listener::new(&secret(1), &bytes(), &first).unwrap().answer(99).unwrap();
            let other = flipped(&second, bit).try_into().unwrap();
            assert!(dialler.end(&other).is_err(), "bit {bit} of the second");
        }
        for bit in 0..THIRD * 8 {
            let (listener, _, _, third) = halfway();
            let other = flipped(&third, bit).try_into().unwrap();
            assert!(matches!(listener.end(&other), Err(Refusal::Repeated)), "bit {bit} of the third");
        }
    }

    #[test]
    fn what_was_recorded_is_worth_nothing() {
        let (_, first, second, third) = halfway();
        // To the end that listens: its answer is another one, and the recorded third message does not fit.
        let mut listener = Listener::new(&secret(1), &bytes(), &first).unwrap();
        assert_ne!(listener.answer(99).unwrap(), second);
        assert!(matches!(listener.end(&third), Err(Refusal::Repeated)));
        // To the end that dials.
        let (dialler, _) = Dialler::new(&secret(1), &bytes()).unwrap();
        assert!(matches!(dialler.end(&second), Err(Refusal::OtherSecret)));
    }

    #[test]
    fn an_ends_own_messages_are_worth_nothing_to_it() {
        let (dialler, first) = Dialler::new(&secret(1), &bytes()).unwrap();
        let mut back = [0; SECOND];
        back[..FIRST].copy_from_slice(&first);
        assert!(matches!(dialler.end(&back), Err(Refusal::OtherSecret)));
        // The end that listens would have to be given its second message's tag as the third.
        let (listener, _, second, _) = halfway();
        let tail = second[SECOND - THIRD..].try_into().unwrap();
        assert!(matches!(listener.end(&tail), Err(Refusal::Repeated)));
    }
}
