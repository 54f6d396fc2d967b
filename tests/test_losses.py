"""The update against a plain float64 implementation, option by option.

The reference below loops over envs and steps and uses no module, no TorchRL and no autograd function
of the suite. Shapes: N envs, T steps, L layers, H hidden, A actions.
"""

import math

import pytest
import torch
from isaaclab_rnn_ppo.utils.losses import entropy_of, kl_estimate, make_critic_loss, make_loss, value_loss
from isaaclab_rnn_ppo.utils.models import make_models
from isaaclab_rnn_ppo.utils.schedules import AdaptiveLR, make_optimizer
from isaaclab_rnn_ppo.utils.update import make_update
from tensordict import TensorDict
from torchrl.data import Composite, Unbounded

N, T, OBS, PRIV, A, H = 4, 7, 3, 5, 2, 6
RTOL = 1e-6


def specs():
    groups = {"policy": Unbounded((N, OBS)), "critic": Unbounded((N, PRIV))}
    return {"observation_spec": Composite(groups, shape=[N]), "action_spec": Unbounded((N, A))}


def make_window(models, rnn, num_layers, tanh):
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    steps = TensorDict(
        {
            "policy": 3 * draw(N, T, OBS) + 1,
            "critic": 2 * draw(N, T, PRIV) - 1,
            "is_init": torch.rand(N, T, 1, generator=generator) < 0.2,
            "action": draw(N, T, A).tanh() * 0.9 if tanh else draw(N, T, A),
            "action_log_prob": -2.5 + 0.4 * draw(N, T),
            "advantage": draw(N, T, 1),
            "value_target": 5 + 3 * draw(N, T, 1),
            "state_value": 0.3 * draw(N, T, 1),
        },
        [N, T],
    )
    keys = [k for k in models.collector_policy.in_keys if "_state" in k]
    return TensorDict({"steps": steps, "initial": {k: draw(N, num_layers, H) for k in keys}}, [N])


# The reference.


def ref_normalize(normalizer, x):
    std = max(float(normalizer.epsilon), 0.0)
    return ((x - normalizer.mean) / normalizer.var.sqrt().clamp(min=std)).clamp(-normalizer.clip, normalizer.clip)


def ref_mlp(layers, x, last_is_linear):
    linears = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
    for i, layer in enumerate(linears):
        x = layer.weight @ x + layer.bias
        if not (last_is_linear and i == len(linears) - 1):
            x = torch.where(x > 0, x, torch.expm1(x))  # ELU
    return x


def ref_cell(cell, x, h, c, weights):
    w_ih, w_hh, b_ih, b_hh = weights
    a, b = w_ih @ x + b_ih, w_hh @ h + b_hh
    size = h.shape[0]
    if cell == "lstm":
        i, f, g, o = (a + b).split(size)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    (ar, az, an), (br, bz, bn) = a.split(size), b.split(size)
    z = torch.sigmoid(az + bz)
    n = torch.tanh(an + torch.sigmoid(ar + br) * bn)
    return (1 - z) * n + z * h, c


def ref_features(backbone, batch, group, prefix):
    """Features of every env and step, as nested lists."""
    modules = list(backbone.modules())
    normalizer = next((m for m in modules if type(m).__name__ == "RunningNormalizer"), None)
    linears = [m for m in modules if isinstance(m, torch.nn.Linear)]
    core = next((m for m in modules if hasattr(m, "flat_weights")), None)
    steps, initial = batch["steps"], batch["initial"]
    features = []
    for n in range(N):
        if core is not None:
            h = [initial[prefix + "_h"][n, l] for l in range(core.num_layers)]
            c = [initial[prefix + "_c"][n, l] if core.cell == "lstm" else None for l in range(core.num_layers)]
        row = []
        for t in range(T):
            x = steps[group][n, t]
            if normalizer is not None:
                x = ref_normalize(normalizer, x)
            x = ref_mlp(linears, x, last_is_linear=False)
            if core is not None:
                weights = core.flat_weights()
                for l in range(core.num_layers):
                    if steps["is_init"][n, t]:
                        h[l] = torch.zeros_like(h[l])
                        c[l] = None if c[l] is None else torch.zeros_like(c[l])
                    h[l], c[l] = ref_cell(core.cell, x, h[l], c[l], weights[4 * l : 4 * l + 4])
                    x = h[l]
            row.append(x)
        features.append(row)
    return features


def ref_value(net, x):
    value = ref_mlp((net.net if hasattr(net, "net") else net).children(), x, last_is_linear=True)
    if hasattr(net, "returns"):
        value = value * net.returns.var.sqrt() + net.returns.mean
    return value


def ref_value_loss(net, features, steps, coeff, clip):
    scale = net.returns.var.sqrt().item() if hasattr(net, "returns") else 1.0
    total = 0.0
    for n in range(N):
        for t in range(T):
            value, old = ref_value(net, features[n][t])[0], steps["state_value"][n, t, 0]
            target = steps["value_target"][n, t, 0]
            error = ((value - target) / scale) ** 2
            if clip is not None:
                move = torch.clamp((value - old) / scale, -clip, clip) * scale
                error = torch.maximum(error, ((old + move - target) / scale) ** 2)
            total = total + error
    return coeff * total / (N * T)


def ref_policy_losses(head, features, steps, *, clip, entropy_coeff, bounds_coeff, bound, tanh):
    std = head.log_std.exp()
    surrogate = entropy = excess = kl = 0.0
    for n in range(N):
        for t in range(T):
            mean = ref_mlp(head.mean.children(), features[n][t], last_is_linear=True)
            action, advantage = steps["action"][n, t], steps["advantage"][n, t, 0]
            log_prob = 0.0
            if tanh:  # TorchRL's default: the mean is softly bounded at 5
                log_det = torch.log(1 - action**2).sum()
                action = torch.atanh(action)
                log_prob = log_prob - log_det
            z = (action - mean) / std
            log_prob = log_prob + (-0.5 * z**2 - std.log() - 0.5 * math.log(2 * math.pi)).sum()
            ratio = torch.exp(log_prob - steps["action_log_prob"][n, t])
            clipped = torch.clamp(ratio, 1 - clip, 1 + clip)
            surrogate = surrogate + torch.minimum(ratio * advantage, clipped * advantage)
            entropy = entropy + (0.5 + 0.5 * math.log(2 * math.pi) + std.log()).sum()
            excess = excess + ((mean - bound).clamp(min=0) ** 2 + (-mean - bound).clamp(min=0) ** 2).sum()
            kl = kl + ratio.detach() - 1 - ratio.detach().log()
    losses = {"loss_policy": -surrogate / (N * T), "kl": kl / (N * T)}
    if not tanh:
        losses["loss_entropy"] = -entropy_coeff * entropy / (N * T)
    if bounds_coeff > 0:
        losses["loss_bounds"] = bounds_coeff * excess / (N * T)
    return losses


def ref_adam_step(parameters, gradients, lr, max_norm):
    """First step of Adam, behind a clip of the global norm."""
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
    factor = min(1.0, max_norm / (norm + 1e-6))
    updated = []
    for p, g in zip(parameters, gradients, strict=True):
        g = g * factor
        first, second = 0.1 * g, 0.001 * g**2
        updated.append(p - lr * (first / (1 - 0.9)) / ((second / (1 - 0.999)).sqrt() + 1e-8))
    return updated, norm


OPTIONS = {
    "plain": {},
    "gru": {"rnn": "gru"},
    "none": {"rnn": "none"},
    "two layers": {"num_layers": 2},
    "mlps": {"embedding": (7, 5), "head_hidden": (4,)},
    "memory horizon": {"memory_horizon": 30.0},
    "recompute": {"rnn_recompute": True},
    "tanh_normal": {"action_dist": "tanh_normal"},
    "normalize obs": {"normalize_obs": True},
    "normalize value": {"normalize_value": True},
    "value clip": {"value_clip": 0.3, "value_coeff": 0.7},
    "clip epsilon": {"clip_epsilon": 0.05},
    "entropy": {"entropy_coeff": 0.3},
    "bounds": {"bounds_coeff": 0.5, "action_bound": 0.002},
    "separate critic": {"critic_obs": "critic"},
    "adaptive": {"adaptive": True},
    "everything": {
        "num_layers": 2,
        "embedding": (7, 5),
        "head_hidden": (4,),
        "memory_horizon": 30.0,
        "normalize_obs": True,
        "normalize_value": True,
        "value_clip": 0.3,
        "value_coeff": 0.7,
        "clip_epsilon": 0.1,
        "entropy_coeff": 0.3,
        "bounds_coeff": 0.5,
        "action_bound": 0.002,
        "adaptive": True,
    },
    "everything, separate critic": {
        "rnn": "gru",
        "num_layers": 2,
        "embedding": (7, 5),
        "head_hidden": (4,),
        "normalize_obs": True,
        "normalize_value": True,
        "value_clip": 0.3,
        "value_coeff": 0.7,
        "entropy_coeff": 0.3,
        "bounds_coeff": 0.5,
        "action_bound": 0.002,
        "adaptive": True,
        "critic_obs": "critic",
    },
}
MODEL_OPTIONS = (
    "rnn num_layers embedding head_hidden memory_horizon rnn_recompute action_dist normalize_obs normalize_value "
    "critic_obs"
)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_update_equals_a_plain_float64_implementation(option):
    options = {"critic_obs": "shared", "entropy_coeff": 0.01} | OPTIONS[option]
    tanh = options.get("action_dist") == "tanh_normal"
    if tanh:
        options["entropy_coeff"] = 0.0  # sampled, see the next test
    torch.manual_seed(0)
    models = make_models(
        **specs(),
        hidden_size=H,
        **{"embedding": (5,)} | {k: v for k, v in options.items() if k in MODEL_OPTIONS.split()},
    )
    for view in (models.collector_policy, models.actor, models.value_operator):
        view.double()
    batch = make_window(models, options.get("rnn", "lstm"), options.get("num_layers", 1), tanh)
    for group, normalizer in models.normalizers:
        normalizer.update(batch["steps"][group] * 0.8 + 0.1)
    if models.value_normalizer is not None:
        models.value_normalizer.update(batch["steps"]["value_target"] * 0.5)

    value_options = {
        "value_coeff": options.get("value_coeff", 1.0),
        "value_clip": options.get("value_clip"),
        "value_normalizer": models.value_normalizer,
    }
    clip, bounds = (
        options.get("clip_epsilon", 0.2),
        (options.get("bounds_coeff", 0.0), options.get("action_bound", 1.1)),
    )
    loss = make_loss(
        actor=models.actor,
        value_head=models.value_head,
        clip_epsilon=clip,
        entropy_coeff=options["entropy_coeff"],
        bounds_coeff=bounds[0],
        action_bound=bounds[1],
        **value_options,
    ).double()

    head = next(m for m in models.actor.modules() if type(m).__name__ == "GaussianHead")
    features = ref_features(models.actor[0], batch, "policy", "recurrent_state")
    expected = ref_policy_losses(
        head,
        features,
        batch["steps"],
        clip=clip,
        entropy_coeff=options["entropy_coeff"],
        bounds_coeff=bounds[0],
        bound=bounds[1],
        tanh=tanh,
    )
    groups = {"actor": (loss, expected)}
    if models.has_separate_critic:
        net = models.value_operator[1].module
        critic_features = ref_features(models.value_operator[0], batch, "critic", "critic_state")
        value = ref_value_loss(
            net, critic_features, batch["steps"], value_options["value_coeff"], value_options["value_clip"]
        )
        critic_loss = make_critic_loss(value_operator=models.value_operator, **value_options).double()
        groups["critic"] = (critic_loss, {"loss_value": value})
    else:
        expected["loss_value"] = ref_value_loss(
            models.value_head.module,
            features,
            batch["steps"],
            value_options["value_coeff"],
            value_options["value_clip"],
        )

    for name, (module, reference) in groups.items():
        parameters = [p for p in module.parameters()]
        total = sum(v for k, v in reference.items() if k.startswith("loss_"))
        gradients = torch.autograd.grad(total, parameters)
        optimizer = make_optimizer(parameters, 3e-4)
        adaptive = options.get("adaptive", False) and name == "actor"
        lr = 3e-4
        if adaptive:  # the KL of this window is above 2 x 0.01
            assert reference["kl"] > 0.02
            lr = 3e-4 / 1.5
        updated, norm = ref_adam_step([p.detach().clone() for p in parameters], gradients, lr, 0.1)
        update = make_update(
            loss_module=module,
            optimizer=optimizer,
            clip_grad_norm=0.1,
            adapt_lr=AdaptiveLR(optimizer, desired_kl=0.01) if adaptive else None,
        )
        metrics = update(batch)
        for key, value in reference.items():
            torch.testing.assert_close(metrics[key], torch.as_tensor(value).detach(), rtol=RTOL, atol=1e-12)
        assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=RTOL)
        for parameter, value in zip(parameters, updated, strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=RTOL, atol=1e-9)


def test_value_loss_by_hand():
    value, old, target = (torch.tensor([[[v]]]) for v in (2.0, 0.0, 3.0))
    assert value_loss(value, old, target) == 1.0
    assert value_loss(value, old, target, clip=0.5) == 6.25  # moved 2, may count 0.5: (0.5 - 3)^2
    assert value_loss(value, old, target, clip=0.5, scale=2.0) == 1.0  # may count 1: ((1 - 3) / 2)^2
    # Moving too far in the right direction is punished no less than not clipping would.
    assert value_loss(target + 1, old, target, clip=10.0) == 1.0


def test_kl_estimate_is_the_kl_of_the_gaussians():
    torch.manual_seed(0)
    old, new = torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.1, 1.15)
    actions = old.sample((2_000_000,))
    exact = torch.distributions.kl_divergence(old, new)
    estimate = kl_estimate(new.log_prob(actions) - old.log_prob(actions))
    assert float(estimate) == pytest.approx(float(exact), rel=0.01)
    assert kl_estimate(torch.zeros(5)) == 0.0
    # Of tiny log-ratios the sum r - 1 - log r in float32 leaves rounding noise, even below zero.
    tiny = torch.tensor([1e-4, -1e-4])
    assert float(kl_estimate(tiny)) == pytest.approx(0.5e-8, rel=0.05)


def test_entropy_of_a_squashed_gaussian_is_its_mean_negative_log_probability():
    from torchrl.modules import IndependentNormal, TanhNormal

    torch.manual_seed(0)
    loc, scale = torch.zeros(200_000, 1), torch.full((200_000, 1), 0.5)
    sampled = entropy_of(TanhNormal(loc, scale)).mean()
    grid = torch.linspace(-0.9999, 0.9999, 200_001, dtype=torch.float64)
    base = torch.atanh(grid)
    log_density = -0.5 * (base / 0.5) ** 2 - math.log(0.5) - 0.5 * math.log(2 * math.pi) - torch.log(1 - grid**2)
    exact = -torch.trapezoid(log_density.exp() * log_density, grid)
    assert float(sampled) == pytest.approx(float(exact), abs=0.01)
    assert float(entropy_of(IndependentNormal(loc, scale))[0]) == pytest.approx(
        0.5 + 0.5 * math.log(2 * math.pi) + math.log(0.5)
    )


def test_settings_are_not_in_a_checkpoint():
    models = make_models(**specs(), hidden_size=H, embedding=(5,), critic_obs="shared")
    loss = make_loss(actor=models.actor, value_head=models.value_head, clip_epsilon=0.3)
    assert not {"clip_epsilon", "entropy_coeff", "critic_coeff"} & set(loss.state_dict())
    loss.entropy_coeff.fill_(0.25)
    assert dict(loss.named_buffers())["entropy_coeff"] == 0.25
