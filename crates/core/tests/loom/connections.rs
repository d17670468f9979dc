//! Stands for the connections between processes: whoever has news for a rank writes them on its board.

mod board;
mod watch;

use std::sync::Arc;

pub(crate) use self::board::Board;
use self::link::{Link, MOST};
pub(crate) use self::watch::Watch;
use crate::call::Tag;
use crate::wait::Deadline;

/// Data connections, which no model has.
mod link {
    pub(super) const MOST: usize = 1;

    pub(crate) struct Link;

    impl Link {
        pub fn new(_streams: Vec<std::net::TcpStream>) -> std::io::Result<Link> {
            Ok(Link)
        }
    }
}

pub(crate) struct Tcp {
    board: Arc<Board>,
    world_size: usize,
}

impl Tcp {
    pub fn new(board: Arc<Board>, world_size: usize) -> Tcp {
        Tcp { board, world_size }
    }

    pub fn world_size(&self) -> usize {
        self.world_size
    }

    pub fn board(&self) -> &Board {
        &self.board
    }

    pub fn watch<'a>(&'a self, tag: &'a Tag, deadline: &'a Deadline) -> Watch<'a> {
        Watch::new(&self.board, tag, deadline)
    }
}
