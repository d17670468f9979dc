//! Who does an operation, by size and topology: a kernel and in which grid, NCCL, or neither, which leaves it to the host.

use std::sync::LazyLock;

use super::control::{MAX_BLOCKS, PUSH_BYTES};
use super::kernel::{Form, Kernel, reduces};
use super::remote;
use bonfire_core::{Call, Error, Operation};

/// How data travels between devices, as far as `BONFIRE_CUDA` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// As the table below says.
    Auto,
    /// By kernels, the form chosen by size, where they can.
    Kernels,
    /// By kernels, all-reduces by those of one form, where it can do the call.
    Form(Form),
    /// By NCCL where it can.
    Nccl,
    /// Through host memory.
    Host,
}

/// What `BONFIRE_CUDA` may be.
const ROUTES: [(&str, Route); 7] = [
    ("auto", Route::Auto),
    ("kernels", Route::Kernels),
    ("push", Route::Form(Form::Push)),
    ("one-shot", Route::Form(Form::OneShot)),
    ("two-shot", Route::Form(Form::TwoShot)),
    ("nccl", Route::Nccl),
    ("host", Route::Host),
];

/// What the environment asks for. A device has nobody to return an error to, so a malformed setting is told to the log.
pub(super) static ROUTE: LazyLock<Route> = LazyLock::new(|| match std::env::var("BONFIRE_CUDA") {
    Ok(text) => route(&text).unwrap_or_else(|error| {
        log::warn!("{error}; taking auto");
        Route::Auto
    }),
    Err(_) => Route::Auto,
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

/// Up to how many bytes a way is taken, by the number of ranks. Push and one-shot move more data than two-shot and meet
/// less often. Between GPUs a meeting costs more than inside one. Above `kernels` NCCL does it, where it is there: it can
/// let a switch between GPUs add. From what vLLM and NCCL do; not yet measured here.
struct Limits {
    ranks: usize,
    push: usize,
    one_shot: usize,
    kernels: usize,
}

const BETWEEN_GPUS: [Limits; 3] = [
    Limits { ranks: 2, push: 16 << 10, one_shot: 1 << 20, kernels: usize::MAX },
    Limits { ranks: 4, push: 16 << 10, one_shot: 512 << 10, kernels: 8 << 20 },
    Limits { ranks: 8, push: 8 << 10, one_shot: 256 << 10, kernels: 8 << 20 },
];

const ON_ONE_GPU: [Limits; 3] = [
    Limits { ranks: 2, push: 16 << 10, one_shot: 256 << 10, kernels: usize::MAX },
    Limits { ranks: 4, push: 16 << 10, one_shot: 128 << 10, kernels: usize::MAX },
    Limits { ranks: 8, push: 8 << 10, one_shot: 64 << 10, kernels: usize::MAX },
];

impl Limits {
    fn of(topology: &Topology) -> Option<&'static Limits> {
        let limits = if topology.gpus > 1 { &BETWEEN_GPUS } else { &ON_ONE_GPU };
        limits.iter().find(|limits| topology.ranks <= limits.ranks)
    }
}

/// Who does a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Way {
    Kernel(Launch),
    Nccl,
}

/// Who does a call, the same on all ranks; none leaves it to the host. `kernels` is the topology where kernels can work for
/// the ranks, `nccl` whether they have a communicator.
pub(super) fn way(route: Route, call: &Call, kernels: Option<&Topology>, nccl: bool) -> Option<Way> {
    let kernel = || kernels.and_then(|topology| launch(route, call, topology)).map(Way::Kernel);
    let nccl = || (nccl && remote::serves(call)).then_some(Way::Nccl);
    let large = kernels.and_then(Limits::of).is_some_and(|limits| call.bytes() > limits.kernels);
    match route {
        Route::Host => None,
        Route::Nccl => nccl().or_else(kernel),
        Route::Auto if large => nccl().or_else(kernel),
        Route::Auto | Route::Kernels | Route::Form(_) => kernel().or_else(nccl),
    }
}

/// Whether any call is NCCL's, if it is there.
pub(super) fn wants_nccl(route: Route, kernels: Option<&Topology>) -> bool {
    let always = || kernels.and_then(Limits::of).is_some_and(|limits| limits.kernels == usize::MAX);
    match route {
        Route::Host => false,
        Route::Nccl => true,
        Route::Auto => !always(),
        Route::Kernels | Route::Form(_) => kernels.is_none(),
    }
}

/// How a call is launched; none where no kernel does it.
pub(super) fn launch(route: Route, call: &Call, topology: &Topology) -> Option<Launch> {
    if call.is_sized() || call.reduction.is_some_and(|op| !reduces(op, call.dtype)) {
        return None;
    }
    let bytes = call.bytes();
    let limits = Limits::of(topology)?;
    let form = match (call.operation, route) {
        (_, Route::Host) => return None,
        (Operation::ReduceScatter, _) => Form::ReduceScatter,
        (Operation::AllGather, _) => Form::AllGather,
        (Operation::Broadcast, _) => Form::Broadcast,
        (Operation::AllToAll, _) => Form::AllToAll,
        (Operation::AllReduce, Route::Form(Form::Push)) if bytes > PUSH_BYTES => Form::TwoShot,
        (Operation::AllReduce, Route::Form(form)) => form,
        (Operation::AllReduce, _) if bytes <= limits.push => Form::Push,
        (Operation::AllReduce, _) if bytes <= limits.one_shot => Form::OneShot,
        (Operation::AllReduce, _) => Form::TwoShot,
        _ => return None,
    };
    let threads = 512;
    // What a thread does at a time: a packet of 8 bytes, or four packs of 16. Mostly each rank has only a part.
    let work = match form {
        Form::Push => bytes.div_ceil(8),
        Form::OneShot | Form::AllToAll => bytes.div_ceil(64),
        _ => bytes.div_ceil(64 * topology.ranks),
    };
    // A block of 512 threads fits on a multiprocessor whatever the kernel's registers are: see `__launch_bounds__`. A kernel
    // that waits for another GPU must leave room for what that GPU may be waiting for here.
    let usable = if topology.gpus > 1 { topology.multiprocessors / 4 } else { topology.multiprocessors };
    let most = MAX_BLOCKS.min(usable / topology.sharing).max(1);
    let blocks = u32::try_from(work.div_ceil(threads)).unwrap_or(most).clamp(1, most);
    let reduces = call.reduction.map(|op| (op, call.dtype));
    Some(Launch { kernel: Kernel { form, reduces }, blocks, threads: threads as u32 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bonfire_core::{DType, ReduceOp};

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
    fn what_is_moved_needs_no_element_type_and_what_is_uneven_no_kernel() {
        let gather = Call { operation: Operation::AllGather, reduction: None, ..all_reduce(DType::I16, 10) };
        let form = |call: &Call| launch(Route::Form(Form::Push), call, &EIGHT).map(|launch| launch.kernel.form);
        assert_eq!(form(&gather), Some(Form::AllGather));
        assert_eq!(form(&Call { sizes: Some(1), ..gather }), None);
        let scatter = Call { operation: Operation::ReduceScatter, ..all_reduce(DType::F32, 10) };
        assert_eq!(form(&scatter), Some(Form::ReduceScatter));
        assert_eq!(form(&Call { operation: Operation::Gather, root: Some(0), ..gather }), None);
    }

    #[test]
    fn nccl_does_what_kernels_cannot_or_are_slower_at() {
        let large = all_reduce(DType::F32, 4 << 20);
        let auto = |call: &Call, kernels: Option<&Topology>, nccl| way(Route::Auto, call, kernels, nccl);
        for topology in [TWO_ON_ONE, EIGHT] {
            let small = all_reduce(DType::F32, 100);
            let kernel = launch(Route::Auto, &small, &topology).map(Way::Kernel);
            assert_eq!(auto(&small, Some(&topology), true), kernel);
            assert_eq!(way(Route::Host, &small, Some(&topology), true), None);
        }
        assert_eq!(auto(&large, None, false), None);
        assert!(matches!(auto(&large, Some(&EIGHT), false), Some(Way::Kernel(_))));
        #[cfg(feature = "nccl")]
        {
            assert_eq!(auto(&large, None, true), Some(Way::Nccl));
            assert_eq!(auto(&large, Some(&EIGHT), true), Some(Way::Nccl));
            assert!(matches!(auto(&large, Some(&TWO_ON_ONE), true), Some(Way::Kernel(_))));
            assert!(matches!(way(Route::Kernels, &large, Some(&EIGHT), true), Some(Way::Kernel(_))));
            assert_eq!(way(Route::Nccl, &all_reduce(DType::F32, 1), Some(&EIGHT), true), Some(Way::Nccl));
        }
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
        assert!(error.contains("'fast'") && error.contains("one of auto, kernels, push"), "{error}");
    }
}
