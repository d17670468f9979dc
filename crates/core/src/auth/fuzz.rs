//! Fuzz tests of the handshake with malformed, tampered and hostile peers.

use std::io::{self, Read};

use super::connect::{accept_handshake, confirmed_blocking, dial, dial_blocking};
use super::handshake::{FIRST, Initiator, Responder, SECOND, SESSION, THIRD};
use super::prologue::{HEAD, Prologue, Purpose, Refusal, check_prologue_head};
use super::secret::Secret;
use bonfire_testing::fuzz::fuzz;

const PROLOGUE: Prologue =
    Prologue { purpose: Purpose::Data, session: 7, from: 2, to: 1, world_size: 3, number: 0, of: 1 };

/// The session number of the listener's job.
const JOB: u64 = 99;

fn secret() -> Secret {
    Secret::new([1; 32]).unwrap()
}

/// One prologue for each purpose.
fn prologues() -> Vec<Prologue> {
    Purpose::ALL.map(|purpose| Prologue { purpose, ..PROLOGUE }).to_vec()
}

/// The first `N` bytes, padded with zeros.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    std::array::from_fn(|i| bytes.get(i).copied().unwrap_or(0))
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

#[test]
fn fuzz_openings() {
    let seeds =
        prologues().into_iter().flat_map(|prologue| [false, true].map(|secret| prologue.to_bytes(secret).to_vec()));
    fuzz("prologue", seeds, |bytes| {
        let bytes = array(bytes);
        match Prologue::from_bytes(&bytes) {
            Ok((prologue, secret)) => {
                assert_eq!(prologue.to_bytes(secret), bytes, "not a byte is ignored");
                true
            }
            Err(refusal) => {
                assert!(
                    matches!(refusal, Refusal::Stranger | Refusal::Version { .. } | Refusal::ByteOrder),
                    "{refusal:?}"
                );
                false
            }
        }
    });
}

#[test]
fn fuzz_answers() {
    let misplaced = Refusal::Misplaced(String::new());
    let refusals = [Refusal::OnlyTheirs, Refusal::OnlyOurs, Refusal::OtherSecret, misplaced, Refusal::ByteOrder];
    let seeds = refusals.iter().map(Some).chain([None]).map(|refusal| Refusal::answer(refusal).to_vec());
    fuzz("answer", seeds, |bytes| {
        let head: [u8; HEAD] = array(bytes);
        let told = Refusal::from_answer(&head);
        assert_eq!(told.is_ok(), head == Refusal::answer(None), "not a byte is ignored");
        !matches!(told, Err(Refusal::Stranger))
    });
}

/// The input is a mask of the bits that an attacker on the path flips, from the first byte of the prologue to the last
/// byte of the third message. No flipped bit goes undetected.
#[test]
fn fuzz_tampered_handshakes() {
    let secret = secret();
    fuzz("tampered", [vec![], vec![0; 32], vec![0; 152]], |bits| {
        let mut bits = array::<{ Prologue::BYTES + FIRST + SECOND + THIRD }>(bits).into_iter();
        let untouched = bits.clone().all(|bits| bits == 0);
        let prologue = PROLOGUE.to_bytes(true);
        let (initiator, first) = Initiator::new(&secret, &prologue).unwrap();
        let prologue = prologue.map(|byte| byte ^ bits.next().unwrap());
        let first = first.map(|byte| byte ^ bits.next().unwrap());
        let both = || {
            let (heard, theirs) = Prologue::from_bytes(&prologue)?;
            let mut responder = Responder::new(&secret, &prologue, &first)?;
            let second = responder.answer(JOB)?.map(|byte| byte ^ bits.next().unwrap());
            let (session, third) = initiator.finish(&second)?;
            responder.finish(&third.map(|byte| byte ^ bits.next().unwrap()))?;
            Ok::<_, Refusal>((heard, theirs, session))
        };
        let ended = both();
        assert_eq!(ended.is_ok(), untouched, "{ended:?}");
        assert!(ended.is_err() || ended.unwrap() == (PROLOGUE, true, JOB));
        !untouched
    });
}

/// The input is everything that a dialler without the secret sends. Some seeds replay a first message of one with it.
#[test]
fn fuzz_dialling_strangers() {
    /// The most bytes read from a connection that is accepted or answered with a refusal, and the most sent to it.
    const READ: usize = Prologue::BYTES + FIRST + THIRD + 4096;
    const TOLD: usize = HEAD + SECOND;
    let (secret, runtime) = (secret(), runtime());
    let mut seeds: Vec<_> = prologues().into_iter().map(|prologue| prologue.to_bytes(false).to_vec()).collect();
    for prologue in prologues() {
        let prologue = prologue.to_bytes(true);
        let first = Initiator::new(&secret, &prologue).unwrap().1;
        seeds.extend([[&prologue[..], &first].concat(), [&prologue[..], &first, &[0; THIRD]].concat()]);
    }
    fuzz("dials", seeds, |bytes| {
        let hear = |secret: Option<&Secret>, fits: bool| {
            let mut stream = tokio::io::join(bytes, Vec::new());
            let fits = |_: &Prologue| if fits { Ok(()) } else { Err("no".to_owned()) };
            let heard = runtime.block_on(accept_handshake(&mut stream, secret, JOB, fits));
            let (rest, told) = stream.into_inner();
            assert!(bytes.len() - rest.len() <= READ && told.len() <= TOLD);
            if let Err(Refusal::Stranger) = check_prologue_head(&array(bytes)) {
                assert!(told.is_empty() && bytes.len() - rest.len() <= HEAD, "a stranger gets no answer");
            }
            heard
        };
        assert!(hear(Some(&secret), true).is_err(), "no dialler is accepted without the secret");
        assert!(hear(None, false).is_err() && hear(Some(&secret), false).is_err());
        match hear(None, true) {
            Ok(prologue) => {
                assert_eq!(prologue.to_bytes(false), bytes[..Prologue::BYTES]);
                true
            }
            Err(refusal) => refusal.is_ours(),
        }
    });
}

/// The input is everything that a listener without the secret sends. [`dial`] and [`dial_blocking`] accept the same
/// answers.
#[test]
fn fuzz_listening_strangers() {
    let (secret, runtime) = (secret(), runtime());
    let head = Refusal::answer(None);
    let second = Responder::new(
        &secret,
        &PROLOGUE.to_bytes(true),
        &Initiator::new(&secret, &PROLOGUE.to_bytes(true)).unwrap().1,
    )
    .and_then(|mut responder| responder.answer(JOB))
    .unwrap();
    let refused = Refusal::answer(Some(&Refusal::OtherSecret));
    let seeds = [[&head[..], &JOB.to_le_bytes(), &[1]].concat(), [&head[..], &second, &[1]].concat(), refused.to_vec()];
    fuzz("listens", seeds, |bytes| {
        let ask = |secret: Option<&Secret>| {
            let mut stream = tokio::io::join(bytes, tokio::io::sink());
            let dialled = runtime.block_on(dial(&mut stream, secret, PROLOGUE));
            let mut rest = bytes;
            let mut read = |into: &mut [u8]| rest.read_exact(into).map_err(io::Error::into);
            let proved: Result<u64, Refusal> = dial_blocking(secret, PROLOGUE, |_| Ok(()), &mut read)
                .and_then(|session| confirmed_blocking(read).map(|()| session));
            assert_eq!(dialled.as_ref().ok(), proved.as_ref().ok());
            dialled
        };
        assert!(ask(Some(&secret)).is_err(), "no listener is trusted without the secret");
        let job = ask(None);
        let right = bytes.len() > HEAD + SESSION && bytes[..HEAD] == head && bytes[HEAD + SESSION] == 1;
        assert_eq!(job.as_ref().ok(), right.then(|| u64::from_le_bytes(array(&bytes[HEAD..]))).as_ref());
        right
    });
}
