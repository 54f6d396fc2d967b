"""What every benchmark says of the machine, and the peak memory of a call."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch


def environment(*packages: str) -> dict:
    """Hardware and versions that the figures belong to; ``packages`` beside torch, torchrl, tensordict and triton."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "torchrl", "tensordict", "triton", *packages)},
        "date": time.strftime("%Y-%m-%d"),
    }


def status_bytes(key: str, pid: int | str = "self") -> int:
    """``VmRSS`` or ``VmHWM`` of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def added_peak_bytes(call: Callable[[], object]) -> int:
    """Bytes of resident memory that ``call`` adds to this process at its peak. Run a small one before."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status_bytes("VmRSS")
    call()
    return status_bytes("VmHWM") - before
