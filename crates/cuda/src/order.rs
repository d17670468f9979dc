//! How streams of tensors are ordered against ours: two small kernels on them, one before an operation and one after.

use std::time::Duration;

use super::address::Word;
use super::control::Order;
use super::kernel::OrderKernel;
use super::runtime::Runtime;

/// The values that were given to one `READY` word: how often tensors became ready.
pub(crate) struct ReadyCounter<R: Runtime> {
    value: u64,
    /// The stream of the last signal: the word only grows if each signal is ordered after the one before.
    last: Option<R::Stream>,
    own: OwnToken<R>,
}

impl<R: Runtime> ReadyCounter<R> {
    pub fn new() -> ReadyCounter<R> {
        ReadyCounter { value: 0, last: None, own: OwnToken::new() }
    }

    /// Makes the word grow once the work queued so far on these streams is done: the tensors on them are then ready.
    /// Returns the value that the word has from then on.
    pub fn signal(&mut self, server: &mut R::Server, word: Word, streams: &[R::Stream], stream: R::Stream) -> u64 {
        self.value += 1;
        // A stream without a partner is paired with itself.
        let mut pairs: Vec<_> = streams.chunks(2).map(|pair| [pair[0], *pair.last().unwrap_or(&stream)]).collect();
        let at_once = pairs.pop().unwrap_or([stream; 2]);
        let before = pairs.into_iter().map(|pair| (pair, self.value - 1));
        for ([one, other], value) in before.chain([(at_once, self.value)]) {
            let order = Order::write(word, value);
            let mut tokens = vec![(stream, self.own.of(server, stream))];
            let parameters = [one, other, self.last.unwrap_or(stream)].map(|of| {
                let place = tokens.iter().position(|(stream, _)| *stream == of).unwrap_or_else(|| {
                    tokens.push((of, token::<R>(server, of)));
                    tokens.len() - 1
                });
                tokens[place].1.clone()
            });
            R::launch(server, OrderKernel::TensorsReady, parameters.to_vec(), order, stream);
            self.last = Some(stream);
        }
        self.value
    }
}

/// Makes the stream wait for the word. `own` is of the same server.
pub(crate) fn await_done<R: Runtime>(server: &mut R::Server, order: Order, stream: R::Stream, own: &mut OwnToken<R>) {
    let token = own.of(server, stream);
    R::launch(server, OrderKernel::AwaitDone, vec![token], order, stream);
}

/// Memory of the stream on which kernels are launched, which takes a parameter's place. They run after the work on that
/// stream whatever memory they have, so it is kept, for the last such stream, and a launch there allocates nothing.
pub(crate) struct OwnToken<R: Runtime>(Option<(R::Stream, R::Memory)>);

impl<R: Runtime> OwnToken<R> {
    pub fn new() -> OwnToken<R> {
        OwnToken(None)
    }

    fn of(&mut self, server: &mut R::Server, stream: R::Stream) -> R::Memory {
        match &self.0 {
            Some((of, token)) if *of == stream => token.clone(),
            _ => self.0.insert((stream, token::<R>(server, stream))).1.clone(),
        }
    }
}

/// New memory of a stream: a server orders a kernel that uses it after the work on the stream that it is from. Of older
/// memory it may know only when it was allocated, and not that it was written since.
fn token<R: Runtime>(server: &mut R::Server, stream: R::Stream) -> R::Memory {
    R::allocate(server, 8, stream)
}

/// The end of an operation, for which streams of its device can wait: a word then has this value or a greater one.
pub struct End {
    pub(crate) word: Word,
    /// The words where a stream reports that it has waited for too long.
    pub(crate) host: Word,
    pub(crate) value: u64,
    /// How long the operation may wait for other devices.
    pub(crate) limit: Duration,
    /// Whether the operation has ended.
    pub(crate) passed: Box<dyn Fn() -> bool + Send>,
}
