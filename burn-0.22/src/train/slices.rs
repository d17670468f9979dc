//! Parts of parameters, as a module that burn's optimizers update.
//!
//! burn 0.22 hides the type of an optimizer in a `ModuleOptimizer`, which updates modules. It finds the group of a
//! parameter by its path, and the parameter's state by its id. So parts of parameters are a module with these paths and
//! ids.

use std::ops::Range;

use burn::grad_clipping::GradientClipping;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Device, Tensor};

use super::model::Parameter;
use bonfire_core::Error;

/// Updates a part of a parameter. Neither has autodiff.
pub(super) fn update<const D: usize>(
    optimizer: &mut ModuleOptimizer,
    rate: ModuleLearningRate,
    parameter: &Parameter,
    value: Tensor<D>,
    gradient: Tensor<D>,
) -> Tensor<D> {
    let mut gradients = GradientsParams::new();
    gradients.register(parameter.id, gradient);
    // burn takes a parameter's state of autodiff, and gives it back.
    let slice = Slice { id: parameter.id, path: parameter.path.clone(), value: Tensor::from_inner(value) };
    optimizer.step(rate, slice, gradients).value.inner()
}

/// A part of a parameter.
#[derive(Clone, Debug)]
struct Slice<const D: usize> {
    id: ParamId,
    path: String,
    value: Tensor<D>,
}

impl<const D: usize> Module for Slice<D> {
    fn collect_devices(&self, mut devices: Devices) -> Devices {
        devices.push(self.value.device());
        devices
    }

    fn fork(self, device: &Device) -> Self {
        self.to_device(device)
    }

    fn to_device(self, device: &Device) -> Self {
        Slice { value: self.value.to_device(device), ..self }
    }

    fn train(self) -> Self {
        self
    }

    fn valid(&self) -> Self {
        self.clone()
    }

    fn materialize(self) -> Self {
        self
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        let names = self.path.split('.');
        names.clone().for_each(|name| visitor.enter_module(name, ""));
        visitor.visit_float(&Param::initialized(self.id, self.value.clone()));
        names.for_each(|name| visitor.exit_module(name, ""));
    }

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Self {
        let Slice { id, path, value } = self;
        path.split('.').for_each(|name| mapper.enter_module(name, ""));
        let value = mapper.map_float(Param::initialized(id, value)).into_value();
        path.split('.').for_each(|name| mapper.exit_module(name, ""));
        Slice { id, path, value }
    }
}

/// Fails unless the optimizer updates a part of a parameter as it updates the whole: it is tried on twelve numbers, in
/// the place of this parameter.
pub(super) fn check_elementwise(
    operation: &str,
    optimizer: &ModuleOptimizer,
    parameter: &Parameter,
) -> Result<(), Error> {
    let new = || {
        let new = optimizer.clone().load_record(OptimizerRecord::default());
        // That one is known, and applied to whole gradients.
        match new.grad_clipping() {
            Some(_) => new.with_grad_clipping(GradientClipping::Value(f32::INFINITY)),
            None => new,
        }
    };
    let device = Device::new(parameter.spec.device.clone());
    let wave = |factor: f32| {
        let values: Vec<f32> = (0..12).map(|i| (factor * i as f32).sin()).collect();
        Tensor::<1>::from_floats(&values[..], &device).reshape([4, 3])
    };
    let (values, gradients) = (wave(0.7), wave(1.3));
    let updated = |rows: Range<usize>| {
        let (mut optimizer, mut own) = (new(), values.clone().slice([rows.clone()]));
        for _ in 0..2 {
            let gradient = gradients.clone().slice([rows.clone()]);
            own = update::<2>(&mut optimizer, 0.1.into(), parameter, own, gradient);
        }
        own
    };
    let difference = (Tensor::cat(vec![updated(0..1), updated(1..4)], 0) - updated(0..4)).abs().max();
    let difference = difference.try_into_data().map_err(|e| Error::io("trying an optimizer on slices", e))?;
    if difference.iter::<f64>().all(|difference| difference < 1e-3) {
        return Ok(());
    }
    let reason = format!(
        "the optimizer of `{}` updates an element by others of its parameter, as Muon, LAMB and clipping by norm in a \
         group do, and a rank has a part only; give these parameters one that treats each element by itself, such as \
         `AdamW` (`Parts::split`), or train them with `DataParallel`, where every rank updates whole ones",
        parameter.path
    );
    Err(Error::argument(operation, reason))
}
