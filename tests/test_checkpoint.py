"""Checkpoints: whole or not at all, checked, and safe to load."""

import pickle
import subprocess
from pathlib import Path

import pytest
import torch
from isaaclab_rnn_ppo.utils.checkpoint import (
    RESUME_ENTRIES,
    checkpoint_path,
    checkpoints,
    checksum,
    load_checkpoint,
    load_model,
    resume_from,
    save_checkpoint,
)

STATE = dict.fromkeys(RESUME_ENTRIES) | {
    "model": {"w": torch.arange(5000.0)},
    "iteration": 3,
    "rng": (1, [2.5, "x"], torch.tensor(7)),
}


def save(run_dir: Path, *iterations: int, **options) -> list[Path]:
    for iteration in iterations:
        save_checkpoint(checkpoint_path(run_dir, iteration), STATE | {"iteration": iteration}, **options)
    return checkpoints(run_dir)


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_round_trip(tmp_path):
    (path,) = save(tmp_path, 3)
    state = load_checkpoint(path)
    assert checksum(state) == checksum(STATE)
    assert [file.name for file in path.parent.iterdir()] == ["iteration_0000003.pt"]


def test_the_checksum_sees_every_kind_of_change():
    changes = [
        STATE | {"model": {"w": STATE["model"]["w"] + 1e-6}},
        STATE | {"model": {"v": STATE["model"]["w"]}},
        STATE | {"iteration": 4},
        STATE | {"rng": (1, [2.5, "y"], torch.tensor(7))},
        STATE | {"rng": (1, [2.5, "x"], torch.tensor(7.0))},
    ]
    assert len({checksum(STATE), *map(checksum, changes)}) == 1 + len(changes)


def test_the_last_ones_are_kept(tmp_path):
    assert [path.name[-4] for path in save(tmp_path, 1, 2, 3, 4, keep=2)] == ["3", "4"]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path, damage):
    newest = save(tmp_path, 1, 2)[-1]
    if damage == "flipped":
        flip_bit(newest, newest.read_bytes().index(torch.arange(1000.0, 1010.0).numpy().tobytes()))
    else:
        newest.write_bytes(newest.read_bytes()[: 0 if damage == "empty" else 3000])
    with pytest.raises(ValueError, match=newest.name):
        load_checkpoint(newest)
    with pytest.warns(UserWarning, match="Trying the one before"):
        path, state = resume_from(str(tmp_path), log_dir="", task="")
    assert path.name == "iteration_0000001.pt" and state["iteration"] == 1


def test_what_an_older_version_left_out_is_named(tmp_path):
    path = checkpoint_path(tmp_path, 1)
    save_checkpoint(path, {name: value for name, value in STATE.items() if name not in ("workers", "rank_rng")})
    assert load_checkpoint(path)["iteration"] == 3
    with pytest.raises(ValueError, match="not a checkpoint of this version, it has no workers, rank_rng"):
        resume_from(str(path), log_dir="", task="")


def test_auto_takes_the_latest_run_of_the_task(tmp_path):
    assert resume_from("auto", log_dir=tmp_path, task="T") is None
    save(tmp_path / "T" / "20260101-000000-0", 1)
    save(tmp_path / "T" / "20260102-000000-0", 2)
    (tmp_path / "T" / "20260103-000000-0").mkdir()  # died before its first checkpoint
    path, _ = resume_from("auto", log_dir=tmp_path, task="T")
    assert path.parent.parent.name == "20260102-000000-0"


def test_no_code_from_the_file_runs(tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"model": Evil()}, tmp_path / "evil.pt", pickle_module=pickle)
    with pytest.raises(ValueError, match="not a readable checkpoint"):
        load_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        (path,) = save(disk, 1)
        for iteration in (2, 3, 4):
            with pytest.raises(OSError, match="No space left"):
                save_checkpoint(checkpoint_path(disk, iteration), STATE | {"more": torch.zeros(50_000)})
        assert load_checkpoint(path)["iteration"] == 1
        assert [file.name for file in path.parent.iterdir()] == ["iteration_0000001.pt"]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_another_model_is_named():
    module = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"weight is \[2, 4\] in the checkpoint and \[2, 3\] here"):
        load_model(module, torch.nn.Linear(4, 2).state_dict())
    with pytest.raises(ValueError, match="bias is missing"):
        load_model(module, {"weight": torch.zeros(2, 3)})
