//! Properties of the streams that collectives and copies run on, as the software driver records them.
//! `scripts/gpu-check` leaves these tests out.

use bonfire::server::copy;
use cubecl::server::Handle;
use cudarc::driver::{CudaContext, sys};

use crate::Devices;
use crate::devices::{F32, create, read};
use crate::faults::works;
use crate::software_driver::SoftwareDriver;

#[test]
#[ignore = "needs the software driver"]
fn collectives_run_on_streams_of_the_highest_priority() {
    let driver = SoftwareDriver::loaded();
    works(&Devices::new(88, 2));
    let context = CudaContext::new(0).unwrap();
    context.bind_to_thread().unwrap();
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: the context is current on this thread, and both places are valid.
    unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }.result().unwrap();
    assert!(greatest < least, "the driver has priorities");
    assert!(driver.launches("push_sum_f32") > 0);
    assert_eq!(driver.least_priority("push_sum_f32"), greatest);
    // cubecl's streams have none.
    assert_eq!(driver.least_priority("tensors_ready"), least);
}

/// A host function would make the next copy wait for the host.
#[test]
#[ignore = "needs the software driver"]
fn copies_do_not_wait_for_the_host_and_their_memory_is_reused() {
    let driver = SoftwareDriver::loaded();
    let devices = Devices::new(90, 2);
    let clients = [devices.client(0), devices.client(1)];
    let values = vec![3.5; 1 << 18];
    let before = driver.host_functions();
    let source = create(&clients[0], &values);
    let copy_once = || -> Handle {
        let tensor = source.clone().copy_descriptor([values.len()].into(), [1].into(), F32.size());
        copy(&clients[0], tensor, &clients[1]).unwrap()
    };
    let in_use = || clients.each_ref().map(|client| client.memory_usage().unwrap().bytes_in_use);
    assert!(read(&clients[1], &copy_once()) == values);
    clients.iter().for_each(|client| client.flush().unwrap());
    let after_one = in_use();
    for _ in 0..100 {
        // In flight together with copies before it.
        drop(copy_once());
    }
    assert!(read(&clients[1], &copy_once()) == values);
    clients.iter().for_each(|client| client.flush().unwrap());
    assert_eq!(driver.host_functions(), before, "no copy calls the host");
    assert_eq!(in_use(), after_one, "the memory of copies that are done is free");
}
