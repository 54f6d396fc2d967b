"""Is this machine ready to train? ``python -m isaaclab_rnn_ppo.preflight [--json]``.

One line a check, with what to do where it fails; exit code 1 if any fails. Nothing here imports
Isaac Lab, which can start Kit, and torch only in a subprocess: a broken installation must be
reported, not met.
"""

from __future__ import annotations

import argparse
import getpass
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

GIB = 2**30
MIB = 2**20

SUPPORTED = {
    "torch": "2.11.0",
    "torchrl": "0.14.1",
    "tensordict": "0.14.3",
    "isaaclab": "3.0.0",
    "newton": "1.6.1",
    "warp-lang": "1.17.0",
    "mujoco": "3.12.0",
    "mujoco-warp": "3.12.0",
    "hydra-core": "1.3.8",
}
"""What this suite was tested with. The test of this file compares it with pyproject.toml."""

# Oldest Linux drivers by CUDA major version: NVIDIA, CUDA compatibility guide, "minor version compatibility".
MIN_DRIVER = {12: 525, 13: 580}
MIN_SHM = 256 * MIB
MIN_DISK = 5 * GIB
NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "glusterfs", "fuse.sshfs"}

# Kit asks for these on a terminal; a job has none. Setting them is the user's statement, never ours.
LICENCE_VARIABLES = {"OMNI_KIT_ACCEPT_EULA": "yes", "ACCEPT_EULA": "Y", "PRIVACY_CONSENT": "Y"}

TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "available": cuda,
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
}))
"""


@dataclass
class Check:
    """One line of the report.

    Attributes:
        status: ``ok``; ``warn``: training runs, but see the advice; ``fail``: it does not;
            ``skip``: does not apply here.
        todo: what to do about a warning or a failure.
    """

    name: str
    status: str
    detail: str
    todo: str = ""


# ------------------------------------------------------------------------------------------------------- the machine


def check_python() -> Check:
    """Isaac Lab 3.0.0 has wheels for Python 3.12 only."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] != (3, 12):
        return Check("python", "fail", found, "Isaac Lab 3.0.0 needs Python 3.12: uv venv --python 3.12")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return Check("python", "warn", found, "this suite was tested on Linux x86-64 only")
    return Check("python", "ok", found)


def check_driver(device: str) -> Check:
    """The NVIDIA driver, asked through ``nvidia-smi``."""
    missing = "fail" if device == "cuda" else "skip"
    smi = shutil.which("nvidia-smi")
    if device == "cpu" or smi is None:
        todo = "install the NVIDIA driver on the host; in a container: --gpus all, or apptainer --nv"
        detail = "not asked for (--device cpu)" if device == "cpu" else "no nvidia-smi: no NVIDIA driver here"
        return Check("driver", missing, detail, todo if missing == "fail" else "")
    query = [smi, "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        run = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("driver", "fail", f"nvidia-smi: {error}", "restart the driver: see nvidia-smi and dmesg")
    lines = [line.strip() for line in run.stdout.splitlines() if line.strip()]
    if run.returncode or not lines:
        detail = (run.stderr or run.stdout).strip().splitlines()
        return Check("driver", "fail", f"nvidia-smi: {detail[-1] if detail else 'no GPU'}", "see nvidia-smi and dmesg")
    return Check("driver", "ok", "; ".join(lines))


def check_shm(path: str = "/dev/shm") -> Check:
    """Batches and weights cross from the workers in shared memory."""
    todo = f"give it more: docker --shm-size=8g or --ipc=host; mount -o remount,size=8g {path}"
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Check("shared memory", "fail", f"{path}: {error.strerror}", todo)
    detail = f"{path}: {_size(usage.free)} free of {_size(usage.total)}"
    return Check("shared memory", *(("fail", detail, todo) if usage.free < MIN_SHM else ("ok", detail)))


def check_disk(log_dir: str) -> Check:
    """Room for checkpoints, and permission to write them."""
    folder = _nearest_folder(Path(log_dir))
    if error := _cannot_write(folder):
        return Check("disk", "fail", f"{log_dir}: {error}", "give --log-dir a folder that you may write to")
    free = shutil.disk_usage(folder).free
    detail = f"{log_dir}: {_size(free)} free"
    if free < MIN_DISK:
        return Check("disk", "fail", detail, f"free {_size(MIN_DISK)}, or give --log-dir a folder on another disk")
    return Check("disk", "ok", detail)


def cache_folders() -> dict[str, Path]:
    """Where compiled kernels and the bundled assets go, by the variable that moves them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        user = str(os.getuid())
    defaults = {
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()) / f"torchinductor_{user}",
        "TRITON_CACHE_DIR": Path.home() / ".triton" / "cache",
        "WARP_CACHE_PATH": cache / "warp",
    }
    folders = {name: Path(os.environ.get(name) or default) for name, default in defaults.items()}
    return folders | {"XDG_CACHE_HOME": cache}


def check_caches() -> Iterator[Check]:
    """Writable, and rather not on a network file system: many small files, locks, renames."""
    for variable, folder in cache_folders().items():
        name, above = f"cache {variable}", _nearest_folder(folder)
        todo = f"export {variable}=<a folder on this node's own disk>"
        if error := _cannot_write(above):
            yield Check(name, "fail", f"{folder}: {error}", todo)
        elif (kind := _file_system(above)) in NETWORK_FILE_SYSTEMS:
            yield Check(name, "warn", f"{folder} is on {kind}: slow, and locks may fail", todo)
        else:
            yield Check(name, "ok", str(folder))


def check_compiler() -> Check:
    """``--compile`` on the CPU calls a C++ compiler, Triton on a GPU a C compiler with Python's headers."""
    tools = {"cc": os.environ.get("CC", "cc"), "g++": os.environ.get("CXX", "g++")}
    missing = [name for name, command in tools.items() if shutil.which(command.split()[0]) is None]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        missing.append(str(header))
    if missing:
        todo = "apt-get install g++ python3.12-dev; without them: no --compile, and on a GPU --rnn-backend scan"
        return Check("compiler", "warn", f"missing: {', '.join(missing)}", todo)
    return Check("compiler", "ok", "cc, g++ and Python.h")


# -------------------------------------------------------------------------------------------------- the installation


def probe_torch() -> dict | str:
    """What torch says of itself, or the last line of the error that its import ends with."""
    try:
        run = subprocess.run([sys.executable, "-c", TORCH_PROBE], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return "import torch did not end within 300 s"
    if run.returncode:
        lines = run.stderr.strip().splitlines()
        return lines[-1] if lines else f"import torch ended with code {run.returncode}"
    return json.loads(run.stdout.splitlines()[-1])


def check_torch(device: str, driver: Check) -> Iterator[Check]:
    """Torch's import, its build, and whether it reaches a GPU."""
    torch = probe_torch()
    if isinstance(torch, str):
        todo = "reinstall torch with its own dependencies: uv pip install --reinstall torch==" + SUPPORTED["torch"]
        if "nccl" in torch.lower():
            todo = "its NCCL is of another CUDA version: uv pip install --reinstall nvidia-nccl-cu13"
        yield Check("torch", "fail", torch, todo)
        yield Check("cuda", "fail" if device == "cuda" else "skip", "torch cannot be imported")
        return
    build = f"{torch['version']}, built for " + (f"CUDA {torch['cuda']}" if torch["cuda"] else "the CPU only")
    yield Check("torch", "ok", build)
    if device == "cpu":
        yield Check("cuda", "skip", "not asked for (--device cpu)")
    elif torch["available"]:
        yield Check("cuda", "ok", ", ".join(torch["devices"]))
    elif driver.status == "skip":
        yield Check("cuda", "skip", "no GPU: simulation and training run on the CPU (Newton physics)")
    elif torch["cuda"] is None:
        yield Check("cuda", "fail", "this torch has no CUDA", f"install torch {SUPPORTED['torch']} built for CUDA")
    else:
        major = int(torch["cuda"].split(".")[0])
        needed = MIN_DRIVER.get(major)
        old = driver.status == "ok" and needed and int(driver.detail.split(".")[0]) < needed
        todo = "check CUDA_VISIBLE_DEVICES, and that the container was started with its GPUs"
        if old:
            todo = f"CUDA {major} needs driver {needed} or newer: update the driver of the host"
        yield Check("cuda", "fail", "torch finds no GPU", todo)


def check_versions() -> Iterator[Check]:
    """The installed versions against ``SUPPORTED``. Installers of other Isaac packages can replace torch."""
    for name, supported in SUPPORTED.items():
        fix = f"uv pip install {name}=={supported}"
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(f"version {name}", "fail", "not installed", fix)
            continue
        if found.split("+")[0] == supported:
            yield Check(f"version {name}", "ok", found)
        else:
            yield Check(f"version {name}", "fail", f"{found}; tested with {supported}", fix)


def is_installed(module: str) -> bool:
    """Whether ``import module`` would find something, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def check_isaaclab() -> Iterator[Check]:
    """Isaac Lab and what it needs without Isaac Sim; then Isaac Sim and its licence variables."""
    missing = [name for name in ("isaaclab", "isaaclab_tasks", "newton", "warp", "pxr") if not is_installed(name)]
    if missing:
        todo = f"uv pip install isaaclab=={SUPPORTED['isaaclab']}"
        yield Check("isaac lab", "fail", f"no module {', '.join(missing)}", todo)
    else:
        yield Check("isaac lab", "ok", "isaaclab, isaaclab_tasks, newton, warp and pxr are importable")

    if not is_installed("isaacsim"):
        yield Check("licence", "skip", "Isaac Sim is not installed: no PhysX, no Kit, and no licence to accept")
        return
    unset = [name for name in LICENCE_VARIABLES if not os.environ.get(name)]
    if unset:
        values = " ".join(f"{name}={LICENCE_VARIABLES[name]}" for name in unset)
        todo = f"read NVIDIA's licence and privacy terms; if you accept them, export {values}"
        yield Check("licence", "fail", f"Isaac Sim would ask at its first import: {', '.join(unset)} not set", todo)
    elif os.geteuid() == 0 and not os.environ.get("OMNI_KIT_ALLOW_ROOT"):
        yield Check("licence", "fail", "Kit refuses to run as root", "run as a user, or export OMNI_KIT_ALLOW_ROOT=1")
    else:
        yield Check("licence", "ok", "set: " + ", ".join(LICENCE_VARIABLES))


def check_assets(choice: str, task: str) -> Check:
    """The asset root that a run of ``task`` would take."""
    try:
        root, line = _load_assets_module().resolve_asset_root(choice, task=task)
    except (ValueError, RuntimeError, OSError) as error:
        return Check("assets", "fail", str(error), "point --asset-root or ISAACSIM_ASSET_ROOT at a folder with Isaac/")
    detail = line.removeprefix("assets: ")
    if "may miss files" in detail:
        return Check("assets", "warn", detail, f"give {task} a mirror of the asset server: --asset-root FOLDER")
    return Check("assets", "ok", detail if root in detail else f"{root} ({detail})")


def _load_assets_module() -> ModuleType:
    """``utils/assets.py`` by itself: the package around it imports torch, which may be what is broken."""
    path = Path(__file__).with_name("utils") / "assets.py"
    spec = importlib.util.spec_from_file_location("_preflight_assets", path)
    assert spec is not None and spec.loader is not None  # a file of this package
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------------------ helpers


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"


def _nearest_folder(path: Path) -> Path:
    """The path itself, or what of it exists: the folder in which it would be made."""
    path = path.expanduser().absolute()
    while not os.path.lexists(path):
        path = path.parent
    return path


def _cannot_write(folder: Path) -> str:
    """Why no file can be made in ``folder``, or an empty text. Root may do anything by its bits, so it is tried."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{error.strerror} ({folder})"


def _file_system(folder: Path) -> str:
    """Type of the file system that holds ``folder``, as the kernel names it."""
    best, kind = "", ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, this_kind = line.split()[:3]
        mount = mount.encode().decode("unicode_escape")
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, this_kind
    return kind


def run_checks(*, device: str, log_dir: str, asset_root: str, task: str) -> list[Check]:
    """All checks in order."""
    driver = check_driver(device)
    return [
        check_python(),
        driver,
        *check_torch(device, driver),
        *check_versions(),
        *check_isaaclab(),
        check_shm(),
        check_disk(log_dir),
        *check_caches(),
        check_compiler(),
        check_assets(asset_root, task),
    ]


def report(checks: list[Check], write: Callable[[str], None] = print) -> None:
    """A line a check, and a line of advice below those that need it."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        write(f"{check.status:4}  {check.name:{width}}  {check.detail}")
        if check.todo:
            write(f"{'':4}  {'':{width}}  -> {check.todo}")
    counts = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail", "skip")}
    write(", ".join(f"{count} {status}" for status, count in counts.items()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="preflight", description="Check that this machine can train, without starting a simulator."
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: a GPU that is there must work; cuda: there must be one; cpu: none is looked for (default: auto)",
    )
    parser.add_argument("--task", default="Isaac-Ant", help="task whose assets are looked for (default: Isaac-Ant)")
    parser.add_argument("--asset-root", default="auto", help="as train.py's (default: auto)")
    parser.add_argument("--log-dir", default="runs", help="as train.py's (default: runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    checks = run_checks(device=args.device, log_dir=args.log_dir, asset_root=args.asset_root, task=args.task)
    passed = all(check.status != "fail" for check in checks)
    if args.json:
        print(json.dumps({"passed": passed, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        report(checks)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
