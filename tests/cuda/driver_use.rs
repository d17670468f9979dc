//! Properties of the streams that collectives and copies run on, as the software driver records them.

use cudarc::driver::{CudaContext, sys};

use crate::Devices;
use crate::faults::works;
use crate::software_driver::SoftwareDriver;

#[test]
#[ignore = "needs the software driver"]
fn collectives_run_on_streams_of_the_highest_priority() {
    let Some(driver) = SoftwareDriver::loaded() else { return };
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
