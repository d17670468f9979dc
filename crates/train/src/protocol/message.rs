//! Messages as words: what each rank writes, and what all ranks read of all others.

use bytemuck::{Pod, cast_slice, cast_slice_mut};

use super::{OPERATION, Refusal};
use bonfire_core::internal::{ByteOperations, Request};
use bonfire_core::{DType, Error, Group, Operation, Work};

/// Writes a rank's message. All ranks write values of the same types and lengths, in the same order.
#[derive(Default)]
pub(crate) struct Writer(Vec<u64>);

impl Writer {
    /// Appends a value that consists of words.
    pub fn words<T: Pod>(&mut self, value: &T) {
        self.0.extend_from_slice(cast_slice(std::slice::from_ref(value)));
    }

    /// Appends bits.
    pub fn bits(&mut self, bits: &[bool]) {
        let start = self.0.len();
        self.0.resize(start + bits.len().div_ceil(64), 0);
        for (i, bit) in bits.iter().enumerate() {
            self.0[start + i / 64] |= u64::from(*bit) << (i % 64);
        }
    }

    pub fn finish(self) -> Words {
        Words(self.0)
    }
}

/// A rank's message.
pub(crate) struct Words(Vec<u64>);

impl Words {
    /// Exchanges the messages of all ranks. Errors name `function`.
    #[track_caller]
    pub fn exchange(self, group: &Group, function: &str) -> Result<Vec<u64>, Error> {
        let mut all = self.repeated(group);
        group.operate(request(function), None, cast_slice_mut(&mut all))?;
        Ok(all)
    }

    /// Starts the exchange.
    #[track_caller]
    pub fn start<T>(self, group: &Group, function: &str) -> Result<Exchanged<T>, Error> {
        let all = self.repeated(group);
        let work = group.start_operation(request(function), all.len(), all, |all| Ok(cast_slice_mut(all)))?;
        Ok(Exchanged::InFlight(work))
    }

    fn repeated(self, group: &Group) -> Vec<u64> {
        self.0.repeat(group.world_size())
    }
}

fn request(function: &str) -> Request<'static> {
    Request::new(Operation::AllGather, DType::U64).part_of(function)
}

/// The messages of all ranks: in flight, or evaluated. All ranks find the same.
pub(crate) enum Exchanged<T> {
    InFlight(Work<Vec<u64>>),
    Evaluated(Result<T, Refusal>),
    /// The exchange has failed, and with it the group.
    Failed,
}

impl<T: Clone> Exchanged<T> {
    /// Whether [`get`](Self::get) would return at once.
    pub fn is_ready(&self) -> bool {
        match self {
            Exchanged::InFlight(work) => work.is_finished(),
            _ => true,
        }
    }

    /// Waits for the messages, and evaluates them if that was not done before.
    pub fn get(
        &mut self,
        group: &Group,
        evaluate: impl FnOnce(&mut Reader<'_>) -> Result<T, Refusal>,
    ) -> Result<Result<T, Refusal>, Error> {
        if let Exchanged::InFlight(_) = self
            && let Exchanged::InFlight(work) = std::mem::replace(self, Exchanged::Failed)
        {
            let all = work.wait().map_err(|(error, _)| error)?;
            *self = Exchanged::Evaluated(evaluate(&mut Reader::new(&all, group.world_size())));
        }
        match self {
            Exchanged::Evaluated(evaluated) => Ok(evaluated.clone()),
            _ => Err(group.failure().unwrap_or_else(|| Error::broken(OPERATION, "its messages have failed"))),
        }
    }
}

/// Reads the messages of all ranks, in the order in which they were written.
pub(crate) struct Reader<'a> {
    messages: Vec<&'a [u64]>,
    next: usize,
}

impl<'a> Reader<'a> {
    pub fn new(all: &'a [u64], world_size: usize) -> Reader<'a> {
        Reader { messages: all.chunks_exact((all.len() / world_size).max(1)).collect(), next: 0 }
    }

    /// Reads a value of each rank.
    pub fn words<T: Pod>(&mut self) -> Vec<T> {
        let words = self.next..self.next + size_of::<T>() / size_of::<u64>();
        self.next = words.end;
        self.messages.iter().map(|message| cast_slice(&message[words.clone()])[0]).collect()
    }

    /// Reads so many bits of each rank.
    pub fn bits(&mut self, count: usize) -> Bits<'a> {
        let words = self.next..self.next + count.div_ceil(64);
        self.next = words.end;
        Bits { count, ranks: self.messages.iter().map(|message| &message[words.clone()]).collect() }
    }
}

/// The bits of all ranks.
pub(crate) struct Bits<'a> {
    count: usize,
    ranks: Vec<&'a [u64]>,
}

impl Bits<'_> {
    fn get(words: &[u64], i: usize) -> bool {
        words[i / 64] >> (i % 64) & 1 == 1
    }

    /// By index, whether any rank has the bit.
    pub fn anywhere(&self) -> Vec<bool> {
        (0..self.count).map(|i| self.ranks.iter().any(|rank| Self::get(rank, i))).collect()
    }

    /// By index, whether all ranks have the bit.
    pub fn everywhere(&self) -> Vec<bool> {
        (0..self.count).map(|i| self.ranks.iter().all(|rank| Self::get(rank, i))).collect()
    }

    /// Returns the first bit that is not the same on all ranks.
    pub fn first_difference(&self) -> Option<usize> {
        (0..self.count).find(|i| self.ranks.iter().any(|rank| Self::get(rank, *i) != Self::get(self.ranks[0], *i)))
    }

    /// Returns the ranks that have a bit.
    pub fn ranks_with(&self, i: usize) -> Vec<usize> {
        (0..self.ranks.len()).filter(|rank| Self::get(self.ranks[*rank], i)).collect()
    }
}
