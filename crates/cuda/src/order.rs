//! How streams of tensors are ordered against ours: two small kernels on them, one before an operation and one after.

use std::time::Duration;

use super::address::Word;
use super::control::Order;
use super::kernel::OrderKernel;
use super::runtime::Runtime;

/// The values that were given to one `READY` word: how often tensors became ready.
pub(crate) struct ReadyCounter<S> {
    value: u64,
    /// The stream of the last signal: the word only grows if each signal is ordered after the one before.
    last: Option<S>,
}

impl<S: Copy> ReadyCounter<S> {
    pub fn new() -> ReadyCounter<S> {
        ReadyCounter { value: 0, last: None }
    }

    /// Makes the word grow once the work queued so far on these streams is done: the tensors on them are then ready.
    /// Returns the value that the word has from then on.
    pub fn signal<R: Runtime<Stream = S>>(
        &mut self,
        server: &mut R::Server,
        word: Word,
        streams: &[S],
        stream: S,
    ) -> u64 {
        self.value += 1;
        // A stream without a partner is paired with itself.
        let mut pairs: Vec<_> = streams.chunks(2).map(|pair| [pair[0], *pair.last().unwrap_or(&stream)]).collect();
        let at_once = pairs.pop().unwrap_or([stream; 2]);
        let before = pairs.into_iter().map(|pair| (pair, self.value - 1));
        for ([one, other], value) in before.chain([(at_once, self.value)]) {
            let order = Order::write(word, value);
            let tokens = [one, other, self.last.unwrap_or(stream)].map(|stream| token::<R>(server, stream)).to_vec();
            R::launch(server, OrderKernel::TensorsReady, tokens, order, stream);
            self.last = Some(stream);
        }
        self.value
    }
}

/// Makes the stream wait for the word.
pub(crate) fn await_done<R: Runtime>(server: &mut R::Server, order: Order, stream: R::Stream) {
    let token = token::<R>(server, stream);
    R::launch(server, OrderKernel::AwaitDone, vec![token], order, stream);
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
