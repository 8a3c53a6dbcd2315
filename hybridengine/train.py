"""Entry point: compose the configuration, build the parts, run the loop.

torchrun --nproc-per-node 8 -m hybridengine.train model.path=/models/Qwen2.5-7B data.train=train.jsonl ...
python -m hybridengine.train +experiment=quickstart rollout.tp=1        (world size 1)
"""

from __future__ import annotations

import sys
import time

from hybridengine.compose import ConfigError, build, conf_dir, register_schema
from hybridengine.help import help_text, wants_help

#: Hydra's own flags that show something and run nothing.
INSPECT = {"--cfg", "-c", "--info", "-i", "--hydra-help", "--version"}

#: Exit status for what the user has to change, as argparse has it.
USAGE_ERROR = 2

#: Exit status when rollouts can't go on; the run's last state is saved and can be resumed.
ROLLOUT_LOST = 3


def main(arguments: list[str] | None = None) -> int:
    """Run one job; the return value is the process's exit status."""
    started = time.perf_counter()
    arguments = sys.argv[1:] if arguments is None else arguments
    if wants_help(arguments):
        sys.stdout.write(help_text() + "\n")
        return 0
    if INSPECT.intersection(argument.split("=")[0] for argument in arguments):
        return _inspect()

    from hybridengine.distributed.world import World

    world = World.from_env()
    world.platform.prepare_process()
    try:
        config = build(arguments)
        from hybridengine.validate import validate

        validate(config, world)
        from hybridengine.assemble import run
        from hybridengine.schedule.base import RolloutLostError

        try:
            return run(config, world, started=started)
        except RolloutLostError as error:
            _refuse(error, world.rank)
            return ROLLOUT_LOST
    except ConfigError as error:
        return _refuse(error, world.rank)


def _refuse(error: Exception, rank: int) -> int:
    """One message from rank 0; the others leave a moment later, so that the launcher doesn't cut it short."""
    if rank == 0:
        sys.stderr.write(f"hybridengine: {error}\n")
        sys.stderr.flush()
    else:
        time.sleep(1.0)
    return USAGE_ERROR


def _inspect() -> int:
    """``--cfg`` and ``--info`` are Hydra's own."""
    import hydra

    register_schema()
    hydra.main(version_base=None, config_path=str(conf_dir()), config_name="config")(lambda _: None)()
    return 0


if __name__ == "__main__":
    sys.exit(main())
