//! `BONFIRE_CUDA`: the path that a user requests, for all sizes or by size. `BONFIRE_CUDA_MULTIPROCESSORS`: how much of
//! a GPU the kernels take.

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

/// The multiprocessors of a GPU that kernels between its ranks take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Share {
    #[default]
    All,
    /// So that a kernel on the other half runs beside them.
    Half,
}

impl Share {
    /// How many of so many multiprocessors that is, at least 1.
    pub fn of(self, multiprocessors: u32) -> u32 {
        match self {
            Share::All => multiprocessors,
            Share::Half => (multiprocessors / 2).max(1),
        }
    }

    fn parse(text: &str) -> Result<Share, Error> {
        match text {
            "all" => Ok(Share::All),
            "half" => Ok(Share::Half),
            _ => Err(Error::Config(format!("{MULTIPROCESSORS} is '{text}'; it must be all or half"))),
        }
    }
}

const PATH: &str = "BONFIRE_CUDA";
const MULTIPROCESSORS: &str = "BONFIRE_CUDA_MULTIPROCESSORS";

/// What the user requests of collectives on CUDA. All ranks must have the same.
pub(crate) struct Settings {
    pub by_size: BySize<Mode>,
    pub share: Share,
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PATH} is {}", self.by_size)?;
        match self.share {
            Share::All => Ok(()),
            Share::Half => write!(f, " and {MULTIPROCESSORS} half"),
        }
    }
}

/// The requested settings.
///
/// # Errors
/// [`Error::Config`] if one is malformed.
pub(crate) fn settings() -> Result<&'static Settings, Error> {
    static SETTINGS: LazyLock<Result<Settings, Error>> = LazyLock::new(|| {
        let by_size = variable(PATH)?.map_or(Ok(BySize::all(Mode::Auto)), |text| parse_paths(&text))?;
        let share = variable(MULTIPROCESSORS)?.map_or(Ok(Share::All), |text| Share::parse(&text))?;
        Ok(Settings { by_size, share })
    });
    SETTINGS.as_ref().map_err(Error::clone)
}

fn variable(name: &str) -> Result<Option<String>, Error> {
    match std::env::var(name) {
        Ok(text) => Ok(Some(text)),
        Err(VarError::NotPresent) => Ok(None),
        Err(error) => Err(Error::Config(format!("{name}: {error}"))),
    }
}

/// Parses a path, or a table such as `kernels:0-65535;nccl:65536-`.
pub(crate) fn parse_paths(text: &str) -> Result<BySize<Mode>, Error> {
    let names = || MODES.map(|(name, _)| name).join(", ");
    let find = |name: &str| MODES.iter().find(|(other, _)| *other == name).map(|(_, mode)| *mode);
    if !text.contains(':') {
        let unknown = || {
            let reason = format!("it must be one of {}, or a table such as kernels:0-65535;nccl:65536-", names());
            Error::Config(format!("{PATH} is '{text}'; {reason}"))
        };
        return find(text).map(BySize::all).ok_or_else(unknown);
    }
    let path = |name: &str| find(name).ok_or_else(|| format!("'{name}' is not a path: give one of {}", names()));
    let table = BySize::parse(text, "nccl", path);
    table.map_err(|reason| Error::Config(format!("{PATH} is '{text}': {reason}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_names_or_tables() {
        assert_eq!(parse_paths("two-shot"), Ok(BySize::all(Mode::Form(Form::TwoShot))));
        let table = parse_paths("push:0-1023;kernels:1024-65535;nccl:65536-").unwrap();
        let at = [(0, Mode::Form(Form::Push)), (1024, Mode::Kernels), (65_535, Mode::Kernels), (65_536, Mode::Nccl)];
        at.into_iter().for_each(|(bytes, mode)| assert_eq!(table.at(bytes), mode, "{bytes}"));
        assert_eq!(parse_paths(&table.to_string()), Ok(table));
        for (text, reason) in [
            ("fast", "'fast'; it must be one of auto, kernels, push"),
            ("fast:0-", "'fast' is not a path: give one of auto, kernels, push"),
            ("nccl:1-", "no path for sizes from 0 to 0"),
            ("host:0-9", "no path for sizes from 10 on"),
        ] {
            let error = parse_paths(text).unwrap_err().to_string();
            assert!(error.contains("BONFIRE_CUDA") && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn half_of_the_multiprocessors_is_a_setting() {
        assert_eq!(["all", "half"].map(Share::parse), [Ok(Share::All), Ok(Share::Half)]);
        let error = Share::parse("a third").unwrap_err().to_string();
        assert!(error.contains("BONFIRE_CUDA_MULTIPROCESSORS is 'a third'; it must be all or half"), "{error}");
        assert_eq!([132, 3, 1].map(|all| [Share::All.of(all), Share::Half.of(all)]), [[132, 66], [3, 1], [1, 1]]);
        let text = |share| Settings { by_size: BySize::all(Mode::Nccl), share }.to_string();
        assert_eq!(text(Share::All), "BONFIRE_CUDA is nccl:0-");
        assert_eq!(text(Share::Half), "BONFIRE_CUDA is nccl:0- and BONFIRE_CUDA_MULTIPROCESSORS half");
    }
}
