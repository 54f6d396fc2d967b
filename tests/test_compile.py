"""Compiled phases: one graph, never another, and what eager computes.

Compiling takes seconds, so the default run compiles one configuration; `-m slow` compiles them all.
"""

import itertools
import subprocess
import sys
from functools import partial

import pytest
import torch
from isaaclab_rnn_ppo.utils.advantages import make_advantage
from isaaclab_rnn_ppo.utils.losses import make_critic_loss, make_loss
from isaaclab_rnn_ppo.utils.schedules import AdaptiveLR, make_optimizer
from isaaclab_rnn_ppo.utils.update import COMPILE_MODES, accelerate, compile_seconds, make_update
from tensor_env import make_local_collector, make_random_env, make_test_policy
from tensordict import TensorDict
from test_update import parameter_vector, rollout, tiny_models
from torch import nn
from torch._dynamo.utils import counters
from torchrl.envs.utils import ExplorationType


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Learner:
    """The learning phase of train.py on synthetic batches: advantages, then updates of actor and critic."""

    def __init__(
        self, *, compile_mode=None, backend="scan", critic=False, adaptive=False, cudagraphs=False, device="cpu"
    ):
        models = self.models = tiny_models(backend=backend, critic=critic, device=device)
        acceleration = {
            "compile_mode": compile_mode,
            "fullgraph": backend != "pad",
            "cudagraphs": cudagraphs,
            "cudagraph_warmup": 3,
        }
        self.device = device
        self.advantage = accelerate(
            make_advantage(value_operator=models.value_operator), **acceleration | {"cudagraphs": False}
        )
        losses = [make_loss(actor=models.actor, value_head=None if critic else models.value_head)]
        if critic:
            losses.append(make_critic_loss(value_operator=models.value_operator))
        self.losses = nn.ModuleList(losses)
        self.optimizers = [make_optimizer(loss.parameters(), 1e-2) for loss in losses]
        adapt_lr = AdaptiveLR(self.optimizers[0], desired_kl=0.01) if adaptive else None
        self.updates = [
            make_update(loss_module=loss, optimizer=optimizer, adapt_lr=adapt_lr if i == 0 else None, **acceleration)
            for i, (loss, optimizer) in enumerate(zip(losses, self.optimizers, strict=True))
        ]

    def iterate(self, i):
        """One batch, one minibatch of all envs; the learning rate decays."""
        training = self.advantage(rollout(self.models, seed=i, device=self.device))
        for optimizer, update in zip(self.optimizers, self.updates, strict=True):
            if i:
                optimizer.param_groups[0]["lr"].mul_(0.9)
            self.metrics = update(training)

    def vector(self):
        return parameter_vector(self.losses)


def relative_difference(one, other):
    return float((one - other).norm() / other.norm())


def check_one_graph_each(num_phases):
    """Every frame was compiled, whole, and once."""
    assert counters["stats"]["unique_graphs"] == num_phases
    assert counters["aot_autograd"]["total"] == counters["aot_autograd"]["ok"] == num_phases
    assert counters["frames"]["ok"] == counters["frames"]["total"]
    assert not counters["graph_break"] and not counters["unimplemented"]


@pytest.mark.parametrize("critic", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["shared", "separate"])
def test_training_compiles_whole_and_once(critic):
    eager = Learner(critic=critic, adaptive=True)
    compiled = Learner(compile_mode="default", critic=critic, adaptive=True)
    before = compile_seconds()
    for i in range(10):
        if i < 2:
            compiled.iterate(i)
            spent = compile_seconds()
        else:
            with torch._dynamo.config.patch(error_on_recompile=True):
                compiled.iterate(i)
        eager.iterate(i)
        check_one_graph_each(3 if critic else 2)
    assert 0 < spent - before == compile_seconds() - before
    assert relative_difference(compiled.vector(), eager.vector()) <= 1e-5
    assert compiled.metrics.keys() == eager.metrics.keys()
    for name, value in eager.metrics.items():
        torch.testing.assert_close(compiled.metrics[name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("rnn", ["lstm", "gru"])
def test_the_compiled_policy_step_acts_as_the_eager_one(rnn):
    """Over two windows with resets, and with weights that change between them; one graph."""
    batches = []
    for accelerated in (False, True):
        collector = make_local_collector(
            make_random_env(5, critic=True),
            rollout_steps=8,
            make_policy=partial(make_test_policy, rnn=rnn),
            accelerate_policy=accelerated,
            exploration_type=ExplorationType.DETERMINISTIC,
        )
        rollouts = iter(collector)
        batches.append([next(rollouts).clone()])
        weights = TensorDict.from_module(collector.policy).data.clone()
        collector.update_policy_weights_(
            weights.apply(lambda value: value * 10 if value.is_floating_point() else value)
        )
        batches[-1].append(next(rollouts).clone())
    check_one_graph_each(1)
    for eager, compiled in zip(*batches, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)
    actions = [batch["steps", "action"] for batch in batches[0]]
    assert float((actions[0] - actions[1]).abs().max()) > 1e-2


@pytest.mark.slow
def test_the_quick_probe_finds_the_vector_units_that_torch_finds():
    probe = (
        "import time, torch\n"
        "from isaaclab_rnn_ppo.utils import update\n"
        "from torch._inductor.cpu_vec_isa import pick_vec_isa, valid_vec_isa_list\n"
        "{}\n"
        "start = time.perf_counter()\n"
        "print(pick_vec_isa().build_arch_flags(), *valid_vec_isa_list(), sep=';')\n"
        "print(time.perf_counter() - start)\n"
    )
    results = []
    for preparation in ("", "update._quick_probe_of_vector_units()"):
        command = [sys.executable, "-c", probe.format(preparation)]
        results.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    (stock, stock_s), (quick, quick_s) = results
    assert quick == stock and quick.count(";")
    assert float(quick_s) < float(stock_s)


def test_the_check_sees_a_silent_fallback():
    """Left to itself torch.compile runs what it cannot compile eagerly, and says nothing."""

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, window):
            torch._dynamo.graph_break()
            return {"loss_x": (self.weight * window["x"]).sum()}

    batch = TensorDict({"steps": TensorDict({"x": torch.ones(2, 1, 3)}, [2, 1]), "initial": TensorDict({}, [2])}, [2])
    for fullgraph in (True, False):
        module = Breaks()
        update = make_update(
            loss_module=module,
            optimizer=make_optimizer(module.parameters(), 1e-2),
            compile_mode="default",
            fullgraph=fullgraph,
        )
        if fullgraph:
            with pytest.raises(torch._dynamo.exc.Unsupported):
                update(batch)
        else:
            with torch.compiler.set_stance("force_eager"):
                update(batch)
            with pytest.raises(AssertionError):
                check_one_graph_each(1)
            update(batch)
            with pytest.raises(AssertionError):
                check_one_graph_each(1)


GRID = [
    pytest.param(*combination, id="-".join([*combination[:2], "separate" if combination[2] else "shared"]))
    for combination in itertools.product(COMPILE_MODES, ("scan", "pad"), (False, True))
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "backend", "critic"), GRID)
def test_every_combination_agrees_with_eager(mode, backend, critic):
    eager, compiled = (
        Learner(backend=backend, critic=critic),
        Learner(compile_mode=mode, backend=backend, critic=critic),
    )
    for i in range(5):
        eager.iterate(i), compiled.iterate(i)
    assert relative_difference(compiled.vector(), eager.vector()) <= 1e-5
    if backend == "scan":
        check_one_graph_each(3 if critic else 2)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cudagraphs", [False, True], ids=["plain", "cudagraphs"])
@pytest.mark.parametrize("backend", ["triton", "scan", "pad"])
@pytest.mark.parametrize("mode", [None, *COMPILE_MODES])
def test_every_combination_agrees_with_eager_on_cuda(mode, backend, cudagraphs):
    """200 updates; after the first ten the device is never waited for."""
    if backend == "pad" and cudagraphs:
        pytest.skip("pad reads the episodes' lengths back: it cannot be captured")
    eager = Learner(backend=backend, device="cuda")
    fast = Learner(compile_mode=mode, backend=backend, cudagraphs=cudagraphs, device="cuda")
    training = [learner.advantage(rollout(eager.models, device="cuda")) for learner in (eager, fast)]
    for i in range(200):
        eager.updates[0](training[0])
        if i == 10 and backend != "pad":
            torch.cuda.set_sync_debug_mode("error")
        try:
            fast.updates[0](training[1])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert relative_difference(fast.vector(), eager.vector()) <= 1e-5
