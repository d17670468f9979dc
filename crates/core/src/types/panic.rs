//! Panics of the program's own code, which become errors where other ranks wait for this one.

use std::any::Any;

/// Returns the text of a panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
