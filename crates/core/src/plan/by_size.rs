//! Tables by size, as users read and write them.

use std::fmt;

use super::table;

/// Paths, each with the smallest size in bytes that it is for, in ascending order from 0 on.
///
/// The text form is `path:from-to;path:from-`, from 0 on without gaps; both ends of a range belong to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BySize<P>(pub(super) Vec<(P, usize)>);

impl<P: Copy> BySize<P> {
    /// Returns a table with one path for all sizes.
    pub fn all(path: P) -> Self {
        BySize(vec![(path, 0)])
    }

    /// Returns the path for this many bytes.
    pub fn at(&self, bytes: usize) -> P {
        table::at(&self.0, bytes)
    }

    /// Returns all paths, in ascending order of their sizes.
    pub fn paths(&self) -> impl Iterator<Item = P> {
        self.0.iter().map(|(path, _)| *path)
    }

    /// Parses the text form, or returns what is wrong with the text. `path` finds a path by its name, and `example` is
    /// one.
    pub fn parse(text: &str, example: &str, path: impl Fn(&str) -> Result<P, String>) -> Result<Self, String> {
        let mut entries = Vec::new();
        // The size at which the next range must begin; none after an open range.
        let mut next = Some(0usize);
        for range in text.split(';') {
            let form =
                || format!("'{range}' does not have the form path:from-to or path:from-, such as {example}:65536-");
            let (name, sizes) = range.split_once(':').ok_or_else(form)?;
            let (from, to) = sizes.split_once('-').ok_or_else(form)?;
            let path = path(name)?;
            let from = size(from).ok_or_else(form)?;
            match next {
                None => return Err(format!("'{range}' comes after a range without an end")),
                Some(next) if from > next => {
                    return Err(format!("no path for sizes from {next} to {}: let '{range}' begin there", from - 1));
                }
                Some(next) if from < next => {
                    return Err(format!("two paths for size {from}: let '{range}' begin with {next}"));
                }
                Some(_) => entries.push((path, from)),
            }
            next = match to {
                "" => None,
                to => {
                    let to = size(to).ok_or_else(form)?;
                    if to < from {
                        return Err(format!("'{range}' ends before it begins"));
                    }
                    Some(to.checked_add(1).ok_or_else(form)?)
                }
            };
        }
        match next {
            Some(next) => Err(format!("no path for sizes from {next} on: leave out the end of the last range")),
            None => Ok(BySize(entries)),
        }
    }
}

/// Parses digits only: the standard library would also accept `+1`.
fn size(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

impl<P: fmt::Display> fmt::Display for BySize<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (path, from)) in self.0.iter().enumerate() {
            write!(f, "{}{path}:{from}-", if i == 0 { "" } else { ";" })?;
            if let Some((_, next)) = self.0.get(i + 1) {
                write!(f, "{}", next - 1)?;
            }
        }
        Ok(())
    }
}
