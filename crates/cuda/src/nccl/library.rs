//! NCCL's library. It is loaded at run time, with every function that is used or not at all.
//!
//! Types are cudarc's, functions are not. cudarc looks for `libnccl.so`, which the packages that install NCCL do not
//! contain (they have `libnccl.so.2`). It panics if a library or a function is missing. And it converts return codes to
//! an enum, while a newer library than cudarc's may return other values.

use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::time::Duration;

use cudarc::nccl::sys::{cudaStream_t, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};

use bonfire_core::Error;

/// Return code of a successful call.
pub(super) const SUCCESS: c_int = 0;
/// Return code while a non-blocking communicator is busy.
pub(super) const IN_PROGRESS: c_int = 7;

/// The first version with non-blocking communicators that can be split.
const OLDEST: c_int = 2_18_00;

macro_rules! functions {
    ($($field:ident = $name:literal($($argument:ty),*)$( -> $result:ty)?;)*) => {
        /// The functions that are used, as declared in NCCL's header.
        pub(super) struct Functions {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> functions!(@result $($result)?),)*
        }

        impl Functions {
            /// Loads all functions. The error is the name of a missing one.
            fn load(library: &libloading::Library) -> Result<Self, &'static str> {
                $(
                    // SAFETY: the type is the one in NCCL's header, where no function has changed since `OLDEST`.
                    let $field = *unsafe { library.get($name.as_bytes()) }.map_err(|_| $name)?;
                )*
                Ok(Functions { $($field),* })
            }
        }
    };
    (@result) => { c_int };
    (@result $result:ty) => { $result };
}

functions! {
    get_unique_id = "ncclGetUniqueId"(*mut ncclUniqueId);
    init_rank_config = "ncclCommInitRankConfig"(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut Config);
    split = "ncclCommSplit"(ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut Config);
    finalize = "ncclCommFinalize"(ncclComm_t);
    destroy = "ncclCommDestroy"(ncclComm_t);
    abort = "ncclCommAbort"(ncclComm_t);
    get_async_error = "ncclCommGetAsyncError"(ncclComm_t, *mut c_int);
    count = "ncclCommCount"(ncclComm_t, *mut c_int);
    user_rank = "ncclCommUserRank"(ncclComm_t, *mut c_int);
    get_error_string = "ncclGetErrorString"(c_int) -> *const c_char;
    get_last_error = "ncclGetLastError"(ncclComm_t) -> *const c_char;
    group_start = "ncclGroupStart"();
    group_end = "ncclGroupEnd"();
    all_reduce = "ncclAllReduce"(
        *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
    reduce = "ncclReduce"(
        *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, c_int, ncclComm_t, cudaStream_t);
    reduce_scatter = "ncclReduceScatter"(
        *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t);
    broadcast = "ncclBroadcast"(
        *const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t);
    all_gather = "ncclAllGather"(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, cudaStream_t);
    send = "ncclSend"(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t);
    receive = "ncclRecv"(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, cudaStream_t);
}

/// A communicator's configuration: `ncclConfig_t` as of [`OLDEST`], and the field after it in place of padding.
/// Newer libraries use defaults for the fields that it lacks.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cluster_size: c_int,
    min_blocks: c_int,
    max_blocks: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
}

impl Config {
    /// The configuration of a communicator whose functions return while it is busy.
    pub fn polled() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Config {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: OLDEST as u32,
            blocking: 0,
            cluster_size: UNDEFINED,
            min_blocks: UNDEFINED,
            max_blocks: UNDEFINED,
            net_name: ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        }
    }
}

/// NCCL as it was found.
pub(super) struct Library {
    pub functions: Functions,
    pub version: c_int,
}

/// Returns the version of the NCCL that is found at run time, encoded as in its header: 23007 is 2.30.7.
///
/// # Errors
/// [`Error::Library`] if there is none, or one before 2.18.
pub fn version() -> Result<i32, Error> {
    library().map(|library| library.version)
}

/// The library, which is looked for once.
pub(super) fn library() -> Result<&'static Library, Error> {
    static LIBRARY: OnceLock<Result<Library, Error>> = OnceLock::new();
    LIBRARY.get_or_init(Library::find).as_ref().map_err(Error::clone)
}

impl Library {
    fn find() -> Result<Library, Error> {
        let names = [OsString::from("libnccl.so.2"), libloading::library_filename("nccl")];
        let mut problems = Vec::new();
        for name in names {
            // SAFETY: a library with NCCL's name is taken for NCCL, whose initialisers have no requirements.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => return Library::of(library),
                Err(error) => problems.push(error.to_string()),
            }
        }
        Err(unfit(&format!("it is not found ({})", problems.join("; "))))
    }

    fn of(library: libloading::Library) -> Result<Library, Error> {
        type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY: the type is the one in NCCL's header.
        let get_version = *unsafe { library.get::<GetVersion>("ncclGetVersion") }
            .map_err(|error| unfit(&format!("the library that was found is not NCCL ({error})")))?;
        let mut version = 0;
        // SAFETY: `version` receives the result.
        if unsafe { get_version(&mut version) } != SUCCESS || version < OLDEST {
            return Err(unfit(&format!("version {} is too old", Version(version))));
        }
        let functions = Functions::load(&library)
            .map_err(|name| unfit(&format!("version {} is incomplete: it has no {name}", Version(version))))?;
        // Functions are kept as long as the process lives, and NCCL has threads that are never joined.
        std::mem::forget(library);
        log::info!("NCCL {}", Version(version));
        Ok(Library { functions, version })
    }

    /// Converts a return code to an error.
    pub fn error(&self, function: &str, code: c_int, comm: ncclComm_t, rank: usize, elapsed: Duration) -> Error {
        // SAFETY: every number has a text, which is a constant.
        let mut reason = unsafe { text((self.functions.get_error_string)(code)) };
        // SAFETY: the communicator is valid or null. The text is copied before another call changes it.
        let last = unsafe { text((self.functions.get_last_error)(comm)) };
        if !last.is_empty() {
            reason = format!("{reason} ({last})");
        }
        Error::Nccl { function: function.into(), rank, code, reason, elapsed }
    }
}

/// Copies a text of NCCL.
///
/// # Safety
/// `chars` must be null or a C string.
unsafe fn text(chars: *const c_char) -> String {
    if chars.is_null() {
        return String::new();
    }
    // SAFETY: a C string, guaranteed by the caller.
    unsafe { CStr::from_ptr(chars) }.to_string_lossy().trim().to_owned()
}

fn unfit(problem: &str) -> Error {
    let reason = format!(
        "{problem}; install version {} or newer: `pip install nvidia-nccl-cu12` (or -cu13, to match CUDA) and add its \
         folder, site-packages/nvidia/nccl/lib, to LD_LIBRARY_PATH, or install the system package libnccl2",
        Version(OLDEST)
    );
    Error::Library { library: "NCCL".into(), reason }
}

/// Displays a version as `major.minor.patch`.
pub(super) struct Version(pub c_int);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Up to 2.8 a version had one digit for the minor number.
        let major = if self.0 < 10_000 { 1000 } else { 10_000 };
        write!(f, "{}.{}.{}", self.0 / major, self.0 % major / 100, self.0 % 100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_decoded() {
        let texts = [2_30_07, 2_18_00, 2_09_06, 2804, 2402].map(|code| Version(code).to_string());
        assert_eq!(texts, ["2.30.7", "2.18.0", "2.9.6", "2.8.4", "2.4.2"]);
    }

    #[test]
    fn the_configuration_has_nccls_layout() {
        assert_eq!((size_of::<Config>(), std::mem::offset_of!(Config, net_name)), (48, 32));
    }

    #[test]
    fn a_library_that_is_not_nccl_is_a_typed_error() {
        let own = libloading::os::unix::Library::this();
        let error = Library::of(own.into()).err();
        assert!(matches!(&error, Some(Error::Library { reason, .. }) if reason.contains("is not NCCL")), "{error:?}");
        assert!(error.is_some_and(|error| error.to_string().contains("pip install nvidia-nccl-cu12")));
    }
}
