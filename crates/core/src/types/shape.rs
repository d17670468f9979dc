//! Finds a tensor's shape by its fingerprint.
//!
//! Ranks compare fingerprints of shapes, and send no more than that. An error shows the calls of all ranks, and must be
//! the same on each. So the shape is looked for among those with as many elements as the call: usually there are few.

/// The most dimensions that are tried.
const DIMENSIONS: usize = 5;

/// The most elements: their divisors are found by trial.
const ELEMENTS: usize = 1 << 32;

/// The most shapes that are tried, which takes some milliseconds: so few that a wrong one hardly has the fingerprint.
const TRIES: u32 = 50_000;

/// Returns a shape of `count` elements for which `is_it`, if one is found. Tries those with fewer dimensions first.
pub(super) fn find_shape(count: usize, is_it: impl Fn(&[usize]) -> bool) -> Option<Vec<usize>> {
    if count == 0 || count > ELEMENTS {
        return None;
    }
    let small = (1..=count.isqrt()).filter(|divisor| count.is_multiple_of(*divisor));
    let mut divisors: Vec<usize> = small.flat_map(|divisor| [divisor, count / divisor]).collect();
    divisors.sort_unstable();
    divisors.dedup();
    let mut search = Search { divisors, shape: Vec::new(), is_it, tries: TRIES };
    (1..=DIMENSIONS).any(|dimensions| search.extend(count, dimensions)).then_some(search.shape)
}

struct Search<F> {
    divisors: Vec<usize>,
    /// The first dimensions of the shape.
    shape: Vec<usize>,
    is_it: F,
    tries: u32,
}

impl<F: Fn(&[usize]) -> bool> Search<F> {
    /// Extends the shape by so many dimensions of `rest` elements. Leaves it as it was if none is right.
    fn extend(&mut self, rest: usize, dimensions: usize) -> bool {
        if dimensions == 1 {
            self.tries = self.tries.saturating_sub(1);
            return self.with(rest, |search| search.tries > 0 && (search.is_it)(&search.shape));
        }
        (0..self.divisors.len()).any(|i| {
            let divisor = self.divisors[i];
            let fits = self.tries > 0 && rest.is_multiple_of(divisor);
            fits && self.with(divisor, |search| search.extend(rest / divisor, dimensions - 1))
        })
    }

    /// Appends a dimension, and removes it again unless `found`.
    fn with(&mut self, dimension: usize, found: impl FnOnce(&mut Self) -> bool) -> bool {
        self.shape.push(dimension);
        let found = found(self);
        if !found {
            self.shape.pop();
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_is_tried_once() {
        for (count, shapes) in [(1, 5), (7, 1 + 2 + 3 + 4 + 5), (12, 1 + 6 + 18 + 40 + 75)] {
            let seen = std::cell::RefCell::new(std::collections::BTreeSet::new());
            let find = find_shape(count, |shape| {
                assert!(shape.iter().product::<usize>() == count && seen.borrow_mut().insert(shape.to_vec()));
                false
            });
            assert_eq!((find, seen.borrow().len()), (None, shapes));
        }
    }

    #[test]
    fn a_search_ends() {
        for count in [0, 3_491_888_400, 1 << 32, usize::MAX] {
            assert_eq!(find_shape(count, |_| false), None);
        }
        assert_eq!(find_shape(1 << 20, |shape| shape == [64, 64, 256]), Some(vec![64, 64, 256]));
    }
}
