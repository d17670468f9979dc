//! What executes a call, by size and topology: a kernel and its grid, NCCL, or neither, which leaves it to the host.
//!
//! Neither does parts of variable sizes, nor reductions of 16-bit integers; products are NCCL's only. All ranks choose
//! alike, because the choice depends on what they have agreed on and on the call, which they compare.

use std::sync::LazyLock;

use super::control::{MAX_BLOCKS, PUSH_BYTES};
use super::kernel::{Form, Kernel, reduces};
use super::remote;
use bonfire_core::{Call, Error, Operation};

/// The data path between devices, as `BONFIRE_CUDA` requests it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// As the limits below say.
    Auto,
    /// By kernels where possible. The size decides the form.
    Kernels,
    /// By kernels where possible. All-reduces use this form if it supports the call.
    Form(Form),
    /// By NCCL where possible.
    Nccl,
    /// Through host memory.
    Host,
}

/// The values of `BONFIRE_CUDA`.
const MODES: [(&str, Mode); 7] = [
    ("auto", Mode::Auto),
    ("kernels", Mode::Kernels),
    ("push", Mode::Form(Form::Push)),
    ("one-shot", Mode::Form(Form::OneShot)),
    ("two-shot", Mode::Form(Form::TwoShot)),
    ("nccl", Mode::Nccl),
    ("host", Mode::Host),
];

/// The requested mode. A device has no caller to return an error to, so a malformed setting is logged.
pub(super) static MODE: LazyLock<Mode> = LazyLock::new(|| match std::env::var("BONFIRE_CUDA") {
    Ok(text) => parse_mode(&text).unwrap_or_else(|error| {
        log::warn!("{error}; taking auto");
        Mode::Auto
    }),
    Err(_) => Mode::Auto,
});

pub(super) fn parse_mode(text: &str) -> Result<Mode, Error> {
    let found = MODES.iter().find(|(name, _)| *name == text).map(|(_, mode)| *mode);
    found.ok_or_else(|| {
        let names: Vec<_> = MODES.iter().map(|(name, _)| *name).collect();
        Error::Config(format!("BONFIRE_CUDA is '{text}'; it must be one of {}", names.join(", ")))
    })
}

/// How the ranks are distributed over GPUs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Topology {
    pub ranks: usize,
    pub gpus: usize,
    /// The largest number of ranks on one GPU.
    pub sharing: u32,
    /// Of the GPU that has the fewest.
    pub multiprocessors: u32,
}

/// A kernel and its grid, the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LaunchConfig {
    pub kernel: Kernel,
    /// Per rank.
    pub blocks: u32,
    pub threads: u32,
}

/// Sizes in bytes up to which each form is used, by the number of ranks. Push and one-shot move more data than two-shot
/// but synchronise less often; between GPUs synchronisation costs more than within one. Above `kernels` NCCL is used if
/// available: it can let a switch between GPUs add. The values follow vLLM and NCCL and are not yet measured here.
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

/// What executes a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Choice {
    Kernel(LaunchConfig),
    Nccl,
}

/// Chooses what executes a call, the same on all ranks. `None` leaves it to the host. `kernels` is the topology if
/// kernels can serve the ranks; `nccl` is whether they have a communicator.
pub(super) fn choose(mode: Mode, call: &Call, kernels: Option<&Topology>, nccl: bool) -> Option<Choice> {
    let kernel = || kernels.and_then(|topology| launch_config(mode, call, topology)).map(Choice::Kernel);
    let nccl = || (nccl && remote::supports(call)).then_some(Choice::Nccl);
    let large = kernels.and_then(Limits::of).is_some_and(|limits| call.bytes() > limits.kernels);
    match mode {
        Mode::Host => None,
        Mode::Nccl => nccl().or_else(kernel),
        Mode::Auto if large => nccl().or_else(kernel),
        Mode::Auto | Mode::Kernels | Mode::Form(_) => kernel().or_else(nccl),
    }
}

/// Whether NCCL would execute some calls, if it is available.
pub(super) fn wants_nccl(mode: Mode, kernels: Option<&Topology>) -> bool {
    let always = || kernels.and_then(Limits::of).is_some_and(|limits| limits.kernels == usize::MAX);
    match mode {
        Mode::Host => false,
        Mode::Nccl => true,
        Mode::Auto => !always(),
        Mode::Kernels | Mode::Form(_) => kernels.is_none(),
    }
}

/// The kernel and grid for a call, or `None` if no kernel supports it.
pub(super) fn launch_config(mode: Mode, call: &Call, topology: &Topology) -> Option<LaunchConfig> {
    if call.is_sized() || call.reduction.is_some_and(|op| !reduces(op, call.dtype)) {
        return None;
    }
    let bytes = call.bytes();
    let limits = Limits::of(topology)?;
    let form = match (call.operation, mode) {
        (_, Mode::Host) => return None,
        (Operation::ReduceScatter, _) => Form::ReduceScatter,
        (Operation::AllGather, _) => Form::AllGather,
        (Operation::Broadcast, _) => Form::Broadcast,
        (Operation::AllToAll, _) => Form::AllToAll,
        (Operation::AllReduce, Mode::Form(Form::Push)) if bytes > PUSH_BYTES => Form::TwoShot,
        (Operation::AllReduce, Mode::Form(form)) => form,
        (Operation::AllReduce, _) if bytes <= limits.push => Form::Push,
        (Operation::AllReduce, _) if bytes <= limits.one_shot => Form::OneShot,
        (Operation::AllReduce, _) => Form::TwoShot,
        _ => return None,
    };
    let threads = 512;
    // A packet of 8 bytes or a pack of 16 for each thread, until blocks run out; then several packs. In most forms a
    // rank has only its part.
    let work = match form {
        Form::Push => bytes.div_ceil(8),
        Form::OneShot | Form::AllToAll => bytes.div_ceil(16),
        _ => bytes.div_ceil(16 * topology.ranks),
    };
    // A block of 512 threads fits on a multiprocessor whatever the kernel's registers are: see `__launch_bounds__`. A
    // kernel that waits for another GPU must leave room for what that GPU may be waiting for here, such as the kernel
    // of another team.
    let usable = if topology.gpus > 1 { topology.multiprocessors / 4 } else { topology.multiprocessors };
    let most = MAX_BLOCKS.min(usable / topology.sharing).max(1);
    let blocks = u32::try_from(work.div_ceil(threads)).unwrap_or(most).clamp(1, most);
    let reduces = call.reduction.map(|op| (op, call.dtype));
    Some(LaunchConfig { kernel: Kernel { form, reduces }, blocks, threads: threads as u32 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bonfire_core::internal::Request;
    use bonfire_core::{DType, ReduceOp};

    fn all_reduce(dtype: DType, count: usize) -> Call {
        Call::new(Operation::AllReduce, dtype, count).reducing(ReduceOp::Sum)
    }

    const TWO_ON_ONE: Topology = Topology { ranks: 2, gpus: 1, sharing: 2, multiprocessors: 132 };
    const EIGHT: Topology = Topology { ranks: 8, gpus: 8, sharing: 1, multiprocessors: 132 };

    fn form(mode: Mode, topology: &Topology, bytes: usize) -> Form {
        launch_config(mode, &all_reduce(DType::F32, bytes / 4), topology).unwrap().kernel.form
    }

    #[test]
    fn size_and_topology_select_the_form() {
        assert_eq!(form(Mode::Kernels, &TWO_ON_ONE, 8 << 10), Form::Push);
        assert_eq!(form(Mode::Kernels, &TWO_ON_ONE, 64 << 10), Form::OneShot);
        assert_eq!(form(Mode::Kernels, &TWO_ON_ONE, 1 << 20), Form::TwoShot);
        assert_eq!(form(Mode::Kernels, &EIGHT, 128 << 10), Form::OneShot);
        assert_eq!(form(Mode::Kernels, &EIGHT, 512 << 10), Form::TwoShot);
    }

    #[test]
    fn a_forced_form_is_used_where_possible() {
        assert_eq!(form(Mode::Form(Form::OneShot), &EIGHT, 1 << 30), Form::OneShot);
        assert_eq!(form(Mode::Form(Form::Push), &EIGHT, PUSH_BYTES), Form::Push);
        assert_eq!(form(Mode::Form(Form::Push), &EIGHT, PUSH_BYTES + 4), Form::TwoShot);
        assert_eq!(launch_config(Mode::Host, &all_reduce(DType::F32, 1), &EIGHT), None);
        assert_eq!(launch_config(Mode::Kernels, &all_reduce(DType::I16, 1), &EIGHT), None);
    }

    #[test]
    fn moves_take_any_element_type_and_uneven_parts_have_no_kernel() {
        let gather = Call::new(Operation::AllGather, DType::I16, 10);
        let form = |call: &Call| launch_config(Mode::Form(Form::Push), call, &EIGHT).map(|config| config.kernel.form);
        assert_eq!(form(&gather), Some(Form::AllGather));
        assert_eq!(form(&Request::from(gather).sizes(&[1, 9]).call(10)), None);
        let scatter = Call::new(Operation::ReduceScatter, DType::F32, 10).reducing(ReduceOp::Sum);
        assert_eq!(form(&scatter), Some(Form::ReduceScatter));
        assert_eq!(form(&Call::new(Operation::Gather, DType::I16, 10).rooted(0)), None);
    }

    #[test]
    fn nccl_takes_calls_that_kernels_cannot_do_or_do_slower() {
        let large = all_reduce(DType::F32, 4 << 20);
        let auto = |call: &Call, kernels: Option<&Topology>, nccl| choose(Mode::Auto, call, kernels, nccl);
        for topology in [TWO_ON_ONE, EIGHT] {
            let small = all_reduce(DType::F32, 100);
            let kernel = launch_config(Mode::Auto, &small, &topology).map(Choice::Kernel);
            assert_eq!(auto(&small, Some(&topology), true), kernel);
            assert_eq!(choose(Mode::Host, &small, Some(&topology), true), None);
        }
        assert_eq!(auto(&large, None, false), None);
        assert!(matches!(auto(&large, Some(&EIGHT), false), Some(Choice::Kernel(_))));
        #[cfg(feature = "nccl")]
        {
            assert_eq!(auto(&large, None, true), Some(Choice::Nccl));
            assert_eq!(auto(&large, Some(&EIGHT), true), Some(Choice::Nccl));
            assert!(matches!(auto(&large, Some(&TWO_ON_ONE), true), Some(Choice::Kernel(_))));
            assert!(matches!(choose(Mode::Kernels, &large, Some(&EIGHT), true), Some(Choice::Kernel(_))));
            assert_eq!(choose(Mode::Nccl, &all_reduce(DType::F32, 1), Some(&EIGHT), true), Some(Choice::Nccl));
        }
    }

    #[test]
    fn grids_fit_on_the_gpu() {
        for (topology, most) in [(TWO_ON_ONE, 66), (EIGHT, 33)] {
            let config = |count| launch_config(Mode::Kernels, &all_reduce(DType::F32, count), &topology).unwrap();
            assert_eq!((config(0).blocks, config(1).blocks, config(64 << 20).blocks), (1, 1, most));
        }
        // A pack for each thread of a small message.
        let blocks = |bytes: usize| {
            launch_config(Mode::Kernels, &all_reduce(DType::F32, bytes / 4), &TWO_ON_ONE).unwrap().blocks
        };
        assert_eq!([64 << 10, 512 << 10].map(blocks), [8, 32]);
        // More ranks than multiprocessors.
        let oversubscribed = Topology { ranks: 8, gpus: 1, sharing: 8, multiprocessors: 4 };
        assert_eq!(launch_config(Mode::Kernels, &all_reduce(DType::F32, 1 << 20), &oversubscribed).unwrap().blocks, 1);
    }

    #[test]
    fn settings_are_names_from_the_table() {
        assert_eq!(parse_mode("two-shot"), Ok(Mode::Form(Form::TwoShot)));
        let error = parse_mode("fast").unwrap_err().to_string();
        assert!(error.contains("'fast'") && error.contains("one of auto, kernels, push"), "{error}");
    }
}
