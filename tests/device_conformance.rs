//! All collectives of devices, compared with results of the host.

#[path = "common/device_cases.rs"]
mod cases;
#[path = "common/devices.rs"]
mod devices;

use cubecl::ir::{ElemType, FloatKind};
use cubecl::wgpu::WgpuRuntime;

use cases::{Case, all_reduces};
use devices::F32;

type Devices = devices::Devices<WgpuRuntime>;

/// All lengths with padding around them: data starts at a multiple of 4 bytes.
fn cases(lengths: &[usize]) -> Vec<Case> {
    cases::cases(lengths, |_| [(0, 0), (12, 0), (0, 5), (32, 11)])
}

#[test]
fn all_reduce_on_one_device() {
    all_reduces(&Devices::new(0, 1), &cases(&[0, 1, 7]));
}

#[test]
fn all_reduce_on_two_devices() {
    all_reduces(&Devices::new(1, 2), &cases(&[0, 1, 7, 1001]));
}

#[test]
fn all_reduce_on_three_devices() {
    all_reduces(&Devices::new(3, 3), &cases(&[0, 1, 7]));
}

#[test]
fn all_reduce_on_five_devices() {
    all_reduces(&Devices::new(6, 5), &cases(&[0, 1, 33]));
}

#[test]
fn all_reduce_of_large_buffers() {
    // More than one round's worth, less, and one that ends inside a word.
    let case = |number, dtype, length, around| Case { number, dtype, mean: false, in_place: true, length, around };
    let f16 = ElemType::Float(FloatKind::F16);
    let cases = [case(0, F32, 7 << 20, (0, 0)), case(1, F32, 1 << 20, (8, 4)), case(2, f16, (1 << 18) + 1, (0, 2))];
    all_reduces(&Devices::new(11, 2), &cases);
}

#[test]
fn reductions_of_results_that_are_not_there_yet() {
    cases::chained_all_reduces::<WgpuRuntime>([(13, 2), (15, 3)]);
}

#[test]
fn transfers_between_all_pairs() {
    cases::transfers::<WgpuRuntime>([(18, 1), (19, 2), (21, 3), (24, 5)]);
}

#[test]
fn copies_between_all_pairs() {
    cases::copies::<WgpuRuntime>([(29, 1), (30, 2), (32, 3), (35, 5)]);
}
