//! What the ranks of a group share in this process.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, Weak};

use bonfire_core::Error;
use bonfire_core::internal::lock;

/// One value for each group, by a number that its ranks have agreed on. It lives as long as a rank has it.
pub struct Shared<T>(LazyLock<Mutex<HashMap<u64, Weak<T>>>>);

impl<T> Shared<T> {
    /// Returns one without values, for a static.
    #[allow(clippy::new_without_default, reason = "statics need a constant")]
    pub const fn new() -> Shared<T> {
        Shared(LazyLock::new(Mutex::default))
    }

    /// Returns the group's value. The first rank makes it, and the others wait for it.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn of(&self, group: u64, make: impl FnOnce() -> Result<T, Error>) -> Result<Arc<T>, Error> {
        let mut groups = lock(&self.0);
        if let Some(value) = groups.get(&group).and_then(Weak::upgrade) {
            return Ok(value);
        }
        groups.retain(|_, value| value.strong_count() > 0);
        let value = Arc::new(make()?);
        groups.insert(group, Arc::downgrade(&value));
        Ok(value)
    }
}
