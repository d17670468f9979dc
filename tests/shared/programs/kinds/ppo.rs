//! PPO: an actor and a critic that learn from episodes of different lengths. Each rollout is used in several epochs,
//! and its advantages are normalised over all ranks.

use burn::module::Param;
use burn::optim::{AdamConfig, GradientsParams};

use super::*;

const ROLLOUTS: usize = 3;
/// Epochs over a rollout, and minibatches of an epoch.
const EPOCHS: usize = 3;
const PARTS: usize = 2;

models! {
    struct ActorCritic {
        actor: Net,
        critic: Net,
        /// The logarithm of the actions' deviation.
        spread: Param<Tensor<1>>,
    }
}

/// A state in which the policy has acted.
struct Transition {
    episode: usize,
    /// The number of the state.
    state: usize,
    action: f64,
    /// The logarithm of the action's density then.
    density: f64,
    advantage: f64,
    discounted: f64,
}

impl ActorCritic {
    fn new() -> Self {
        let spread = Param::from_tensor(Tensor::zeros([1], &device()));
        known(ActorCritic { actor: Net::new(1), critic: Net::new(5), spread }, 25)
    }

    /// The logarithms of the densities of actions, up to a constant.
    fn densities(&self, states: &[usize], actions: Tensor<2>) -> Tensor<2> {
        let spread = self.spread.val().unsqueeze::<2>();
        let deviations = (actions - self.actor.forward(inputs(states))) / spread.clone().exp();
        deviations.powf_scalar(2.0) * -0.5 - spread
    }

    /// Runs episodes with this policy.
    fn rollout(&self, episodes: &[usize]) -> Vec<Transition> {
        let states = episodes.iter().flat_map(|episode| (0..length(*episode)).map(move |place| (*episode, place)));
        let (of_states, states): (Vec<usize>, Vec<usize>) =
            states.map(|(episode, place)| (episode, 5 * episode + place)).unzip();
        let deviation = values(self.spread.val())[0].exp();
        let means = values(self.actor.forward(inputs(&states)));
        let actions: Vec<f64> = means.iter().zip(&states).map(|(mean, i)| mean + deviation * wave(*i, 9)).collect();
        let densities = values(self.densities(&states, column(actions.clone())));
        let judged = values(self.critic.forward(inputs(&states)));
        let mut taken = Vec::new();
        // From the end, because an advantage depends on what follows in its episode.
        for i in (0..states.len()).rev() {
            let reward = -(actions[i] - wave(states[i], 8)).powi(2);
            let next = (i + 1 < states.len() && of_states[i + 1] == of_states[i]).then_some(i + 1);
            let error = reward + next.map_or(0.0, |next| 0.9 * judged[next]) - judged[i];
            let after = next.and(taken.last()).map_or(0.0, |next: &Transition| next.advantage);
            let advantage = error + 0.9 * 0.95 * after;
            let (episode, state, action, density) = (of_states[i], states[i], actions[i], densities[i]);
            taken.push(Transition { episode, state, action, density, advantage, discounted: advantage + judged[i] });
        }
        taken
    }

    /// The mean loss of these transitions.
    fn loss(&self, taken: &[&Transition]) -> Tensor<1> {
        let states: Vec<usize> = taken.iter().map(|taken| taken.state).collect();
        let of_taken = |number: fn(&Transition) -> f64| column(taken.iter().map(|taken| number(taken)));
        let densities = self.densities(&states, of_taken(|taken| taken.action));
        let ratios = (densities - of_taken(|taken| taken.density)).exp();
        let advantages = of_taken(|taken| taken.advantage);
        let gains = (ratios.clone() * advantages.clone()).min_pair(ratios.clamp(0.8, 1.2) * advantages);
        let errors = (self.critic.forward(inputs(&states)) - of_taken(|taken| taken.discounted)).powf_scalar(2.0);
        (errors * 0.5 - gains).mean() - self.spread.val() * 0.01
    }
}

/// The means of the advantages and of their squares.
fn moments(taken: &[Transition]) -> [f64; 2] {
    let mean = |power| taken.iter().map(|taken| taken.advantage.powi(power)).sum::<f64>() / taken.len() as f64;
    [mean(1), mean(2)]
}

fn normalise(taken: &mut [Transition], [mean, square]: [f64; 2]) {
    let deviation = (square - mean * mean).sqrt();
    taken.iter_mut().for_each(|taken| taken.advantage = (taken.advantage - mean) / (deviation + 1e-8));
}

/// A minibatch: of a rank's transitions it may have none.
fn minibatch(taken: &[Transition], epoch: usize, part: usize) -> Vec<&Transition> {
    taken.iter().filter(|taken| (taken.episode + epoch) % PARTS == part).collect()
}

/// Without Bonfire.
pub fn plain() -> Vec<f64> {
    let mut model = ActorCritic::new();
    let mut optimizer: AdamOf<ActorCritic> = AdamConfig::new().init();
    for rollout in 0..ROLLOUTS {
        let mut taken = model.rollout(&all(rollout));
        let moments = moments(&taken);
        normalise(&mut taken, moments);
        for (epoch, part) in (0..EPOCHS).flat_map(|epoch| (0..PARTS).map(move |part| (epoch, part))) {
            let batch = minibatch(&taken, epoch, part);
            let grads = GradientsParams::from_grads(model.loss(&batch).backward(), &model);
            model = optimizer.step(RATE, model, grads);
        }
    }
    weights(&model)
}

/// With Bonfire: each rank runs episodes of its own.
pub fn with_bonfire(group: Group, form: Form) -> Vec<f64> {
    let mut model = Trained::new(&group, form, DType::F64, ActorCritic::new());
    for rollout in 0..ROLLOUTS {
        let mut taken = model.whole().rollout(&uneven(&group, rollout));
        let moments = mean(&group, moments(&taken), taken.len());
        normalise(&mut taken, moments);
        for (epoch, part) in (0..EPOCHS).flat_map(|epoch| (0..PARTS).map(move |part| (epoch, part))) {
            let batch = minibatch(&taken, epoch, part);
            model.run(form.batches(&batch), |model, batch| (model.loss(batch), batch.len()));
        }
    }
    weights(&model.whole())
}

#[test]
fn ppo_trains_as_on_burn_alone() {
    agrees("PPO");
}
