//! The property test of training on burn 0.21. `burn-0.22/tests/property` is the same on burn 0.22.

#[path = "../common/burn_version.rs"]
mod burn_version;
#[path = "../common/model_data.rs"]
mod model_data;

mod model;
mod modes;
mod program;
mod reference;
mod run;
