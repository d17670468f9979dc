//! Values of a thread, for a while.

use std::cell::RefCell;
use std::thread::LocalKey;

/// Runs `run` while `local` has this value. Afterwards, also after a panic, it has the one before.
pub fn with_local<V, T>(local: &'static LocalKey<RefCell<Option<V>>>, value: V, run: impl FnOnce() -> T) -> T {
    struct Reset<V: 'static>(&'static LocalKey<RefCell<Option<V>>>, Option<V>);
    impl<V> Drop for Reset<V> {
        fn drop(&mut self) {
            self.0.replace(self.1.take());
        }
    }
    let _reset = Reset(local, local.replace(Some(value)));
    run()
}

#[cfg(test)]
mod tests {
    use super::*;

    thread_local! {
        static LOCAL: RefCell<Option<u32>> = const { RefCell::new(None) };
    }

    fn value() -> Option<u32> {
        LOCAL.with_borrow(|value| *value)
    }

    #[test]
    fn the_value_before_comes_back_also_after_a_panic() {
        let outer = with_local(&LOCAL, 1, || {
            let inner = with_local(&LOCAL, 2, value);
            let panicked = std::panic::catch_unwind(|| with_local(&LOCAL, 3, || assert_eq!(value(), None)));
            (inner, panicked.is_err(), value())
        });
        assert_eq!((outer, value()), ((Some(2), true, Some(1)), None));
    }
}
