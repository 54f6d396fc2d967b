"""One PPO update: loss, gradient clipping, optimizer; and compilation and CUDA graphs for any phase of training.

Shapes: N envs, T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch._dynamo.utils import calculate_time_spent
from torch._inductor import list_mode_options
from torch._inductor.cpu_vec_isa import VecISA
from torchrl.modules import set_recurrent_mode

from isaaclab_rnn_ppo.utils.advantages import with_initial_state
from isaaclab_rnn_ppo.utils.nonfinite import is_usable
from isaaclab_rnn_ppo.utils.ranks import average_over_ranks

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")

# -------------------------------------------------------------------------------------------------------- optimizer


def global_norm(tensors: list[Tensor]) -> Tensor:
    """Norm [] of all entries of ``tensors``."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))


def adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lr: Tensor,
    grad_scale: Tensor,
    found_inf: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
) -> None:
    """Scale ``grads`` by ``grad_scale`` and take one step of Adam or AdamW, all in place.

    Where ``found_inf`` is 1 and not 0, nothing but ``grads`` changes.
    """
    # The fused kernel walks through the memory of all four tensors alike, whatever their strides say.
    grads = [grad.contiguous() for grad in grads]
    # Two parameters that are always added (an LSTM's biases) may share one gradient: scale it once.
    torch._foreach_mul_(list({grad.data_ptr(): grad for grad in grads}.values()), grad_scale)
    torch._foreach_add_(steps, 1 - found_inf)
    kernel = torch._fused_adamw_ if decoupled_weight_decay else torch._fused_adam_
    kernel(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=found_inf,
    )


# One node each in a compiled graph. Written out, every parameter is a kernel to generate and to compile.
_global_norm_op = torch.library.custom_op("isaaclab_rnn_ppo::global_norm", global_norm, mutates_args=())
_global_norm_op.register_fake(lambda tensors: tensors[0].new_empty(()))
_adam_op = torch.library.custom_op(
    "isaaclab_rnn_ppo::adam", adam, mutates_args=("params", "grads", "exp_avgs", "exp_avg_sqs", "steps")
)
_adam_op.register_fake(lambda *args, **kwargs: None)


class OptimizerStep:
    """Clipping and Adam on the state of ``optimizer`` itself, as a function of gradients.

    ``Optimizer.step`` breaks graphs and, like ``clip_grad_norm_``, wants gradients in ``.grad``. The
    learning rate becomes a tensor, for schedules to change in place. It and the state keep their
    addresses, through a ``load_state_dict`` as well: a captured step knows nothing else of them.

    Args:
        optimizer: Adam or AdamW.
        max_norm: the gradient's global norm is scaled down to this.

    Raises:
        ValueError: another optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, max_norm: float):
        groups = optimizer.param_groups
        if not isinstance(optimizer, torch.optim.Adam) or any(g["amsgrad"] or g["maximize"] for g in groups):
            raise ValueError(f"the update knows Adam and AdamW, without amsgrad and maximize, not {optimizer}")
        self.max_norm = max_norm
        self.params = [param for group in groups for param in group["params"]]
        self.groups: list[dict[str, Any]] = []
        for group in groups:
            device = group["params"][0].device
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
            for param in group["params"]:
                state = optimizer.state[param]
                state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32, device=device)
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(param, memory_format=torch.contiguous_format)
            names = ("exp_avg", "exp_avg_sq", "step")
            state = {name: [optimizer.state[param][name] for param in group["params"]] for name in names}
            for tensor in (group["lr"], *state["exp_avg"], *state["exp_avg_sq"], *state["step"]):
                torch._dynamo.mark_static_address(tensor)
            self.groups.append(
                {
                    "params": list(group["params"]),
                    "exp_avgs": state["exp_avg"],
                    "exp_avg_sqs": state["exp_avg_sq"],
                    "steps": state["step"],
                    "lr": group["lr"],
                    "beta1": group["betas"][0],
                    "beta2": group["betas"][1],
                    "eps": group["eps"],
                    "weight_decay": group["weight_decay"],
                    "decoupled_weight_decay": group["decoupled_weight_decay"],
                }
            )
        optimizer.register_load_state_dict_post_hook(self._keep_addresses)

    def _keep_addresses(self, optimizer: torch.optim.Optimizer) -> None:
        for own, loaded in zip(self.groups, optimizer.param_groups, strict=True):
            loaded["lr"] = own["lr"].copy_(torch.as_tensor(loaded["lr"]))
            for name, entries in (
                ("exp_avg", own["exp_avgs"]),
                ("exp_avg_sq", own["exp_avg_sqs"]),
                ("step", own["steps"]),
            ):
                for param, entry in zip(own["params"], entries, strict=True):
                    optimizer.state[param][name] = entry.copy_(optimizer.state[param][name])

    @torch.no_grad()
    def __call__(self, grads: list[Tensor], norm: Tensor) -> None:
        """Step along ``grads``, one for each of ``params``, of global norm ``norm`` []; not if that is not usable."""
        scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        found_inf = 1 - is_usable(norm).float()
        for group in self.groups:
            own, grads = grads[: len(group["params"])], grads[len(group["params"]) :]
            step = _adam_op if torch.compiler.is_compiling() else adam
            step(grads=own, grad_scale=scale, found_inf=found_inf, **group)


# ----------------------------------------------------------------------------------------------------------- update


def make_update(
    *,
    loss_module: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip_grad_norm: float = 1.0,
    adapt_lr: Callable[[Tensor], None] | None = None,
    compile_mode: str | None = None,
    fullgraph: bool = True,
    cudagraphs: bool = False,
    cudagraph_warmup: int = 5,
    cudagraph_trees: bool = True,
) -> Callable[[TensorDictBase], dict[str, Tensor]]:
    """The update of one minibatch.

    Args:
        loss_module: of a window [n, T] returns scalars; those named ``loss_*`` add up to the loss.
        optimizer: Adam or AdamW over ``loss_module.parameters()``; see ``OptimizerStep``.
        clip_grad_norm: the gradient's global norm is scaled down to this.
        adapt_lr: given the minibatch's ``kl`` before each step; see ``schedules.AdaptiveLR``.
        compile_mode, fullgraph, cudagraphs, cudagraph_warmup, cudagraph_trees: see ``accelerate``.

    Returns:
        a function of a minibatch (``steps`` [n, T], ``initial`` [n]) that returns the loss module's
        scalars, ``grad_norm`` (before clipping) and ``skipped_updates``, on the device. Gradients and scalars are means
        over the ranks (``ranks``). Where loss or gradient of any are not usable (``nonfinite``), the last is 1, the
        others are 0, and parameters, optimizer and learning rate stay as they are.

    Raises:
        ValueError: see ``OptimizerStep`` and ``accelerate``.
    """
    optimizer_step = OptimizerStep(optimizer, clip_grad_norm)

    def update(minibatch: TensorDictBase) -> dict[str, Tensor]:
        with set_recurrent_mode(True):
            metrics = loss_module(with_initial_state(minibatch["steps"], minibatch["initial"]))
        loss = torch.stack([value for name, value in metrics.items() if name.startswith("loss_")]).sum()
        loss = loss * torch.where(is_usable(loss), 1.0, torch.nan)  # then the gradient's norm tells it all
        grads = list(torch.autograd.grad(loss, optimizer_step.params))
        means = average_over_ranks([*grads, *(value.detach() for value in metrics.values())])
        grads, metrics = means[: len(grads)], dict(zip(metrics, means[len(grads) :]))
        norm = metrics["grad_norm"] = (_global_norm_op if torch.compiler.is_compiling() else global_norm)(grads)
        usable = is_usable(norm)
        if adapt_lr is not None:
            adapt_lr(torch.where(usable, metrics["kl"], 0.0))  # 0 leaves the learning rate alone
        optimizer_step(grads, norm)
        metrics = {name: torch.where(usable, value, 0.0) for name, value in metrics.items()}
        return metrics | {"skipped_updates": 1 - usable.float()}

    return accelerate(
        update,
        compile_mode=compile_mode,
        fullgraph=fullgraph,
        cudagraphs=cudagraphs,
        cudagraph_warmup=cudagraph_warmup,
        cudagraph_trees=cudagraph_trees,
    )


def minibatches(num_envs: int, num_minibatches: int, device: torch.device | str) -> Iterator[Tensor]:
    """Env indices [num_envs / num_minibatches] that use every env once, in a new order each call."""
    yield from torch.randperm(num_envs, device=device).view(num_minibatches, -1)


# ------------------------------------------------------------------------------------------ compilation, CUDA graphs


def accelerate(
    function: Callable[[TensorDictBase], TensorDictBase | dict[str, Tensor]],
    *,
    compile_mode: str | None = None,
    fullgraph: bool = True,
    cudagraphs: bool = False,
    cudagraph_warmup: int = 5,
    cudagraph_trees: bool = True,
) -> Callable[[TensorDictBase], TensorDictBase | dict[str, Tensor]]:
    """Compile a phase of training, replay it as a CUDA graph, or both.

    Args:
        function: of a tensordict; every call brings the same keys and shapes.
        compile_mode: one of ``COMPILE_MODES``, or None.
        fullgraph: a part that cannot be compiled is an error; otherwise it runs eagerly.
        cudagraphs: replay the whole call as one CUDA graph.
        cudagraph_warmup: calls before the capture; the first of them pay for the compilation.
        cudagraph_trees: let ``reduce-overhead`` and ``max-autotune`` capture CUDA graphs of their own.
            They never do inside ``cudagraphs``.

    Returns:
        a function like ``function``, or itself if nothing is asked for. What it returns stays valid
        through later calls.

    Raises:
        ValueError: an unknown mode, or ``cudagraphs`` without CUDA.
    """
    if compile_mode is None and not cudagraphs:
        return function
    if compile_mode not in (None, *COMPILE_MODES):
        raise ValueError(f"--compile {compile_mode}: valid are {', '.join(COMPILE_MODES)}.")
    if cudagraphs and not torch.cuda.is_available():
        raise ValueError("--cudagraphs: needs a CUDA device.")

    # Tensors instead of a tensordict: fewer guards to check at every call, and buffers to capture.
    def flat(structure: tuple, *leaves: Tensor) -> tuple[tuple, list[Tensor]]:
        return _flatten(function(_unflatten(structure, iter(leaves))))

    flat.__code__ = flat.__code__.replace()  # Dynamo keeps its graphs, and their limit, by code object
    if compile_mode is not None:
        options = list_mode_options(compile_mode)
        own_graphs = options.get("triton.cudagraphs", False) and cudagraph_trees and not cudagraphs
        flat = _compiled(flat, fullgraph, options | {"triton.cudagraphs": own_graphs and torch.cuda.is_available()})
    if cudagraphs:
        flat = Replay(flat, warmup=cudagraph_warmup)

    def accelerated(tensordict: TensorDictBase) -> TensorDictBase | dict[str, Tensor]:
        structure, leaves = _flatten(tensordict)
        structure, leaves = flat(structure, *leaves)
        return _unflatten(structure, iter(leaves))

    return accelerated


def compile_seconds() -> float:
    """Time that this process has spent in ``torch.compile`` so far."""
    return calculate_time_spent()["total_wall_time"]


def _quick_probe_of_vector_units() -> None:
    """Let inductor's probe of the processor start Pythons without torch.

    In every process torch 2.11 builds a small library for each vector unit and loads it in a Python that imports torch:
    most of what a start with a filled compile cache costs. The library needs ``libtorch_cpu`` alone.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    load = f"from ctypes import CDLL, RTLD_GLOBAL\nCDLL({str(library)!r}, RTLD_GLOBAL)\n"
    VecISA._avx_py_load = VecISA._avx_py_load.replace("import torch\n", load)


def _compiled(flat: Callable, fullgraph: bool, options: dict[str, Any]) -> Callable:
    torch._dynamo.config.trace_autograd_ops = True  # the update calls autograd.grad in the middle of its graph
    _quick_probe_of_vector_units()
    compiled = torch.compile(flat, fullgraph=fullgraph, dynamic=False if fullgraph else None, options=options)
    if not options["triton.cudagraphs"]:
        return compiled

    def safe_to_keep(structure: tuple, *leaves: Tensor) -> tuple[tuple, list[Tensor]]:
        torch.compiler.cudagraph_mark_step_begin()
        structure, outputs = compiled(structure, *leaves)
        return structure, [output.clone() for output in outputs]  # the next call overwrites them

    return safe_to_keep


class Replay:
    """Calls ``function`` a few times as it is, then replays a recording of it.

    At every replay the inputs are copied into the buffers that the recording reads, and the outputs
    out of those that it writes. So an entry that is both, or that the caller changes in place, is
    read afresh, and what was returned is never overwritten.

    Args:
        function: of a hashable structure and tensors; returns a structure and tensors.
        warmup: calls before the recording.
        record: of a call without arguments; returns the function that replays it.
    """

    def __init__(self, function: Callable, *, warmup: int, record: Callable[[Callable], Callable] | None = None):
        self.function, self.warmup, self.record = function, warmup, record or record_cuda_graph
        self.inputs: list[Tensor] = []
        self.key: Any = None
        self.replay: Callable[[], tuple[tuple, list[Tensor]]]

    def __call__(self, structure: tuple, *leaves: Tensor) -> tuple[tuple, list[Tensor]]:
        if self.warmup > 0:
            self.warmup -= 1
            return self.function(structure, *leaves)
        key = structure, [leaf.shape for leaf in leaves]
        if self.key is None:
            self.key, self.inputs = key, [leaf.clone() for leaf in leaves]
            self.replay = self.record(partial(self.function, structure, *self.inputs))
        elif self.key != key:
            raise ValueError(f"a CUDA graph replays one shape: recorded with {self.key}, called with {key}.")
        torch._foreach_copy_(self.inputs, leaves)
        structure, outputs = self.replay()
        return structure, [output.clone() for output in outputs]


def record_cuda_graph(call: Callable) -> Callable:
    """Capture ``call`` without running it; the function returned runs it, into the same tensors each time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _flatten(tree: TensorDictBase | dict[str, Tensor]) -> tuple[tuple, list[Tensor]]:
    """Nested tensordicts as a hashable structure and their tensors. Names of dimensions are dropped."""
    entries, leaves = [], []
    for name, value in tree.items():
        inner, tensors = (None, [value]) if isinstance(value, Tensor) else _flatten(value)
        entries.append((name, inner))
        leaves += tensors
    batch = None if isinstance(tree, dict) else (tree.batch_size, tree.device)
    return (batch, tuple(entries)), leaves


def _unflatten(structure: tuple, leaves: Iterator[Tensor]) -> TensorDictBase | dict[str, Tensor]:
    batch, entries = structure
    tree = {name: next(leaves) if inner is None else _unflatten(inner, leaves) for name, inner in entries}
    return tree if batch is None else TensorDict(tree, batch_size=batch[0], device=batch[1])
