"""The update against torch's own pieces, and the logic of graph replay with a stand-in for the graph."""

import copy

import pytest
import torch
from isaaclab_rnn_ppo.utils.advantages import make_advantage, with_initial_state
from isaaclab_rnn_ppo.utils.losses import make_loss
from isaaclab_rnn_ppo.utils.models import make_models
from isaaclab_rnn_ppo.utils.update import Replay, _flatten, _unflatten, accelerate, make_update, minibatches
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torch.utils import _pytree
from torchrl.data import Composite, Unbounded
from torchrl.modules import set_recurrent_mode

OBS, ACT, HIDDEN = 5, 2, 16


def tiny_models(*, backend="scan", critic=False, rnn="lstm", device="cpu"):
    torch.manual_seed(0)
    groups = {"policy": Unbounded((1, OBS))} | ({"critic": Unbounded((1, OBS))} if critic else {})
    return make_models(
        observation_spec=Composite(groups, shape=[1]),
        action_spec=Unbounded((1, ACT)),
        hidden_size=HIDDEN,
        rnn=rnn,
        rnn_backend=backend,
        embedding=(HIDDEN,),
        device=device,
    )


def rollout(models, num_envs=6, num_steps=5, seed=0, device="cpu") -> TensorDictBase:
    """A batch with terminations, truncations and resets, as ``utils.rollout`` describes it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    done = torch.rand(num_envs, num_steps, 1, generator=generator) < 0.2
    is_init = torch.cat([torch.rand(num_envs, 1, 1, generator=generator) < 0.2, done[:, :-1]], 1)
    steps = {
        "action": normal(num_envs, num_steps, ACT),
        "action_log_prob": normal(num_envs, num_steps) * 0.1 - 3,
        "is_init": is_init,
        "next": {"reward": normal(num_envs, num_steps, 1), "done": done, "terminated": done & (normal(done.shape) > 0)},
    }
    valid = torch.tensor([False, True]).expand(num_envs, 2)
    final = {"time": torch.full((num_envs, 2), num_steps - 1), "valid": valid}
    for group in ("policy", "critic") if models.has_separate_critic else ("policy",):
        steps[group], final[group] = normal(num_envs, num_steps, OBS), normal(num_envs, 2, OBS)
    keys = [key for key in models.value_operator.in_keys if "_state" in key]
    keys += [key for key in models.actor.in_keys if "_state" in key and key not in keys]
    return TensorDict(
        {
            "steps": TensorDict(steps, [num_envs, num_steps]),
            "initial": TensorDict({key: normal(num_envs, 1, HIDDEN) * 0.1 for key in keys}, [num_envs]),
            "final": TensorDict(final, [num_envs, 2]),
        },
        [num_envs],
    ).to(device)


def parameter_vector(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("rnn", ["lstm", "gru"])
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        lambda parameters: torch.optim.Adam(
            [{"params": parameters[:3], "lr": 1e-3}, {"params": parameters[3:]}], lr=1e-2, betas=(0.8, 0.9), eps=1e-5
        ),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.3),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.3),
    ],
    ids=["adam", "groups", "adamw", "weight decay"],
)
@pytest.mark.parametrize("max_norm", [0.1, 1e3])
def test_update_is_backward_clip_and_step(rnn, make_optimizer, max_norm):
    """The LSTM's two biases share one gradient tensor; with clipping it must be scaled once."""
    ours, theirs = tiny_models(rnn=rnn), tiny_models(rnn=rnn)
    training = make_advantage(value_operator=ours.value_operator)(rollout(ours))
    loss_ours, loss_theirs = (make_loss(actor=m.actor, value_head=m.value_head) for m in (ours, theirs))
    update = make_update(
        loss_module=loss_ours, optimizer=make_optimizer(list(loss_ours.parameters())), clip_grad_norm=max_norm
    )
    optimizer = make_optimizer(list(loss_theirs.parameters()))
    for _ in range(5):
        with set_recurrent_mode(True):
            metrics = loss_theirs(with_initial_state(training["steps"], training["initial"]))
        optimizer.zero_grad()
        sum(value for name, value in metrics.items() if name.startswith("loss_")).backward()
        norm = nn.utils.clip_grad_norm_(loss_theirs.parameters(), max_norm)
        optimizer.step()
        result = update(training)
        torch.testing.assert_close(result["grad_norm"], norm, rtol=1e-6, atol=0)
        torch.testing.assert_close(result["loss_value"], metrics["loss_value"].detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(parameter_vector(loss_ours), parameter_vector(loss_theirs), rtol=1e-6, atol=1e-7)


class TransposedGradient(torch.autograd.Function):
    """Identity whose gradient is right and lies in memory the other way round."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.t().contiguous().t()


class OddLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, window):
        target = torch.linspace(-1, 1, 12).view(3, 4)
        loss = (TransposedGradient.apply(self.weight) * target).sum() + self.bias.sum()  # an expanded gradient
        return {"loss_odd": loss + 0 * window["x"].sum()}


def one_step_minibatch():
    return TensorDict({"steps": TensorDict({"x": torch.zeros(2, 3)}, [2, 3]), "initial": TensorDict({}, [2])}, [2])


def test_gradients_may_have_any_strides():
    ours, theirs = OddLoss(), OddLoss()
    update = make_update(loss_module=ours, optimizer=torch.optim.Adam(ours.parameters(), lr=0.1), clip_grad_norm=0.5)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.1)
    for _ in range(3):
        update(one_step_minibatch())
        optimizer.zero_grad()
        theirs(one_step_minibatch()["steps"])["loss_odd"].backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
    torch.testing.assert_close(parameter_vector(ours), parameter_vector(theirs), rtol=1e-6, atol=1e-7)


def test_optimizer_state_stays_its_own():
    """A checkpoint of it continues in torch's Adam, and a loaded one continues in place."""
    models = tiny_models()
    loss_module = make_loss(actor=models.actor, value_head=models.value_head)
    training = make_advantage(value_operator=models.value_operator)(rollout(models))
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-2)
    update = make_update(loss_module=loss_module, optimizer=optimizer)
    update(training), update(training)
    weights = {name: value.clone() for name, value in loss_module.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())
    update(training)
    expected = parameter_vector(loss_module)

    loss_module.load_state_dict(weights)
    stock = torch.optim.Adam(loss_module.parameters(), lr=1.0)
    stock.load_state_dict(copy.deepcopy(saved))
    with set_recurrent_mode(True):
        metrics = loss_module(with_initial_state(training["steps"], training["initial"]))
    sum(value for name, value in metrics.items() if name.startswith("loss_")).backward()
    nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
    stock.step()
    torch.testing.assert_close(parameter_vector(loss_module), expected, rtol=1e-6, atol=1e-7)

    loss_module.load_state_dict(weights)
    addresses = [t.data_ptr() for state in optimizer.state.values() for t in state.values()]
    lr = optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert addresses == [t.data_ptr() for state in optimizer.state.values() for t in state.values()]
    assert optimizer.param_groups[0]["lr"] is lr
    update(training)
    assert torch.equal(parameter_vector(loss_module), expected)


def test_a_learning_rate_changed_in_place_counts():
    loss_module = OddLoss()
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=0.1)
    update = make_update(loss_module=loss_module, optimizer=optimizer)
    path = [parameter_vector(loss_module)]
    for factor in (1.0, 0.5):
        optimizer.param_groups[0]["lr"].fill_(0.1 * factor)
        update(one_step_minibatch())
        path.append(parameter_vector(loss_module))
    # Under a constant gradient every step of Adam has the size of the learning rate.
    moving = path[1] != path[0]
    torch.testing.assert_close((path[2] - path[1])[moving], 0.5 * (path[1] - path[0])[moving], rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adam(p, amsgrad=True)],
    ids=["sgd", "amsgrad"],
)
def test_other_optimizers_are_refused(make):
    loss_module = OddLoss()
    with pytest.raises(ValueError, match="Adam and AdamW"):
        make_update(loss_module=loss_module, optimizer=make(loss_module.parameters()))


def test_minibatches_use_every_env_once_in_a_new_order():
    torch.manual_seed(0)
    first, second = (torch.cat(list(minibatches(12, 3, "cpu"))) for _ in range(2))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(12))
    assert first.tolist() != second.tolist()


def test_structure_round_trip():
    inner = TensorDict({"a": torch.ones(2, 3, 4), "next": {"b": torch.zeros(2, 3)}}, [2, 3])
    tree = TensorDict({"steps": inner, "empty": TensorDict({}, [2]), "x": torch.arange(2)}, [2])
    structure, leaves = _flatten(tree)
    hash(structure)
    result = _unflatten(structure, iter(leaves))
    assert result["steps"].batch_size == (2, 3) and result["steps", "next"].batch_size == (2, 3)
    assert result["empty"].batch_size == (2,) and result["x"] is tree["x"]
    assert (result["steps"] == inner).all()
    scalars = {"loss": torch.tensor(1.0), "kl": torch.tensor(2.0)}
    structure, leaves = _flatten(scalars)
    assert _unflatten(structure, iter(leaves)) == scalars


def test_nothing_asked_is_nothing_done():
    def phase(tensordict):
        return tensordict

    assert accelerate(phase) is phase
    with pytest.raises(ValueError, match="--compile fast: valid are default"):
        accelerate(phase, compile_mode="fast")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_cudagraphs_without_cuda_is_an_error_and_leaves_pytree_alone():
    with pytest.raises(ValueError, match="--cudagraphs: needs a CUDA device"):
        accelerate(lambda tensordict: tensordict, cudagraphs=True)
    assert TensorDict in _pytree.SUPPORTED_NODES


# -------------------------------------------------------------------------------------------------------------- replay


def record_rerun(call):
    """Stands in for a CUDA graph: replaying runs the call again, into the tensors that it returned first.

    Like a capture, recording by itself changes nothing.
    """
    outputs = []

    def replay():
        structure, tensors = call()
        if not outputs:
            outputs.extend(tensor.clone() for tensor in tensors)
        for output, tensor in zip(outputs, tensors, strict=True):
            output.copy_(tensor)
        return structure, outputs

    return replay


NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
RECORDERS = [
    pytest.param(record_rerun, "cpu", id="stand-in"),
    pytest.param(None, "cuda", id="cuda", marks=[pytest.mark.gpu, NEEDS_CUDA]),
]
needs_device = pytest.mark.parametrize(("record", "device"), RECORDERS)


def replayed(function, record, warmup=2):
    """``accelerate(function, cudagraphs=True)`` with a recorder of choice."""
    replay = Replay(
        lambda structure, *leaves: _flatten(function(_unflatten(structure, iter(leaves)))), warmup=warmup, record=record
    )

    def call(tensordict):
        structure, leaves = replay(*(lambda s, ls: (s, *ls))(*_flatten(tensordict)))
        return _unflatten(structure, iter(leaves))

    return call


@needs_device
def test_a_key_that_goes_in_and_comes_out_is_read_afresh(record, device):
    """PITFALLS 4: replayed with two states, what eager gives; fed back, what eager gives."""
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).to(device)

    def step(tensordict):
        tensordict["state"] = torch.tanh(tensordict["state"] @ weight + tensordict["x"])
        return tensordict

    def inputs(value):
        return TensorDict({"x": torch.full((3, 4), value), "state": torch.full((3, 4), -value)}, [3]).to(device)

    graphed = replayed(step, record)
    for value in (0.1, 0.2, 0.3, 0.4, -0.5):  # two calls as they are, then replays
        torch.testing.assert_close(graphed(inputs(value))["state"], step(inputs(value))["state"])
    fed_back, eager = inputs(0.3), inputs(0.3)
    for _ in range(5):
        fed_back, eager = graphed(fed_back), step(eager)
        torch.testing.assert_close(fed_back["state"], eager["state"])


@needs_device
def test_what_a_replay_returned_is_never_overwritten(record, device):
    graphed = replayed(lambda tensordict: {"double": 2 * tensordict["x"], "same": tensordict["x"]}, record, warmup=1)
    results = [graphed(TensorDict({"x": torch.full((3,), float(i))}, [3]).to(device)) for i in range(4)]
    for name, factor in (("double", 2.0), ("same", 1.0)):
        assert [result[name][0].item() for result in results] == [factor * i for i in range(4)]


@needs_device
def test_an_input_that_the_caller_reuses_is_read_afresh(record, device):
    graphed = replayed(lambda tensordict: {"double": 2 * tensordict["x"]}, record, warmup=1)
    buffer = TensorDict({"x": torch.zeros(3)}, [3]).to(device)
    for value in (1.0, 2.0, 3.0):
        buffer["x"].fill_(value)
        assert graphed(buffer)["double"].tolist() == [2 * value] * 3


@needs_device
def test_another_shape_is_an_error(record, device):
    graphed = replayed(lambda tensordict: {"double": 2 * tensordict["x"]}, record, warmup=0)
    graphed(TensorDict({"x": torch.zeros(3, 2)}, [3]).to(device))
    with pytest.raises(ValueError, match="one shape"):
        graphed(TensorDict({"x": torch.zeros(3, 1)}, [3]).to(device))


@needs_device
def test_a_replayed_update_with_a_schedule_is_the_eager_one(record, device):
    results = []
    for graphed in (False, True):
        models = tiny_models(device=device)
        loss_module = make_loss(actor=models.actor, value_head=models.value_head)
        optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-2)
        update = make_update(loss_module=loss_module, optimizer=optimizer)
        if graphed:
            update = replayed(update, record, warmup=3)
        advantage = make_advantage(value_operator=models.value_operator)
        for i in range(8):
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (i + 1))
            metrics = update(advantage(rollout(models, seed=i, device=device)))
        results.append((parameter_vector(loss_module), metrics["grad_norm"]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
