//! Failures on a GPU: every device that took part gets a typed error in time, and the GPU stays usable.

use std::time::Duration;

use bonfire::Error;
use cubecl::cuda::CudaRuntime;
use cubecl::server::ReduceOperation::Sum;

use crate::Devices;
use crate::cases::{Case, all_reduces};
use crate::devices::{Client, F32, create};
use crate::faults::{self, fails, works};
use bonfire_testing::process::{Process, is_child, send_line};

const DEADLINE: Duration = Duration::from_secs(2);

#[test]
#[ignore = "needs a CUDA GPU"]
fn missing_devices_are_named_on_all_devices() {
    faults::missing_devices(&Devices::new(71, 4), DEADLINE);
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn devices_that_disagree_get_the_same_error() {
    faults::disagreements(&Devices::new(75, 3));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn an_invalid_call_of_one_device_fails_all_before_the_deadline() {
    faults::impossible_calls(&Devices::new(78, 2));
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn a_rank_that_stops_midway_is_named_and_the_devices_work_again() {
    let devices = Devices::new(80, 4);
    for (stops, in_flight) in [(0, 1), (2, 1), (3, 7)] {
        let failures = fails(&devices, DEADLINE, |rank, client| {
            for call in 0.. {
                if rank == stops && call == 25 {
                    // The calls that its peers made with it are done before the peers fail.
                    client.sync_collective();
                    while client.flush().is_ok() {
                        std::thread::yield_now();
                    }
                    return;
                }
                let tensor = create(client, &vec![1.0; 1 << (call % 16)]);
                client.all_reduce(tensor.clone(), tensor, F32, devices.ids.clone(), Sum);
                if call % in_flight == 0 {
                    client.sync_collective();
                    if client.flush().is_err() {
                        return;
                    }
                }
            }
        });
        for failure in &failures {
            assert!(matches!(failure, Error::Timeout { missing, .. } if missing == &[stops]), "{failure}");
        }
        let case = |number| Case {
            number,
            dtype: F32,
            mean: false,
            in_place: false,
            length: 1 << (2 * number),
            around: (0, 0),
        };
        all_reduces(&devices, &(0..10).map(case).collect::<Vec<_>>());
    }
}

/// The ways in which a process that has devices ends.
const ENDS: [&str; 4] = ["done", "alone", "in flight", "exit"];

#[test]
#[ignore = "needs a CUDA GPU"]
fn processes_end_in_any_state_of_their_devices_and_leave_the_gpu_usable() {
    const END: &str = "BONFIRE_TEST_END";
    if is_child() {
        let devices = Devices::new(0, 2);
        works(&devices);
        let end = std::env::var(END).unwrap();
        let tensor = |client: &Client<CudaRuntime>| create(client, &vec![1.0; 1 << 22]);
        if end == "alone" {
            let mut client = devices.client(0);
            let tensor = tensor(&client);
            client.all_reduce(tensor.clone(), tensor, F32, devices.ids.clone(), Sum);
            client.flush().unwrap();
        } else if end != "done" {
            devices.run(|_, mut client| {
                for _ in 0..50 {
                    let tensor = tensor(&client);
                    client.all_reduce(tensor.clone(), tensor, F32, devices.ids.clone(), Sum);
                }
                client.flush().unwrap();
            });
        }
        send_line(&end);
        if end == "exit" {
            std::process::exit(0);
        }
        return;
    }
    let name = "failure::processes_end_in_any_state_of_their_devices_and_leave_the_gpu_usable";
    for end in ENDS {
        let mut process = Process::start(name, &[(END, end.to_owned())]);
        assert_eq!(process.read_line(), end);
        let status = process.end_within(Duration::from_secs(60));
        assert!(status.is_some_and(|status| status.success()), "{end}: {status:?}");
        works(&Devices::new(84, 2));
    }
}
