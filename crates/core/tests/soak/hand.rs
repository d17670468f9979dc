//! One rank's call of an operation, in one of its forms, on buffers between guards.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bonfire_core::{Buffer, Error, Group, Operation, Work};
use bytemuck::{bytes_of, cast_slice, pod_read_unaligned};

use crate::case::{Case, GROUPS, below};
use bonfire_testing::oracle::Sample;
use bonfire_testing::transport::Random;

/// The alignment in bytes from which peers can access a part of a buffer from `Group::allocate`.
const PEER_ALIGNMENT: usize = 64 << 10;

/// The form of a call, which each rank chooses for itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    InPlace,
    Into,
    Started,
}

/// How often the ranks of each group have called a barrier.
pub type Arrivals = [AtomicUsize; GROUPS];

/// Waits for the operation and compares its result.
pub type Check = Box<dyn FnOnce() -> Result<(), String>>;

/// A buffer with guards on both sides, which no operation may write to.
enum GuardedBuffer<T> {
    Private(Vec<T>, Range<usize>),
    Allocated(Buffer<T>, Range<usize>),
}

impl<T: Sample> GuardedBuffer<T> {
    fn new(case: &Case, group: &Group, random: &mut Random, contents: &[T]) -> Result<Self, Error> {
        // A few ranks of an operation use the other kind.
        let allocated = case.allocated != (below(random, 16) == 0);
        let (before, after) = match below(random, 8) {
            0..5 => (0, 0),
            5 if allocated => (PEER_ALIGNMENT / size_of::<T>(), 0),
            _ => (below(random, 9), below(random, 9)),
        };
        let (range, len) = (before..before + contents.len(), before + contents.len() + after);
        let guard = Self::guard();
        let mut memory = if allocated {
            GuardedBuffer::Allocated(group.allocate(len)?, range.clone())
        } else {
            GuardedBuffer::Private(vec![guard; len], range.clone())
        };
        let elements = memory.elements();
        elements.fill(guard);
        elements[range].copy_from_slice(contents);
        Ok(memory)
    }

    fn guard() -> T {
        pod_read_unaligned(&[0xa5; 8][..size_of::<T>()])
    }

    fn elements(&mut self) -> &mut [T] {
        match self {
            GuardedBuffer::Private(elements, _) => elements,
            GuardedBuffer::Allocated(elements, _) => elements,
        }
    }

    /// Compares `part` of the buffer, and checks the guards.
    fn compare(&mut self, part: Range<usize>, want: &[T]) -> Result<(), String> {
        let range = self.range();
        let elements = self.elements();
        same(&elements[range.clone()][part], want)?;
        let guard = Self::guard();
        let intact = |elements: &[T]| elements.iter().all(|x| bytes_of(x) == bytes_of(&guard));
        match intact(&elements[..range.start]) && intact(&elements[range.end..]) {
            true => Ok(()),
            false => Err("an operation wrote outside its buffer".to_owned()),
        }
    }

    fn range(&self) -> Range<usize> {
        match self {
            GuardedBuffer::Private(_, range) | GuardedBuffer::Allocated(_, range) => range.clone(),
        }
    }
}

impl<T: Sample> AsMut<[T]> for GuardedBuffer<T> {
    fn as_mut(&mut self) -> &mut [T] {
        let range = self.range();
        &mut self.elements()[range]
    }
}

/// Compares bit for bit.
fn same<T: Sample>(found: &[T], want: &[T]) -> Result<(), String> {
    if cast_slice::<T, u8>(found) == cast_slice::<T, u8>(want) {
        return Ok(());
    }
    let wrong: Vec<usize> = (0..want.len()).filter(|i| bytes_of(&found[*i]) != bytes_of(&want[*i])).collect();
    let first = wrong[0];
    let (found, expected) = (bytes_of(&found[first]), bytes_of(&want[first]));
    Err(format!(
        "{} of {} elements are wrong, element {first} first: bytes {found:x?} instead of {expected:x?}",
        wrong.len(),
        want.len()
    ))
}

fn describe(error: Error) -> String {
    error.to_string()
}

fn wait<B>(work: Work<B>) -> Result<B, String> {
    work.wait().map_err(|(error, _)| describe(error))
}

/// One rank's call of an operation.
pub struct RankCall<'a> {
    pub case: Case,
    pub group: Group,
    /// The group that allocates the buffers.
    pub allocator: Group,
    pub random: &'a mut Random,
}

impl RankCall<'_> {
    fn memory<T: Sample>(&mut self, contents: &[T]) -> Result<GuardedBuffer<T>, String> {
        GuardedBuffer::new(&self.case, &self.allocator, self.random, contents).map_err(describe)
    }

    fn blank<T: Sample>(&mut self, len: usize) -> Result<GuardedBuffer<T>, String> {
        self.memory(&vec![GuardedBuffer::guard(); len])
    }

    pub fn run<T: Sample>(mut self, form: Form, arrived: &Arc<Arrivals>) -> Result<Check, String> {
        match (self.case.call.operation, form) {
            (Operation::Barrier, _) => self.barrier(form, arrived.clone()),
            (Operation::Send, Form::Started) => self.started_message::<T>(),
            (Operation::Send, _) => self.message::<T>(),
            (_, Form::InPlace) => self.in_place::<T>(),
            (_, Form::Into) => self.out_of_place::<T>(),
            (_, Form::Started) => self.started::<T>(),
        }
    }

    fn barrier(&mut self, form: Form, arrived: Arc<Arrivals>) -> Result<Check, String> {
        let Case { group, ranks, barriers, .. } = self.case;
        arrived[group].fetch_add(1, Ordering::Relaxed);
        let work = if form == Form::Started {
            Some(self.group.start_barrier().map_err(describe)?)
        } else {
            self.group.barrier().map_err(describe)?;
            None
        };
        Ok(Box::new(move || {
            work.map_or(Ok(()), wait)?;
            match (barriers * ranks).saturating_sub(arrived[group].load(Ordering::Relaxed)) {
                0 => Ok(()),
                missing => Err(format!("{missing} ranks had not called the barrier")),
            }
        }))
    }

    /// The next rank in the ring, and the previous one.
    fn neighbours(&self) -> (usize, usize) {
        let (rank, n) = (self.group.rank(), self.case.ranks);
        ((rank + 1) % n, (rank + n - 1) % n)
    }

    fn message<T: Sample>(&mut self) -> Result<Check, String> {
        let (case, rank, (next, previous)) = (self.case, self.group.rank(), self.neighbours());
        let mine = case.input::<T>(rank);
        let (mut sent, mut received) = (self.memory(&mine)?, self.blank::<T>(mine.len())?);
        // Even ranks send first and odd ranks receive first, so the ranks never wait for each other in a cycle.
        if rank % 2 == 0 {
            self.group.send(sent.as_mut(), next).map_err(describe)?;
            self.group.recv(received.as_mut(), previous).map_err(describe)?;
        } else {
            self.group.recv(received.as_mut(), previous).map_err(describe)?;
            self.group.send(sent.as_mut(), next).map_err(describe)?;
        }
        Ok(Box::new(move || {
            sent.compare(0..mine.len(), &mine)?;
            received.compare(0..mine.len(), &case.want(rank).1)
        }))
    }

    fn started_message<T: Sample>(&mut self) -> Result<Check, String> {
        let (case, rank, (next, previous)) = (self.case, self.group.rank(), self.neighbours());
        let mine = case.input::<T>(rank);
        let (sent, received) = (self.memory(&mine)?, self.blank::<T>(mine.len())?);
        let (sent, received) = if rank % 2 == 0 {
            let sent = self.group.start_send(sent, next);
            (sent, self.group.start_recv(received, previous))
        } else {
            let received = self.group.start_recv(received, previous);
            (self.group.start_send(sent, next), received)
        };
        let (sent, received) = (sent.map_err(describe)?, received.map_err(describe)?);
        Ok(Box::new(move || {
            wait(received)?.compare(0..mine.len(), &case.want(rank).1)?;
            wait(sent)?.compare(0..mine.len(), &mine)
        }))
    }

    fn in_place<T: Sample>(&mut self) -> Result<Check, String> {
        let (case, rank) = (self.case, self.group.rank());
        let mut memory = self.memory(&case.input::<T>(rank))?;
        let (group, data) = (&self.group, memory.as_mut());
        match case.call.operation {
            Operation::AllReduce => group.all_reduce(data, case.op()),
            Operation::Reduce => group.reduce(data, case.op(), case.root()),
            Operation::Broadcast => group.broadcast(data, case.root()),
            Operation::AllGather => group.all_gather(data),
            Operation::ReduceScatter => group.reduce_scatter(data, case.op()),
            Operation::Gather => group.gather(data, case.root()),
            Operation::Scatter => group.scatter(data, case.root()),
            _ => group.all_to_all(data),
        }
        .map_err(describe)?;
        Ok(Box::new(move || {
            let (part, want) = case.want(rank);
            memory.compare(part, &want)
        }))
    }

    fn started<T: Sample>(&mut self) -> Result<Check, String> {
        let (case, rank) = (self.case, self.group.rank());
        let data = self.memory(&case.input::<T>(rank))?;
        let group = &self.group;
        let work = match case.call.operation {
            Operation::AllReduce => group.start_all_reduce(data, case.op()),
            Operation::Reduce => group.start_reduce(data, case.op(), case.root()),
            Operation::Broadcast => group.start_broadcast(data, case.root()),
            Operation::AllGather => group.start_all_gather(data),
            Operation::ReduceScatter => group.start_reduce_scatter(data, case.op()),
            Operation::Gather => group.start_gather(data, case.root()),
            Operation::Scatter => group.start_scatter(data, case.root()),
            _ => group.start_all_to_all(data),
        }
        .map_err(describe)?;
        Ok(Box::new(move || {
            let (part, want) = case.want(rank);
            wait(work)?.compare(part, &want)
        }))
    }

    fn out_of_place<T: Sample>(&mut self) -> Result<Check, String> {
        let (case, rank) = (self.case, self.group.rank());
        let (mut mine, mut want) = (case.input::<T>(rank), case.want::<T>(rank).1);
        match case.call.operation {
            Operation::AllGather | Operation::Gather => mine = mine[case.part(rank)].to_vec(),
            Operation::Scatter if rank != case.root() => mine.clear(),
            _ => {}
        }
        if matches!(case.call.operation, Operation::Reduce | Operation::Gather) && rank != case.root() {
            want.clear();
        }
        let (mut input, mut output) = (self.memory(&mine)?, self.blank::<T>(want.len())?);
        let (group, from, to) = (&self.group, input.as_mut(), output.as_mut());
        match case.call.operation {
            Operation::AllReduce => group.all_reduce_into(from, to, case.op()),
            Operation::Reduce => group.reduce_into(from, to, case.op(), case.root()),
            Operation::Broadcast => group.broadcast_into((rank == case.root()).then_some(from), to, case.root()),
            Operation::AllGather => group.all_gather_into(from, to),
            Operation::ReduceScatter => group.reduce_scatter_into(from, to, case.op()),
            Operation::Gather => group.gather_into(from, to, case.root()),
            Operation::Scatter => group.scatter_into(from, to, case.root()),
            _ => group.all_to_all_into(from, to),
        }
        .map_err(describe)?;
        Ok(Box::new(move || {
            input.compare(0..mine.len(), &mine).map_err(|e| format!("in the input: {e}"))?;
            output.compare(0..want.len(), &want)
        }))
    }
}
