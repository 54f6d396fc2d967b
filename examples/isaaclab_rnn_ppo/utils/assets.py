"""Which folder or server Isaac Lab loads its robots and ground planes from.

Isaac Lab reads its assets below one root: an online server by default, or what the environment
variable ``ISAACSIM_ASSET_ROOT`` names. Without a reachable server it waits about a minute and then
fails, so the root is chosen here, in the learner, before a simulator starts. Nothing here imports
Isaac Lab or Newton; their files are found through ``importlib``.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import tempfile
import threading
import urllib.error
import urllib.request
from importlib.util import find_spec
from pathlib import Path

ASSET_ROOT_ENV = "ISAACSIM_ASSET_ROOT"
"""The variable that Isaac Lab reads its asset root from, once, when it is imported."""

SERVER_TIMEOUT_S = 3.0

BUNDLED_TASKS: set[str] = {
    "Isaac-Cartpole",
    "Isaac-Cartpole-Direct",
    "Isaac-Ant",
    "Isaac-Ant-Direct",
    "Isaac-Cartpole-Recall",
    "Isaac-Cartpole-NoVelocity",
    "Isaac-Ant-NoVelocity",
}
"""Tasks that need nothing but the bundled root. A task of this suite built on the same robots adds its id."""

_GROUND_PLANE = "Isaac/IsaacLab/Environments/Grid/default_ground_plane_checker_v1/default_ground_plane.usda"
_CARTPOLE = "Isaac/IsaacLab/Robots/Classic/Cartpole/cartpole.usd"
_ANT = "Isaac/Robots/IsaacSim/Ant/ant_instanceable.usd"

# Isaac Lab binds its physics material to the first prim of type Plane; it needs nothing else of a ground plane.
_GROUND_PLANE_USDA = """#usda 1.0
(
    defaultPrim = "GroundPlane"
    metersPerUnit = 1
    upAxis = "Z"
)

def Xform "GroundPlane"
{
    def Plane "CollisionPlane" (
        prepend apiSchemas = ["PhysicsCollisionAPI"]
    )
    {
        uniform token axis = "Z"
    }
}
"""


def resolve_asset_root(choice: str = "auto", *, task: str | None = None) -> tuple[str, str]:
    """Choose the root that the simulator loads its assets from.

    ``auto`` takes ``ISAACSIM_ASSET_ROOT`` if it is set; else the official server if it answers
    within 3 seconds; else the bundled root, for the tasks in :data:`BUNDLED_TASKS`.

    Args:
        choice: the value of ``--asset-root``: ``auto``, ``official``, ``bundled``, a folder or a URL.
        task: id of the Isaac Lab task; None where any task's root will do.

    Returns:
        The root (an absolute path or a URL), and one line that says which root is in use and why.

    Raises:
        ValueError: a folder that does not exist, or ``auto`` found no root for this task.
        RuntimeError: the installed ``newton`` package does not ship the robots as expected.
    """
    if choice == "official":
        root = _official_root()
        return root, f"assets: {root} (--asset-root official)"
    if choice == "bundled":
        root = str(build_bundled_root())
        covered = task is None or task in BUNDLED_TASKS
        note = "" if covered else f"; made for {_listed(BUNDLED_TASKS)}, {task} may miss files"
        return root, f"assets: {root} (--asset-root bundled{note})"
    if choice != "auto":
        root = _existing(choice, source="--asset-root")
        return root, f"assets: {root} (--asset-root)"

    if from_env := os.environ.get(ASSET_ROOT_ENV):
        root = _existing(from_env, source=ASSET_ROOT_ENV)
        return root, f"assets: {root} ({ASSET_ROOT_ENV} is set)"
    root = _official_root()
    if _answers(f"{root}/{_GROUND_PLANE}", timeout_s=SERVER_TIMEOUT_S):
        return root, f"assets: {root} (the official server answers)"
    silent = f"the official server did not answer within {SERVER_TIMEOUT_S:g} s"
    if task is None or task in BUNDLED_TASKS:
        root = str(build_bundled_root())
        return root, f"assets: {root} (bundled, {silent})"
    # Whether such a task exists at all, only the simulator knows: it may be one of these, misspelt.
    near = difflib.get_close_matches(task, BUNDLED_TASKS, n=3, cutoff=0.8)
    nearest = f" Nearest names of tasks that the bundled root covers: {', '.join(near)}." if near else ""
    raise ValueError(
        f"--asset-root auto: no assets for {task}: {ASSET_ROOT_ENV} is not set, {silent} ({root}), and the robots "
        f"and scenes of {task} are not in the bundled root, which holds {_listed([_CARTPOLE, _ANT, _GROUND_PLANE])} "
        f"for {_listed(BUNDLED_TASKS)}. Point --asset-root or {ASSET_ROOT_ENV} at a local mirror of the server: "
        f"a folder with `Isaac/` in it.{nearest}"
    )


def build_bundled_root() -> Path:
    """Assemble the bundled root in the cache folder, or find it there.

    The robots are copied from the installed ``newton`` package (its cartpole with its ``defaultPrim``
    corrected), the ground plane is this suite's own. The folder's name is a hash of its content. Every
    file appears by a rename, so that processes that start together never see a half-written one, and a
    file that has been damaged or removed is written again.

    Returns:
        ``$XDG_CACHE_HOME/isaaclab_rnn_ppo/assets/<hash>``, or the same below ``~/.cache``.

    Raises:
        RuntimeError: ``newton`` is not installed or ships other files.
        OSError: the cache folder cannot be written.
    """
    files = {_GROUND_PLANE: _GROUND_PLANE_USDA.encode(), _CARTPOLE: _cartpole(), _ANT: _newton_asset("ant.usda")}
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + content)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = cache / "isaaclab_rnn_ppo" / "assets" / digest.hexdigest()[:12]
    for name, content in files.items():
        target = root / name
        if target.is_file() and target.read_bytes() == content:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".", delete=False) as handle:
            handle.write(content)
        os.chmod(handle.name, 0o644)
        os.replace(handle.name, target)
    return root.resolve()


def _newton_asset(name: str) -> bytes:
    spec = find_spec("newton")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the bundled asset root is made of files of the `newton` package, which is not installed")
    path = Path(spec.submodule_search_locations[0]) / "examples" / "assets" / name
    if not path.is_file():
        raise RuntimeError(f"the installed `newton` package does not ship {path}, which the bundled asset root needs")
    return path.read_bytes()


def _cartpole() -> bytes:
    """Newton's cartpole names a default prim `cartPole` that does not exist: USD would load an empty robot."""
    content = _newton_asset("cartpole_single_pendulum.usda")
    content = content.replace(b'defaultPrim = "cartPole"', b'defaultPrim = "cartpole"', 1)
    if b'defaultPrim = "cartpole"' not in content or b'def Xform "cartpole"' not in content:
        raise RuntimeError(
            "the cartpole of the installed `newton` package is not the one that the bundled root expects"
        )
    return content


def _existing(root: str, *, source: str) -> str:
    if "://" in root:
        return root.rstrip("/")
    path = Path(root).expanduser()
    if not (path / "Isaac").is_dir():
        raise ValueError(
            f"{source}: {root!r} is not an asset root; valid are auto, official, bundled, a URL, "
            "or an existing folder with `Isaac/` in it (a mirror of the asset server)"
        )
    return str(path.resolve())


def _official_root() -> str:
    """The root that Isaac Lab itself would use, read from the file it reads it from."""
    profile = os.environ.get("ISAACSIM_ASSET_REGION_PROFILE") or "us"
    if profile != "us":
        raise ValueError(
            f"ISAACSIM_ASSET_REGION_PROFILE={profile!r}: give that region's server as --asset-root URL, "
            "or unset the variable"
        )
    spec = find_spec("isaaclab")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("--asset-root: Isaac Lab is not installed, so its asset server is not known")
    experience = Path(spec.submodule_search_locations[0]) / "apps" / "isaaclab.python.kit"
    found = re.findall(r'^\s*persistent\.isaac\.asset_root\.default\s*=\s*"([^"]+)"', experience.read_text(), re.M)
    if not found:
        raise RuntimeError(f"{experience} names no asset root")
    return found[-1].rstrip("/")


def _answers(url: str, *, timeout_s: float) -> bool:
    """Whether a HEAD request for `url` succeeds in time, name resolution included.

    The request runs in a daemon thread, because a hanging DNS lookup obeys no socket timeout.
    """
    answered: list[bool] = []

    def head() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s):
                answered.append(True)
        except (OSError, ValueError):  # refused, unresolved, timed out, or an HTTP error status
            return

    thread = threading.Thread(target=head, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return bool(answered)


def _listed(names) -> str:
    return ", ".join(sorted(names))
