"""Metrics and console: ``metrics.csv`` always, one of TorchRL's loggers beside it."""

from __future__ import annotations

import csv
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from tensordict import TensorDictBase
from torchrl.record.loggers import Logger, get_logger

from isaaclab_rnn_ppo.utils.ranks import sum_over_ranks

CSV_NAME = "metrics.csv"


class EpisodeStatistics:
    """Means over the episodes that ended last, at least ``num_episodes`` of them once there were as many.

    Args:
        log_names: Isaac Lab's names of the K entries of ``episodes["log"]``.
        num_episodes: how far the mean looks back.
    """

    def __init__(self, log_names: Sequence[str] = (), num_episodes: int = 100):
        self.log_names, self.num_episodes = list(log_names), num_episodes
        self._window: deque[torch.Tensor] = deque()

    def update(self, episodes: TensorDictBase) -> dict[str, float]:
        """Add the ``episodes`` part [N] of every rank's rollout; NaN before any episode has ended."""
        sums = [episodes[key].sum().unsqueeze(0) for key in ("count", "return", "length")]
        self._window.append(sum_over_ranks(torch.cat([*sums, episodes["log"].sum(0)]).double().cpu()))
        total = torch.stack(list(self._window)).sum(0)
        while len(self._window) > 1 and total[0] - self._window[0][0] >= self.num_episodes:
            total -= self._window.popleft()
        names = ["episode_return", "episode_length", *self.log_names]
        return dict(zip(names, (total[1:] / total[0]).tolist()))

    def state_dict(self) -> list[torch.Tensor]:
        """Sums [3 + K] of the iterations that the mean looks back on."""
        return list(self._window)

    def load_state_dict(self, state: list[torch.Tensor]) -> None:
        self._window = deque(state)


@contextmanager
def _no_disk_is_no_reason_to_stop() -> Iterator[None]:
    """Rows that find the disk full wait in the file's buffer, 8 kB of them."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{CSV_NAME} lacks rows, training goes on: {error}", stacklevel=4)


class MetricsCsv:
    """``metrics.csv``: one row an iteration; the first row decides the columns.

    A resumed run keeps the rows up to ``last_iteration`` and drops what was lost with the crash.
    """

    def __init__(self, path: Path, last_iteration: int = 0):
        rows: list[dict[str, str]] = []
        if path.exists():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if int(row["iteration"]) <= last_iteration]
        self._file = path.open("w", newline="")
        self._writer: csv.DictWriter | None = None
        for row in rows:
            self.write(row)

    def write(self, metrics: Mapping[str, float | str]) -> None:
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(metrics), extrasaction="ignore")
            self._writer.writeheader()
        with _no_disk_is_no_reason_to_stop():
            self._writer.writerow(dict(metrics))
            self._file.flush()

    def close(self) -> None:
        with _no_disk_is_no_reason_to_stop():
            self._file.close()


class Progress:
    """Live table on a terminal, a line an iteration elsewhere."""

    def __init__(self, num_iterations: int, first_iteration: int = 0):
        self.num_iterations, self.first_iteration = num_iterations, first_iteration
        self.console = Console()
        self._start = time.monotonic()
        self._live = Live(console=self.console, auto_refresh=False) if self.console.is_terminal else None
        if self._live is not None:
            self._live.start()

    def show(self, metrics: Mapping[str, float]) -> None:
        iteration = int(metrics["iteration"])
        done = iteration - self.first_iteration
        eta = (time.monotonic() - self._start) / done * (self.num_iterations - iteration)
        frames = metrics["fps"] * (metrics["collect_s"] + metrics["learn_s"])
        cells = {
            "iteration": f"{iteration}/{self.num_iterations}",
            "frames": f"{int(metrics['frames']):,}",
            "fps": f"{metrics['fps']:,.0f}",
            "collect fps": f"{frames / metrics['collect_s']:,.0f}",
            "learn fps": f"{frames / metrics['learn_s']:,.0f}",
            "return": f"{metrics['episode_return']:.3f}",
            "length": f"{metrics['episode_length']:.1f}",
            "kl": f"{metrics['kl']:.4f}",
            "eta": str(timedelta(seconds=round(eta))),
        }
        if self._live is None:
            print("  ".join(f"{name} {value}" for name, value in cells.items()), flush=True)
            return
        table = Table(*cells)
        table.add_row(*cells.values())
        self._live.update(table, refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


class RunLogger:
    """``log(metrics, step)`` to the csv file, TorchRL's logger and the console.

    Args:
        run_dir: the run's folder.
        kind: ``csv`` or ``none`` (metrics.csv alone), ``tensorboard``, ``wandb``.
        num_iterations: of the whole run.
        first_iteration: iterations that an earlier process has done.
    """

    def __init__(self, run_dir: Path, *, kind: str, num_iterations: int, first_iteration: int = 0):
        self._csv = MetricsCsv(run_dir / CSV_NAME, first_iteration)
        self._kind, self._logger = kind, make_torchrl_logger(kind, run_dir)
        self._progress = Progress(num_iterations, first_iteration)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """``step`` counts frames."""
        self._csv.write(metrics)
        if self._logger is not None:
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            self._logger.log_metrics(finite, step=step)
        self._progress.show(metrics)

    def log_video(self, path: Path, step: int) -> None:
        """Give a video to wandb; the other loggers show none, and it is in the run's folder anyway."""
        if self._kind == "wandb" and self._logger is not None:
            import wandb  # slow to import, and only wandb's users need it

            self._logger.experiment.log({"eval/video": wandb.Video(str(path), format="mp4")}, step=step)

    def close(self) -> None:
        self._progress.close()
        self._csv.close()
        if self._logger is not None:
            self._logger.close()


class NoLogger:
    """A run that another process logs: the ranks above 0. Arguments: ``RunLogger``."""

    def __init__(self, run_dir: Path, *, kind: str, num_iterations: int, first_iteration: int = 0):
        pass

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def log_video(self, path: Path, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def make_torchrl_logger(kind: str, run_dir: Path) -> Logger | None:
    """TorchRL's logger of that kind.

    wandb takes project, entity, group and mode from its own environment variables, and is offline
    where nobody is logged in or no server answers: nothing about it can stop a run. A run folder is one run
    of wandb, however often it is resumed.
    """
    if kind in ("csv", "none"):
        return None
    if kind != "wandb":
        return get_logger(kind, str(run_dir), run_dir.name)
    import wandb  # lazy: its import costs every worker, which has this module too, a second

    logged_in = "WANDB_API_KEY" in os.environ or _has_netrc_entry()
    mode = os.environ.get("WANDB_MODE", "online" if logged_in else "offline")
    options = {
        "id": f"{run_dir.parent.name}-{run_dir.name}".replace(":", "-"),
        "project": os.environ.get("WANDB_PROJECT", "isaaclab_rnn_ppo"),
    }
    try:
        options |= {"mode": mode, "offline": mode != "online"}
        return get_logger(kind, str(run_dir), run_dir.name, wandb_kwargs=options)
    except wandb.Error as error:
        wandb.teardown()  # it takes the run's id for used
        reason = str(error).splitlines()[0]
        warnings.warn(f"--logger wandb: {reason}; offline instead, `wandb sync` sends it later", stacklevel=2)
        options |= {"mode": "offline", "offline": True}
        return get_logger(kind, str(run_dir), run_dir.name, wandb_kwargs=options)


def _has_netrc_entry() -> bool:
    netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    return netrc.is_file() and "wandb" in netrc.read_text()
