"""Entry point: compose the configuration, build the parts, run the loop.

torchrun --nproc-per-node 8 -m hybridengine.train model.path=/models/Qwen2.5-7B data.train=train.jsonl ...
python -m hybridengine.train +experiment=quickstart rollout.tp=1        (world size 1)

Exit statuses: 0 done, or interrupted and saved; 1 an error of the program or of a function that it calls; 2 something
that the user has to change; 3 rollouts can't go on, and the last state is saved. torchrun itself ends with 1 for each
of the last three and shows the rank's own status; ``hybridengine train`` passes it on.
"""

from __future__ import annotations

import os
import sys
import time

from hybridengine.config.arguments import Arguments, read_arguments
from hybridengine.config.compose import build, conf_dir, hydra_overrides, register_schema
from hybridengine.config.help import help_text, version_text, wants_help
from hybridengine.failure import report
from hybridengine.interrupt import die_with_launcher
from hybridengine.validate.earlier_run import check_earlier_run
from hybridengine.validate.output_dir import claim
from hybridengine.validate.resolve import resolve


def main(given: list[str] | None = None) -> int:
    """Run one job; the return value is the process's exit status."""
    started = time.perf_counter()
    given = sys.argv[1:] if given is None else given
    if wants_help(given):
        sys.stdout.write(help_text() + "\n")
        return 0
    if "--version" in given:
        sys.stdout.write(version_text() + "\n")
        return 0
    rank = int(os.environ.get("RANK", "0"))
    try:
        arguments = read_arguments(given)
        if arguments.show:
            return _show(arguments)
        return _run(arguments, rank, started)
    except Exception as error:  # noqa: BLE001  the end of the program
        return report(error, rank)


def _run(arguments: Arguments, rank: int, started: float) -> int:
    config = resolve(build(arguments.overrides, arguments.config_dirs))
    if (finished := check_earlier_run(config)) is not None:
        if rank == 0:
            sys.stdout.write(f"hybridengine: {finished}\n")
        return 0

    from hybridengine.distributed.world import World

    world = World.from_env()
    world.platform.prepare_process()
    from hybridengine.validate.contradictions import validate

    validate(config, world)
    die_with_launcher()
    lock = claim(config.output_dir) if world.is_main else None
    from hybridengine.assemble import run

    try:
        return run(config, world, started=started)
    finally:
        if lock is not None:
            lock.close()


def _show(arguments: Arguments) -> int:
    """``--cfg`` and ``--info`` are Hydra's own."""
    import hydra

    overrides = hydra_overrides(arguments.overrides, arguments.config_dirs)
    register_schema()
    sys.argv = [sys.argv[0], *arguments.show, *overrides]
    hydra.main(version_base=None, config_path=str(conf_dir()), config_name="config")(lambda _: None)()
    return 0


if __name__ == "__main__":
    sys.exit(main())
