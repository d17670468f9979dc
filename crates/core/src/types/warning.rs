//! Warnings that a program without a logger must not miss.

use std::fmt;

use log::LevelFilter;

/// Logs a warning. Without a logger it goes to standard error: what it says may cost a training, and no error follows.
pub fn warn(text: fmt::Arguments) {
    if log::max_level() == LevelFilter::Off {
        eprintln!("bonfire: {text}");
    } else {
        log::warn!("{text}");
    }
}
