//! Random programs: what is trained, and how.

use crate::burn_version::{MUON, TWO_BACKWARD_PASSES};

/// So many steps has a program.
pub const STEPS: usize = 5;

/// What a program may have. Each is chosen by a part of the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// A layer is frozen from the start.
    Frozen,
    /// An optional layer is there, and used by some ranks in some steps only.
    Optional,
    /// The first layer is used twice in each pass.
    Shared,
    /// The first two layers are one, by a clone.
    Tied,
    /// burn's batch normalisation.
    BatchNorm,
    SyncBatchNorm,
    /// Parameters of f32 and of bf16.
    Mixed,
    /// A layer is frozen in one step and unfrozen in a later one.
    Refrozen,
    /// The loss has a penalty on the weights of the model in training, not of the pass's model.
    Penalty,
    /// Several passes per step.
    Passes,
    /// Weights of passes are not their samples.
    Tokens,
    /// The program calls `backward` itself.
    Manual,
    /// All forward passes of a step run before its first backward pass.
    TwoViews,
    /// Two models, one after the other in each step.
    TwoInALoop,
    /// Two models, whose steps end with one backward pass.
    TwoInABackward,
    TwoOptimizers,
    /// In some steps a rank has no samples.
    NoSamples,
    /// Ranks have different numbers of passes.
    UnequalPasses,
    /// Gradients are clipped by the norm of all.
    ClipNorm,
    /// The optimizer clips each gradient by its norm.
    ClipEach,
    /// The optimizer clips elements.
    ClipValues,
}

impl Feature {
    pub const ALL: [Feature; 21] = [
        Feature::Frozen,
        Feature::Optional,
        Feature::Shared,
        Feature::Tied,
        Feature::BatchNorm,
        Feature::SyncBatchNorm,
        Feature::Mixed,
        Feature::Refrozen,
        Feature::Penalty,
        Feature::Passes,
        Feature::Tokens,
        Feature::Manual,
        Feature::TwoViews,
        Feature::TwoInALoop,
        Feature::TwoInABackward,
        Feature::TwoOptimizers,
        Feature::NoSamples,
        Feature::UnequalPasses,
        Feature::ClipNorm,
        Feature::ClipEach,
        Feature::ClipValues,
    ];
}

/// What goes wrong in the third step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Rank 0 alone freezes a layer.
    FreezesAlone,
    /// The closure of the last rank fails.
    Closure,
    /// Rank 0 runs two backward passes in one pass, where burn does.
    SecondBackward,
    /// No rank has samples.
    NobodyHasSamples,
    /// Rank 0 has a gradient of another shape, from elsewhere.
    OtherShape,
    /// The optimizer is Muon.
    Muon,
}

/// How a program is distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    Step,
    Sync,
    Zero1,
    Zero2,
    Zero3,
    Hybrid,
}

pub const MODES: [Mode; 6] = [Mode::Step, Mode::Sync, Mode::Zero1, Mode::Zero2, Mode::Zero3, Mode::Hybrid];

#[derive(Clone, Debug)]
pub struct Program {
    pub seed: u64,
    pub ranks: usize,
    /// Whether ranks are threads of one process.
    pub threads: bool,
    pub layers: usize,
    pub adam: bool,
    pub features: Vec<Feature>,
    pub fault: Option<Fault>,
    /// By step and rank, the passes: samples and weight of each.
    pub passes: Vec<Vec<Vec<(usize, usize)>>>,
}

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, end: u64) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % end) as usize
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

impl Program {
    pub fn new(seed: u64) -> Program {
        use Feature::*;
        let random = &mut Random(seed);
        let (ranks, threads) = (1 + random.below(4), random.one_in(2));
        let mut features = Vec::new();
        for (feature, one_in) in [
            (Frozen, 4),
            (Optional, 4),
            (Shared, 4),
            (Mixed, 5),
            (Refrozen, 4),
            (Penalty, 16),
            (Passes, 2),
            (Tokens, 3),
            (Manual, 3),
            (TwoOptimizers, 5),
            (NoSamples, 4),
            (UnequalPasses, 4),
        ] {
            if random.one_in(one_in) {
                features.push(feature);
            }
        }
        let mut choose = |all: &[Feature]| features.extend(all.get(random.below(all.len() as u64 + 3)));
        choose(&[BatchNorm, SyncBatchNorm]);
        choose(&[TwoInALoop, TwoInABackward]);
        choose(&[ClipNorm, ClipEach, ClipValues]);
        let mut program = Program {
            seed,
            ranks,
            threads,
            layers: 2 + random.below(5),
            adam: random.one_in(2),
            features,
            fault: None,
            passes: Vec::new(),
        };
        if random.one_in(14) {
            let faults = [
                Fault::FreezesAlone,
                Fault::Closure,
                Fault::SecondBackward,
                Fault::NobodyHasSamples,
                Fault::OtherShape,
                Fault::Muon,
            ];
            let fault = faults[random.below(faults.len() as u64)];
            program.fault = Some(fault).filter(|fault| *fault != Fault::SecondBackward || TWO_BACKWARD_PASSES);
        } else if random.one_in(20) {
            program.features.push(Tied);
        }
        program.settle(random);
        program.passes =
            (0..STEPS).map(|step| (0..ranks).map(|rank| program.draw(random, step, rank)).collect()).collect();
        program
    }

    /// Removes features that do not go together.
    fn settle(&mut self, random: &mut Random) {
        use Feature::*;
        if self.has(SyncBatchNorm) && !random.one_in(20) {
            // Its layers wait for all ranks.
            self.without(&[NoSamples, UnequalPasses]);
        }
        if self.has(Tied) {
            self.without(&[Shared, Frozen, Refrozen, Mixed]);
        }
        if self.has(TwoInABackward) {
            self.features.push(Manual);
        }
        if self.has(Manual) && self.has(Passes) && random.one_in(2) {
            self.features.push(TwoViews);
        }
        if self.fault == Some(Fault::FreezesAlone) {
            self.without(&[Frozen]);
        }
        if matches!(self.fault, Some(Fault::SecondBackward)) {
            self.features.push(Manual);
            self.without(&[TwoInABackward]);
        }
        if matches!(self.fault, Some(Fault::Closure)) {
            self.without(&[Manual, TwoInABackward, TwoViews, NoSamples, UnequalPasses]);
        }
        self.features.sort_unstable();
        self.features.dedup();
    }

    fn without(&mut self, features: &[Feature]) {
        self.features.retain(|feature| !features.contains(feature));
    }

    /// Draws the passes of a rank in a step.
    fn draw(&self, random: &mut Random, step: usize, rank: usize) -> Vec<(usize, usize)> {
        use Feature::*;
        let is_empty = self.fault == Some(Fault::NobodyHasSamples) && step == 2;
        // Rank 0 always has samples.
        let idle = self.has(NoSamples) && rank > 0 && random.one_in(3);
        if is_empty || idle {
            return Vec::new();
        }
        let count = if self.has(Passes) { 3 } else { 1 };
        let fewer = if self.has(UnequalPasses) && rank > 0 { random.below(count) } else { 0 };
        let pass = |_| {
            let samples = 2 + random.below(3);
            (samples, if self.has(Tokens) { 1 + random.below(9) } else { samples })
        };
        (0..count as usize - fewer).map(pass).collect()
    }

    pub fn has(&self, feature: Feature) -> bool {
        self.features.contains(&feature)
    }

    pub fn models(&self) -> usize {
        if self.has(Feature::TwoInALoop) || self.has(Feature::TwoInABackward) { 2 } else { 1 }
    }

    /// Whether a mode can run the program. Gradients that a program adds up itself need ranks that are processes, and
    /// `SyncBatchNorm` then takes a pass's samples for its weight.
    pub fn runs_in(&self, mode: Mode) -> bool {
        let by_samples = !(self.has(Feature::SyncBatchNorm) && self.has(Feature::Tokens));
        mode != Mode::Sync || (!self.threads && by_samples)
    }
}

/// Says what refuses a program in a mode: a text of the error that all ranks get. `None`: it trains as on one rank.
pub fn predict(program: &Program, mode: Mode) -> Option<&'static str> {
    let (sharded, alone) = (matches!(mode, Mode::Zero2 | Mode::Zero3 | Mode::Hybrid), program.ranks == 1);
    let gathers = sharded && program.ranks > if mode == Mode::Hybrid { 3 } else { 1 };
    let differ = |passes: &Vec<Vec<(usize, usize)>>| passes.iter().any(|own| own.len() != passes[0].len());
    // Before the first step: an element-wise optimizer only, and one holder of each parameter.
    if program.fault == Some(Fault::Muon) && !matches!(mode, Mode::Step | Mode::Sync) {
        return Some(MUON);
    }
    if program.has(Feature::Tied) && !sharded {
        return Some("are one parameter, and a burn optimizer updates only one of them");
    }
    // In the first step that has it: a layer that waits for all ranks, and a part that is used as the whole.
    let communicates = program.has(Feature::SyncBatchNorm) && !alone;
    let unequal = program.passes.iter().position(differ);
    let together = sharded && program.has(Feature::TwoInABackward);
    let idle = unequal.is_some_and(|step| program.passes[step].iter().any(Vec::is_empty));
    let text = match () {
        // It serves the first model alone, and others begin with both.
        _ if idle && together => Some("ranks disagree"),
        _ if together => Some("some ranks run a pass that others do not"),
        _ if communicates => Some("ranks disagree"),
        _ => None,
    };
    let runs_with_others = program.passes[2][1..].iter().any(|own| own.len() == program.passes[2][0].len());
    let part = (sharded && program.has(Feature::Penalty)).then_some(0);
    let fault = match program.fault {
        Some(Fault::FreezesAlone) if !alone => Some("freeze and unfreeze parameters on all ranks alike"),
        Some(Fault::Closure) if mode != Mode::Sync => Some("'s own code has failed: on purpose"),
        // Its forward pass communicates, and other ranks that run the pass have none.
        Some(Fault::SecondBackward) if (communicates || gathers) && runs_with_others => Some("ranks disagree"),
        Some(Fault::SecondBackward) if mode != Mode::Sync => Some("rank 0 has two gradients of `"),
        Some(Fault::NobodyHasSamples) => Some("no rank has any samples"),
        Some(Fault::OtherShape) if mode == Mode::Sync => {
            Some("has another shape or element type than the parameter had")
        }
        _ => None,
    };
    let refused = [
        unequal.zip(text),
        fault.map(|text| (2, text)),
        part.map(|step| (step, "has used its part of `scale` as if it were the whole parameter")),
    ];
    refused.into_iter().flatten().min_by_key(|(step, _)| *step).map(|(_, text)| text)
}
