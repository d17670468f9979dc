//! What executes a call, by size and topology: a kernel and its grid, NCCL, or neither, which leaves it to the host.
//!
//! [`TABLE`] is the whole policy, and `BONFIRE_CUDA` overrides it. Neither path does parts of variable sizes, nor
//! reductions of 16-bit integers; products are NCCL's only. All ranks choose alike, because the choice depends on what
//! they have agreed on, the setting among it, and on the call, which they compare.

mod setting;

pub(crate) use self::setting::{Mode, Settings, Share, parse_paths, settings};
use super::control::{MAX_BLOCKS, MAX_RANKS, PUSH_BYTES};
use super::kernel::{Form, Kernel, reduces};
use super::remote;
use bonfire_core::{Call, Operation};

/// How the ranks' GPUs are connected: the slowest connection between any two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// All ranks are on one GPU.
    OneGpu,
    /// NVLink, or another connection with atomic operations between GPUs.
    Nvlink,
    /// PCIe, with access to each other's memory.
    Pcie,
    /// As `Nvlink`, between processes: data that peers access is copied to windows and from them.
    NvlinkWindows,
    /// As `Pcie`, between processes.
    PcieWindows,
    /// Ranks of several processes share a GPU, which divides its time among processes: a kernel that waits for one of
    /// another process costs a slice of time at each signal. Only kernels that a user requests do that.
    TimeSliced,
    /// Without access to each other's memory, of several hosts, or of processes that cannot open each other's memory.
    Apart,
}

/// A row: with this link and up to this many ranks, the sizes in bytes up to which kernels do an all-reduce, in each of
/// their forms. Other operations have one form, so only the last limit is theirs. Above, and in rows without kernels,
/// NCCL does it if it is available, else kernels if they support the ranks, else the host.
struct Row(Link, usize, Option<[usize; 3]>);

/// Push and one-shot move more data than two-shot but synchronise less often; between GPUs synchronisation costs more
/// than within one. NCCL can let a switch add, and over PCIe it writes where our kernels read, which waits for a round
/// trip. On one GPU it is no faster, and most versions refuse it. Windows cost one-shot a copy within the GPU's memory,
/// and two-shot two, which count beside NVLink and not beside PCIe. The rows of one GPU were measured on an H100
/// (docs/measurements/gpu.md). The others follow vLLM and NCCL, and are not yet measured here.
#[rustfmt::skip]
static TABLE: [Row; 17] = [
    //  link          ranks                  push      one-shot  two-shot
    Row(Link::OneGpu, 2,         Some([32 << 10, 512 << 10, usize::MAX])),
    Row(Link::OneGpu, 4,         Some([32 << 10, 256 << 10, usize::MAX])),
    Row(Link::OneGpu, MAX_RANKS, Some([32 << 10, 128 << 10, usize::MAX])),
    Row(Link::Nvlink, 2,         Some([16 << 10,   1 << 20, 8 << 20])),
    Row(Link::Nvlink, 4,         Some([16 << 10, 512 << 10, 8 << 20])),
    Row(Link::Nvlink, MAX_RANKS, Some([ 8 << 10, 256 << 10, 8 << 20])),
    Row(Link::Pcie,   2,         Some([16 << 10, 128 << 10, 512 << 10])),
    Row(Link::Pcie,   4,         Some([ 8 << 10,  32 << 10,  64 << 10])),
    Row(Link::Pcie,   MAX_RANKS, Some([ 8 << 10,  16 << 10,  32 << 10])),
    Row(Link::NvlinkWindows, 2,         Some([16 << 10, 512 << 10, 4 << 20])),
    Row(Link::NvlinkWindows, 4,         Some([16 << 10, 256 << 10, 4 << 20])),
    Row(Link::NvlinkWindows, MAX_RANKS, Some([ 8 << 10, 128 << 10, 4 << 20])),
    Row(Link::PcieWindows,   2,         Some([16 << 10, 128 << 10, 512 << 10])),
    Row(Link::PcieWindows,   4,         Some([ 8 << 10,  32 << 10,  64 << 10])),
    Row(Link::PcieWindows,   MAX_RANKS, Some([ 8 << 10,  16 << 10,  32 << 10])),
    Row(Link::TimeSliced,    MAX_RANKS, Some([16 << 10, 256 << 10, 0])),
    Row(Link::Apart,  usize::MAX, None),
];

/// How the ranks are distributed over GPUs that kernels can serve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Topology {
    pub ranks: usize,
    pub gpus: usize,
    pub link: Link,
    /// The largest number of ranks on one GPU.
    pub sharing: u32,
    /// Of the GPU that has the fewest.
    pub multiprocessors: u32,
    /// What kernels take of these if there is one GPU.
    pub share: Share,
}

/// A kernel and its grid, the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LaunchConfig {
    pub kernel: Kernel,
    /// Per rank.
    pub blocks: u32,
    pub threads: u32,
}

/// The limits of the table's row for these ranks. `None` if kernels do not serve them.
fn limits(kernels: Option<&Topology>) -> Option<&'static [usize; 3]> {
    let (link, ranks) = kernels.map_or((Link::Apart, 0), |topology| (topology.link, topology.ranks));
    TABLE.iter().find(|Row(of, up_to, _)| *of == link && ranks <= *up_to)?.2.as_ref()
}

/// What executes a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Choice {
    Kernel(LaunchConfig),
    Nccl,
}

/// Chooses what executes a call, the same on all ranks. `None` leaves it to the host. `kernels` is the topology if
/// kernels can serve the ranks; `nccl` is whether they have a communicator.
pub(crate) fn choose(mode: Mode, call: &Call, kernels: Option<&Topology>, nccl: bool) -> Option<Choice> {
    let kernel = || kernels.and_then(|topology| launch_config(mode, call, topology)).map(Choice::Kernel);
    let nccl = || (nccl && remote::supports(call)).then_some(Choice::Nccl);
    let shared = kernels.is_some_and(|topology| topology.link == Link::TimeSliced);
    let large = limits(kernels).is_none_or(|[.., two_shot]| call.bytes() > *two_shot);
    match mode {
        Mode::Host => None,
        Mode::Nccl => nccl().or_else(kernel),
        Mode::Auto if shared => nccl(),
        Mode::Auto if large => nccl().or_else(kernel),
        Mode::Auto | Mode::Kernels | Mode::Form(_) => kernel().or_else(nccl),
    }
}

/// Whether NCCL would execute some calls, if it is available.
pub(crate) fn wants_nccl(mode: Mode, kernels: Option<&Topology>) -> bool {
    match mode {
        Mode::Host => false,
        Mode::Nccl => true,
        // Most versions of NCCL refuse ranks that share a GPU.
        Mode::Auto if kernels.is_some_and(|topology| topology.sharing > 1) => false,
        Mode::Auto => limits(kernels).is_none_or(|[.., two_shot]| *two_shot < usize::MAX),
        Mode::Kernels | Mode::Form(_) => kernels.is_none(),
    }
}

fn all_reduce_form(mode: Mode, bytes: usize, push: usize, one_shot: usize) -> Form {
    match mode {
        Mode::Form(Form::Push) if bytes > PUSH_BYTES => Form::TwoShot,
        Mode::Form(form) => form,
        _ if bytes <= push => Form::Push,
        _ if bytes <= one_shot => Form::OneShot,
        _ => Form::TwoShot,
    }
}

/// The kernel and grid for a call, or `None` if no kernel supports it.
pub(crate) fn launch_config(mode: Mode, call: &Call, topology: &Topology) -> Option<LaunchConfig> {
    if call.is_sized() || call.reduction.is_some_and(|op| !reduces(op, call.dtype)) {
        return None;
    }
    let bytes = call.bytes();
    let [push, one_shot, _] = limits(Some(topology))?;
    let form = match (call.operation, mode) {
        (_, Mode::Host) => return None,
        (Operation::ReduceScatter, _) => Form::ReduceScatter,
        (Operation::AllGather, _) => Form::AllGather,
        (Operation::Broadcast, _) => Form::Broadcast,
        (Operation::AllToAll, _) => Form::AllToAll,
        (Operation::Gather, _) => Form::Gather,
        (Operation::Scatter, _) => Form::Scatter,
        // A reduce is an all-reduce whose results the other ranks drop: too rare in training for kernels of its own.
        (Operation::AllReduce | Operation::Reduce, mode) => all_reduce_form(mode, bytes, *push, *one_shot),
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
    let usable = match topology.gpus {
        1 => topology.share.of(topology.multiprocessors),
        _ => topology.multiprocessors / 4,
    };
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

    const TWO_ON_ONE: Topology =
        Topology { ranks: 2, gpus: 1, link: Link::OneGpu, sharing: 2, multiprocessors: 132, share: Share::All };
    const EIGHT: Topology = between(Link::Nvlink, 8);

    const fn between(link: Link, ranks: usize) -> Topology {
        Topology { ranks, gpus: ranks, link, sharing: 1, multiprocessors: 132, share: Share::All }
    }

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
        assert_eq!(form(&Call::new(Operation::Gather, DType::I16, 10).rooted(0)), Some(Form::Gather));
        assert_eq!(form(&Call::new(Operation::Scatter, DType::I16, 10).rooted(0)), Some(Form::Scatter));
        let reduce = |count| Call::new(Operation::Reduce, DType::F32, count).reducing(ReduceOp::Sum).rooted(1);
        assert_eq!([10, 10 << 20].map(|count| form(&reduce(count))), [Some(Form::Push), Some(Form::TwoShot)]);
        assert_eq!(form(&Call::new(Operation::Send, DType::F32, 10)), None);
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
        let half = |topology| Topology { share: Share::Half, ..topology };
        // Between GPUs a kernel takes a quarter in any case.
        for (topology, most) in [(TWO_ON_ONE, 66), (half(TWO_ON_ONE), 33), (EIGHT, 33), (half(EIGHT), 33)] {
            let config = |count| launch_config(Mode::Kernels, &all_reduce(DType::F32, count), &topology).unwrap();
            assert_eq!((config(0).blocks, config(1).blocks, config(64 << 20).blocks), (1, 1, most));
        }
        // A pack for each thread of a small message.
        let blocks = |bytes: usize| {
            launch_config(Mode::Kernels, &all_reduce(DType::F32, bytes / 4), &TWO_ON_ONE).unwrap().blocks
        };
        assert_eq!([64 << 10, 768 << 10].map(blocks), [8, 48]);
        // More ranks than multiprocessors.
        let oversubscribed = Topology { ranks: 8, sharing: 8, multiprocessors: 4, ..TWO_ON_ONE };
        assert_eq!(launch_config(Mode::Kernels, &all_reduce(DType::F32, 1 << 20), &oversubscribed).unwrap().blocks, 1);
    }

    /// Each row at the edges of its sizes, with what is chosen up to there and above.
    #[test]
    fn every_row_of_the_table_selects_by_size() {
        let on_one = |ranks| Topology { ranks, sharing: ranks as u32, ..TWO_ON_ONE };
        let rows = [
            (Some(on_one(1)), [32 << 10, 512 << 10, 0]),
            (Some(on_one(2)), [32 << 10, 512 << 10, 0]),
            (Some(on_one(4)), [32 << 10, 256 << 10, 0]),
            (Some(on_one(8)), [32 << 10, 128 << 10, 0]),
            (Some(between(Link::Nvlink, 2)), [16 << 10, 1 << 20, 8 << 20]),
            (Some(between(Link::Nvlink, 3)), [16 << 10, 512 << 10, 8 << 20]),
            (Some(between(Link::Nvlink, 8)), [8 << 10, 256 << 10, 8 << 20]),
            (Some(between(Link::Pcie, 2)), [16 << 10, 128 << 10, 512 << 10]),
            (Some(between(Link::Pcie, 4)), [8 << 10, 32 << 10, 64 << 10]),
            (Some(between(Link::Pcie, 5)), [8 << 10, 16 << 10, 32 << 10]),
            (Some(between(Link::NvlinkWindows, 2)), [16 << 10, 512 << 10, 4 << 20]),
            (Some(between(Link::NvlinkWindows, 4)), [16 << 10, 256 << 10, 4 << 20]),
            (Some(between(Link::NvlinkWindows, 5)), [8 << 10, 128 << 10, 4 << 20]),
            (Some(between(Link::PcieWindows, 2)), [16 << 10, 128 << 10, 512 << 10]),
            (Some(between(Link::PcieWindows, 3)), [8 << 10, 32 << 10, 64 << 10]),
            (Some(between(Link::PcieWindows, 8)), [8 << 10, 16 << 10, 32 << 10]),
        ];
        for (topology, [push, one_shot, two_shot]) in rows {
            let chosen = |bytes: usize, nccl| match choose(
                Mode::Auto,
                &all_reduce(DType::F32, bytes / 4),
                topology.as_ref(),
                nccl,
            ) {
                Some(Choice::Kernel(config)) => Some(config.kernel.form),
                Some(Choice::Nccl) => None,
                None => panic!("{topology:?} leaves {bytes} bytes to the host"),
            };
            for nccl in [false, true] {
                let mut expected = vec![
                    (0, Some(Form::Push)),
                    (push, Some(Form::Push)),
                    (push + 4, Some(Form::OneShot)),
                    (one_shot, Some(Form::OneShot)),
                    (one_shot + 4, Some(Form::TwoShot)),
                ];
                if two_shot > 0 {
                    let large = if nccl && cfg!(feature = "nccl") { None } else { Some(Form::TwoShot) };
                    expected.extend([(two_shot, Some(Form::TwoShot)), (two_shot + 4, large)]);
                }
                for (bytes, form) in expected {
                    assert_eq!(chosen(bytes, nccl), form, "{bytes} bytes of {topology:?}, NCCL: {nccl}");
                }
            }
            assert_eq!(wants_nccl(Mode::Auto, topology.as_ref()), two_shot > 0, "{topology:?}");
        }
        // Processes that share a GPU use kernels only if they are requested.
        let shared = Topology { link: Link::TimeSliced, ..TWO_ON_ONE };
        for bytes in [0, 4, 64 << 20] {
            let call = all_reduce(DType::F32, bytes / 4);
            assert_eq!(choose(Mode::Auto, &call, Some(&shared), false), None);
            let kernel = choose(Mode::Kernels, &call, Some(&shared), true);
            assert!(matches!(kernel, Some(Choice::Kernel(_))), "{bytes} bytes");
        }
        // Apart: NCCL, else the host.
        let call = all_reduce(DType::F32, 1);
        assert_eq!(choose(Mode::Auto, &call, None, false), None);
        assert_eq!(choose(Mode::Auto, &call, None, true), cfg!(feature = "nccl").then_some(Choice::Nccl));
        assert!(wants_nccl(Mode::Auto, None));
        // Ranks that share GPUs get no communicator.
        assert!(!wants_nccl(Mode::Auto, Some(&Topology { ranks: 4, sharing: 2, ..between(Link::Pcie, 2) })));
    }
}
