"""``train.py`` on the tensor env: ``python tests/train_tensor_env.py`` with its flags."""

import sys

from isaaclab_rnn_ppo import train
from isaaclab_rnn_ppo.utils.signals import Interrupted, interruptible
from tensor_env import make_task_env

if __name__ == "__main__":
    train.make_env = make_task_env
    try:
        with interruptible():
            train.main()
    except Interrupted as stop:
        sys.exit(stop.exit_code)
