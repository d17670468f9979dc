//! Which kernel does an all-reduce, and in which grid.

use std::sync::LazyLock;

use super::control::{MAX_BLOCKS, PUSH_BYTES};
use super::kernel::{Form, Kernel, reduces};
use crate::call::Call;
use crate::error::Error;

/// How the data of devices in one process travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// By kernels, the form chosen by size.
    Kernels,
    /// By kernels of one form, where it can do the call.
    Form(Form),
    /// Through host memory.
    Host,
}

/// What `BONFIRE_CUDA` may be.
const ROUTES: [(&str, Route); 5] = [
    ("kernels", Route::Kernels),
    ("push", Route::Form(Form::Push)),
    ("one-shot", Route::Form(Form::OneShot)),
    ("two-shot", Route::Form(Form::TwoShot)),
    ("host", Route::Host),
];

/// What the environment asks for. A device has nobody to return an error to, so a malformed setting is told to the log.
pub(super) static ROUTE: LazyLock<Route> = LazyLock::new(|| match std::env::var("BONFIRE_CUDA") {
    Ok(text) => route(&text).unwrap_or_else(|error| {
        log::warn!("{error}; taking kernels");
        Route::Kernels
    }),
    Err(_) => Route::Kernels,
});

pub(super) fn route(text: &str) -> Result<Route, Error> {
    let found = ROUTES.iter().find(|(name, _)| *name == text).map(|(_, route)| *route);
    found.ok_or_else(|| {
        let names: Vec<_> = ROUTES.iter().map(|(name, _)| *name).collect();
        Error::Config(format!("BONFIRE_CUDA is '{text}'; it must be one of {}", names.join(", ")))
    })
}

/// Where the ranks are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Topology {
    pub ranks: usize,
    pub gpus: usize,
    /// The most ranks on one GPU.
    pub sharing: u32,
    /// Of the GPU that has the fewest.
    pub multiprocessors: u32,
}

/// A kernel and its grid: the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Launch {
    pub kernel: Kernel,
    /// For each rank.
    pub blocks: u32,
    pub threads: u32,
}

/// Up to how many bytes a form is taken, by the number of ranks. Push and one-shot move more data than two-shot and meet
/// less often. Between GPUs a meeting costs more than inside one. From what vLLM and NCCL do; not yet measured here.
struct Limits {
    ranks: usize,
    push: usize,
    one_shot: usize,
}

const BETWEEN_GPUS: [Limits; 3] = [
    Limits { ranks: 2, push: 16 << 10, one_shot: 1 << 20 },
    Limits { ranks: 4, push: 16 << 10, one_shot: 512 << 10 },
    Limits { ranks: 8, push: 8 << 10, one_shot: 256 << 10 },
];

const ON_ONE_GPU: [Limits; 3] = [
    Limits { ranks: 2, push: 16 << 10, one_shot: 256 << 10 },
    Limits { ranks: 4, push: 16 << 10, one_shot: 128 << 10 },
    Limits { ranks: 8, push: 8 << 10, one_shot: 64 << 10 },
];

/// How a call is launched; none where no kernel does it.
pub(super) fn launch(route: Route, call: &Call, topology: &Topology) -> Option<Launch> {
    let op = call.reduction?;
    if !reduces(op, call.dtype) {
        return None;
    }
    let bytes = call.bytes();
    let limits = if topology.gpus > 1 { &BETWEEN_GPUS } else { &ON_ONE_GPU };
    let limits = limits.iter().find(|limits| topology.ranks <= limits.ranks)?;
    let form = match route {
        Route::Host => return None,
        Route::Form(Form::Push) if bytes > PUSH_BYTES => Form::TwoShot,
        Route::Form(form) => form,
        Route::Kernels if bytes <= limits.push => Form::Push,
        Route::Kernels if bytes <= limits.one_shot => Form::OneShot,
        Route::Kernels => Form::TwoShot,
    };
    let threads = 512;
    // What a thread does at a time: a packet of 8 bytes, or four packs of 16. Of two-shot each rank has only a part.
    let work = match form {
        Form::Push => bytes.div_ceil(8),
        Form::OneShot => bytes.div_ceil(64),
        _ => bytes.div_ceil(64 * topology.ranks),
    };
    // A block of 512 threads fits on a multiprocessor whatever the kernel's registers are: see `__launch_bounds__`. A kernel
    // that waits for another GPU must leave room for what that GPU may be waiting for here.
    let usable = if topology.gpus > 1 { topology.multiprocessors / 4 } else { topology.multiprocessors };
    let most = MAX_BLOCKS.min(usable / topology.sharing).max(1);
    let blocks = u32::try_from(work.div_ceil(threads)).unwrap_or(most).clamp(1, most);
    Some(Launch { kernel: Kernel { form, op, dtype: call.dtype }, blocks, threads: threads as u32 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Operation;
    use crate::dtype::{DType, ReduceOp};

    fn all_reduce(dtype: DType, count: usize) -> Call {
        Call { operation: Operation::AllReduce, dtype, count, reduction: Some(ReduceOp::Sum), root: None, sizes: None }
    }

    const TWO_ON_ONE: Topology = Topology { ranks: 2, gpus: 1, sharing: 2, multiprocessors: 132 };
    const EIGHT: Topology = Topology { ranks: 8, gpus: 8, sharing: 1, multiprocessors: 132 };

    fn form(route: Route, topology: &Topology, bytes: usize) -> Form {
        launch(route, &all_reduce(DType::F32, bytes / 4), topology).unwrap().kernel.form
    }

    #[test]
    fn the_form_goes_by_size_and_topology() {
        assert_eq!(form(Route::Kernels, &TWO_ON_ONE, 8 << 10), Form::Push);
        assert_eq!(form(Route::Kernels, &TWO_ON_ONE, 64 << 10), Form::OneShot);
        assert_eq!(form(Route::Kernels, &TWO_ON_ONE, 1 << 20), Form::TwoShot);
        assert_eq!(form(Route::Kernels, &EIGHT, 128 << 10), Form::OneShot);
        assert_eq!(form(Route::Kernels, &EIGHT, 512 << 10), Form::TwoShot);
    }

    #[test]
    fn a_forced_form_is_taken_where_it_can_do_the_call() {
        assert_eq!(form(Route::Form(Form::OneShot), &EIGHT, 1 << 30), Form::OneShot);
        assert_eq!(form(Route::Form(Form::Push), &EIGHT, PUSH_BYTES), Form::Push);
        assert_eq!(form(Route::Form(Form::Push), &EIGHT, PUSH_BYTES + 4), Form::TwoShot);
        assert_eq!(launch(Route::Host, &all_reduce(DType::F32, 1), &EIGHT), None);
        assert_eq!(launch(Route::Kernels, &all_reduce(DType::I16, 1), &EIGHT), None);
    }

    #[test]
    fn grids_fit_on_the_gpu() {
        for (topology, most) in [(TWO_ON_ONE, 66), (EIGHT, 33)] {
            let launch = |count| launch(Route::Kernels, &all_reduce(DType::F32, count), &topology).unwrap();
            assert_eq!((launch(0).blocks, launch(1).blocks, launch(64 << 20).blocks), (1, 1, most));
        }
        // More ranks than multiprocessors.
        let crowded = Topology { ranks: 8, gpus: 1, sharing: 8, multiprocessors: 4 };
        assert_eq!(launch(Route::Kernels, &all_reduce(DType::F32, 1 << 20), &crowded).unwrap().blocks, 1);
    }

    #[test]
    fn settings_are_names_from_the_table() {
        assert_eq!(route("two-shot"), Ok(Route::Form(Form::TwoShot)));
        let error = route("fast").unwrap_err().to_string();
        assert!(error.contains("'fast'") && error.contains("one of kernels, push"), "{error}");
    }
}
