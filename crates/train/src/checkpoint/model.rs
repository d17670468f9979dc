//! The tensors of a model, in a set: under the names and the shapes of whole parameters, however they were sharded.

use std::collections::BTreeSet;
use std::ops::Range;

use super::SAVING;
use super::contents::argument;
use super::format::{Dtype, Sink, width};
use super::own_part::OwnPart;
use super::parts::{Parts, describe};
use super::set::Set;
use bonfire_core::Error;

impl Parts {
    /// Adds a parameter of this shape. Without `part` it is the same on all ranks. `read` passes the bytes of a range
    /// of its elements on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if it has another shape than `part`. Those of [`add`](Self::add) and of `read`.
    pub fn add_parameter(
        &mut self,
        name: String,
        dtype: Dtype,
        shape: &[usize],
        part: Option<OwnPart>,
        read: impl Fn(Range<usize>, Sink<'_>) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        match part {
            None => self.add_replicated(name, dtype, shape, read),
            Some(part) if shape == part.shape => part.add(self, name, dtype, read),
            Some(OwnPart { whole, shape: own, .. }) => {
                let reason = format!(
                    "`{name}` has the shape {shape:?}, and this rank's part of {whole:?} has {own:?}; save the model \
                     that the optimizer has updated, and an average of such models"
                );
                Err(Error::argument(SAVING, reason))
            }
        }
    }

    /// Adds a quantised parameter, which is the same on all ranks: its bytes, and the scheme by which they are read.
    ///
    /// # Errors
    /// Those of [`add`](Self::add) and of `read`.
    pub fn add_quantised(
        &mut self,
        name: String,
        scheme: String,
        bytes: usize,
        read: impl Fn(Range<usize>, Sink<'_>) -> Result<(), Error> + Send + 'static,
    ) -> Result<(), Error> {
        self.add_value(format!("{name}/{SCHEME}"), scheme.into_bytes())?;
        self.add_replicated(name, Dtype::U8, &[bytes], read)
    }
}

/// What the name of a quantised parameter's scheme ends with.
const SCHEME: &str = "scheme";

/// Reads a model from a set, which must be the model that was saved.
pub struct ModelReader<'a> {
    item: &'a str,
    set: &'a Set,
    used: BTreeSet<String>,
}

impl<'a> ModelReader<'a> {
    /// Reads what was saved under this name.
    pub fn new(item: &'a str, set: &'a Set) -> Self {
        ModelReader { item, set, used: BTreeSet::new() }
    }

    /// Returns the elements of a parameter, or of this rank's part of it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if another one was saved, or none. Those of [`Set::read`].
    pub fn read(
        &mut self,
        path: &str,
        dtype: Dtype,
        shape: &[usize],
        part: Option<&OwnPart>,
    ) -> Result<Vec<u8>, Error> {
        let name = format!("{}/{path}", self.item);
        let whole = part.map_or(shape, |part| &part.whole);
        let own = describe(dtype, whole);
        let Some(tensor) = self.set.tensor(&name) else { return Err(other_model(path, "nothing", &own)) };
        if dtype != tensor.dtype || tensor.shape != whole {
            return Err(other_model(path, &describe(tensor.dtype, &tensor.shape), &own));
        }
        let mut bytes = match part {
            Some(part) => part.read(self.set, &name, width(dtype))?,
            None => self.set.read(&name, 0..tensor.elements())?,
        };
        if dtype == Dtype::BOOL {
            // Only 0 and 1 are valid.
            bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
        }
        self.used.insert(name);
        Ok(bytes)
    }

    /// Returns the bytes of a quantised parameter.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if another one was saved, or none, or with another scheme. Those of [`Set::read`].
    pub fn read_quantised(&mut self, path: &str, scheme: &str, bytes: usize) -> Result<Vec<u8>, Error> {
        let name = format!("{}/{path}/{SCHEME}", self.item);
        let saved = self.set.value(&name)?.map(|saved| String::from_utf8_lossy(&saved).into_owned());
        if saved.as_deref() != Some(scheme) {
            return Err(other_model(path, saved.as_deref().unwrap_or("not quantised"), scheme));
        }
        self.used.insert(name);
        self.read(path, Dtype::U8, &[bytes], None)
    }

    /// Fails if something was not read: the model that was saved had it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], which names it.
    pub fn finish(self) -> Result<(), Error> {
        let prefix = format!("{}/", self.item);
        match self.set.names(&prefix).find(|(path, _)| !self.used.contains(&format!("{prefix}{path}"))) {
            None => Ok(()),
            Some((path, tensor)) => Err(other_model(path, &describe(tensor.dtype, &tensor.shape), "nothing")),
        }
    }
}

fn other_model(path: &str, saved: &str, own: &str) -> Error {
    argument(format!(
        "it was saved for another model: `{path}` was {saved} then and is {own} now; load it into the model that was \
         saved, or give another folder"
    ))
}
