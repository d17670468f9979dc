//! The handshake with strangers.

use std::io::{self, Read};

use super::connect::{answer, dial, prove};
use super::handshake::{Dialler, FIRST, Listener, SECOND, SESSION, THIRD};
use super::opening::{HEAD, Opening, Purpose, Refusal, opens};
use super::secret::Secret;
use bonfire_testing::fuzz::fuzz;

const OPENING: Opening =
    Opening { purpose: Purpose::Data, session: 7, from: 2, to: 1, world_size: 3, number: 0, of: 1 };

/// The number of the job that listens.
const JOB: u64 = 99;

fn secret() -> Secret {
    Secret::new([1; 32]).unwrap()
}

/// Openings for everything, without a secret and with one.
fn openings() -> Vec<Opening> {
    let all = [Purpose::Rendezvous, Purpose::Control, Purpose::Data, Purpose::Memory, Purpose::Registration];
    all.map(|purpose| Opening { purpose, ..OPENING }).to_vec()
}

/// The first bytes as an array, with zeros for those that are not there.
fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    std::array::from_fn(|i| bytes.get(i).copied().unwrap_or(0))
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

#[test]
fn fuzz_openings() {
    let seeds =
        openings().into_iter().flat_map(|opening| [false, true].map(|secret| opening.to_bytes(secret).to_vec()));
    fuzz("opening", seeds, |bytes| {
        let bytes = array(bytes);
        match Opening::from_bytes(&bytes) {
            Ok((opening, secret)) => {
                assert_eq!(opening.to_bytes(secret), bytes, "not a byte is ignored");
                true
            }
            Err(refusal) => {
                assert!(matches!(refusal, Refusal::Stranger | Refusal::Version { .. }), "{refusal:?}");
                false
            }
        }
    });
}

#[test]
fn fuzz_answers() {
    let refusals = [Refusal::OnlyTheirs, Refusal::OnlyOurs, Refusal::OtherSecret, Refusal::Misplaced(String::new())];
    let seeds = refusals.iter().map(Some).chain([None]).map(|refusal| Refusal::answer(refusal).to_vec());
    fuzz("answer", seeds, |bytes| {
        let head: [u8; HEAD] = array(bytes);
        let told = Refusal::told(&head);
        assert_eq!(told.is_ok(), head == Refusal::answer(None), "not a byte is ignored");
        !matches!(told, Err(Refusal::Stranger))
    });
}

/// The input is the bits that somebody between the two ends turns over, from the first byte to the last of the third
/// message. Nobody can turn one over without being noticed.
#[test]
fn fuzz_handshakes_that_are_tampered_with() {
    let secret = secret();
    fuzz("tampered", [vec![], vec![0; 32], vec![0; 152]], |bits| {
        let mut bits = array::<{ Opening::BYTES + FIRST + SECOND + THIRD }>(bits).into_iter();
        let untouched = bits.clone().all(|bits| bits == 0);
        let opening = OPENING.to_bytes(true);
        let (dialler, first) = Dialler::new(&secret, &opening).unwrap();
        let opening = opening.map(|byte| byte ^ bits.next().unwrap());
        let first = first.map(|byte| byte ^ bits.next().unwrap());
        let both = || {
            let (heard, theirs) = Opening::from_bytes(&opening)?;
            let mut listener = Listener::new(&secret, &opening, &first)?;
            let second = listener.answer(JOB)?.map(|byte| byte ^ bits.next().unwrap());
            let (session, third) = dialler.end(&second)?;
            listener.end(&third.map(|byte| byte ^ bits.next().unwrap()))?;
            Ok::<_, Refusal>((heard, theirs, session))
        };
        let ended = both();
        assert_eq!(ended.is_ok(), untouched, "{ended:?}");
        assert!(ended.is_err() || ended.unwrap() == (OPENING, true, JOB));
        !untouched
    });
}

/// The input is all that a stranger says who dials, also one that has heard a first message of somebody who knows the
/// secret and repeats it.
#[test]
fn fuzz_strangers_who_dial() {
    /// The most that is read of a connection that is let in or told why not, and the most that it is told.
    const READ: usize = Opening::BYTES + FIRST + THIRD + 4096;
    const TOLD: usize = HEAD + SECOND;
    let (secret, runtime) = (secret(), runtime());
    let mut seeds: Vec<_> = openings().into_iter().map(|opening| opening.to_bytes(false).to_vec()).collect();
    for opening in openings() {
        let opening = opening.to_bytes(true);
        let first = Dialler::new(&secret, &opening).unwrap().1;
        seeds.extend([[&opening[..], &first].concat(), [&opening[..], &first, &[0; THIRD]].concat()]);
    }
    fuzz("dials", seeds, |bytes| {
        let hear = |secret: Option<&Secret>, fits: bool| {
            let mut stream = tokio::io::join(bytes, Vec::new());
            let fits = |_: &Opening| if fits { Ok(()) } else { Err("no".to_owned()) };
            let heard = runtime.block_on(answer(&mut stream, secret, JOB, fits));
            let (rest, told) = stream.into_inner();
            assert!(bytes.len() - rest.len() <= READ && told.len() <= TOLD);
            if let Err(Refusal::Stranger) = opens(&array(bytes)) {
                assert!(told.is_empty() && bytes.len() - rest.len() <= HEAD, "strangers are told nothing");
            }
            heard
        };
        assert!(hear(Some(&secret), true).is_err(), "nobody comes in without the secret");
        assert!(hear(None, false).is_err() && hear(Some(&secret), false).is_err());
        match hear(None, true) {
            Ok(opening) => {
                assert_eq!(opening.to_bytes(false), bytes[..Opening::BYTES]);
                true
            }
            Err(refusal) => refusal.is_ours(),
        }
    });
}

/// The input is all that a stranger says who listens. Both forms of the end that dials take the same for an answer.
#[test]
fn fuzz_strangers_who_listen() {
    let (secret, runtime) = (secret(), runtime());
    let head = Refusal::answer(None);
    let second =
        Listener::new(&secret, &OPENING.to_bytes(true), &Dialler::new(&secret, &OPENING.to_bytes(true)).unwrap().1)
            .and_then(|mut listener| listener.answer(JOB))
            .unwrap();
    let refused = Refusal::answer(Some(&Refusal::OtherSecret));
    let seeds = [[&head[..], &JOB.to_le_bytes(), &[1]].concat(), [&head[..], &second, &[1]].concat(), refused.to_vec()];
    fuzz("listens", seeds, |bytes| {
        let ask = |secret: Option<&Secret>| {
            let mut stream = tokio::io::join(bytes, tokio::io::sink());
            let dialled = runtime.block_on(dial(&mut stream, secret, OPENING));
            let mut rest = bytes;
            let proved: Result<u64, Refusal> =
                prove(secret, OPENING, |_| Ok(()), |into| rest.read_exact(into).map_err(io::Error::into));
            assert_eq!(dialled.as_ref().ok(), proved.as_ref().ok());
            dialled
        };
        assert!(ask(Some(&secret)).is_err(), "nobody is believed without the secret");
        let job = ask(None);
        let right = bytes.len() > HEAD + SESSION && bytes[..HEAD] == head && bytes[HEAD + SESSION] == 1;
        assert_eq!(job.as_ref().ok(), right.then(|| u64::from_le_bytes(array(&bytes[HEAD..]))).as_ref());
        right
    });
}
