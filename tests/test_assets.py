"""The asset root: which one is chosen, and the bundled one's content. No simulator starts here."""

import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from isaaclab_rnn_ppo.utils import assets
from isaaclab_rnn_ppo.utils.assets import BUNDLED_TASKS, build_bundled_root, resolve_asset_root


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("ISAACSIM_ASSET_ROOT", raising=False)
    monkeypatch.delenv("ISAACSIM_ASSET_REGION_PROFILE", raising=False)


@pytest.fixture
def no_server(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(assets, "_official_root", lambda: f"http://127.0.0.1:{port}/Assets")


@pytest.fixture
def server(monkeypatch):
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200 if self.path.startswith("/Assets/Isaac/") else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        monkeypatch.setattr(assets, "_official_root", lambda: f"http://127.0.0.1:{http.server_port}/Assets")
        yield assets._official_root()
        http.shutdown()
        thread.join()


def _mirror(path: Path) -> Path:
    (path / "Isaac").mkdir(parents=True)
    return path


@pytest.mark.parametrize("task", [*sorted(BUNDLED_TASKS), None])
def test_auto_falls_back_to_the_bundled_root(no_server, task):
    root, line = resolve_asset_root("auto", task=task)
    assert Path(root) == build_bundled_root()
    assert root in line and "bundled" in line and "did not answer within 3 s" in line and "\n" not in line


def test_auto_prefers_the_environment_variable_then_the_server(server, tmp_path, monkeypatch):
    assert resolve_asset_root("auto", task="Isaac-Humanoid")[0] == server
    mirror = _mirror(tmp_path / "mirror")
    monkeypatch.setenv("ISAACSIM_ASSET_ROOT", f"{mirror}/")
    root, line = resolve_asset_root("auto", task="Isaac-Humanoid")
    assert root == str(mirror) and "ISAACSIM_ASSET_ROOT is set" in line


def test_auto_without_any_root_says_what_to_do(no_server):
    with pytest.raises(ValueError, match=r"no assets for Isaac-Humanoid.*ant_instanceable\.usd.*Point --asset-root"):
        resolve_asset_root("auto", task="Isaac-Humanoid")


def test_a_misspelt_task_without_any_root_gets_the_nearest_names(no_server):
    with pytest.raises(ValueError, match=r"no assets for Isaac-Cartpol\b.*Nearest names .*: Isaac-Cartpole\."):
        resolve_asset_root("auto", task="Isaac-Cartpol")


def test_a_server_that_accepts_and_never_answers_costs_three_seconds(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(assets, "_official_root", lambda: f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        assert "bundled" in resolve_asset_root("auto", task="Isaac-Ant")[1]
        assert 2.5 < time.monotonic() - start < 4.0


def test_a_hanging_name_lookup_costs_three_seconds(monkeypatch):
    hang = threading.Event()

    def lookup(*_, **__):
        hang.wait(20)
        raise socket.gaierror("no name server")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(assets, "SERVER_TIMEOUT_S", 0.5)
    start = time.monotonic()
    assert "bundled" in resolve_asset_root("auto", task="Isaac-Ant")[1]
    assert time.monotonic() - start < 1.5
    hang.set()


def test_explicit_choices(no_server, tmp_path):
    mirror = _mirror(tmp_path / "mirror")
    assert resolve_asset_root(str(mirror)) == (str(mirror), f"assets: {mirror} (--asset-root)")
    assert resolve_asset_root("http://mirror/Assets/")[0] == "http://mirror/Assets"
    assert resolve_asset_root("official")[0] == assets._official_root()
    root, line = resolve_asset_root("bundled", task="Isaac-Humanoid")
    assert root == str(build_bundled_root()) and "Isaac-Humanoid may miss files" in line


def test_a_folder_that_is_no_root_is_an_error_that_names_it(tmp_path, monkeypatch):
    missing = str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"--asset-root: .*nowhere.*auto, official, bundled"):
        resolve_asset_root(missing)
    with pytest.raises(ValueError, match="--asset-root"):
        resolve_asset_root(str(tmp_path))  # exists, and holds no Isaac/
    monkeypatch.setenv("ISAACSIM_ASSET_ROOT", missing)
    with pytest.raises(ValueError, match=r"^ISAACSIM_ASSET_ROOT: .*nowhere"):
        resolve_asset_root("auto")


def test_the_official_root_is_the_one_isaac_lab_names(monkeypatch):
    assert assets._official_root().startswith("https://") and "/Assets/Isaac/" in assets._official_root()
    monkeypatch.setenv("ISAACSIM_ASSET_REGION_PROFILE", "china")
    with pytest.raises(ValueError, match="ISAACSIM_ASSET_REGION_PROFILE='china'"):
        assets._official_root()


def test_the_bundled_files_open_as_usd_with_the_prims_that_the_tasks_need():
    root = build_bundled_root()
    code = f"""
from pxr import Usd
root = {str(root)!r}
for path, prim in [
    ("Isaac/IsaacLab/Robots/Classic/Cartpole/cartpole.usd", "cartpole"),
    ("Isaac/Robots/IsaacSim/Ant/ant_instanceable.usd", "ant"),
    ("Isaac/IsaacLab/Environments/Grid/default_ground_plane_checker_v1/default_ground_plane.usda", "GroundPlane"),
]:
    stage = Usd.Stage.Open(f"{{root}}/{{path}}")
    assert stage.GetDefaultPrim().GetName() == prim, path
planes = [p for p in stage.Traverse() if p.GetTypeName() == "Plane"]
assert len(planes) == 1 and "PhysicsCollisionAPI" in planes[0].GetAppliedSchemas()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_bundled_root_is_reused_healed_and_safe_to_build_twice_at_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        roots = list(pool.map(lambda _: build_bundled_root(), range(32)))
    assert len(set(roots)) == 1
    files = [path for path in roots[0].rglob("*") if path.is_file()]
    assert len(files) == 3 and not any(path.name.startswith(".") for path in files)
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}
    files[0].write_bytes(b"")
    files[1].unlink()
    assert build_bundled_root() == roots[0]
    assert {path: path.read_bytes() for path in files} == {path: content for path, (_, content) in before.items()}
    assert files[2].stat().st_mtime_ns == before[files[2]][0]
