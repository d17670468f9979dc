//! Errors as other ranks receive them.

use super::{Error, ShrinkError};

/// The longest text of an error that other ranks receive, in bytes.
const LONGEST_TEXT: usize = 16 << 10;

impl Error {
    /// Returns the error as other ranks see it: as text, without its source. Long texts, such as the output of another
    /// program, are cut, because a message to other ranks has a limit.
    pub(crate) fn for_peers(&self) -> Self {
        let mut error = self.clone();
        if let Error::Io { source, .. } = &mut error {
            *source = None;
        }
        error.texts().into_iter().for_each(cut);
        error
    }

    /// The texts whose length nothing limits.
    fn texts(&mut self) -> Vec<&mut String> {
        match self {
            Error::InvalidArgument { operation, reason }
            | Error::Io { operation, reason, .. }
            | Error::Broken { operation, reason }
            | Error::Gpu { operation, reason, .. } => vec![operation, reason],
            Error::Config(reason)
            | Error::Rendezvous { reason, .. }
            | Error::PeerLost { reason, .. }
            | Error::Disconnected { reason, .. }
            | Error::Stalled { reason, .. } => vec![reason],
            Error::Mpi { function, reason, .. } | Error::Nccl { function, reason, .. } => vec![function, reason],
            Error::Library { library, reason } => vec![library, reason],
            Error::OutOfMemory { operation, device, reason } => vec![operation, device, reason],
            Error::Shrink { why: ShrinkError::Missing { problem, .. }, .. } => vec![problem],
            Error::Mismatch { note, .. } | Error::Left { note, .. } => vec![note],
            Error::Timeout { .. } | Error::MemberMismatch { .. } | Error::Shrink { .. } => Vec::new(),
        }
    }
}

fn cut(text: &mut String) {
    if text.len() > LONGEST_TEXT {
        let bytes = text.len();
        text.truncate(text.floor_char_boundary(LONGEST_TEXT));
        text.push_str(&format!(" (cut: {bytes} bytes)"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_for_other_ranks_and_not_here() {
        let long = "é".repeat(300 << 10);
        let errors = [
            Error::Config(long.clone()),
            Error::argument(&long, &*long),
            Error::io(&*long, std::io::Error::other(long.clone())),
            Error::Library { library: long.clone(), reason: long.clone() },
            Error::OutOfMemory { operation: long.clone(), device: long.clone(), reason: long.clone() },
        ];
        for error in errors {
            // A message between ranks has at most 256 KiB.
            let sent = postcard::to_stdvec(&error.for_peers()).unwrap();
            assert!(sent.len() < 64 << 10, "{} bytes", sent.len());
            assert!(error.to_string().contains(&long) && error.for_peers().to_string().contains("(cut: 614400 bytes)"));
        }
        let short = Error::broken("save", "no space");
        assert_eq!(short.for_peers(), short);
    }
}
