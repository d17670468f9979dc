//! Words that say nothing but that a rank is there, and what becomes of a rank from which none come.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{MissedTickBehavior, interval};

use super::board::Board;
use super::control::{Heard, Message};
use super::word::News;
use crate::transport::frame;

/// Between a rank's words. All ranks say them as often, however long each of them waits for the others'.
const BEAT: Duration = Duration::from_secs(1);

/// How long a peer may be silent before it counts as lost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Silence {
    /// Before its first word: it may still be connecting to others.
    pub first: Duration,
    /// After any word.
    pub later: Duration,
}

impl Silence {
    /// The least that can be asked for: a word may be late.
    pub const LEAST: Duration = Duration::from_secs(3);

    /// Beats without a word after which less than `limit` has passed since the last one, which may have come just after
    /// the beat before.
    fn beats(limit: Duration) -> u64 {
        (limit.as_secs() / BEAT.as_secs()).saturating_sub(1).max(1)
    }
}

/// Says the first word to every peer.
pub(super) async fn greet(connections: &mut [Option<TcpStream>]) {
    for stream in connections.iter_mut().flatten() {
        // A connection that fails is noticed by its reader.
        let _ = frame::write(stream, &Message::Here).await;
    }
}

/// Says a word to every peer with each beat, and gives those up that have been silent for too long.
///
/// It counts beats of this rank's own and not time: a rank that was stopped itself, or whose machine slept, finds the
/// others' words when it goes on, and takes nobody for lost.
pub(super) async fn run(
    board: Arc<Board>,
    writers: Vec<Option<UnboundedSender<Message>>>,
    silence: Silence,
    news: UnboundedSender<Heard>,
) {
    let mut left = vec![Silence::beats(silence.first.max(silence.later)); writers.len()];
    let mut beats = interval(BEAT);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        beats.tick().await;
        for (peer, writer) in writers.iter().enumerate() {
            let Some(writer) = writer.as_ref().filter(|_| left[peer] > 0) else { continue };
            // A writer that has ended is of a peer that the reader knows to be gone.
            let _ = writer.send(Message::Here);
            if board.spoke(peer) {
                left[peer] = Silence::beats(silence.later);
                continue;
            }
            left[peer] -= 1;
            if left[peer] == 0 {
                let reason = "nothing was heard of it for too long, though its connection is open: it is stopped, or the \
                              network between is down; BONFIRE_SILENCE sets how long";
                // Who is known to have gone is not silent.
                if board.lost(peer, reason.into()) {
                    let _ = news.send((peer, News::Silent));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::unbounded_channel;
    use tokio::time::timeout;

    use super::*;
    use crate::transport::Fault;

    /// Peers 1 and 2 of three: what becomes of them if 1 speaks with each of its beats, and 2 `words` times.
    #[test]
    fn a_peer_is_lost_once_it_has_been_silent_for_too_long_and_no_other_is() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            for (words, alive, gone) in [(0, 7, 9), (1, 3, 6), (3, 5, 8)] {
                let board = Arc::new(Board::new(3).unwrap());
                let ((one, mut to_one), (two, _to_two)) = (unbounded_channel(), unbounded_channel());
                let silence = Silence { first: Duration::from_secs(10), later: Duration::from_secs(5) };
                let beating = run(board.clone(), vec![None, Some(one), Some(two)], silence, unbounded_channel().0);
                let peers = async {
                    for second in 0.. {
                        board.speaks(1);
                        if second < words {
                            board.speaks(2);
                        }
                        // Between the beats.
                        tokio::time::sleep(if second == 0 { BEAT / 2 } else { BEAT }).await;
                        assert!(to_one.try_recv().is_ok());
                        let lost = matches!(board.absence(2), Some(Fault::Lost { peer: 2, .. }));
                        assert!(second > alive || !lost, "{words}: lost after {second} s");
                        assert!(second < gone || lost, "{words}: not lost after {second} s");
                        if second == gone {
                            break;
                        }
                    }
                };
                tokio::select! {
                    () = beating => {}
                    () = peers => {}
                }
                assert!(matches!(board.failure(), Some((Fault::Lost { peer: 2, .. }, _))));
            }
        });
    }

    #[test]
    fn a_rank_that_was_stopped_itself_takes_nobody_for_lost() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let board = Arc::new(Board::new(2).unwrap());
            let (one, _to_one) = unbounded_channel();
            let silence = Silence { first: Duration::from_secs(10), later: Duration::from_secs(5) };
            let beating = run(board.clone(), vec![None, Some(one)], silence, unbounded_channel().0);
            let peer = async {
                board.speaks(1);
                tokio::time::sleep(BEAT * 3 / 2).await;
                // A minute in which nothing runs here.
                tokio::time::advance(Duration::from_secs(60)).await;
                tokio::time::sleep(BEAT / 2).await;
                board.speaks(1);
                tokio::time::sleep(BEAT).await;
            };
            assert!(
                timeout(Duration::from_secs(600), async {
                    tokio::select! { () = beating => {} () = peer => {} }
                })
                .await
                .is_ok()
            );
            assert_eq!(board.failure(), None);
        });
    }
}
