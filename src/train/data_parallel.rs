//! The same model on all ranks, and the same gradients in every step.

use std::collections::{HashSet, VecDeque};
use std::fmt;

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensorOps;
use burn::tensor::{Tensor, TensorData, TensorPrimitive};

use super::agree::{Described, Parameter, check_same, load_from_first, parameters, renew};
use super::announce::{Announced, Announcement, no_samples};
use super::bucket::{Bucket, Exchange, buckets, due, scale, scaled};
use super::states;
use crate::tensor::device::{Offer, Waiting, serves, start_all_reduce};
use bonfire_core::internal::Request;
use bonfire_core::{Buffer, DType, Error, Group, Operation, ReduceOp, Work};

/// One rank's part in the data-parallel training of a model: see [`train`](crate::train) for a whole loop.
pub struct DataParallel<B: AutodiffBackend> {
    pub(super) group: Group,
    /// The model's float parameters in visiting order, which is the order on which all ranks agree: the ids differ.
    pub(super) parameters: Vec<Parameter<B>>,
    /// Memory of packed buckets that is not in use.
    pub(super) memory: Vec<Buffer<u64>>,
    /// Synchronised so far.
    pub(super) steps: u64,
}

/// A bucket whose reduction was started.
enum Started<B: AutodiffBackend> {
    /// On the host: its tensors, by the positions of their parameters, and its memory. The tensor of a bucket that is
    /// reduced in its own memory has given that away for now.
    Host { tensors: Vec<(usize, TensorData)>, work: Work<Bucket> },
    /// On the way from and to the device.
    Device { positions: Vec<usize>, waiting: Waiting<B::InnerBackend> },
}

impl<B: AutodiffBackend> DataParallel<B> {
    /// Gives every rank rank 0's parameters: floats, ints, bools and running states such as batch norm's. Each rank
    /// brings a model of its own (with threads as ranks a clone will do, it is made independent here) and trains the
    /// one that is returned; its parameters keep their ids.
    ///
    /// Create the optimizer afterwards, and load a checkpoint before.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks where the models are not the same: it names the first parameter whose
    /// path, kind, element type, shape or need for a gradient differs, what rank 0 has and what another rank has. Else
    /// the errors of [`Group::all_reduce`].
    pub fn new<M: AutodiffModule<B>>(group: Group, model: M) -> Result<(M, Self), Error> {
        let (model, mappers) = renew(model);
        let (described, parameters) = trained(&model);
        check_same(&group, &described)?;
        let model = load_from_first(&group, model, mappers)?;
        Ok((model, DataParallel { group, parameters, memory: Vec::new(), steps: 0 }))
    }

    /// How often gradients were synchronised: steps, if each was followed by one of the optimizer's.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The group of ranks.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Averages the gradients over all ranks, weighted by the number of samples that each rank's loss was averaged
    /// over: `sum(samples * gradient) / sum(samples)`. The result is what one rank would have had if it had averaged
    /// its loss over all these samples, and it has the same bits on all ranks.
    ///
    /// All ranks call this in every step, also a rank without samples: it passes 0 and any gradients, such as
    /// `GradientsParams::new()`, which count for nothing. A gradient that is missing on some ranks counts as zero
    /// there; one that is missing on all ranks stays missing.
    ///
    /// To accumulate gradients over several micro-batches, synchronise once, after the last of them, with the number of
    /// all their samples. Weight each loss by its part of them, because accumulated gradients are added up:
    ///
    /// ```
    /// # use bonfire::{DataParallel, Group};
    /// # use burn::backend::{Autodiff, Flex};
    /// # use burn::nn::LinearConfig;
    /// # use burn::optim::{GradientsAccumulator, GradientsParams};
    /// # use burn::tensor::Tensor;
    /// # let device = Default::default();
    /// # let group = Group::threads(1)?.remove(0);
    /// # let linear = LinearConfig::new(2, 1).init::<Autodiff<Flex>>(&device);
    /// # let (model, mut ddp) = DataParallel::new(group, linear)?;
    /// # let micro_batches = [Tensor::<_, 2>::ones([3, 2], &device), Tensor::ones([1, 2], &device)];
    /// let samples: usize = micro_batches.iter().map(|input| input.dims()[0]).sum();
    /// let mut accumulator = GradientsAccumulator::new();
    /// for input in micro_batches {
    ///     let weight = input.dims()[0] as f32 / samples as f32;
    ///     let loss = model.forward(input).mean() * weight;
    ///     accumulator.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
    /// }
    /// let grads = ddp.sync(accumulator.grads(), samples)?;
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks where no rank has samples, or where a rank has gradients that do not
    /// belong to the model's parameters; the group stays sound. Else the errors of [`Group::all_reduce`].
    #[track_caller]
    pub fn sync(&mut self, grads: GradientsParams, samples: usize) -> Result<GradientsParams, Error> {
        let announcement = Announcement { operation: "sync", parameters: &self.parameters, grads, samples, lost: None };
        let Announced { mut grads, factor, exists } = announcement.make(&self.group)?;
        if self.group.world_size() == 1 {
            self.steps += 1;
            return Ok(grads);
        }
        // The last layers' gradients first, as they come out of the backward pass.
        let items = self.parameters.iter().enumerate().rev().filter(|(position, _)| exists[*position]);
        let items = items.map(|(position, parameter)| parameter.item(position));
        let mut started = VecDeque::new();
        for positions in buckets(items) {
            if let Some(oldest) = due(&mut started) {
                self.finish(oldest, &mut grads)?;
            }
            started.push_back(self.start(positions, &mut grads, factor)?);
        }
        started.into_iter().try_for_each(|oldest| self.finish(oldest, &mut grads))?;
        self.steps += 1;
        Ok(grads)
    }

    /// The means of metrics over all ranks, weighted by the number of samples of each rank: all ranks get the same. A
    /// rank without samples passes 0, and its values count for nothing.
    ///
    /// ```
    /// # let device = Default::default();
    /// # let group = bonfire::Group::threads(1)?.remove(0);
    /// # let linear = burn::nn::LinearConfig::new(2, 1).init::<burn::backend::Autodiff<burn::backend::Flex>>(&device);
    /// # let (_, ddp) = bonfire::DataParallel::new(group, linear)?;
    /// let [loss, accuracy] = ddp.mean(&[0.3, 0.9], 50)?;
    /// # Ok::<(), bonfire::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on all ranks where no rank has samples, else the errors of [`Group::all_reduce`].
    #[track_caller]
    pub fn mean<const N: usize>(&self, values: &[f64; N], samples: usize) -> Result<[f64; N], Error> {
        let weighted = values.iter().map(|value| if samples == 0 { 0.0 } else { value * samples as f64 });
        let mut sums: Vec<f64> = weighted.chain([samples as f64]).collect();
        self.group.all_reduce(&mut sums, ReduceOp::Sum)?;
        if sums[N] == 0.0 {
            return Err(no_samples("mean"));
        }
        Ok(std::array::from_fn(|i| sums[i] / sums[N]))
    }

    /// Averages the states that the ranks' models keep for themselves, such as the running statistics of batch norm:
    /// each rank's has seen its own samples only. Call it on all ranks before validating and saving.
    ///
    /// These are the float parameters that need no gradient. One that has the same bits on all ranks, such as a frozen
    /// weight, stays as it is.
    ///
    /// # Errors
    /// Those of [`Group::all_reduce`].
    pub fn average_states<M: AutodiffModule<B>>(&self, model: M) -> Result<M, Error> {
        states::average(&self.group, model)
    }

    /// Takes a bucket's gradients, scaled, and starts their reduction.
    #[track_caller]
    fn start(&mut self, positions: Vec<usize>, grads: &mut GradientsParams, factor: f64) -> Result<Started<B>, Error> {
        let dtype = self.parameters[positions[0]].element;
        let on_device = factor != 1.0 && serves::<B::InnerBackend>();
        let tensors = positions.iter().map(|&position| {
            let parameter = &self.parameters[position];
            match grads.remove::<B::InnerBackend, 1>(parameter.id) {
                Some(grad) => grad.into_primitive().tensor(),
                None => {
                    let zeros = TensorData::full_dtype(parameter.shape.clone(), 0, parameter.dtype);
                    B::InnerBackend::float_from_data(zeros, &parameter.device)
                }
            }
        });
        let scaled = |tensor| if on_device { scaled::<B::InnerBackend>(tensor, dtype, factor) } else { tensor };
        let tensors = tensors.map(scaled).collect();
        let request = Request::new(Operation::AllReduce, dtype).reduction(ReduceOp::Mean);
        match start_all_reduce::<B::InnerBackend>(&self.group, tensors, request) {
            Offer::Taken(waiting) => Ok(Started::Device { positions, waiting: waiting? }),
            Offer::Declined(tensors) => {
                let mut read = Vec::with_capacity(tensors.len());
                for (position, tensor) in positions.into_iter().zip(tensors) {
                    let grad = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(tensor));
                    read.push((position, grad.try_into_data().map_err(|e| Error::io("reading a gradient", e))?));
                }
                let mut bucket = self.pack(&mut read, dtype)?;
                if factor != 1.0 {
                    scale(bucket.bytes(), dtype, factor);
                }
                Ok(Started::Host { work: bucket.start(&self.group, dtype, Exchange::AllReduce)?, tensors: read })
            }
        }
    }

    fn pack(&mut self, tensors: &mut [(usize, TensorData)], dtype: DType) -> Result<Bucket, Error> {
        if let [(_, data)] = tensors
            && let Some(bucket) = Bucket::own(&mut data.bytes, dtype)
        {
            return Ok(bucket);
        }
        let tensors = tensors.iter().map(|(_, data)| (Some(&data.bytes[..]), data.bytes.len()));
        let bytes = tensors.clone().map(|(_, bytes)| bytes).sum();
        Ok(Bucket::packed(&self.group, self.memory.pop(), bytes)?.fill(tensors))
    }

    /// Waits for a reduction and registers its results as gradients.
    fn finish(&mut self, started: Started<B>, grads: &mut GradientsParams) -> Result<(), Error> {
        let mut register = |position: usize, tensor| {
            let grad = Tensor::<B::InnerBackend, 1>::from_primitive(TensorPrimitive::Float(tensor));
            grads.register(self.parameters[position].id, grad);
        };
        let (mut tensors, work) = match started {
            Started::Device { positions, waiting } => {
                positions.into_iter().zip(waiting()?).for_each(|(position, tensor)| register(position, tensor));
                return Ok(());
            }
            Started::Host { tensors, work } => (tensors, work),
        };
        match work.wait().map_err(|(error, _)| error)? {
            Bucket::Own(bytes) => tensors[0].1.bytes = bytes,
            Bucket::Packed(memory, bytes) => {
                let mut rest = &bytemuck::cast_slice(&memory)[..bytes];
                for (_, data) in &mut tensors {
                    let (part, after) = rest.split_at(data.bytes.len());
                    data.bytes.copy_from_slice(part);
                    rest = after;
                }
                self.memory.push(memory);
            }
        }
        for (position, data) in tensors {
            register(position, B::InnerBackend::float_from_data(data, &self.parameters[position].device));
        }
        Ok(())
    }
}

/// All parameters as the ranks compare them, and those whose gradients are synchronised.
pub(super) fn trained<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> (Vec<Described>, Vec<Parameter<B>>) {
    let (described, mut parameters) = parameters::<B, M>(model);
    // A parameter that is used twice in a model has one id and one gradient.
    let mut known = HashSet::new();
    parameters.retain(|parameter| known.insert(parameter.id));
    (described, parameters)
}

impl<B: AutodiffBackend> fmt::Debug for DataParallel<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters = self.parameters.len();
        f.debug_struct("DataParallel").field("group", &self.group).field("parameters", &parameters).finish()
    }
}
