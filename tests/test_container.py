"""The images and the scheduler's scripts, as far as no container engine and no cluster allow.

The linters come with the dev group; shellcheck may come from the system.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONTAINER = ROOT / "container"
DOCKERFILE, DEFINITION = CONTAINER / "Dockerfile", CONTAINER / "isaaclab_rnn_ppo.def"
SCRIPTS = [CONTAINER / "install.sh", *sorted((CONTAINER / "slurm").iterdir())]
TOOLS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def lint(tool: str, *args: str, text: str | None = None) -> None:
    found = shutil.which(tool, path=TOOLS)
    if found is None:
        pytest.fail(f"{tool} is not installed: it is in the dev group")
    done = subprocess.run([found, *args], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in lines if line.strip()]


def sections() -> dict[str, str]:
    """The definition file's sections by name; the header's lines under an empty name."""
    head, *rest = re.split(r"^%(\w+).*\n", DEFINITION.read_text(), flags=re.M)
    return {"": head, **dict(zip(rest[::2], rest[1::2]))}


def packages(text: str) -> set[str]:
    """What a shell text installs with apt-get."""
    line = re.search(r"apt-get install ([^&\n]*)", text.replace("\\\n", " "))[1]
    return {word for word in line.split() if not word.startswith("-")}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(path):
    lint("shellcheck", str(path))


def test_dockerfile_passes_hadolint():
    lint("hadolint", str(DOCKERFILE))


@pytest.mark.parametrize("section", ["post", "environment", "runscript", "test"])
def test_definition_passes_shellcheck(section):
    lint("shellcheck", "--shell=sh", "-", text="#!/bin/sh\n" + re.sub(r"{{ (\w+) }}", r"${\1:-}", sections()[section]))


def test_definition_is_well_formed():
    header = dict(line.split(": ", 1) for line in sections()[""].splitlines() if line.strip())
    assert set(header) == {"Bootstrap", "From"}
    assert set(sections()) == {"", "labels", "help", "arguments", "files", "post", "environment", "runscript", "test"}
    declared = dict(line.strip().split("=") for line in sections()["arguments"].split())
    assert set(re.findall(r"{{ (\w+) }}", DEFINITION.read_text())) == set(declared)


def test_both_images_are_built_alike():
    arguments = dict(value.split("=", 1) for word, value in instructions() if word == "ARG" and "=" in value)
    run = next(value for word, value in instructions() if word == "RUN" and "apt-get" in value)
    for name, value in arguments.items():
        run = run.replace("${" + name + "}", value.strip('"'))
    assert packages(run) == packages(sections()["post"])
    assert f"From: {arguments['BASE']}" in sections()[""]
    copied = {source for source, _ in copies_of_dockerfile()}
    assert copied == {line.split()[0] for line in sections()["files"].splitlines() if line.strip()}
    ignored = (CONTAINER / "Dockerfile.dockerignore").read_text().split()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_nobody_accepts_a_licence_for_the_user():
    for path in [DOCKERFILE, DEFINITION, *SCRIPTS]:
        for value in re.findall(r"(?:EULA|PRIVACY_CONSENT)=([^\s\\]*)", path.read_text()):
            assert value in ('""', "${OMNI_KIT_ACCEPT_EULA}", "${ACCEPT_EULA}", "${PRIVACY_CONSENT}"), path


def test_task_sh_goes_on_from_the_newest_checkpoint(tmp_path):
    """With `echo` in Python's place: what would run, the first time and after a requeue."""
    env = os.environ | {
        "PYTHON": "echo python",
        "SLURM_PROCID": "3",
        "SLURM_JOB_ID": "7",
        "SEED": "10",
        "RUNS": str(tmp_path / "runs"),
        "CACHES": str(tmp_path / "caches"),
    }
    command = ["bash", str(CONTAINER / "slurm" / "task.sh"), "--task", "Isaac-Ant"]

    def words() -> list[str]:
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()

    runs = tmp_path / "runs" / "7" / "seed_13"
    start = ["python", "-m", "isaaclab_rnn_ppo.train", "--seed", "13", "--log-dir", str(runs)]
    assert words() == [*start, "--task", "Isaac-Ant"]
    for number, age in ((1, 100), (2, 0)):
        file = runs / "Isaac-Ant" / f"2026010{number}-000000-13" / "checkpoints" / "iteration_0000050.pt"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (1e9 - age, 1e9 - age))
    assert words() == [*start, "--resume", str(file.parent.parent), "--task", "Isaac-Ant"]


def test_task_sh_with_ranks_is_a_nodes_part_of_one_run(tmp_path):
    env = os.environ | {
        "PYTHON": "echo python",
        "SLURM_PROCID": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "32",
        "RANKS": "4",
        "HEAD": "node1:20007",
        "RUNS": str(tmp_path / "runs"),
        "CACHES": str(tmp_path / "caches"),
    }
    command = ["bash", str(CONTAINER / "slurm" / "task.sh"), "--task", "Isaac-Ant"]
    line = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    torchrun = (
        "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node1:20007 --rdzv-id 7 --max-restarts 3"
    )
    train = f"-m isaaclab_rnn_ppo.train --seed 0 --log-dir {tmp_path}/runs/7/seed_0 --task Isaac-Ant"
    assert line == f"python -m torch.distributed.run {torchrun} {train}\n"


# -------------------------------------------------------------------------------------------------------------- replay


def copies_of_dockerfile() -> list[tuple[str, str]]:
    found = []
    for word, value in instructions():
        if word == "COPY":
            *sources, target = [part for part in value.split() if not part.startswith("--")]
            found += [(s, f"{target}{Path(s).name}" if target.endswith("/") else target) for s in sources]
    return found


def shell(text: str, folder: Path, env: dict[str, str]) -> None:
    """A step of an image, in a folder: without what needs root, and with the user's package cache."""
    assert "/opt/" in text
    text = text.replace("/opt/", f"{folder}/opt/").replace("UV_NO_CACHE=1", "").replace("{{ isaacsim }}", "0")
    done = subprocess.run(["bash", "-euc", text], env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def copy(pairs: list[tuple[str, str]], folder: Path) -> None:
    for source, target in pairs:
        there = Path(f"{folder}{target}")
        there.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, there, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, there)


@pytest.mark.slow
def test_replay_of_the_dockerfile(tmp_path):
    """Its steps in order, in a folder: all but the base, the system packages and the user."""
    copy(copies_of_dockerfile(), tmp_path)
    env = os.environ | {"ISAACSIM": "0"}
    (step,) = [value for word, value in instructions() if word == "RUN" and "apt-get" not in value]
    shell(step, tmp_path, env)
    (health,) = [value for word, value in instructions() if word == "HEALTHCHECK"]
    python, *words = json.loads(health[health.index("[") :])
    python = f"{tmp_path}/opt/isaaclab_rnn_ppo/venv/bin/{python}"
    subprocess.run([python, *words], cwd=tmp_path, check=True)


@pytest.mark.slow
def test_replay_of_the_definition(tmp_path):
    """Its sections in order, in a folder: all but the base and the system packages."""
    copy([tuple(line.split()) for line in sections()["files"].splitlines() if line.strip()], tmp_path)
    post = re.sub(r"^ *(apt-get|rm -rf /var)(.*\\\n)*.*\n", "", sections()["post"], flags=re.M)
    assert "apt-get" not in post and "/var" not in post
    shell(post, tmp_path, dict(os.environ))
    shell(sections()["test"], tmp_path, dict(os.environ))
    assert shlex.split(sections()["runscript"])[:4] == ["exec", "python", "-m", "isaaclab_rnn_ppo.train"]
