//! The handshake on a stream, from both ends.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::handshake::{Dialler, FIRST, Listener, SECOND, SESSION, THIRD};
use super::opening::{HEAD, Opening, Refusal, opens};
use super::secret::Secret;

/// How long a connection may take to prove who it is.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// That the end that listens has taken the connection.
const TAKEN: [u8; 1] = [1];

/// How much of what a refused end still sends is read, and for how long: a socket that is closed with unread bytes in it
/// throws away what it has not delivered.
const DREGS: (u64, Duration) = (4096, Duration::from_millis(200));

/// From the end that dials: says what the connection is for, proves the secret, and has it proved. Gives the number of the
/// job. `write` and `read` move all bytes they are given.
pub fn prove<E: From<Refusal>>(
    secret: Option<&Secret>,
    opening: Opening,
    mut write: impl FnMut(&[u8]) -> Result<(), E>,
    mut read: impl FnMut(&mut [u8]) -> Result<(), E>,
) -> Result<u64, E> {
    let (words, proof) = first(secret, opening)?;
    write(&words)?;
    let (mut head, mut taken) = ([0; HEAD], [0]);
    read(&mut head)?;
    Refusal::told(&head)?;
    let Some(proof) = proof else {
        let mut session = [0; SESSION];
        read(&mut session)?;
        read(&mut taken)?;
        confirmed(taken)?;
        return Ok(u64::from_le_bytes(session));
    };
    let mut second = [0; SECOND];
    read(&mut second)?;
    let (session, third) = proof.end(&second)?;
    write(&third)?;
    read(&mut taken)?;
    confirmed(taken)?;
    Ok(session)
}

/// As [`prove`], within a moment.
pub async fn dial(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    secret: Option<&Secret>,
    opening: Opening,
) -> Result<u64, Refusal> {
    let proving = async {
        let (words, proof) = first(secret, opening)?;
        stream.write_all(&words).await?;
        Refusal::told(&array::<HEAD>(stream).await?)?;
        let Some(proof) = proof else {
            let session = u64::from_le_bytes(array::<SESSION>(stream).await?);
            confirmed(array(stream).await?)?;
            return Ok(session);
        };
        let (session, third) = proof.end(&array::<SECOND>(stream).await?)?;
        stream.write_all(&third).await?;
        confirmed(array(stream).await?)?;
        Ok(session)
    };
    tokio::time::timeout(PATIENCE, proving).await.unwrap_or_else(|_| Err(late()))
}

/// What the end that dials says unasked.
fn first(secret: Option<&Secret>, opening: Opening) -> Result<(Vec<u8>, Option<Dialler>), Refusal> {
    let opening = opening.to_bytes(secret.is_some());
    let Some(secret) = secret else { return Ok((opening.to_vec(), None)) };
    let (proof, first) = Dialler::new(secret, &opening)?;
    Ok(([&opening[..], &first].concat(), Some(proof)))
}

/// From the end that listens: hears what the connection is for, has the secret proved, and proves it. `fits` says whether
/// this end expects such a connection; `session` is the number of the job. The caller limits the time.
pub async fn answer(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    secret: Option<&Secret>,
    session: u64,
    fits: impl FnOnce(&Opening) -> Result<(), String>,
) -> Result<Opening, Refusal> {
    match heard(stream, secret, fits).await {
        Ok((opening, None)) => {
            let words = [&Refusal::answer(None)[..], &session.to_le_bytes()].concat();
            stream.write_all(&words).await?;
            Ok(opening)
        }
        Ok((opening, Some(mut proof))) => {
            let words = [&Refusal::answer(None)[..], &proof.answer(session)?].concat();
            stream.write_all(&words).await?;
            proof.end(&array::<THIRD>(stream).await?)?;
            Ok(opening)
        }
        Err(refusal) => {
            // Who does not even begin as Bonfire does is told nothing.
            if refusal.is_ours() {
                stream.write_all(&Refusal::answer(Some(&refusal))).await?;
                stream.shutdown().await?;
                let (mut dregs, mut sink) = (stream.take(DREGS.0), tokio::io::sink());
                let _ = tokio::time::timeout(DREGS.1, tokio::io::copy(&mut dregs, &mut sink)).await;
            }
            Err(refusal)
        }
    }
}

/// From the end that listens, once it has [`answer`]ed and will not turn the connection away any more: the other end waits
/// for this byte, and dials again where it does not come.
pub async fn confirm(stream: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    stream.write_all(&TAKEN).await
}

/// What the end that listens says last, checked.
fn confirmed(taken: [u8; TAKEN.len()]) -> Result<(), Refusal> {
    if taken == TAKEN { Ok(()) } else { Err(Refusal::Stranger) }
}

/// What the end that dials says unasked, checked.
async fn heard(
    stream: &mut (impl AsyncRead + Unpin),
    secret: Option<&Secret>,
    fits: impl FnOnce(&Opening) -> Result<(), String>,
) -> Result<(Opening, Option<Listener>), Refusal> {
    let mut bytes = [0; Opening::BYTES];
    // What follows the head depends on the version.
    let head = array::<HEAD>(stream).await?;
    opens(&head)?;
    bytes[..HEAD].copy_from_slice(&head);
    stream.read_exact(&mut bytes[HEAD..]).await?;
    let (opening, theirs) = Opening::from_bytes(&bytes)?;
    let proof = match secret {
        None if theirs => return Err(Refusal::OnlyTheirs),
        Some(_) if !theirs => return Err(Refusal::OnlyOurs),
        None => None,
        Some(secret) => Some(Listener::new(secret, &bytes, &array::<FIRST>(stream).await?)?),
    };
    fits(&opening).map_err(Refusal::Misplaced)?;
    Ok((opening, proof))
}

async fn array<const N: usize>(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

fn late() -> Refusal {
    Refusal::Io(io::Error::new(io::ErrorKind::TimedOut, format!("it did not answer within {PATIENCE:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::Purpose;

    const OPENING: Opening =
        Opening { purpose: Purpose::Control, session: 7, from: 2, to: 1, world_size: 3, number: 0, of: 1 };

    fn secret(seed: u8) -> Option<Secret> {
        (seed > 0).then(|| Secret::new([seed; 40]).unwrap())
    }

    /// What the two ends say of each other.
    fn meet(dials: u8, listens: u8, fits: bool) -> (Result<u64, Refusal>, Result<Opening, Refusal>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut one, mut two) = tokio::io::duplex(64);
            let fits = |_: &Opening| if fits { Ok(()) } else { Err("no".into()) };
            let (dials, listens) = (secret(dials), secret(listens));
            let dialled = async {
                let result = dial(&mut one, dials.as_ref(), OPENING).await;
                // Both ends may write only so much unread.
                drop(one);
                result
            };
            let answered = async {
                let opening = answer(&mut two, listens.as_ref(), 99, fits).await?;
                confirm(&mut two).await?;
                Ok(opening)
            };
            tokio::join!(dialled, answered)
        })
    }

    #[test]
    fn ends_that_belong_together_meet() {
        for seed in [0, 1] {
            let (session, opening) = meet(seed, seed, true);
            assert_eq!((session.unwrap(), opening.unwrap()), (99, OPENING));
        }
    }

    #[test]
    fn both_ends_name_what_keeps_them_apart() {
        use Refusal::{Misplaced, OnlyOurs, OnlyTheirs, OtherSecret};
        assert!(matches!(meet(1, 2, true), (Err(OtherSecret), Err(OtherSecret))));
        assert!(matches!(meet(1, 0, true), (Err(OnlyOurs), Err(OnlyTheirs))));
        assert!(matches!(meet(0, 1, true), (Err(OnlyTheirs), Err(OnlyOurs))));
        assert!(matches!(meet(1, 1, false), (Err(Misplaced(_)), Err(Misplaced(_)))));
        assert!(matches!(meet(0, 0, false), (Err(Misplaced(_)), Err(Misplaced(_)))));
    }

    #[test]
    fn the_blocking_end_says_the_same() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for seed in [0, 1] {
            let (mut one, two) = std::os::unix::net::UnixStream::pair().unwrap();
            let dialling = std::thread::spawn(move || {
                let mut other = one.try_clone().unwrap();
                prove::<Refusal>(
                    secret(seed).as_ref(),
                    OPENING,
                    |bytes| Ok(io::Write::write_all(&mut one, bytes)?),
                    |bytes| Ok(io::Read::read_exact(&mut other, bytes)?),
                )
            });
            let opening = runtime.block_on(async {
                two.set_nonblocking(true).unwrap();
                let mut two = tokio::net::UnixStream::from_std(two).unwrap();
                let opening = answer(&mut two, secret(seed).as_ref(), 99, |_| Ok(())).await;
                confirm(&mut two).await.unwrap();
                opening
            });
            assert_eq!((dialling.join().unwrap().unwrap(), opening.unwrap()), (99, OPENING));
        }
    }
}
