"""Whatever is typed: a configuration or one line, never a traceback."""

import contextlib
import io

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from isaaclab_rnn_ppo.utils.config import ALL_FLAGS, parse_args

NUMBERS = ["0", "1", "-1", "2", "3.5", "1e-3", "1e400", "nan", "inf", "-inf", "0x10", "1_000", "٣", "9" * 40]
WORDS = ["", " ", "null", "true", "False", "cpu", "cuda:0", "cuda:-1", "mps", "auto", "lstm", "normal", "64,"]
ODD = ["[", "{}", "[1,2]", "${task}", "${oc.env:HOME}", "'", '"', "\\", "\x00", "\n", "=", "==", "@", "~", "+", ","]
values = st.sampled_from([*NUMBERS, *WORDS, *ODD]) | st.integers().map(str) | st.floats().map(str) | st.text(max_size=8)
names = st.sampled_from(list(ALL_FLAGS)) | st.text(max_size=8)
spelled = st.tuples(st.sampled_from(["--", "--no-", "-", ""]), names, st.booleans()).map(
    lambda parts: parts[0] + (parts[1].replace("_", "-") if parts[2] else parts[1])
)
flags = st.tuples(spelled, values).map(list) | st.tuples(spelled, values).map("=".join).map(lambda token: [token])
overrides = st.tuples(st.sampled_from(["", "+", "++", "~", "env.", "env.scene.", "physics=", "hydra."]), names, values)
tokens = overrides.map(lambda parts: [f"{parts[0]}{parts[1]}={parts[2]}"])
parts = st.lists(flags | tokens | values.map(lambda value: [value]), max_size=5)
argvs = parts.map(lambda parts: [token for part in parts for token in part])


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(argvs)
def test_500_command_lines(argv):
    check(argv)


def check(argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            args = parse_args(argv)
        except SystemExit as stop:
            args = None
            code = stop.code
    if args is None:
        if code == 0:
            assert out.getvalue().startswith("usage: ") and err.getvalue() == ""
            return
        message = err.getvalue()
        assert code == 2 and message.startswith("train.py: error: ") and message.count("\n") == 1, message
    else:
        assert err.getvalue() == "" and vars(args).keys() == {*ALL_FLAGS, "env_overrides"}
        for name, flag in ALL_FLAGS.items():
            value = getattr(args, name)
            assert value is None or (flag.check(value) and (not flag.choices or value in flag.choices)), name
