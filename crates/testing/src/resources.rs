//! What a group could leave behind: in its process, and in `/dev/shm`.

use std::time::{Duration, Instant};
use std::{fs, thread};

/// Resources of this process that a group could leak.
#[derive(Debug)]
pub struct Resources([(&'static str, usize); 3]);

impl Resources {
    /// The resources before the first group: opens what a process opens once and keeps.
    pub fn at_start() -> Resources {
        // tokio's first runtime opens two sockets for signals.
        drop(tokio::runtime::Builder::new_current_thread().enable_all().build());
        Resources::now()
    }

    fn now() -> Resources {
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        Resources([
            ("descriptors", count("/proc/self/fd")),
            ("threads", count("/proc/self/task")),
            ("segments", maps.lines().filter(|line| line.contains("memfd:bonfire")).count()),
        ])
    }

    /// Returns the resources of which there are more than before, after giving threads time to end.
    pub fn leaks(&self) -> Vec<String> {
        const TIME: Duration = Duration::from_secs(3);
        let start = Instant::now();
        loop {
            let both = self.0.iter().zip(Resources::now().0).filter(|(before, now)| now.1 > before.1);
            let more: Vec<_> = both.map(|(before, now)| format!("{} {}, {} before", now.1, now.0, before.1)).collect();
            if more.is_empty() || start.elapsed() > TIME {
                return more;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Returns the number of entries in a folder.
pub fn count(folder: &str) -> usize {
    fs::read_dir(folder).map_or(0, Iterator::count)
}

/// Files that groups could leave in `/dev/shm`.
pub fn shared_files() -> Vec<String> {
    let files = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    files.map(|file| file.file_name().to_string_lossy().into_owned()).filter(|name| name.contains("bonfire")).collect()
}
