"""The documents: commands that run, links that lead somewhere, words that are spelt right.

A fence of shell or Python in a document says behind its language what happens to it (knowledge_base/README.md):
``run`` and ``run-slow`` are run here, ``gpu`` and ``illustrative`` are not.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from isaaclab_rnn_ppo.utils.config import ALL_FLAGS

ROOT = Path(__file__).parent.parent
KNOWLEDGE = sorted((ROOT / "knowledge_base").glob("*.md"))
MARKED = [ROOT / "README.md", *KNOWLEDGE, ROOT / "container" / "README.md"]
DOCUMENTS = [*MARKED, ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").rglob("README.md"))]
MARKS = {"run", "run-slow", "gpu", "illustrative"}
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.M | re.S)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fences(path: Path) -> list[tuple[str, str, str]]:
    """Language, mark and text of every fence."""
    found = FENCE.findall(path.read_text())
    return [(*f"{info} - -".split()[:2], text) for _, info, text in found]


def commands(mark: str) -> list:
    return [
        pytest.param(language, text, id=f"{name(path)}-{number}")
        for path in MARKED
        for number, (language, this_mark, text) in enumerate(fences(path))
        if this_mark == mark
    ]


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text())


# ----------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize("path", MARKED, ids=name)
def test_every_shell_command_is_marked(path):
    for language, mark, text in fences(path):
        if language in ("bash", "sh", "shell", "console"):
            assert mark in MARKS, f"mark this fence, ```{language} run|run-slow|gpu|illustrative:\n{text}"


def run(language: str, text: str, folder: Path) -> None:
    """Run a fence in a copy of the repository's root, made of links, with this environment's Python first.

    `uv run` is dropped: this environment is the one that it would install, and other tests are using it.
    """
    for entry in ROOT.iterdir():
        if entry.name not in ("runs", ".git"):
            (folder / entry.name).symlink_to(entry)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": os.environ["HOME"]}
    if language == "python":
        file = folder / (re.match(r"# (\w+\.py)", text) or ["", "recipe.py"])[1]
        file.write_text(text)
        command = [sys.executable, str(file)]
    else:
        command = ["bash", "-euo", "pipefail", "-c", text.replace("uv run ", "")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, timeout=580)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize(("language", "text"), commands("run"))
def test_commands_run(language, text, tmp_path):
    run(language, text, tmp_path)


@pytest.mark.slow
@pytest.mark.isaac
@pytest.mark.parametrize(("language", "text"), commands("run-slow"))
def test_slow_commands_run(language, text, tmp_path):
    run(language, text, tmp_path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_files_that_a_command_names_exist(path):
    for language, _, text in fences(path):
        if language == "bash":
            for word in re.findall(r"(?:examples|container|tests|benchmarks)/[\w/.]+\.\w+", text):
                assert (ROOT / word).exists(), word


def test_flags_of_the_knowledge_base_exist():
    """A flag in backquotes is one of train.py's, unless the code span names the program or it is listed here."""
    other_programs = "--no-deps --target --ipc --shm-size --build-arg --isaacsim --signal --cpus-per-task --help --json"
    known = {spelt for flag in ALL_FLAGS for spelt in (f"--{flag}", f"--{flag.replace('_', '-')}")}
    known |= {*other_programs.split(" "), "--checkpoint", "--critic-*"}
    for path in KNOWLEDGE:
        if path.name in ("COMPILE.md", "SCALING.md"):  # they speak of the benchmarks' flags
            continue
        for quoted in re.findall(r"`([^`\n]+)`", prose(path)):
            if quoted.startswith("--") or " " not in quoted:
                for flag in re.findall(r"(?<![\w-])--[a-z][\w*-]*", quoted):
                    assert flag in known, f"{flag} in `{quoted}` of {path.name}"


# ------------------------------------------------------------------------------------------------------ links, tables


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#{1,6} (.+)$", prose(path), re.M)}


def broken_links(path: Path) -> list[str]:
    """Internal links of a document that lead nowhere, anchors included."""
    broken = []
    for target in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"https?://|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_internal_links_and_anchors(path):
    assert broken_links(path) == []


def test_the_link_checker_sees_a_broken_link(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` C\n[ok](#a-b-c) [gone](#d) [file](no.md) [web](https://example.org)\n```\n[code](x.md)\n```\n"
    )
    assert broken_links(page) == ["#d", "no.md"]


def test_the_index_names_every_page():
    index = (ROOT / "knowledge_base" / "README.md").read_text()
    assert [page.name for page in KNOWLEDGE if f"({page.name})" not in index] == ["README.md"]


def test_the_versions_table_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = project["project"]["dependencies"] + project["tool"]["uv"]["constraint-dependencies"]
    pinned = dict(pin.split(";")[0].strip().split("==") for pin in pins)
    text = (ROOT / "knowledge_base" / "ISAACLAB.md").read_text()
    rows = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|$", text, re.M))
    assert rows.pop("python") == project["project"]["requires-python"].removeprefix("==").removesuffix(".*")
    assert rows and {package: pinned[package] for package in rows} == rows


def test_tests_that_a_page_names_exist():
    for path in KNOWLEDGE:
        for file, test in re.findall(r"(test_\w+\.py)(?:::(test_\w+))?", prose(path)):
            assert test in (ROOT / "tests" / file).read_text(), f"{file}::{test} in {path.name}"


def test_spelling():
    """The usual misspellings. A word that is right all the same goes to the list here."""
    codespell = shutil.which("codespell", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if codespell is None:
        pytest.fail("codespell is not installed: it is in the dev group")
    command = [codespell, "--ignore-words-list", "te,nd,ser,ore", *map(str, DOCUMENTS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
