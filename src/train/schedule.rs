//! Which bucket of a step is sent next. All ranks send the same buckets in the same order, whatever the order in which
//! their own gradients are complete.

use super::bucket::BucketTable;

/// The progress of a rank through the buckets of one step.
pub(crate) struct Schedule {
    buckets: BucketTable,
    /// By position, the bucket of a parameter. `None` for those without, such as frozen ones.
    bucket_of: Vec<Option<usize>>,
    /// By bucket, how many of its gradients are not complete.
    incomplete: Vec<usize>,
    /// The next bucket to send.
    next: usize,
}

impl Schedule {
    /// Creates the schedule of a step that has not begun, for `count` parameters.
    pub fn new(buckets: BucketTable, count: usize) -> Schedule {
        let mut bucket_of = vec![None; count];
        for (bucket, positions) in buckets.iter().enumerate() {
            positions.iter().for_each(|position| bucket_of[*position] = Some(bucket));
        }
        let incomplete = buckets.iter().map(Vec::len).collect();
        Schedule { buckets, bucket_of, incomplete, next: 0 }
    }

    /// Counts a gradient as complete. Call it once for each position. Returns false for a parameter without a bucket.
    pub fn complete(&mut self, position: usize) -> bool {
        let Some(bucket) = self.bucket_of.get(position).copied().flatten() else { return false };
        self.incomplete[bucket] -= 1;
        true
    }

    /// Returns the positions of the next bucket to send, if there is one and its gradients are complete.
    pub fn ready(&self) -> Option<&[usize]> {
        let positions = self.buckets.get(self.next)?;
        (self.incomplete[self.next] == 0).then_some(positions)
    }

    /// Returns the positions of the next bucket to send, complete or not.
    pub fn next(&self) -> Option<&[usize]> {
        self.buckets.get(self.next).map(Vec::as_slice)
    }

    /// Goes on to the bucket after the next one, which was sent.
    pub fn sent(&mut self) {
        self.next += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn buckets_leave_in_the_order_of_the_table() {
        let mut schedule = Schedule::new(Arc::new([vec![3, 1], vec![0]]), 4);
        assert!(schedule.complete(0));
        assert_eq!(schedule.ready(), None);
        assert!(schedule.complete(1));
        assert!(!schedule.complete(2));
        assert_eq!(schedule.ready(), None);
        assert!(schedule.complete(3));
        assert_eq!(schedule.ready(), Some(&[3, 1][..]));
        schedule.sent();
        assert_eq!(schedule.ready(), Some(&[0][..]));
        schedule.sent();
        assert_eq!((schedule.ready(), schedule.next()), (None, None));
    }
}
