//! `BONFIRE_CUDA`: the path that a user requests, for all sizes or by size.

use std::env::VarError;
use std::fmt;
use std::sync::LazyLock;

use crate::kernel::Form;
use bonfire_core::Error;
use bonfire_core::internal::BySize;

/// The data path between devices, as `BONFIRE_CUDA` requests it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// As the table says.
    Auto,
    /// By kernels where possible. The table selects the form.
    Kernels,
    /// By kernels where possible. All-reduces use this form if it supports the call.
    Form(Form),
    /// By NCCL where possible.
    Nccl,
    /// Through host memory.
    Host,
}

impl Mode {
    /// Whether kernels are requested, not only allowed.
    pub fn requests_kernels(self) -> bool {
        matches!(self, Mode::Kernels | Mode::Form(_))
    }
}

/// The names of paths.
const MODES: [(&str, Mode); 7] = [
    ("auto", Mode::Auto),
    ("kernels", Mode::Kernels),
    ("push", Mode::Form(Form::Push)),
    ("one-shot", Mode::Form(Form::OneShot)),
    ("two-shot", Mode::Form(Form::TwoShot)),
    ("nccl", Mode::Nccl),
    ("host", Mode::Host),
];

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = MODES.iter().find(|(_, mode)| mode == self).map_or("a form", |(name, _)| name);
        f.write_str(name)
    }
}

/// The requested paths.
///
/// # Errors
/// [`Error::Config`] if the setting is malformed.
pub(crate) fn setting() -> Result<&'static BySize<Mode>, Error> {
    static SETTING: LazyLock<Result<BySize<Mode>, Error>> = LazyLock::new(|| match std::env::var("BONFIRE_CUDA") {
        Ok(text) => parse_setting(&text),
        Err(VarError::NotPresent) => Ok(BySize::all(Mode::Auto)),
        Err(error) => Err(Error::Config(format!("BONFIRE_CUDA: {error}"))),
    });
    SETTING.as_ref().map_err(Error::clone)
}

/// Parses a path, or a table such as `kernels:0-65535;nccl:65536-`.
pub(crate) fn parse_setting(text: &str) -> Result<BySize<Mode>, Error> {
    let names = || MODES.map(|(name, _)| name).join(", ");
    let find = |name: &str| MODES.iter().find(|(other, _)| *other == name).map(|(_, mode)| *mode);
    if !text.contains(':') {
        let unknown = || {
            let reason = format!("it must be one of {}, or a table such as kernels:0-65535;nccl:65536-", names());
            Error::Config(format!("BONFIRE_CUDA is '{text}'; {reason}"))
        };
        return find(text).map(BySize::all).ok_or_else(unknown);
    }
    let path = |name: &str| find(name).ok_or_else(|| format!("'{name}' is not a path: give one of {}", names()));
    let table = BySize::parse(text, "nccl", path);
    table.map_err(|reason| Error::Config(format!("BONFIRE_CUDA is '{text}': {reason}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_names_or_tables() {
        assert_eq!(parse_setting("two-shot"), Ok(BySize::all(Mode::Form(Form::TwoShot))));
        let table = parse_setting("push:0-1023;kernels:1024-65535;nccl:65536-").unwrap();
        let at = [(0, Mode::Form(Form::Push)), (1024, Mode::Kernels), (65_535, Mode::Kernels), (65_536, Mode::Nccl)];
        at.into_iter().for_each(|(bytes, mode)| assert_eq!(table.at(bytes), mode, "{bytes}"));
        assert_eq!(parse_setting(&table.to_string()), Ok(table));
        for (text, reason) in [
            ("fast", "'fast'; it must be one of auto, kernels, push"),
            ("fast:0-", "'fast' is not a path: give one of auto, kernels, push"),
            ("nccl:1-", "no path for sizes from 0 to 0"),
            ("host:0-9", "no path for sizes from 10 on"),
        ] {
            let error = parse_setting(text).unwrap_err().to_string();
            assert!(error.contains("BONFIRE_CUDA") && error.contains(reason), "{error}");
        }
    }
}
