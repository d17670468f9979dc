//! Seeded initialisation: the same weights on any number of ranks.

use burn::module::Module;
use burn::tensor::Device;

use super::walk::visit_floats;
use bonfire_core::internal::AgreedOperations;
use bonfire_core::{Error, Group};

/// Creates a model whose random weights depend on `seed` only: the same on every rank, for any number of ranks, whether
/// they are threads or processes. All ranks call it with the same seed, and `init` draws the same numbers on each.
///
/// burn's backends have one random generator per process, which ranks that are threads share. So the ranks of a process
/// draw one after the other, no rank of the group draws anything else meanwhile, and weights that burn would draw later
/// are drawn at once. Threads that are no ranks of the group must not draw random numbers during the call. `init` must
/// not run operations of the group.
///
/// Afterwards the generator is seeded with `seed` and the rank: ranks that are processes have different dropout masks,
/// the same in every run. Those of threads differ from run to run; `docs/guide/randomness.md` says what to do.
///
/// ```
/// use bonfire::train::seeded;
/// use bonfire::{DataParallel, Group};
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Device;
///
/// fn start(group: Group) -> Result<(Linear, DataParallel), bonfire::Error> {
///     let device = Device::flex().autodiff();
///     let model = seeded(&group, 42, &device, || LinearConfig::new(2, 1).init(&device))?;
///     DataParallel::new(group, model)
/// }
/// # start(Group::threads(1)?.remove(0))?;
/// # Ok::<(), bonfire::Error>(())
/// ```
///
/// # Errors
/// [`Error::Io`] on all ranks if the device of one fails. Otherwise the errors of [`Group::barrier`].
#[track_caller]
pub fn seeded<M: Module>(group: &Group, seed: u64, device: &Device, init: impl FnOnce() -> M) -> Result<M, Error> {
    let _call = group.enter("seeded");
    let draw = || {
        let model = init();
        // burn draws weights when they are first used. Visiting them is such a use.
        visit_floats(&model, |_| ());
        // A device draws asynchronously.
        device.sync().map_err(|error| Error::io("drawing weights", error))?;
        Ok(model)
    };
    bonfire_train::agree::seeded(group, seed, |seed| device.seed(seed), draw)
}
