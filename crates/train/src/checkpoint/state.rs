//! The state that an optimizer has for a parameter, in a set.
//!
//! It is a list of fields: tensors as large as the parameter, such as moments, and numbers, such as a count of steps.
//! Their names lead through the optimizer's types, with dots: `momentum.time`. Of a tensor each rank saves and loads
//! the elements for its part of the parameter, so state of slices becomes state of whole parameters or of other slices.
//! A state without fields is an entry of no bytes: it is another one than none.

use std::ops::Range;

use super::SAVING;
use super::contents::argument;
use super::format::{Dtype, Sink, width};
use super::own_part::OwnPart;
use super::parts::Parts;
use super::scalar::Scalar;
use super::set::Set;
use bonfire_core::Error;

/// A field that is to be saved, or that was loaded.
pub enum Field<T> {
    /// A number.
    Scalar(Scalar),
    /// A tensor.
    Tensor(T),
}

/// The fields of a state by name.
pub type Fields<T> = Vec<(String, Field<T>)>;

/// A tensor of a state, which is to be saved.
pub struct StateTensor {
    /// The element type.
    pub dtype: Dtype,
    /// The shape of what this rank has.
    pub shape: Vec<usize>,
    /// Passes the bytes of a range of its elements on.
    pub read: ReadRange,
}

/// Passes the bytes of a range of elements on.
pub type ReadRange = Box<dyn Fn(Range<usize>, Sink<'_>) -> Result<(), Error> + Send>;

/// What a rank has loaded of a tensor of a state.
pub struct LoadedTensor {
    /// The element type.
    pub dtype: Dtype,
    /// The shape of what this rank has.
    pub shape: Vec<usize>,
    /// Its elements.
    pub bytes: Vec<u8>,
}

/// The name of an optimizer's state for a parameter.
pub fn state_name(optimizer: &str, parameter: &str) -> String {
    format!("{optimizer}/{parameter}")
}

impl Parts {
    /// Adds an optimizer's state for a parameter, under its [`state_name`]. Without `part` it is the same on all ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a tensor has another shape than this rank's part of the parameter; and those of
    /// [`add`](Self::add).
    pub fn add_state(&mut self, name: &str, part: Option<&OwnPart>, fields: Fields<StateTensor>) -> Result<(), Error> {
        let leads = part.map_or(self.rank() == 0, OwnPart::leads);
        if fields.is_empty() && leads {
            self.add_own_value(name.into(), Vec::new())?;
        }
        for (field, value) in fields {
            let field_name = format!("{name}/{field}");
            match (value, part) {
                (Field::Scalar(scalar), _) => self.add_scalar_of(field_name, scalar, leads)?,
                (Field::Tensor(StateTensor { dtype, shape, read }), None) => {
                    self.add_replicated(field_name, dtype, &shape, read)?;
                }
                (Field::Tensor(StateTensor { dtype, shape, read }), Some(part)) if shape == part.shape => {
                    part.add(self, field_name, dtype, read)?;
                }
                (Field::Tensor(_), Some(_)) => {
                    return Err(Error::argument(SAVING, format!("`{name}`: {NOT_ELEMENTWISE}")));
                }
            }
        }
        Ok(())
    }
}

impl Set {
    /// Returns this rank's part of an optimizer's state for a parameter, or without `part` all of it. `None` if the
    /// optimizer had no state for it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a tensor of it has another shape than the parameter, of which only a part is
    /// wanted. Those of [`read`](Self::read).
    pub fn state(&self, name: &str, part: Option<&OwnPart>) -> Result<Option<Fields<LoadedTensor>>, Error> {
        let prefix = format!("{name}/");
        let mut fields = Vec::new();
        for (field, tensor) in self.names(&prefix) {
            let field_name = format!("{prefix}{field}");
            let value = match (self.scalar(&field_name)?, part) {
                (Some(scalar), _) => Field::Scalar(scalar),
                (None, None) => {
                    let (dtype, shape) = (tensor.dtype, tensor.shape.clone());
                    Field::Tensor(LoadedTensor { dtype, shape, bytes: self.read(&field_name, 0..tensor.elements())? })
                }
                (None, Some(part)) if tensor.shape == part.whole => {
                    let (dtype, shape) = (tensor.dtype, part.shape.clone());
                    let bytes = part.read(self, &field_name, width(dtype))?;
                    Field::Tensor(LoadedTensor { dtype, shape, bytes })
                }
                (None, Some(_)) => return Err(argument(format!("`{name}`: {NOT_ELEMENTWISE}"))),
            };
            fields.push((field.to_owned(), value));
        }
        Ok((!fields.is_empty() || self.tensor(name).is_some()).then_some(fields))
    }
}

/// Why a state cannot be saved or loaded in parts.
pub const NOT_ELEMENTWISE: &str = "it has tensors of another shape than the parameter, so it is not element-wise";

#[cfg(test)]
mod tests {
    use super::super::contents::Contents;
    use super::super::folder::file_name;
    use super::super::format::{FileId, Manifest, write};
    use super::*;
    use bonfire_core::partition;

    const SHAPE: [usize; 2] = [5, 3];

    /// A state whose tensor has the elements `range` of `0..15`.
    fn fields(range: Range<usize>, shape: &[usize]) -> Fields<StateTensor> {
        let elements: Vec<f32> = range.map(|i| i as f32).collect();
        let read = move |range: Range<usize>, sink: Sink<'_>| {
            let bytes: Vec<u8> = elements[range].iter().flat_map(|element| element.to_le_bytes()).collect();
            sink(&bytes)
        };
        let tensor = StateTensor { dtype: Dtype::F32, shape: shape.to_vec(), read: Box::new(read) };
        vec![
            ("momentum.time".into(), Field::Scalar(Scalar::UInt(7))),
            ("momentum.moment".into(), Field::Tensor(tensor)),
        ]
    }

    /// The set that `n` ranks write, of which each adds what `add` adds.
    fn saved(folder: &std::path::Path, n: usize, add: impl Fn(usize, &mut Parts)) -> Set {
        let files = (0..n).map(|rank| {
            let mut parts = Parts::new(rank, n);
            add(rank, &mut parts);
            write(&folder.join(file_name(rank)), FileId::new("01", rank, n), parts.into_list().0).unwrap()
        });
        let contents = Contents { epoch: 0, samples: 0, items: Vec::new() };
        Set::open(folder, &Manifest::new("01", files.collect(), contents)).unwrap()
    }

    fn elements(set: &Set, part: Option<&OwnPart>) -> Vec<f32> {
        let fields = set.state("optimizer/a", part).unwrap().expect("a state");
        let [(first, Field::Tensor(tensor)), (second, Field::Scalar(time))] = &fields[..] else {
            panic!("other fields")
        };
        assert_eq!((first.as_str(), second.as_str()), ("momentum.moment", "momentum.time"));
        assert_eq!((tensor.dtype, *time), (Dtype::F32, Scalar::UInt(7)));
        tensor.bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    }

    #[test]
    fn a_state_of_any_form_is_loaded_in_any_other() {
        let all: Vec<f32> = (0..15).map(|i| i as f32).collect();
        let slice = |n, rank| OwnPart::slice(&SHAPE, partition(15, n, rank), (1, 0));
        let rows = |n: usize, rank| OwnPart::new(&SHAPE, &[SHAPE[0].div_ceil(n), 3], rank, (1, 0));
        for n in 1..=3 {
            let folder = tempfile::tempdir().unwrap();
            let (whole, slices) = (folder.path().join("whole"), folder.path().join("slices"));
            [&whole, &slices].into_iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
            let whole = saved(&whole, n, |_, parts| {
                parts.add_state("optimizer/a", None, fields(0..15, &SHAPE)).unwrap();
                parts.add_state("optimizer/ab", None, Vec::new()).unwrap();
            });
            let slices = saved(&slices, n, |rank, parts| {
                let own = partition(15, n, rank);
                let fields = fields(own.clone(), &[own.len()]);
                parts.add_state("optimizer/a", Some(&slice(n, rank)), fields).unwrap();
                parts.add_state("optimizer/ab", Some(&slice(n, rank)), Vec::new()).unwrap();
            });
            for set in [whole, slices] {
                assert_eq!(elements(&set, None), all);
                assert!(set.state("optimizer/ab", None).unwrap().is_some_and(|fields| fields.is_empty()));
                assert!(set.state("optimizer/abc", None).unwrap().is_none());
                let joined = |part: &dyn Fn(usize) -> OwnPart| {
                    (0..2).flat_map(|rank| elements(&set, Some(&part(rank)))).collect::<Vec<_>>()
                };
                assert_eq!(joined(&|rank| slice(2, rank)), all);
                // The last row is padding.
                assert_eq!(joined(&|rank| rows(2, rank)), [&all[..], &[0.0; 3]].concat());
            }
        }
    }

    #[test]
    fn a_state_of_another_shape_is_not_cut() {
        let folder = tempfile::tempdir().unwrap();
        let part = OwnPart::slice(&SHAPE, 0..15, (1, 0));
        let error = Parts::new(0, 1).add_state("optimizer/a", Some(&part), fields(0..3, &[3])).unwrap_err();
        assert!(error.to_string().contains(NOT_ELEMENTWISE), "{error}");
        let set = saved(folder.path(), 1, |_, parts| parts.add_state("optimizer/a", None, fields(0..3, &[3])).unwrap());
        let error = set.state("optimizer/a", Some(&part)).err().unwrap().to_string();
        assert!(error.contains(NOT_ELEMENTWISE), "{error}");
    }
}
