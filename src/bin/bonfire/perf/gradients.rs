//! stub
use super::report::Report;
use bonfire::{Error, Group};
pub fn run(_group: &Group, _report: &Report) -> Result<u64, Error> {
    Ok(0)
}
