//! SAC: a policy, two critics with targets that follow them, and a temperature that is trained too.

use burn::module::Param;
use burn::nn::LinearConfig;
use burn::optim::{AdamConfig, GradientsParams};

use super::*;

/// How much of the critics the targets take over in a step.
const FOLLOWS: f64 = 0.2;
const ENTROPY: f64 = -1.0;

models! {
    struct Actor {
        mean: Net,
        spread: Net,
    }

    struct Critic {
        state: Linear,
        action: Linear,
        output: Linear,
    }

    struct Critics {
        one: Critic,
        two: Critic,
    }

    struct Temperature {
        log: Param<Tensor<1>>,
    }
}

impl Actor {
    fn new() -> Self {
        known(Actor { mean: Net::new(1), spread: Net::new(1) }, 26)
    }

    /// Returns actions in these states, and the logarithms of their densities, up to a constant.
    fn act(&self, states: Tensor<2>, noise: Tensor<2>) -> [Tensor<2>; 2] {
        let spread = self.spread.forward(states.clone()).tanh();
        let action = (self.mean.forward(states) + spread.clone().exp() * noise.clone()).tanh();
        let squashed = (action.clone().powf_scalar(2.0).neg() + (1.0 + 1e-6)).log();
        [action, noise.powf_scalar(2.0) * -0.5 - spread - squashed]
    }
}

impl Critic {
    fn new() -> Self {
        let linear = |inputs, outputs| LinearConfig::new(inputs, outputs).init(&device());
        Critic { state: linear(INPUTS, HIDDEN), action: linear(1, HIDDEN), output: linear(HIDDEN, 1) }
    }

    fn judge(&self, states: Tensor<2>, actions: Tensor<2>) -> Tensor<2> {
        self.output.forward((self.state.forward(states) + self.action.forward(actions)).tanh())
    }
}

impl Critics {
    fn new() -> Self {
        known(Critics { one: Critic::new(), two: Critic::new() }, 36)
    }

    fn judge(&self, states: Tensor<2>, actions: Tensor<2>) -> [Tensor<2>; 2] {
        [self.one.judge(states.clone(), actions.clone()), self.two.judge(states, actions)]
    }

    fn lower(&self, states: Tensor<2>, actions: Tensor<2>) -> Tensor<2> {
        let [one, two] = self.judge(states, actions);
        one.min_pair(two)
    }

    /// The mean loss of these samples. `targets` are the critics that judge what follows.
    fn loss(&self, samples: &[usize], targets: &Critics, actor: &Actor, temperature: f64) -> Tensor<1> {
        let next = rows(samples, INPUTS, 3);
        let [action, density] = actor.act(next.clone(), rows(samples, 1, 4));
        let follows = (targets.lower(next, action) - density * temperature) * 0.9;
        // An episode ends after each seventh sample.
        let goes_on = column(samples.iter().map(|sample| f64::from(u8::from(sample % 7 != 0))));
        let expected = (rows(samples, 1, 5) + follows * goes_on).detach();
        let [one, two] = self.judge(inputs(samples), rows(samples, 1, 6));
        ((one - expected.clone()).powf_scalar(2.0) + (two - expected).powf_scalar(2.0)).mean()
    }
}

impl Actor {
    fn loss(&self, samples: &[usize], critics: &Critics, temperature: f64) -> Tensor<1> {
        let [action, density] = self.act(inputs(samples), rows(samples, 1, 7));
        (density * temperature - critics.lower(inputs(samples), action)).mean()
    }
}

impl Temperature {
    fn new() -> Self {
        known(Temperature { log: Param::from_tensor(Tensor::zeros([1], &device())) }, 46)
    }

    fn value(&self) -> f64 {
        values(self.log.val())[0].exp()
    }

    fn loss(&self, samples: &[usize], actor: &Actor) -> Tensor<1> {
        let [_, density] = actor.act(inputs(samples), rows(samples, 1, 7));
        (density.detach() + ENTROPY).mean() * self.log.val().neg()
    }
}

/// Moves the targets towards the critics.
fn follow(targets: Critics, critics: &Critics) -> Critics {
    let mut new = weights(critics).into_iter();
    map_floats(targets, |old, _| {
        let moved = old.iter::<f64>().zip(&mut new).map(|(old, new)| (1.0 - FOLLOWS) * old + FOLLOWS * new);
        TensorData::new(moved.collect::<Vec<f64>>(), old.shape().clone())
    })
}

/// Without Bonfire.
pub fn plain() -> Vec<f64> {
    let (mut actor, mut critics, mut temperature) = (Actor::new(), Critics::new(), Temperature::new());
    let mut targets = critics.clone();
    let mut of_actor: AdamOf<Actor> = AdamConfig::new().init();
    let mut of_critics: AdamOf<Critics> = AdamConfig::new().init();
    let mut of_temperature: AdamOf<Temperature> = AdamConfig::new().init();
    for step in 0..STEPS {
        let samples = all(step);
        let heat = temperature.value();
        let loss = critics.loss(&samples, &targets, &actor, heat);
        let grads = GradientsParams::from_grads(loss.backward(), &critics);
        critics = of_critics.step(RATE, critics, grads);
        let loss = actor.loss(&samples, &critics, heat);
        let grads = GradientsParams::from_grads(loss.backward(), &actor);
        actor = of_actor.step(RATE, actor, grads);
        let loss = temperature.loss(&samples, &actor);
        let grads = GradientsParams::from_grads(loss.backward(), &temperature);
        temperature = of_temperature.step(RATE, temperature, grads);
        targets = follow(targets, &critics);
    }
    [weights(&actor), weights(&critics), weights(&temperature), weights(&targets)].concat()
}

/// With Bonfire.
pub fn with_bonfire(group: Group, form: Form) -> Vec<f64> {
    let mut actor = Trained::new(&group, form, DType::F64, Actor::new());
    let mut critics = Trained::new(&group, form, DType::F64, Critics::new());
    let mut temperature = Trained::new(&group, form, DType::F64, Temperature::new());
    let mut targets = critics.whole();
    for step in 0..STEPS {
        let samples = uneven(&group, step);
        let (acts, heat) = (actor.whole(), temperature.whole().value());
        critics.run(form.batches(&samples), |critics, own| (critics.loss(own, &targets, &acts, heat), own.len()));
        let judges = critics.whole();
        actor.run(form.batches(&samples), |actor, own| (actor.loss(own, &judges, heat), own.len()));
        let acts = actor.whole();
        temperature.run(form.batches(&samples), |temperature, own| (temperature.loss(own, &acts), own.len()));
        targets = follow(targets, &judges);
    }
    [weights(&actor.whole()), weights(&critics.whole()), weights(&temperature.whole()), weights(&targets)].concat()
}

#[test]
fn sac_trains_as_on_burn_alone() {
    agrees("SAC");
}
