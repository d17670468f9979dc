//! Which bucket of a step is sent next. All ranks send the same buckets in the same order, whatever the order in which
//! their own gradients are complete.

use super::BucketTable;

/// The progress of a rank through the buckets of one step.
pub(crate) struct Schedule {
    /// By position, the bucket of a parameter. `None` for those without, such as frozen ones.
    bucket_of: Vec<Option<usize>>,
    /// By bucket, how many of its gradients are not complete.
    incomplete: Vec<usize>,
    /// The next bucket to send.
    next: usize,
}

impl Schedule {
    /// Creates the schedule of a step that has not begun, for `count` parameters.
    pub fn new(buckets: &BucketTable, count: usize) -> Schedule {
        let mut bucket_of = vec![None; count];
        for (number, bucket) in buckets.iter().enumerate() {
            bucket.positions.iter().for_each(|position| bucket_of[*position] = Some(number));
        }
        Schedule { bucket_of, incomplete: buckets.iter().map(|bucket| bucket.positions.len()).collect(), next: 0 }
    }

    /// Whether a gradient is in a bucket.
    pub fn expects(&self, position: usize) -> bool {
        self.bucket_of[position].is_some()
    }

    /// Counts a gradient as complete. Call it once for each position.
    pub fn complete(&mut self, position: usize) {
        if let Some(bucket) = self.bucket_of[position] {
            self.incomplete[bucket] -= 1;
        }
    }

    /// Returns the next bucket to send, if there is one and its gradients are complete.
    pub fn ready(&self) -> Option<usize> {
        self.next().filter(|next| self.incomplete[*next] == 0)
    }

    /// Returns the next bucket to send, complete or not.
    pub fn next(&self) -> Option<usize> {
        Some(self.next).filter(|next| *next < self.incomplete.len())
    }

    /// Goes on to the bucket after the next one, which was sent.
    pub fn sent(&mut self) {
        self.next += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::Bucket;
    use super::*;

    #[test]
    fn buckets_leave_in_the_order_of_the_table() {
        let table: BucketTable =
            [vec![3, 1], vec![0]].into_iter().map(|positions| Bucket { positions, block: None }).collect();
        let mut schedule = Schedule::new(&table, 4);
        schedule.complete(0);
        assert_eq!(schedule.ready(), None);
        schedule.complete(1);
        schedule.complete(2);
        assert_eq!(schedule.ready(), None);
        schedule.complete(3);
        assert_eq!(schedule.ready(), Some(0));
        schedule.sent();
        assert_eq!(schedule.ready(), Some(1));
        schedule.sent();
        assert_eq!((schedule.ready(), schedule.next()), (None, None));
    }
}
