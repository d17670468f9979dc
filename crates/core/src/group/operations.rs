//! Operations on slices.
//!
//! Collectives have up to three forms: in place (`all_reduce`), out of place (`all_reduce_into`) and started
//! (`start_all_reduce`), which returns at once, owns its buffer while in flight, and returns it from [`Work::wait`].
//!
//! All ranks must call the same collectives in the same order, with the same element type, count, reduction and root.
//! Results are bit-identical on all ranks and in every run.

mod batch;
mod even;
mod message;
mod pairs;
mod rooted;
mod started;
mod variable;

use bytemuck::{cast_slice, cast_slice_mut};

pub use self::batch::Batch;
use super::agreed::AgreedOperations;
use super::buffer::zeroed;
use super::bytes::ByteOperations;
use super::handle::Group;
use super::progress::Work;
use super::request::Request;
use crate::types::{Element, Error};

impl Group {
    #[track_caller]
    fn run<T: Element>(&self, request: Request<'_>, input: Option<&[T]>, output: &mut [T]) -> Result<(), Error> {
        self.operate(request, input.map(cast_slice), cast_slice_mut(output))
    }

    /// Allocates the output of an operation whose sizes the ranks have exchanged. The peers go on to the operation
    /// itself, so a failure must reach them.
    fn output<T: Element>(&self, operation: &str, len: usize) -> Result<Vec<T>, Error> {
        zeroed(operation, len).map_err(|error| self.abandon(error))
    }

    #[track_caller]
    fn start<T: Element, B>(&self, request: Request<'static>, mut buffer: B) -> Result<Work<B>, Error>
    where
        B: AsMut<[T]> + Send + 'static,
    {
        let count = buffer.as_mut().len();
        self.start_operation(request, count, buffer, |buffer| Ok(cast_slice_mut(buffer.as_mut())))
    }
}
