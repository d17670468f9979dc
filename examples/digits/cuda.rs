//! The number of this process on its host, by which ranks choose GPUs.

/// Returns this process's local rank, as set by its launcher, or 0.
pub fn local_rank() -> usize {
    std::env::var("LOCAL_RANK").ok().and_then(|number| number.parse().ok()).unwrap_or(0)
}
