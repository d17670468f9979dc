//! Several trainings in one set, each under a name.
//!
//! Models that train together, such as a generator and a critic, have a state each, and belong together: a set has all
//! or none. What one of them saves does not know of the others: its names in the set begin with its own, as in
//! `critic/model/PATH`, and what it loads from is the part of the set under it.
//!
//! One state with several models would need optimizers of several types in it, for which a tuple cannot implement burn
//! 0.21's trait. And a program with one model would have the type parameters of several.

use std::collections::BTreeSet;

use super::Snapshot;
use super::contents::{Contents, Item, LOADING, argument};
use super::parts::Parts;
use super::scalar::Scalar;
use super::set::Set;
use bonfire_core::Error;

/// One of several trainings, with its name in a set. A tuple of two to four of them is saved as one set, which has all
/// or none, and is loaded whole or in part: `Named` alone loads one of them.
///
/// Names are not empty and have no `/`. Each training has its own position in the data; that of the set is the first
/// one's.
#[derive(Clone, Copy, Debug)]
pub struct Named<'a, S>(pub &'a str, pub S);

/// Between names.
const SEPARATOR: char = '/';

/// A position in the data, of a training with a name.
const EPOCH: &str = "epoch";
const SAMPLES: &str = "samples";

/// Fails if a name cannot be used, or twice.
///
/// # Errors
/// [`Error::InvalidArgument`], which names it.
pub fn check_names(operation: &str, names: &[&str]) -> Result<(), Error> {
    let mut seen = BTreeSet::new();
    let wrong = names.iter().find_map(|name| match *name {
        "" => Some("a training has an empty name; give it another one".to_owned()),
        name if name.contains(SEPARATOR) => Some(format!("the name `{name}` has a `{SEPARATOR}`; give another one")),
        name if !seen.insert(name) => Some(format!("two trainings are called `{name}`; give them different names")),
        _ => None,
    });
    wrong.map_or(Ok(()), |reason| Err(Error::argument(operation, reason)))
}

/// Says in an error about a training which one it is.
///
/// # Errors
/// That of the result.
pub fn about<T>(name: &str, result: Result<T, Error>) -> Result<T, Error> {
    result.map_err(|error| match error {
        Error::InvalidArgument { operation, reason } => Error::argument(operation, format!("`{name}`: {reason}")),
        other => other,
    })
}

impl Snapshot {
    /// Returns the same under a name.
    pub fn named(self, name: &str) -> Snapshot {
        let Snapshot { contents: Contents { epoch, samples, items }, collect } = self;
        let rename = |item: Item| Item { name: format!("{name}{SEPARATOR}{}", item.name), ..item };
        let contents = Contents { epoch, samples, items: items.into_iter().map(rename).collect() };
        let name = name.to_owned();
        let collect = move |parts: &mut Parts| {
            let prefix = format!("{name}{SEPARATOR}");
            let collected = parts.within(&prefix, |parts| {
                parts.add_scalar(EPOCH.into(), Scalar::UInt(epoch))?;
                parts.add_scalar(SAMPLES.into(), Scalar::UInt(samples))?;
                collect(parts)
            });
            about(&name, collected)
        };
        Snapshot { contents, collect: Box::new(collect) }
    }

    /// Returns several with different names as one, at the position of the first.
    pub fn together(snapshots: Vec<Snapshot>) -> Snapshot {
        let (contents, collect): (Vec<_>, Vec<_>) =
            snapshots.into_iter().map(|Snapshot { contents, collect }| (contents, collect)).unzip();
        let (epoch, samples) = contents.first().map_or((0, 0), |first| (first.epoch, first.samples));
        let items = contents.into_iter().flat_map(|contents| contents.items).collect();
        let collect = |parts: &mut Parts| collect.into_iter().try_for_each(|collect| collect(parts));
        Snapshot { contents: Contents { epoch, samples, items }, collect: Box::new(collect) }
    }
}

impl Set {
    /// Returns the part of the set that was saved under a name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is none: it lists the names that there are. Those of [`read`](Self::read).
    pub fn named(&self, name: &str) -> Result<Set, Error> {
        check_names(LOADING, &[name])?;
        let prefix = format!("{name}{SEPARATOR}");
        let saved = self.contents().map_or(&[][..], |contents| &contents.items);
        let items = saved.iter().filter_map(|item| {
            let name = item.name.strip_prefix(&prefix)?.to_owned();
            Some(Item { name, ..item.clone() })
        });
        let items: Vec<Item> = items.collect();
        if items.is_empty() {
            let has = match &self.trainings()[..] {
                [] => "one training without a name; load it without `Named`".into(),
                names => format!("`{}`; load one of these", names.join("`, `")),
            };
            return Err(argument(format!("it was saved without `{name}`, and has {has}")));
        }
        let position = |field: &str| match self.scalar(&format!("{prefix}{field}"))? {
            Some(Scalar::UInt(position)) => Ok(position),
            _ => Err(argument(format!("`{name}` has no position in the data; load another set"))),
        };
        let contents = Contents { epoch: position(EPOCH)?, samples: position(SAMPLES)?, items };
        Ok(self.part(&prefix, contents))
    }

    /// Fails if the set has trainings with names, of which each is loaded by its name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], which lists them.
    pub fn check_unnamed(&self) -> Result<(), Error> {
        match &self.trainings()[..] {
            [] => Ok(()),
            names => {
                let names = names.join("`, `");
                Err(argument(format!("it has trainings with names, `{names}`; load each as `Named` with its name")))
            }
        }
    }

    /// Returns the names of the trainings that have one.
    fn trainings(&self) -> Vec<&str> {
        let items = self.contents().map_or(&[][..], |contents| &contents.items);
        let mut names: Vec<_> = items.iter().filter_map(|item| Some(item.name.split_once(SEPARATOR)?.0)).collect();
        names.dedup();
        names
    }
}

#[cfg(test)]
mod tests {
    use super::super::SAVING;
    use super::super::bytes::{from_bytes, to_bytes};
    use super::super::contents::Kind;
    use super::super::format::Dtype;
    use super::*;

    fn training(value: u8, samples: u64) -> Snapshot {
        let collect = move |parts: &mut Parts| {
            parts.add_replicated("model/a".into(), Dtype::U8, &[3], move |range, sink| sink(&[value; 3][range]))
        };
        let contents = Contents { epoch: 1, samples, items: vec![Item::new("model", Kind::Model).of("Net")] };
        Snapshot { contents, collect: Box::new(collect) }
    }

    fn value(set: &Set) -> (u64, u8) {
        (set.contents().unwrap().samples, set.read("model/a", 0..3).unwrap()[2])
    }

    #[test]
    fn each_of_several_trainings_is_found_by_its_name() {
        let both = Snapshot::together(vec![training(3, 16).named("critic"), training(5, 8).named("generator")]);
        assert_eq!(both.contents.samples, 16);
        let inner = to_bytes(Snapshot::together(vec![both.named("gan"), training(7, 2).named("model")])).unwrap();
        let set = from_bytes(inner).unwrap();
        let gan = set.named("gan").unwrap();
        assert_eq!(value(&gan.named("critic").unwrap()), (16, 3));
        assert_eq!(value(&gan.named("generator").unwrap()), (8, 5));
        assert_eq!(value(&set.named("model").unwrap()), (2, 7));
        let refused = |result: Result<Set, Error>, expected: &str| {
            let error = result.err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        };
        refused(gan.named("judge"), "it was saved without `judge`, and has `critic`, `generator`; load one of these");
        refused(set.named("critic"), "it was saved without `critic`, and has `gan`, `model`;");
        refused(set.named("gan/critic"), "the name `gan/critic` has a `/`");
        refused(gan.named("critic").unwrap().named("a"), "has one training without a name");
        let error = set.check_unnamed().unwrap_err().to_string();
        assert!(error.contains("it has trainings with names, `gan`, `model`; load each as `Named`"), "{error}");
        gan.named("critic").unwrap().check_unnamed().unwrap();
    }

    #[test]
    fn names_are_unique() {
        check_names(SAVING, &["a", "b"]).unwrap();
        let error = check_names(SAVING, &["a", "b", "a"]).unwrap_err().to_string();
        assert!(error.contains("two trainings are called `a`"), "{error}");
        assert!(check_names(SAVING, &["a", ""]).is_err());
    }
}
