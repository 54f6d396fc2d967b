"""The command line: what wins, and one message for every mistake."""

import pytest
import yaml
from isaaclab_rnn_ppo.utils.config import ALL_FLAGS, CONFIG_DIR, make_parser, parse_args

CPU = ["--device", "cpu"]


def test_every_flag_has_a_default_and_every_default_a_flag():
    assert set(yaml.safe_load((CONFIG_DIR / "ppo.yaml").read_text())) == set(ALL_FLAGS)


def test_defaults_preset_and_explicit_values_in_rising_order():
    default = parse_args([*CPU, "--task", "Isaac-Ant"])
    preset = parse_args([*CPU, "--task", "Isaac-Cartpole"])
    explicit = parse_args([*CPU, "--task", "Isaac-Cartpole", "--hidden_size", "32", "rollout_steps=8"])
    assert (default.hidden_size, preset.hidden_size, explicit.hidden_size) == (256, 64, 32)
    assert (default.rollout_steps, preset.rollout_steps, explicit.rollout_steps) == (32, 16, 8)


def test_the_task_may_be_an_override():
    assert parse_args([*CPU, "task=Isaac-Cartpole"]).hidden_size == 64


def test_env_tokens_go_to_the_task_unchanged():
    tokens = ["env.episode_length_s=2.0", "physics=newton_mjwarp"]
    assert parse_args([*CPU, *tokens, "--compile", "env.sim.dt=0.01"]).env_overrides == [*tokens, "env.sim.dt=0.01"]


def test_compile_without_a_mode_is_default():
    assert parse_args([*CPU, "--compile", "--cudagraphs"]).compile == "default"
    assert parse_args([*CPU, "--compile", "max-autotune"]).compile == "max-autotune"
    assert parse_args(CPU).compile is None


def test_max_autotune_unrolls_short_windows_only():
    """On the CPU; what was typed stays."""
    backends = {
        steps: parse_args([*CPU, "--compile", "max-autotune", "--rollout-steps", steps]).rnn_backend
        for steps in ("32", "33")
    }
    assert backends == {"32": "unroll", "33": "auto"}
    assert parse_args([*CPU, "--compile", "max-autotune", "--rnn-backend", "scan"]).rnn_backend == "scan"
    assert parse_args([*CPU, "--compile", "max-autotune", "--rnn", "gru"]).rnn_backend == "auto"


def test_number_of_envs():
    assert parse_args(CPU).num_envs == 256
    args = parse_args([*CPU, "env.scene.num_envs=32", "env.sim.dt=0.01"])
    assert (args.num_envs, args.env_overrides) == (32, ["env.sim.dt=0.01"])
    assert parse_args([*CPU, "--num-envs", "32", "env.scene.num_envs=32"]).num_envs == 32


@pytest.mark.parametrize("argv", [["--collector-devices", "cpu, cpu"], ["collector_devices=[cpu,cpu]"]])
def test_a_collector_on_each_device(argv):
    args = parse_args([*CPU, *argv])
    assert (args.collector_devices, args.num_collectors) == (["cpu", "cpu"], 2)
    assert parse_args([*CPU, "--num-collectors", "2"]).collector_devices is None


@pytest.fixture
def second_rank_of_two(monkeypatch):
    """What torchrun tells a process."""
    variables = {
        "TORCHELASTIC_RUN_ID": "x",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("second_rank_of_two")
def test_ranks_share_devices_out(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert parse_args([]).device == parse_args(["--device", "cuda"]).device == "cuda:1"
    args = parse_args(["--collector-devices", "cuda:0,cuda:1,cuda:2,cuda:3"])
    assert (args.collector_devices, args.num_collectors) == (["cuda:2", "cuda:3"], 2)
    for argv, part in (
        (["--device", "cuda:1"], "2 ranks need a GPU each"),
        (["--collector-devices", "cpu,cpu,cpu"], "3 collectors cannot be shared out evenly among 2 ranks"),
    ):
        with pytest.raises(SystemExit):
            parse_args(argv)
        assert part in capsys.readouterr().err


@pytest.mark.usefixtures("second_rank_of_two")
def test_a_rank_without_a_gpu_says_which(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(SystemExit):
        parse_args(["--device", "cuda"])
    assert "--device cuda of local rank 1: this machine has 1 CUDA devices" in capsys.readouterr().err


def test_booleans_can_be_negated():
    assert parse_args([*CPU, "--no-vectorized-gae"]).vectorized_gae is False
    assert parse_args([*CPU, "--no_vectorized_gae"]).vectorized_gae is False


def test_help_gives_every_flag_its_default():
    text = " ".join(make_parser().format_help().split())
    assert text.count("(default: ") == len(ALL_FLAGS)


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--num-envs 0", ["--num-envs 0", "whole number above 0"]),
        ("--num-envs 10 --num-minibatches 4", ["--num-minibatches 4", "10 environments"]),
        ("--num-envs 9 --num-collectors 2", ["--num-envs 9", "--num-collectors 2"]),
        ("--num-envs 16 env.scene.num_envs=32", ["--num-envs 16", "env.scene.num_envs=32"]),
        ("env.scene.num_envs=many", ["env.scene.num_envs=many", "whole number"]),
        ("--rnn-backend triton", ["--rnn-backend", "triton", "CUDA"]),
        ("--rnn-backend unroll --rnn gru", ["--rnn-backend unroll", "--rnn lstm"]),
        ("--rnn-backend blank --amp bf16", ["--rnn-backend blank", "--rnn lstm in float32"]),
        ("--rnn-backend pad --rnn-recompute", ["--rnn-recompute", "--rnn-backend pad"]),
        ("--clip-grad-norm -1", ["--clip-grad-norm -1", "above 0"]),
        ("--clip-grad-norm nan", ["--clip-grad-norm nan", "above 0"]),
        ("--gamma 1.5", ["--gamma 1.5", "from 0 to 1"]),
        ("--actor-hidden 64,0", ["--actor-hidden 64,0", "above 0"]),
        ("--actor-hidden a", ["--actor-hidden"]),
        ("--compile fast", ["--compile", "fast", "max-autotune"]),
        ("--bogus", ["--bogus"]),
        ("bogus", ["bogus", "key=value"]),
        ("gama=0.9", ["gama", "gamma"]),
        ("qqq=0.9", ["qqq", "--help"]),
        ("hidden_size=3.5", ["--hidden-size 3.5", "whole number"]),
        ("gamma=abc", ["--gamma abc"]),
        ("iterations=inf", ["--iterations inf", "whole number"]),
        ("--seed 9999999999", ["--seed 9999999999", "to 2147483647"]),
        ("rnn=transformer", ["--rnn transformer", "lstm"]),
        ("--hidden-size 64 hidden_size=64", ["hidden_size=64", "--hidden-size 64"]),
        ("--device tpu", ["--device tpu", "cuda"]),
        ("--device cuda:99", ["--device cuda:99", "CUDA devices"]),
        ("--resume /no/such/file", ["--resume /no/such/file"]),
        ("--collector-devices cpu,tpu", ["--collector-devices tpu", "cuda:N"]),
        ("--collector-devices ,", ["--collector-devices", "one or more of cpu and cuda:N"]),
        ("--collector-devices cpu,cpu --num-collectors 3", ["--collector-devices cpu,cpu", "--num-collectors 3"]),
        ("--collector-devices cpu,cpu --num-envs 9", ["--num-envs 9", "--num-collectors 2"]),
        ("--collector-devices cpu --collector-backend ray", ["--collector-devices cpu", "Ray"]),
        ("--collector-backend slurm", ["--collector-backend", "multiprocess"]),
    ],
)
def test_a_mistake_is_one_line_and_code_2(argv, parts, capsys):
    device = [] if "--device" in argv else CPU
    with pytest.raises(SystemExit) as exit_info:
        parse_args([*device, *argv.split()])
    message = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert message.startswith("train.py: error: ") and message.count("\n") == 1
    assert all(part in message for part in parts), message
