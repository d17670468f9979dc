//! What is wrong with data is the same error on all ranks, and none waits for another.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bonfire::{Error, Group};
use bonfire_testing::ranks;
use burn::nn::LinearConfig;

use super::{Batch, Case, Get, Tail, builder, numbers, together};
use crate::burn_version::*;
use crate::loader_version::*;

const CASE: Case = Case { len: 60, batch: 10, seed: Some(1), tail: Tail::Keep, workers: 2 };

#[test]
fn settings_and_data_sets_that_cannot_work_are_an_error_before_the_first_batch() {
    let drops = Case { tail: Tail::Drop, ..CASE };
    type Make = fn(usize) -> Case;
    let cases: [(Make, &str); 9] = [
        (|rank| Case { len: 60 - rank, ..CASE }, "rank 0's sampler has 60 samples, and rank 1's 59 samples"),
        (|rank| Case { batch: 10 + rank / 2, ..CASE }, "batches of 10, and rank 2's batches of 11"),
        (|rank| Case { seed: (rank == 0).then_some(1), ..CASE }, "a shuffled order, and rank 1's the data set's order"),
        (|rank| Case { len: 60 * usize::from(rank != 1), ..CASE }, "rank 1's data set has no samples"),
        (|_| Case { batch: 0, ..CASE }, "on rank 0, a batch has 0 samples for 3 ranks"),
        (|rank| Case { batch: if rank == 2 { 2 } else { 10 }, ..CASE }, "on rank 2, a batch has 2 samples for 3 ranks"),
        (|_| Case { len: 62, ..CASE }, "the last batch of an epoch has 2 samples, so rank 2 of 3 would have none"),
        (|_| Case { len: 9, tail: Tail::Drop, ..CASE }, "`drop_last` leaves no batch of 10"),
        (|rank| Case { tail: [Tail::Keep, Tail::Pad, Tail::Keep][rank], ..CASE }, "is kept, and rank 1's"),
    ];
    for (case, expected) in cases {
        let errors = ranks(3, |group| {
            let loader = case(group.rank()).loader(&group);
            let error = loader.epoch(0).err().expect("an error");
            assert!(matches!(error, Error::InvalidArgument { .. }) && error.to_string().contains(expected), "{error}");
            // As burn iterates; then the group is still usable.
            let (batches, _, text) = iterate(&*loader);
            assert_eq!((batches.len(), text), (0, Some(error.to_string())));
            assert_eq!(drops.loader(&group).epoch(3).unwrap().count(), 6);
            error
        });
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    }
}

#[test]
fn a_tail_that_is_too_short_where_a_training_resumes_is_an_error_on_all_ranks() {
    let errors = ranks(3, |group| {
        let mut batches = CASE.loader(&group).epoch(0).unwrap().after(28);
        let error = batches.next().unwrap().unwrap_err();
        assert!(batches.next().is_none());
        error.to_string()
    });
    assert!(errors.iter().all(|error| error.contains("the last batch of an epoch has 2 samples")), "{errors:?}");
}

#[test]
fn a_data_set_that_changes_its_length_is_an_error_on_all_ranks() {
    let errors = ranks(2, |group| {
        let items = numbers(60, Some as Get);
        let len = items.0.clone();
        let loader = CASE.loader_of(&group, items);
        assert_eq!(loader.epoch(0).unwrap().count(), 6);
        len.store(60 + group.rank(), Ordering::SeqCst);
        let error = loader.epoch(1).err().expect("an error").to_string();
        len.store(60, Ordering::SeqCst);
        assert_eq!(loader.epoch(1).unwrap().count(), 6);
        error
    });
    let expected = "rank 1's data set had 60 samples when its loader was built, and has 61 now";
    assert!(errors.iter().all(|error| error.contains(expected)), "{errors:?}");
}

/// Trains on three ranks, of which rank 1 fails to load sample 31. Returns each rank's error, and the batches that it
/// had before.
fn training(
    workers: usize,
    get: impl Fn(usize, usize) -> Option<usize> + Copy + Send + Sync + 'static,
    batch: impl Fn(usize, &Batch) + Copy + Send + Sync + 'static,
) -> Vec<(Error, usize)> {
    let train = |group: Group, steps: &mut usize| -> Result<(), Error> {
        let rank = group.rank();
        let builder = builder(&group, move |items| {
            batch(rank, &items);
            items
        });
        let items = numbers(90, move |index| get(rank, index));
        let loader = builder.batch_size(9).num_workers(workers).build(items);
        let model: Linear = LinearConfig::new(1, 1).init(&device());
        let (model, ddp) = DataParallel::new(group, model)?;
        for batch in loader.epoch(0)? {
            let batch = batch?;
            let input = Tensor::<2>::ones([batch.len(), 1], &device());
            ddp.run(&model, [input], |model, input| (model.forward(input).mean(), batch.len()))?;
            *steps += 1;
        }
        Ok(())
    };
    ranks(3, |group| {
        let mut steps = 0;
        let error = train(group, &mut steps).expect_err("an error");
        (error, steps)
    })
}

#[test]
fn a_sample_that_cannot_be_loaded_is_an_error_on_all_ranks_and_none_hangs() {
    let fails = |rank, index| rank == 1 && index == 31;
    for workers in [0, 3] {
        let none = training(workers, move |rank, index| (!fails(rank, index)).then_some(index), |_, _| {});
        let panics = training(
            workers,
            move |rank, index| {
                assert!(!fails(rank, index), "a truncated image");
                Some(index)
            },
            |_, _| {},
        );
        let batcher = training(
            workers,
            |_, index| Some(index),
            move |rank, items| assert!(!items.iter().any(|index| fails(rank, *index)), "a truncated image"),
        );
        for (errors, expected) in [(none, MISSING), (panics, "a truncated image"), (batcher, "a truncated image")] {
            for (error, steps) in &errors {
                let text = error.to_string();
                assert!(text.contains(expected) && text.contains("rank 1"), "{workers} workers: {text}");
                // Sample 31 is in the fourth batch.
                assert_eq!((error, *steps), (&errors[0].0, 3), "{workers} workers");
            }
        }
    }
}

#[test]
fn own_loaders_of_different_lengths_are_an_error_at_the_first_step_that_differs() {
    let errors = ranks(2, |group| {
        let batches = 4 + group.rank();
        let model: Linear = LinearConfig::new(1, 1).init(&device());
        let (model, ddp) = DataParallel::new(group, model).unwrap();
        let run = || ddp.run(&model, [()], |model, ()| (model.forward(Tensor::<2>::ones([1, 1], &device())).mean(), 1));
        for _ in 0..4 {
            run().unwrap();
        }
        let end = || if batches == 5 { run().map(drop) } else { ddp.mean(&[0.0], 1).map(drop) };
        end().unwrap_err()
    });
    assert!(matches!(errors[0], Error::Mismatch { .. }) && errors[0] == errors[1], "{errors:?}");
}

#[test]
fn the_same_loader_goes_on_after_an_iterator_that_was_not_used_up() {
    let batches = ranks(2, |group| {
        let loader: Arc<Loader<usize, Batch>> = CASE.loader(&group);
        for _ in 0..3 {
            loader.epoch(0).unwrap().next().unwrap().unwrap();
        }
        iterate(&*loader).0
    });
    assert_eq!(together(batches), CASE.expected(1, 0));
}
