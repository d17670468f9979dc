//! What a set holds, by name and type: loading it into something else is an error that names both.
//!
//! burn's records do not say it: that of a cosine schedule is a bare number, which a linear one takes as its own.

use std::fmt;

use serde::{Deserialize, Serialize};

use bonfire_core::Error;

/// What a set holds. It is in the set's manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contents {
    /// Completed epochs.
    pub epoch: u64,
    /// The samples of the next epoch that were used, by all ranks together.
    pub samples: u64,
    /// All else.
    pub items: Vec<Item>,
}

/// A thing in a set. There may be several of each kind, with different names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Item {
    /// What the names of its tensors begin with.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Its type, without the paths of modules, where the program knows it.
    #[serde(rename = "type")]
    pub of: Option<String>,
    /// What can read its record, such as `burn 0.21`. `None` if tensors and scalars with names are all of it.
    pub record: Option<String>,
    /// How the ranks held it, such as `parts on 3 ranks`. `None` if each had the whole.
    pub sharding: Option<String>,
}

/// The kind of a thing in a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A model.
    Model,
    /// The running average of a model.
    Average,
    /// The state of an optimizer.
    Optimizer,
    /// The state of a learning rate scheduler.
    Scheduler,
    /// The program's own state.
    User,
}

impl Item {
    /// Returns an item that every rank holds as a whole.
    pub fn new(name: &str, kind: Kind) -> Item {
        Item { name: name.into(), kind, of: None, record: None, sharding: None }
    }

    /// With a type, of which it keeps the name without the paths of modules: they change more often than the type.
    pub fn of(mut self, type_name: &str) -> Item {
        self.of = Some(without_paths(type_name));
        self
    }

    /// With a record that only `reader` can read.
    pub fn record(mut self, reader: &str) -> Item {
        self.record = Some(reader.into());
        self
    }

    /// Held by the ranks in this way.
    pub fn sharded(mut self, sharding: String) -> Item {
        self.sharding = Some(sharding);
        self
    }

    /// Fails if the item in a set is another one than this one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], which names both.
    pub(super) fn check(&self, saved: Option<&Item>) -> Result<(), Error> {
        let Some(saved) = saved else {
            let reason = format!("it was saved without {self}; load it into what was saved, or give another folder");
            return Err(argument(reason));
        };
        let types_differ = self.of.is_some() && saved.of.is_some() && self.of != saved.of;
        if saved.kind != self.kind || types_differ {
            let reason = format!(
                "it was saved with {saved}, and this is {self}; load it into what was saved, or give another folder"
            );
            return Err(argument(reason));
        }
        match &saved.record {
            Some(reader) if saved.record != self.record => Err(argument(format!(
                "{saved} is a record for {reader} only; load it with that version, into the same form of training"
            ))),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Item { name, kind, of, sharding, .. } = self;
        write!(f, "the {}", kind.name())?;
        if name != kind.name() {
            write!(f, " `{name}`")?;
        }
        of.as_ref().map_or(Ok(()), |of| write!(f, " of type `{of}`"))?;
        sharding.as_ref().map_or(Ok(()), |sharding| write!(f, " in {sharding}"))
    }
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Model => "model",
            Kind::Average => "average",
            Kind::Optimizer => "optimizer",
            Kind::Scheduler => "scheduler",
            Kind::User => "user's state",
        }
    }
}

fn without_paths(type_name: &str) -> String {
    let (mut short, mut word) = (String::new(), String::new());
    for character in type_name.chars() {
        match character {
            ':' => word.clear(),
            _ if character.is_alphanumeric() || character == '_' => word.push(character),
            _ => {
                short.push_str(&word);
                short.push(character);
                word.clear();
            }
        }
    }
    short + &word
}

/// What errors of a load name.
pub const LOADING: &str = "loading a checkpoint";

/// Refuses a set or the request for it.
pub fn argument(reason: impl Into<String>) -> Error {
    Error::argument(LOADING, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_types_have_no_paths() {
        assert_eq!(without_paths("core::option::Option<a::B<u8, Vec<c::d::E>>>"), "Option<B<u8, Vec<E>>>");
        assert_eq!(without_paths("([f32; 3], &str, f64)"), "([f32; 3], &str, f64)");
    }

    #[test]
    fn another_item_is_refused_with_both_names() {
        let refused = |own: &Item, saved: Option<&Item>, expected: &str| {
            let error = own.check(saved).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        let [cosine, linear] = ["a::Cosine", "a::Linear"].map(|of| Item::new("scheduler", Kind::Scheduler).of(of));
        assert!(
            cosine.check(Some(&cosine)).is_ok() && cosine.check(Some(&Item { of: None, ..linear.clone() })).is_ok()
        );
        refused(
            &cosine,
            Some(&linear),
            "saved with the scheduler of type `Linear`, and this is the scheduler of type `Cosine`",
        );
        refused(&cosine, Some(&Item::new("scheduler", Kind::User)), "saved with the user's state `scheduler`, and");
        refused(&cosine, None, "it was saved without the scheduler of type `Cosine`");
        let record = linear.clone().record("burn 0.21");
        assert!(record.check(Some(&record)).is_ok() && record.check(Some(&linear)).is_ok());
        refused(&linear, Some(&record), "the scheduler of type `Linear` is a record for burn 0.21 only");
    }
}
