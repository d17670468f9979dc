//! What a measurement looks like.

use bonfire::{DType, Group};
use serde_json::json;

use super::Common;

#[derive(Clone)]
pub struct Report {
    transport: String,
    ranks: u32,
    json: bool,
}

pub struct Measurement {
    pub collective: &'static str,
    pub dtype: DType,
    /// One rank's buffer.
    pub bytes: usize,
    pub seconds: f64,
    pub wrong: u64,
}

impl Report {
    pub fn new(common: &Common) -> Report {
        Report { transport: common.transport.to_string(), ranks: common.ranks, json: common.json }
    }

    /// The head of the table.
    pub fn head(&self) {
        if !self.json {
            println!("# {} ranks over {}, times are the slowest rank's mean", self.ranks, self.transport);
            println!("{:>12} {:>12} {:>12} {:>12} {:>8}", "bytes", "time us", "algbw GB/s", "busbw GB/s", "wrong");
        }
    }

    /// Prints on rank 0.
    pub fn print(&self, group: &Group, m: &Measurement) {
        if group.rank() != 0 {
            return;
        }
        let ranks = group.world_size();
        let algbw = m.bytes as f64 / m.seconds / 1e9;
        let busbw = algbw * 2.0 * (ranks - 1) as f64 / ranks as f64;
        let time = m.seconds * 1e6;
        if self.json {
            let line = json!({
                "collective": m.collective, "transport": self.transport, "ranks": ranks,
                "dtype": m.dtype.to_string(), "op": op(m.collective), "bytes": m.bytes, "time_us": time,
                "algbw_gbps": algbw, "busbw_gbps": busbw, "wrong": m.wrong,
            });
            println!("{line}");
        } else {
            println!("{:>12} {time:>12.2} {algbw:>12.3} {busbw:>12.3} {:>8}", m.bytes, m.wrong);
        }
    }
}

/// DataParallel averages.
fn op(collective: &str) -> &'static str {
    if collective == "gradients" { "mean" } else { "sum" }
}
