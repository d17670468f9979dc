//! The property test of training on burn 0.22: the source is that of the root package.

#[path = "../common/burn_version.rs"]
mod burn_version;
#[path = "../../../tests/common/model_data.rs"]
mod model_data;

#[path = "../../../tests/property/model.rs"]
mod model;
#[path = "../../../tests/property/modes.rs"]
mod modes;
#[path = "../../../tests/property/program.rs"]
mod program;
#[path = "../../../tests/property/reference.rs"]
mod reference;
#[path = "../../../tests/property/run.rs"]
mod run;
