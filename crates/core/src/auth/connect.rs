//! The handshake on a stream: both ends, blocking and asynchronous.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::handshake::{FIRST, Initiator, Responder, SECOND, SESSION, THIRD};
use super::prologue::{HEAD, Prologue, Refusal, check_prologue_head};
use super::secret::Secret;

/// How long a connection may take to complete the handshake.
pub(super) const TIMEOUT: Duration = Duration::from_secs(5);

/// The listener's last message: it has taken the connection.
const ACCEPTED: [u8; 1] = [1];

/// How many bytes are drained from a refused connection, and for how long. Closing a socket that has unread bytes
/// discards what it has not delivered yet.
const DRAIN: (u64, Duration) = (4096, Duration::from_millis(200));

/// Runs the dialler's side of the handshake, blocking: sends the prologue, proves the secret, verifies the listener's
/// proof. Returns the session number of the job. The listener's confirmation is still to come
/// ([`confirmed_blocking`]). `write` and `read` must transfer all bytes of their argument.
pub fn dial_blocking<E: From<Refusal>>(
    secret: Option<&Secret>,
    prologue: Prologue,
    mut write: impl FnMut(&[u8]) -> Result<(), E>,
    mut read: impl FnMut(&mut [u8]) -> Result<(), E>,
) -> Result<u64, E> {
    let (message, proof) = first_flight(secret, prologue)?;
    write(&message)?;
    let mut head = [0; HEAD];
    read(&mut head)?;
    Refusal::from_answer(&head)?;
    let Some(proof) = proof else {
        let mut session = [0; SESSION];
        read(&mut session)?;
        return Ok(u64::from_le_bytes(session));
    };
    let mut second = [0; SECOND];
    read(&mut second)?;
    let (session, third) = proof.finish(&second)?;
    write(&third)?;
    Ok(session)
}

/// Waits for the listener's confirmation, after [`dial_blocking`].
pub fn confirmed_blocking<E: From<Refusal>>(mut read: impl FnMut(&mut [u8]) -> Result<(), E>) -> Result<(), E> {
    let mut taken = [0];
    read(&mut taken)?;
    Ok(check_accepted(taken)?)
}

/// Runs the dialler's side like [`dial_blocking`] and [`confirmed_blocking`], asynchronously and within `TIMEOUT`.
pub async fn dial(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    secret: Option<&Secret>,
    prologue: Prologue,
) -> Result<u64, Refusal> {
    let handshake = async {
        let (message, proof) = first_flight(secret, prologue)?;
        stream.write_all(&message).await?;
        Refusal::from_answer(&read_array::<HEAD>(stream).await?)?;
        let Some(proof) = proof else {
            let session = u64::from_le_bytes(read_array::<SESSION>(stream).await?);
            check_accepted(read_array(stream).await?)?;
            return Ok(session);
        };
        let (session, third) = proof.finish(&read_array::<SECOND>(stream).await?)?;
        stream.write_all(&third).await?;
        check_accepted(read_array(stream).await?)?;
        Ok(session)
    };
    tokio::time::timeout(TIMEOUT, handshake).await.unwrap_or_else(|_| Err(timed_out()))
}

/// Returns what the dialler sends unprompted: the prologue and, with a secret, the first Noise message.
fn first_flight(secret: Option<&Secret>, prologue: Prologue) -> Result<(Vec<u8>, Option<Initiator>), Refusal> {
    let prologue = prologue.to_bytes(secret.is_some());
    let Some(secret) = secret else { return Ok((prologue.to_vec(), None)) };
    let (proof, first) = Initiator::new(secret, &prologue)?;
    Ok(([&prologue[..], &first].concat(), Some(proof)))
}

/// Runs the listener's side of the handshake: reads the prologue, verifies the dialler's proof, sends its own. `fits`
/// checks that this end expects such a connection; `session` is the job's number. The caller limits the time.
pub async fn accept_handshake(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    secret: Option<&Secret>,
    session: u64,
    fits: impl FnOnce(&Prologue) -> Result<(), String>,
) -> Result<Prologue, Refusal> {
    match read_first_flight(stream, secret, fits).await {
        Ok((prologue, None)) => {
            let message = [&Refusal::answer(None)[..], &session.to_le_bytes()].concat();
            stream.write_all(&message).await?;
            Ok(prologue)
        }
        Ok((prologue, Some(mut proof))) => {
            let message = [&Refusal::answer(None)[..], &proof.answer(session)?].concat();
            stream.write_all(&message).await?;
            proof.finish(&read_array::<THIRD>(stream).await?)?;
            Ok(prologue)
        }
        Err(refusal) => {
            // A peer that does not speak the protocol gets no answer.
            if refusal.is_ours() {
                stream.write_all(&Refusal::answer(Some(&refusal))).await?;
                stream.shutdown().await?;
                let (mut rest, mut sink) = (stream.take(DRAIN.0), tokio::io::sink());
                let _ = tokio::time::timeout(DRAIN.1, tokio::io::copy(&mut rest, &mut sink)).await;
            }
            Err(refusal)
        }
    }
}

/// Sends the listener's confirmation, after [`accept_handshake`], once it will not drop the connection any more. The
/// dialler waits for this byte, and dials again if it does not arrive.
pub async fn confirm(stream: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    stream.write_all(&ACCEPTED).await
}

/// Checks the listener's confirmation.
fn check_accepted(taken: [u8; ACCEPTED.len()]) -> Result<(), Refusal> {
    if taken == ACCEPTED { Ok(()) } else { Err(Refusal::Stranger) }
}

/// Reads and checks what the dialler sends unprompted.
async fn read_first_flight(
    stream: &mut (impl AsyncRead + Unpin),
    secret: Option<&Secret>,
    fits: impl FnOnce(&Prologue) -> Result<(), String>,
) -> Result<(Prologue, Option<Responder>), Refusal> {
    let mut bytes = [0; Prologue::BYTES];
    // The format of what follows the head depends on the version.
    let head = read_array::<HEAD>(stream).await?;
    check_prologue_head(&head)?;
    bytes[..HEAD].copy_from_slice(&head);
    stream.read_exact(&mut bytes[HEAD..]).await?;
    let (prologue, has_secret) = Prologue::from_bytes(&bytes)?;
    let proof = match secret {
        None if has_secret => return Err(Refusal::OnlyTheirs),
        Some(_) if !has_secret => return Err(Refusal::OnlyOurs),
        None => None,
        Some(secret) => Some(Responder::new(secret, &bytes, &read_array::<FIRST>(stream).await?)?),
    };
    fits(&prologue).map_err(Refusal::Misplaced)?;
    Ok((prologue, proof))
}

async fn read_array<const N: usize>(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).await?;
    Ok(bytes)
}

fn timed_out() -> Refusal {
    Refusal::Io(io::Error::new(io::ErrorKind::TimedOut, format!("it did not answer within {TIMEOUT:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::Purpose;

    const PROLOGUE: Prologue =
        Prologue { purpose: Purpose::Control, session: 7, from: 2, to: 1, world_size: 3, number: 0, of: 1 };

    fn secret(seed: u8) -> Option<Secret> {
        (seed > 0).then(|| Secret::new([seed; 40]).unwrap())
    }

    /// Runs both ends and returns their results.
    fn connect(dials: u8, listens: u8, fits: bool) -> (Result<u64, Refusal>, Result<Prologue, Refusal>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut one, mut two) = tokio::io::duplex(64);
            let fits = |_: &Prologue| if fits { Ok(()) } else { Err("no".into()) };
            let (dials, listens) = (secret(dials), secret(listens));
            let dialled = async {
                let result = dial(&mut one, dials.as_ref(), PROLOGUE).await;
                // The pipe is small: the other end must not block on bytes that are never read.
                drop(one);
                result
            };
            let answered = async {
                let prologue = accept_handshake(&mut two, listens.as_ref(), 99, fits).await?;
                confirm(&mut two).await?;
                Ok(prologue)
            };
            tokio::join!(dialled, answered)
        })
    }

    #[test]
    fn matching_ends_connect() {
        for seed in [0, 1] {
            let (session, prologue) = connect(seed, seed, true);
            assert_eq!((session.unwrap(), prologue.unwrap()), (99, PROLOGUE));
        }
    }

    #[test]
    fn both_ends_report_the_same_refusal() {
        use Refusal::{Misplaced, OnlyOurs, OnlyTheirs, OtherSecret};
        assert!(matches!(connect(1, 2, true), (Err(OtherSecret), Err(OtherSecret))));
        assert!(matches!(connect(1, 0, true), (Err(OnlyOurs), Err(OnlyTheirs))));
        assert!(matches!(connect(0, 1, true), (Err(OnlyTheirs), Err(OnlyOurs))));
        assert!(matches!(connect(1, 1, false), (Err(Misplaced(_)), Err(Misplaced(_)))));
        assert!(matches!(connect(0, 0, false), (Err(Misplaced(_)), Err(Misplaced(_)))));
    }

    #[test]
    fn the_blocking_dialler_speaks_the_same_protocol() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        for seed in [0, 1] {
            let (mut one, two) = std::os::unix::net::UnixStream::pair().unwrap();
            let dialling = std::thread::spawn(move || {
                let mut other = one.try_clone().unwrap();
                let mut read = |bytes: &mut [u8]| Ok(io::Read::read_exact(&mut other, bytes)?);
                let write = |bytes: &[u8]| Ok(io::Write::write_all(&mut one, bytes)?);
                let session = dial_blocking::<Refusal>(secret(seed).as_ref(), PROLOGUE, write, &mut read)?;
                confirmed_blocking(read).map(|()| session)
            });
            let prologue = runtime.block_on(async {
                two.set_nonblocking(true).unwrap();
                let mut two = tokio::net::UnixStream::from_std(two).unwrap();
                let prologue = accept_handshake(&mut two, secret(seed).as_ref(), 99, |_| Ok(())).await;
                confirm(&mut two).await.unwrap();
                prologue
            });
            assert_eq!((dialling.join().unwrap().unwrap(), prologue.unwrap()), (99, PROLOGUE));
        }
    }
}
