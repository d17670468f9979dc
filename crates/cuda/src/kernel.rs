//! The kernels in `kernels/`: their names and sources, and their compilation on first use.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex};

use cudarc::driver::{DriverError, result, sys};
use cudarc::nvrtc;
use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::sys::nvrtcResult;

use bonfire_core::internal::lock;
use bonfire_core::{DType, Error, ReduceOp};

/// What a file in `kernels/` computes: all-reduce in one of three forms, or another operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Form {
    TwoShot,
    OneShot,
    Push,
    ReduceScatter,
    AllGather,
    Broadcast,
    AllToAll,
    Gather,
    Scatter,
}

/// One kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kernel {
    pub form: Form,
    /// The reduction and its element type. `None` for kernels that only move data, of any element size.
    pub reduces: Option<(ReduceOp, DType)>,
}

/// The included files, by name.
const HEADERS: [(&str, &str); 9] = [
    ("combine.cuh", include_str!("../kernels/combine.cuh")),
    ("host.cuh", include_str!("../kernels/host.cuh")),
    ("instances.cuh", include_str!("../kernels/instances.cuh")),
    ("move.cuh", include_str!("../kernels/move.cuh")),
    ("ptx.cuh", include_str!("../kernels/ptx.cuh")),
    ("reduction.cuh", include_str!("../kernels/reduction.cuh")),
    ("signal.cuh", include_str!("../kernels/signal.cuh")),
    ("types.cuh", include_str!("../kernels/types.cuh")),
    ("vector.cuh", include_str!("../kernels/vector.cuh")),
];

/// A kernel that orders streams, which the tensors' library launches: see `kernels/order.cu`. Its parameters are the
/// addresses of three tokens, or of one, and an [`Order`](crate::Order).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OrderKernel {
    /// Writes the word of the order. It has three tokens.
    TensorsReady,
    /// Waits for the word of the order. It has one token.
    AwaitDone,
}

impl OrderKernel {
    /// Returns the name of its entry in the module.
    pub const fn name(self) -> &'static str {
        match self {
            OrderKernel::TensorsReady => "tensors_ready",
            OrderKernel::AwaitDone => "await_done",
        }
    }

    /// Returns the source of both kernels, in CUDA C++, with all that it includes.
    pub fn source() -> &'static str {
        static SOURCE: LazyLock<String> =
            LazyLock::new(|| inline_includes(include_str!("../kernels/order.cu"), &mut Vec::new()));
        &SOURCE
    }
}

impl Form {
    /// Its name and its source file.
    fn source(self) -> (&'static str, &'static str) {
        match self {
            Form::TwoShot => ("two_shot", include_str!("../kernels/all_reduce_two_shot.cu")),
            Form::OneShot => ("one_shot", include_str!("../kernels/all_reduce_one_shot.cu")),
            Form::Push => ("push", include_str!("../kernels/all_reduce_push.cu")),
            Form::ReduceScatter => ("reduce_scatter", include_str!("../kernels/reduce_scatter.cu")),
            Form::AllGather => ("all_gather", include_str!("../kernels/all_gather.cu")),
            Form::Broadcast => ("broadcast", include_str!("../kernels/broadcast.cu")),
            Form::AllToAll => ("all_to_all", include_str!("../kernels/all_to_all.cu")),
            Form::Gather => ("gather", include_str!("../kernels/gather.cu")),
            Form::Scatter => ("scatter", include_str!("../kernels/scatter.cu")),
        }
    }
}

/// The name of a reduction's type in the sources.
fn reduction(op: ReduceOp) -> Option<&'static str> {
    match op {
        ReduceOp::Sum => Some("Sum"),
        ReduceOp::Mean => Some("Mean"),
        ReduceOp::Max => Some("Max"),
        ReduceOp::Min => Some("Min"),
        _ => None,
    }
}

/// Whether there are kernels for this reduction: see `kernels/instances.cuh`.
pub(crate) fn reduces(op: ReduceOp, dtype: DType) -> bool {
    reduction(op).is_some() && !matches!(dtype, DType::I16 | DType::U16)
}

/// The name of the kernel's entry in its module.
impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reduces {
            Some((op, dtype)) => write!(f, "{}_{op}_{dtype}", self.form.source().0),
            None => f.write_str(self.form.source().0),
        }
    }
}

type Images = HashMap<(Kernel, u32), Arc<Vec<u8>>>;

static IMAGES: LazyLock<Mutex<Images>> = LazyLock::new(Mutex::default);

impl Kernel {
    /// The source of this kernel only, with all includes.
    fn source(&self) -> String {
        let source = inline_includes(self.form.source().1, &mut Vec::new());
        match self.reduces {
            Some((op, dtype)) => {
                let kind = reduction(op).unwrap_or("none");
                format!("#define ONLY(NAME) NAME({op}, {kind}, {dtype})\n{source}")
            }
            None => source,
        }
    }

    /// Returns machine code for GPUs of this architecture. Each kernel is compiled once per architecture.
    pub fn compiled(&self, architecture: u32) -> Result<Arc<Vec<u8>>, Error> {
        if let Some(image) = lock(&IMAGES).get(&(*self, architecture)) {
            return Ok(image.clone());
        }
        let begin = std::time::Instant::now();
        let what = format!("compiling the kernel {self} for sm_{architecture}");
        let image = Arc::new(compile(&self.source(), architecture, &what)?);
        log::debug!("{what} took {:.1?}", begin.elapsed());
        Ok(lock(&IMAGES).entry((*self, architecture)).or_insert(image).clone())
    }
}

/// Replaces includes by the headers' text: NVRTC gets no files. The kernels include no header of CUDA's.
fn inline_includes(source: &str, seen: &mut Vec<&'static str>) -> String {
    let mut text = String::new();
    for line in source.lines() {
        let included = line.strip_prefix("#include \"").and_then(|rest| rest.strip_suffix('"'));
        match included.and_then(|name| HEADERS.iter().find(|(header, _)| *header == name)) {
            Some((name, _)) if seen.contains(name) => {}
            Some((name, header)) => {
                seen.push(name);
                text += &inline_includes(header, seen);
            }
            None => {
                text += line;
                text.push('\n');
            }
        }
    }
    text
}

/// Compiles a source with NVRTC. `what` says so in errors.
///
/// # Errors
/// [`Error::Library`] if NVRTC is missing, or older than the GPU.
fn compile(source: &str, architecture: u32, what: &str) -> Result<Vec<u8>, Error> {
    let unfit = |reason: String| {
        let reason = format!(
            "{what}: {reason}; install CUDA's run-time compiler (PyPI: nvidia-cuda-nvrtc-cu12, or nvidia-cuda-nvrtc \
             for CUDA 13, whichever the driver supports), and add its folder to LD_LIBRARY_PATH"
        );
        Error::Library { library: "NVRTC".into(), reason }
    };
    // SAFETY: the call only tries to load the library.
    if !unsafe { nvrtc::sys::is_culib_present() } {
        return Err(unfit("libnvrtc is missing".into()));
    }
    let failed = |error: NvrtcError| Error::broken(what, format!("{error:?}"));
    let source = CString::new(source).map_err(|e| Error::broken(what, e))?;
    let program = nvrtc::result::create_program(&source, None).map_err(failed)?;
    let options = [format!("--gpu-architecture=sm_{architecture}"), "--std=c++17".into(), "-lineinfo".into()];
    // SAFETY: `program` lives until it is destroyed below and is not used after that. The image has as many bytes as
    // the library says.
    unsafe {
        let image = match nvrtc::result::compile_program(program, &options) {
            Ok(()) => image(program).map_err(failed),
            // All options but the architecture are the same everywhere.
            Err(NvrtcError(nvrtcResult::NVRTC_ERROR_INVALID_OPTION)) => {
                let (mut major, mut minor) = (0, 0);
                let _ = nvrtc::sys::nvrtcVersion(&mut major, &mut minor);
                Err(unfit(format!("version {major}.{minor} does not support this GPU")))
            }
            Err(error) => Err(Error::broken(what, compile_log(program).unwrap_or_else(|| format!("{error:?}")))),
        };
        let _ = nvrtc::result::destroy_program(program);
        image
    }
}

/// # Safety
/// The program must have been compiled, and be alive.
unsafe fn image(program: nvrtc::sys::nvrtcProgram) -> Result<Vec<u8>, NvrtcError> {
    let mut size = 0;
    // SAFETY: guaranteed by the caller; the vector has the size that the library asks for.
    unsafe {
        nvrtc::sys::nvrtcGetCUBINSize(program, &mut size).result()?;
        let mut image = vec![0u8; size];
        nvrtc::sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast::<c_char>()).result()?;
        Ok(image)
    }
}

/// The compiler's log.
///
/// # Safety
/// The program must be alive.
unsafe fn compile_log(program: nvrtc::sys::nvrtcProgram) -> Option<String> {
    // SAFETY: guaranteed by the caller; the log is zero-terminated.
    unsafe {
        let log = nvrtc::result::get_program_log(program).ok()?;
        Some(CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned())
    }
}

/// A kernel that is loaded on a GPU. It stays loaded: programs have few, and use them until they end.
pub(crate) struct Module(sys::CUfunction);

// SAFETY: any thread may launch a function.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// Loads the kernel into the current context.
    pub fn load(image: &[u8], kernel: &Kernel) -> Result<Module, DriverError> {
        let name = CString::new(kernel.to_string()).unwrap_or_default();
        // SAFETY: NVRTC made the image, which contains its own size.
        unsafe {
            let module = result::module::load_data(image.as_ptr().cast())?;
            Ok(Module(result::module::get_function(module, name)?))
        }
    }

    pub fn function(&self) -> sys::CUfunction {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn includes_are_inlined_once() {
        let reducing = [Form::TwoShot, Form::OneShot, Form::Push, Form::ReduceScatter];
        let moving = [Form::AllGather, Form::Broadcast, Form::AllToAll, Form::Gather, Form::Scatter];
        let kernels = reducing.map(|form| Kernel { form, reduces: Some((ReduceOp::Sum, DType::F32)) });
        for kernel in kernels.into_iter().chain(moving.map(|form| Kernel { form, reduces: None })) {
            let (form, source) = (kernel.form, kernel.source());
            assert!(source.contains(form.source().0), "{form:?}");
            assert!(!source.contains("#include \""), "{form:?}");
            assert_eq!(source.matches("#define BONFIRE_SIGNAL_CUH").count(), 1, "{form:?}");
        }
        assert!(!OrderKernel::source().contains("#include \""));
    }

    #[test]
    fn reductions_select_kernels_by_name() {
        let kernel = Kernel { form: Form::TwoShot, reduces: Some((ReduceOp::Mean, DType::BF16)) };
        assert_eq!(kernel.to_string(), "two_shot_mean_bf16");
        assert!(kernel.source().starts_with("#define ONLY(NAME) NAME(mean, Mean, bf16)\n"));
        assert_eq!(Kernel { form: Form::AllGather, reduces: None }.to_string(), "all_gather");
        assert!(reduces(ReduceOp::Max, DType::U64));
        assert!(!reduces(ReduceOp::Product, DType::F32) && !reduces(ReduceOp::Sum, DType::I16));
    }
}
