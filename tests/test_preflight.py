"""The preflight: what it says of a sound machine, and that it finds each planted fault and nothing else."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from isaaclab_rnn_ppo import preflight

ROOT = Path(__file__).parent.parent
SIMULATOR = ("isaaclab", "isaaclab_tasks", "newton", "warp", "pxr", "omni", "isaacsim")


@pytest.fixture(scope="module")
def sound():
    """The report of this machine with the GPU left out, from a process of its own."""
    code = f"""
import sys
from isaaclab_rnn_ppo import preflight
code = preflight.main(["--device", "cpu", "--json"])
found = sorted(set({(*SIMULATOR, "torch")!r}) & set(sys.modules))
assert not found, f"the preflight imported {{found}}"
sys.exit(code)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT / "examples")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


def test_a_sound_machine_passes_and_nothing_is_imported(sound):
    assert sound["passed"]
    statuses = {check["name"]: check["status"] for check in sound["checks"]}
    assert {"python", "driver", "torch", "isaac lab", "shared memory", "disk", "assets"} <= set(statuses)
    assert statuses["driver"] == statuses["cuda"] == "skip"
    assert all(check["todo"] for check in sound["checks"] if check["status"] in ("warn", "fail"))


def test_supported_versions_are_the_projects_pins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = project["project"]["dependencies"] + project["tool"]["uv"]["constraint-dependencies"]
    pinned = dict(pin.split(";")[0].strip().split("==") for pin in pins)
    assert {name: pinned[name] for name in preflight.SUPPORTED} == preflight.SUPPORTED


# ----------------------------------------------------------------------------------------------------- planted faults


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def no_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for tool in ("cc", "g++"):
        executable(tmp_path / tool, "")


def broken_driver(tmp_path, monkeypatch):
    executable(tmp_path / "nvidia-smi", "echo 'NVIDIA-SMI has failed: no driver is running' >&2; exit 9")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def old_driver(tmp_path, monkeypatch):
    executable(tmp_path / "nvidia-smi", "echo '470.256.02, NVIDIA T4, 15360 MiB'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def nccl_mismatch(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('undefined symbol: ncclCommShrink')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(preflight, "probe_torch", REAL_PROBE)


def replaced_torch(tmp_path, monkeypatch):
    folder = tmp_path / "torch-2.7.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.7.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def no_isaaclab(tmp_path, monkeypatch):
    site = Path(preflight.importlib.util.find_spec("isaaclab").origin).parents[1]
    for entry in site.iterdir():  # all of it but Isaac Lab
        if not entry.name.startswith("isaaclab"):
            (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.setattr(sys, "path", [str(tmp_path) if Path(p) == site else p for p in sys.path])
    for finder in sys.meta_path[:]:  # an editable install's own finder would still find this suite: it may
        if hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()


def no_licence(tmp_path, monkeypatch):
    (tmp_path / "isaacsim").mkdir()
    (tmp_path / "isaacsim" / "__init__.py").write_text("raise SystemExit('the preflight imported Isaac Sim')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in preflight.LICENCE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def kit_as_root(tmp_path, monkeypatch):
    no_licence(tmp_path, monkeypatch)
    for name, value in preflight.LICENCE_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMNI_KIT_ALLOW_ROOT", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def cache_below_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("WARP_CACHE_PATH", str(tmp_path / "file" / "warp"))


def wrong_asset_root(tmp_path, monkeypatch):
    monkeypatch.setenv("ISAACSIM_ASSET_ROOT", str(tmp_path))


def no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))


REAL_PROBE = preflight.probe_torch
FAULTS = {
    no_driver: ("cuda", {"driver": "--gpus all", "cuda": "CUDA_VISIBLE_DEVICES"}),
    broken_driver: ("auto", {"driver": "nvidia-smi", "cuda": "container"}),
    old_driver: ("auto", {"cuda": "580 or newer"}),
    nccl_mismatch: ("cpu", {"torch": "nvidia-nccl-cu13"}),
    replaced_torch: ("cpu", {"version torch": "torch==2.11.0"}),
    no_isaaclab: ("cpu", {"version isaaclab": "isaaclab==3.0.0", "isaac lab": "isaaclab==3.0.0"}),
    no_licence: ("cpu", {"licence": "export OMNI_KIT_ACCEPT_EULA"}),
    kit_as_root: ("cpu", {"licence": "OMNI_KIT_ALLOW_ROOT=1"}),
    cache_below_a_file: ("cpu", {"cache WARP_CACHE_PATH": "export WARP_CACHE_PATH"}),
    wrong_asset_root: ("cpu", {"assets": "--asset-root"}),
    no_compiler: ("cpu", {"compiler": "g++"}),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_it_finds_a_planted_fault_and_no_other(fault, sound, tmp_path, monkeypatch, capsys):
    device, expected = FAULTS[fault]
    torch = {"version": "2.11.0+cu130", "cuda": "13.0", "available": False, "devices": []}
    monkeypatch.setattr(preflight, "probe_torch", lambda: torch)  # the sound report has asked the real one
    monkeypatch.setenv("ISAACSIM_ASSET_ROOT", "")
    fault(tmp_path, monkeypatch)
    asset_root = "auto" if fault is wrong_asset_root else "bundled"
    log_dir = str(ROOT / "runs")
    code = preflight.main(["--device", device, "--json", "--asset-root", asset_root, "--log-dir", log_dir])
    found = {
        check["name"]: check
        for check in json.loads(capsys.readouterr().out)["checks"]
        if check["status"] in ("warn", "fail")
    }
    known = {check["name"] for check in sound["checks"] if check["status"] in ("warn", "fail")}
    assert set(found) - known == set(expected)
    assert all(advice in found[name]["todo"] for name, advice in expected.items()), found
    assert code == (0 if fault is no_compiler else 1)


def test_shared_memory_and_disk_too_small(tmp_path):
    """On real file systems of 64 MiB, one of them mounted as /dev/shm, as Docker's default is."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("mounting a small file system needs root")
    (tmp_path / "small").mkdir()
    script = (
        f"mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs -o size=64m tmpfs {tmp_path}/small && "
        f"exec {sys.executable} -c 'from isaaclab_rnn_ppo.preflight import *; "
        f'report([check_shm(), check_disk("{tmp_path}/small/runs")])\''
    )
    env = os.environ | {"PYTHONPATH": str(ROOT / "examples")}
    run = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, env=env)
    if "mount:" in run.stderr or "unshare:" in run.stderr:
        pytest.skip(run.stderr.strip())
    assert run.stdout.count("64 MiB free") == 2 and "--shm-size" in run.stdout, run.stdout + run.stderr
    assert "0 ok, 0 warn, 2 fail, 0 skip" in run.stdout


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    check = preflight.check_disk(str(tmp_path / "file" / "runs"))
    assert (check.status, "Not a directory" in check.detail) == ("fail", True)


def test_the_report_names_every_check_and_its_advice(sound):
    lines: list[str] = []
    checks = [preflight.Check(**check) for check in sound["checks"]]
    checks.append(preflight.Check("planted", "fail", "what is wrong", "what to do"))
    preflight.report(checks, lines.append)
    assert sum(line.startswith(("ok", "warn", "fail", "skip")) for line in lines) == len(checks)
    assert any("-> what to do" in line for line in lines)
    assert "1 fail" in lines[-1]
