"""play.py on the real simulator, in a process of its own, as a user runs it. A checkpoint is made without training."""

import json
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from isaaclab_rnn_ppo import play
from isaaclab_rnn_ppo.train import model_factory
from isaaclab_rnn_ppo.utils import make_loss, parse_args, save_checkpoint
from isaaclab_rnn_ppo.utils.task_info import specs_of
from isaaclab_rnn_ppo.utils.video import write_gif, write_mp4
from PIL import Image

PLAY = Path(play.__file__)
SIMULATOR = ("isaaclab", "isaaclab_tasks", "newton", "warp", "pxr", "omni")
SIZES = {"Isaac-Cartpole": (4, 1), "Isaac-Ant": (60, 8)}
WIDTH, HEIGHT, FRAMES = 160, 120, 60


def make_checkpoint(path: Path, task: str) -> Path:
    """An untrained policy of ``task``."""
    num_obs, num_actions = SIZES[task]
    args = parse_args(["--task", task, "--device", "cpu", "--hidden-size", "16", "--actor-hidden", "16"])
    info = {"observation_sizes": {"policy": num_obs}, "num_actions": num_actions}
    torch.manual_seed(0)
    models = model_factory(args)(**specs_of(info))
    state = {"model": make_loss(actor=models.actor, value_head=models.value_head).state_dict()}
    state |= {"iteration": 7, "frames": 70, "config": vars(args), "task_info": info}
    save_checkpoint(path, state)
    return path


def run_play(*argv: str) -> subprocess.CompletedProcess:
    """play.py's main; fails if its process has imported the simulator."""
    code = f"""
import sys
from isaaclab_rnn_ppo import play
if __name__ == "__main__":
    play.main({list(argv)!r})
    found = sorted(set({SIMULATOR!r}) & set(sys.modules))
    assert not found, f"play.py imported {{found}}"
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)


def read_video(path: Path) -> np.ndarray:
    """Frames [F, H, W, 3]."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.mark.isaac
@pytest.mark.parametrize("task", ["Isaac-Cartpole", pytest.param("Isaac-Ant", marks=pytest.mark.slow)])
def test_report_and_video(task, tmp_path):
    make_checkpoint(tmp_path / "runs" / task / "run" / "checkpoints" / "iteration_0000007.pt", task)
    outputs = [part for name in ("json", "gif") for part in (f"--{name}", str(tmp_path / "out" / f"a.{name}"))]
    video = tmp_path / "out" / "a.mp4"
    done = run_play(
        "--checkpoint", "latest", "--log-dir", str(tmp_path / "runs"), *outputs, "--video", str(video),
        "--video-length", str(FRAMES), "--video-size", f"{WIDTH}x{HEIGHT}", "--episodes", "2", "--num-envs", "2",
        "--asset-root", "bundled", "--device", "cpu", "env.episode_length_s=0.5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out" / "a.json").read_text())
    assert report["task"] == task and report["iteration"] == 7 and report["deterministic"]
    assert report["episodes"] == 4 and report["unfinished_envs"] == 0
    assert sum(report["terminations"].values()) >= 4 and report["terminations"]["time_out"] >= 1
    assert 0 < report["length_steps"]["mean"] <= 30, "0.5 s of 1/60 s"
    assert "time_out" in done.stdout and "length_steps" in done.stdout

    frames = read_video(video)
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert_robot_in_view(frames)
    with Image.open(tmp_path / "out" / "a.gif") as gif:
        assert gif.size == (WIDTH, HEIGHT) and gif.n_frames == FRAMES // 4


def assert_robot_in_view(frames: np.ndarray) -> None:
    """The camera looks at the robot, which alone has colours: they are in the middle, and they move."""
    middle = frames[:, HEIGHT // 4 : 3 * HEIGHT // 4, WIDTH // 4 : 3 * WIDTH // 4].astype(int)
    colorful = middle.max(-1) - middle.min(-1) > 50
    assert (colorful.mean((1, 2)) > 0.01).all(), "a frame without the robot"
    assert (middle.std((1, 2)) > 10).all(), "a flat frame"
    # What the robot looks like changes: not merely the ground below it.
    moved = np.abs(middle[1:] - middle[:-1]).max(-1) > 50
    assert (moved & colorful[1:]).any((1, 2)).mean() > 0.5, "a still picture"


def test_the_view_check_notices_an_empty_view():
    """The check above fails on a chessboard without a robot, on grey, and on a still picture."""
    noise = np.random.default_rng(0).integers(40, 90, (FRAMES, HEIGHT, WIDTH, 1)).repeat(3, -1).astype(np.uint8)
    with_robot = noise.copy()
    for k in range(FRAMES):
        with_robot[k, 50:70, 60 + k % 20 : 80 + k % 20] = (200, 90, 20)
    assert_robot_in_view(with_robot)
    for empty in (noise, np.full_like(noise, 90), with_robot[:1].repeat(FRAMES, 0)):
        with pytest.raises(AssertionError):
            assert_robot_in_view(empty)


def test_files_have_the_length_and_the_pictures_they_were_given(tmp_path):
    frames = np.zeros((30, 48, 64, 3), np.uint8)
    for k in range(30):
        frames[k, :, : 2 * k] = (200, 90, 20)
    write_mp4(tmp_path / "a.mp4", frames, fps=60.0)
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert container.streams.video[0].average_rate == 60
        assert container.duration == 500_000  # microseconds
    read = read_video(tmp_path / "a.mp4").astype(int)
    assert read.shape == frames.shape and np.abs(read - frames).mean() < 5
    write_gif(tmp_path / "a.gif", frames, fps=60.0)
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 8 and gif.info["duration"] == 70
        gif.seek(7)
        assert np.abs(np.asarray(gif.convert("RGB")).astype(int) - frames[28]).mean() < 5


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--task", "Isaac-Ant"], ["Isaac-Cartpole", "Isaac-Ant"]),
        (["--checkpoint", "{tmp}/truncated.pt"], ["truncated.pt", "not a readable checkpoint"]),
        (["--checkpoint", "{tmp}/text.pt"], ["text.pt", "not a readable checkpoint"]),
        (["--checkpoint", "{tmp}/damaged.pt"], ["damaged.pt", "checksum"]),
        (["--checkpoint", "latest", "--log-dir", "{tmp}/none"], ["latest", "none"]),
        (["--checkpoint", "best", "--log-dir", "{tmp}"], ["best", "--eval-interval"]),
        (["--num-envs", "0"], ["--num-envs"]),
        (["--video", "{tmp}/a.avi"], ["--video", ".mp4"]),
        (["--video", "{tmp}/truncated.pt/a.mp4"], ["--video", "cannot be written"]),
        (["--gif", "{tmp}/a.mp4"], ["--gif", ".gif"]),
        (["--video-size", "161x120"], ["--video-size"]),
        (["--video-length", "-3"], ["--video-length"]),
        (["--device", "tpu"], ["--device", "tpu"]),
        (["--asset-root", "{tmp}/nowhere"], ["--asset-root", "nowhere"]),
        (["seed=3"], ["seed=3", "env.KEY=VALUE"]),
        (["--nonsense"], ["--nonsense"]),
    ],
)
def test_a_mistake_is_one_message_and_code_2(argv, parts, tmp_path, capsys):
    whole = make_checkpoint(tmp_path / "whole.pt", "Isaac-Cartpole").read_bytes()
    (tmp_path / "truncated.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pt").write_text("not a checkpoint\n")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    torch.save(state | {"iteration": 8}, tmp_path / "damaged.pt")
    argv = [part.format(tmp=tmp_path) for part in argv]
    if "--checkpoint" not in argv:
        argv += ["--checkpoint", str(tmp_path / "whole.pt")]
    with pytest.raises(SystemExit) as end:
        play.main(argv)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("play.py: error: ") and message.count("\n") == 1
    assert all(part in message for part in parts), message


@pytest.mark.isaac
@pytest.mark.slow
def test_a_mistake_that_only_the_simulator_knows_is_one_message_too(tmp_path):
    path = make_checkpoint(tmp_path / "a.pt", "Isaac-Cartpole")
    for token, part in {
        "env.episode_length=2": "env.episode_length_s",
        "env.observations.policy.joint_vel_rel=null": "sizes",
    }.items():
        done = run_play("--checkpoint", str(path), "--asset-root", "bundled", token)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert part in done.stderr and done.stderr.count("play.py: error: ") == 1
