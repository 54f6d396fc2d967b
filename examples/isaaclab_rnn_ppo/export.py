"""A checkpoint as a deployable file: ``python examples/isaaclab_rnn_ppo/export.py --help``."""

from __future__ import annotations

from pathlib import Path

from isaaclab_rnn_ppo.train import model_factory
from isaaclab_rnn_ppo.utils.config import Parser, user_errors
from isaaclab_rnn_ppo.utils.export import CHECK_STEPS, FORMATS, DeployablePolicy, export_policy, make_metadata
from isaaclab_rnn_ppo.utils.restore import (
    add_checkpoint_flags,
    check_output,
    open_checkpoint,
    resolve_checkpoint,
    restore_actor,
)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="export.py", description=__doc__, allow_abbrev=False)
    add_checkpoint_flags(parser)
    parser.add_argument("--format", choices=FORMATS, required=True, help="of the file")
    parser.add_argument("--out", type=Path, required=True, help="file to write; its metadata goes to FILE.json too")
    args = parser.parse_args(argv)
    with user_errors(parser.prog):
        path = resolve_checkpoint(args.checkpoint, log_dir=args.log_dir, task=args.task)
        checkpoint = open_checkpoint(path, task=args.task)
        actor = restore_actor(checkpoint, model_factory)
        check_output("--out", args.out)

    policy = DeployablePolicy(actor, squash=checkpoint["config"]["action_dist"] == "tanh_normal")
    metadata = make_metadata(policy, checkpoint)
    difference = export_policy(policy, args.out, format=args.format, metadata=metadata)
    print(f"checkpoint: {path} ({metadata['task']}, iteration {metadata['iteration']})")
    print(f"wrote {args.out} and {args.out}.json")
    print(f"inputs {metadata['inputs']}, outputs {metadata['outputs']}")
    print(f"run and compared: largest difference {difference:.1e} over {CHECK_STEPS} steps")


if __name__ == "__main__":
    main()
