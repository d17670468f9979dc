//! What the recorder gives, as the crate's own, without files.

use crate::call::Call;

pub(crate) struct Record {
    pub number: u64,
    pub sequence: u64,
    pub call: Call,
    pub message: Option<Message>,
    pub state: State,
    pub begun_ns: u64,
    pub ended_ns: Option<u64>,
    pub at: String,
}

#[derive(Debug, PartialEq)]
pub(crate) struct Message {
    pub peer: usize,
    pub sends: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum State {
    Begun,
    Done,
    Failed,
}
