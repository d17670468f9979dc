//! The calls that the devices of one list have made, and bounded waits for the calls of others.

use std::collections::VecDeque;
use std::time::Duration;

use crate::sync::{Deadline, SlowWaitWarning};
use crate::types::{Call, Error, RankList, Site};

/// The calls of several devices. Each device's calls are numbered in order, starting at 1.
pub struct DeviceCalls {
    /// How many calls each device has made.
    made: Vec<u64>,
    /// The calls with the numbers after `forgotten`.
    calls: VecDeque<Call>,
    forgotten: u64,
    /// The error that ended the group of devices.
    pub failure: Option<Error>,
}

impl DeviceCalls {
    /// Those of this many devices, which have made none.
    pub fn of(devices: usize) -> DeviceCalls {
        DeviceCalls { made: vec![0; devices], calls: VecDeque::new(), forgotten: 0, failure: None }
    }

    /// Records a device's next call and returns its number. Fails if another device made a different call under that
    /// number, or after a failure.
    pub fn add(&mut self, device: usize, call: Call) -> Result<u64, Error> {
        if let Some(error) = &self.failure {
            return Err(error.clone());
        }
        let before = self.made[device];
        match self.get(before + 1) {
            Some(other) if other != call => {
                let made = self.made.iter().enumerate().filter(|(_, made)| **made > before);
                let mut calls: Vec<_> = made.map(|(device, _)| (device, other)).chain([(device, call)]).collect();
                calls.sort_by_key(|(device, _)| *device);
                return Err(Error::Mismatch { sequence: before, calls, note: String::new() });
            }
            Some(_) => {}
            None => self.calls.push_back(call),
        }
        self.made[device] += 1;
        Ok(before + 1)
    }

    /// How many calls this device has made.
    pub fn made(&self, device: usize) -> u64 {
        self.made[device]
    }

    /// How many calls all devices have made.
    pub fn matched(&self) -> u64 {
        self.made.iter().min().copied().unwrap_or(0)
    }

    /// The devices that have not made the call with this number.
    pub fn missing(&self, number: u64) -> Vec<usize> {
        (0..self.made.len()).filter(|device| self.made[*device] < number).collect()
    }

    /// The call with this number, if any device has made it and it is not forgotten.
    pub fn get(&self, number: u64) -> Option<Call> {
        let at = number.checked_sub(self.forgotten + 1)?;
        self.calls.get(usize::try_from(at).ok()?).copied()
    }

    /// Forgets the calls up to this number, which all devices have made.
    pub fn forget(&mut self, until: u64) {
        self.calls.drain(..(until - self.forgotten) as usize);
        self.forgotten = until;
    }
}

/// A device's wait for a call to complete, or for other devices to make it.
pub struct DeviceWait<'a> {
    device: usize,
    deadline: &'a Deadline,
    slow_wait: SlowWaitWarning<'a>,
}

impl<'a> DeviceWait<'a> {
    /// That of this device, until the deadline.
    pub fn of(device: usize, deadline: &'a Deadline) -> DeviceWait<'a> {
        DeviceWait { device, deadline, slow_wait: SlowWaitWarning::until(deadline) }
    }

    /// Returns how long to sleep before the next poll, and an error after the deadline. `late` says what did not
    /// happen, for the case that no device is missing.
    pub fn pause(&mut self, site: Site, missing: Vec<usize>, late: &str) -> Result<Duration, Error> {
        if self.deadline.passed() {
            let elapsed = self.deadline.elapsed();
            return Err(match missing[..] {
                [] => Error::broken(site.to_string(), format!("{late} within {elapsed:.1?}")),
                _ => Error::Timeout { site, rank: self.device, missing, elapsed, whereabouts: Box::default() },
            });
        }
        self.slow_wait.warn(self.device, || {
            let what = match missing[..] {
                [] => format!("at {site}: {late}"),
                _ => format!("at {site} for {}", RankList(&missing)),
            };
            (what, String::new())
        });
        Ok(self.slow_wait.pause().max(Duration::from_millis(1)))
    }
}
