"""Video of a running task: Isaac Lab's camera drawn by Newton's Warp renderer, on a GPU or on the CPU, no display.

Shapes: F frames, H height, W width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

CAMERA = "video_camera"

# From the robot to the camera for a robot of 0.6 m around its middle: all of the bundled Ant and Cartpole is in view.
_OFFSET_M, _OFFSET_RADIUS_M = (3.0, 2.2, 1.5), 0.6
_FOLLOW = (
    0.2  # share of the way to the robot that the camera's target moves at a step: its gait does not shake the view
)
_JUMP_M = 2.0  # further apart than this is a new episode

# What Newton paints a shape without a material, and what such shapes are painted here: the bundled robots
# would be grey on grey. Okabe and Ito's colours (2008, "Color Universal Design").
_UNPAINTED = 0.46135613
_PALETTE = ((0.84, 0.37, 0.0), (0.0, 0.45, 0.70), (0.34, 0.71, 0.91), (0.90, 0.62, 0.0))

_GIF_COLORS = 48
_GIF_FPS = 15


def add_camera(cfg: Any, *, width: int, height: int) -> None:
    """Put a camera into a task's configuration. Runs in a worker, before the launch (``make_env(configure=...)``).

    Isaac Lab wants as many views as envs and draws them all: a video costs the fewer envs the less.
    """
    # Lazy, as everywhere: these import the simulator.
    import isaaclab.sim as sim_utils
    from isaaclab.sensors import CameraCfg
    from isaaclab_newton.renderers import NewtonWarpRendererCfg

    camera = CameraCfg(
        prim_path="{ENV_REGEX_NS}/" + CAMERA,
        data_types=["rgb"],
        width=width,
        height=height,
        spawn=sim_utils.PinholeCameraCfg(focal_length=24.0, horizontal_aperture=20.955, clipping_range=(0.1, 100.0)),
        renderer_cfg=NewtonWarpRendererCfg(enable_shadows=True),
    )
    setattr(cfg.scene, CAMERA, camera)


class CameraFrames(Transform):
    """Draws the first env after a step and keeps the frames until somebody takes them.

    Args:
        isaac: the unwrapped Isaac Lab env, with a camera of ``add_camera``.
        num_frames: it stops drawing after as many, until ``start``.
    """

    def __init__(self, isaac: Any, num_frames: int):
        super().__init__()
        self.num_frames = num_frames
        self._isaac = [isaac]  # in a list: not a submodule
        self._camera = isaac.scene.sensors[CAMERA]
        self._robot = next(iter(isaac.scene.articulations.values()))
        self.start()
        self._target = self._positions().mean(1)
        radius = (self._positions() - self._target.unsqueeze(1)).norm(dim=-1).max()
        self._offset = torch.tensor(_OFFSET_M, device=radius.device) * (radius / _OFFSET_RADIUS_M).clamp(min=1.0)
        _paint(self._camera)

    def start(self) -> None:
        """Draw ``num_frames`` frames from the next step on."""
        self._frames: list[np.ndarray] = []
        self._num_drawn = 0

    def _positions(self) -> torch.Tensor:
        return self._robot.data.body_pos_w.torch

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self._num_drawn < self.num_frames:
            self._num_drawn += 1
            self._frames.append(self._draw())
        return next_tensordict

    def _draw(self) -> np.ndarray:
        middle = self._positions().mean(1)
        apart = middle - self._target
        jumped = apart.norm(dim=-1, keepdim=True) > _JUMP_M
        self._target = torch.where(jumped, middle, self._target + _FOLLOW * apart)
        self._camera.set_world_poses_from_view(self._target + self._offset, self._target)
        return self._camera.data.output["rgb"].torch[0, ..., :3].cpu().numpy().copy()

    def take(self) -> np.ndarray:
        """Frames [F, H, W, 3] uint8 since the last call."""
        camera = self._camera.cfg
        frames, self._frames = self._frames, []
        return np.stack(frames) if frames else np.zeros((0, camera.height, camera.width, 3), np.uint8)


def _paint(camera: Any) -> None:
    """Colour what has no material: moving bodies from the palette, the ground as a chessboard."""
    sensor = camera._renderer.newton_sensor  # isaaclab 3.0 has no public way to it
    model = sensor.model
    colors, bodies = model.shape_color.numpy(), model.shape_body.numpy()
    unpainted = np.isclose(colors, _UNPAINTED).all(1)
    moving = unpainted & (bodies >= 0)
    body_of_env = bodies[moving] % max(len(model.body_label) // camera.num_instances, 1)
    colors[moving] = np.asarray(_PALETTE, np.float32)[body_of_env % len(_PALETTE)]
    model.shape_color.assign(colors)
    if unpainted.all():  # the chessboard replaces every texture of the scene
        sensor.utils.assign_checkerboard_material(shape_indices=np.nonzero(unpainted & (bodies < 0))[0])


def write_mp4(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write [F, H, W, 3] uint8, H and W even, as H.264 in real time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=round(fps))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"  # what every player reads
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def write_gif(path: Path, frames: np.ndarray, fps: float) -> None:
    """Write [F, H, W, 3] uint8 as a small GIF: at most 15 frames a second, one palette for all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    every = max(round(fps / _GIF_FPS), 1)
    images = [Image.fromarray(frame) for frame in frames[::every]]
    samples = np.concatenate(frames[:: max(len(frames) // 8, 1)])
    palette = Image.fromarray(samples).quantize(_GIF_COLORS, dither=Image.Dither.NONE)
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    duration_ms = 10 * round(100 * every / fps)  # a GIF counts in 10 ms
    images[0].save(path, save_all=True, append_images=images[1:], duration=duration_ms, loop=0, optimize=True)
