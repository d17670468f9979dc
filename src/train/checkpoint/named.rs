//! Several trainings in one set.

use super::{Load, Save};
use bonfire_core::Error;
use bonfire_train::checkpoint::{LOADING, Named, SAVING, Set, Snapshot, about, check_names};

impl<S: Save> Save for Named<'_, S> {
    fn snapshot(self) -> Result<Snapshot, Error> {
        let Named(name, training) = self;
        check_names(SAVING, &[name])?;
        Ok(about(name, training.snapshot())?.named(name))
    }
}

impl<S: Load> Load for Named<'_, S> {
    type Loaded = S::Loaded;

    fn read(&self, set: &Set) -> Result<Self::Loaded, Error> {
        let Named(name, training) = self;
        let own = set.named(name)?;
        about(name, training.read(&own))
    }

    fn replace(self, loaded: Self::Loaded) {
        self.1.replace(loaded);
    }

    fn check_savable(&self) -> Result<(), Error> {
        about(self.0, self.1.check_savable())
    }
}

/// Implements what can be saved and loaded for tuples: each type is followed by its place.
macro_rules! several {
    ($($training:ident $place:tt),+) => {
        impl<$($training: Save),+> Save for ($(Named<'_, $training>,)+) {
            fn snapshot(self) -> Result<Snapshot, Error> {
                check_names(SAVING, &[$(self.$place.0),+])?;
                Ok(Snapshot::together(vec![$(self.$place.snapshot()?),+]))
            }
        }

        impl<$($training: Load),+> Load for ($(Named<'_, $training>,)+) {
            type Loaded = ($($training::Loaded,)+);

            fn read(&self, set: &Set) -> Result<Self::Loaded, Error> {
                check_names(LOADING, &[$(self.$place.0),+])?;
                Ok(($(self.$place.read(set)?,)+))
            }

            fn replace(self, loaded: Self::Loaded) {
                $(self.$place.replace(loaded.$place);)+
            }

            fn check_savable(&self) -> Result<(), Error> {
                $(self.$place.check_savable()?;)+
                Ok(())
            }
        }
    };
}

several!(A 0, B 1);
several!(A 0, B 1, C 2);
several!(A 0, B 1, C 2, D 3);
