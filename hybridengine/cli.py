# PYTHON_ARGCOMPLETE_OK
"""The ``hybridengine`` command.

    hybridengine train --nproc-per-node 8 model.path=... data.train=... reward=math
    hybridengine evaluate outputs/run

``train`` and ``evaluate`` start one process per GPU by themselves, through torchrun, and end with the exit status of
the process that failed (``hybridengine train --help`` lists them). Each of the others is ``python -m`` of a module.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A subcommand: the module that is run as a program, and what it does."""

    module: str
    help: str
    launched: bool = False  # one process per GPU


COMMANDS = {
    "train": Command("hybridengine.train", "train a model", launched=True),
    "evaluate": Command("hybridengine.evaluate", "measure a model or a checkpoint", launched=True),
    "export": Command("hybridengine.export", "write a checkpoint as a Hugging Face model"),
    "data": Command("hybridengine.data", "prepare GSM8K or MATH from a local copy"),
    "completions": Command("hybridengine.report.completions", "look at the responses that a run kept"),
    "report": Command("hybridengine.report.html", "write a run's report.html again"),
    "doctor": Command(
        "hybridengine.doctor", "check this machine; the memory of a run; whether engines agree on a model"
    ),
    "compare": Command("hybridengine.compare", "your own job colocated and disaggregated, under every schedule"),
    "simulate": Command("hybridengine.simulate", "another placement, schedule or size, from a run's own costs"),
    "embedded": Command("hybridengine.embedded", "make the embedded model of the quickstart"),
}

#: torchrun's options that the launched commands take, each with one value.
LAUNCH_OPTIONS = (
    "--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-backend",
    "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--local-addr", "--log-dir", "--redirects", "--tee",
)  # fmt: skip


def main(given: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    arguments = list(sys.argv[1:] if given is None else given)
    parser = make_parser()
    complete(parser)
    if not arguments or arguments[0] in ("-h", "--help"):
        parser.print_help()
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from hybridengine.config.help import version_text

        print(version_text())
        return 0
    if arguments[0] == "completion":
        return print_completion(arguments[1:])
    if arguments[0] not in COMMANDS:
        parser.error(f"no such command: {arguments[0]}; there are {', '.join(COMMANDS)}")
    command = COMMANDS[arguments[0]]
    return launch(command, arguments[1:]) if command.launched else run_module(command.module, arguments[1:])


def run_module(module: str, arguments: Sequence[str]) -> int:
    """``python -m module arguments`` in this process."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


# -- one process per GPU ---------------------------------------------------------------------------


def launch(command: Command, arguments: Sequence[str]) -> int:
    """Run a command in as many processes as asked for; by default one per GPU, or one without any.

    Within a process that a launcher started already (torchrun, srun with RANK set) it runs here.
    """
    options, rest = split_options(arguments)
    shows = {"-h", "--help", "--version", "--cfg", "-c", "--info", "-i"}
    if "RANK" in os.environ or shows.intersection(argument.split("=")[0] for argument in rest):
        return run_module(command.module, rest)
    if (status := _refused_early(command, rest)) is not None:
        return status
    processes = options.get("--nproc-per-node") or str(_gpus() or 1)
    if processes == "1" and options.get("--nnodes", "1") == "1":
        return run_module(command.module, rest)
    return torchrun(command.module, rest, options | {"--nproc-per-node": processes})


def split_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """torchrun's options, as their names with dashes, and everything else in order."""
    options: dict[str, str] = {}
    rest: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        known = name.replace("_", "-") if name.startswith("--") else name
        if known not in LAUNCH_OPTIONS:
            rest.append(argument)
        elif equals:
            options[known] = value
        elif left:
            options[known] = left.pop(0)
        else:
            raise SystemExit(f"hybridengine: {argument} needs a value after it")
    return options, rest


def torchrun(module: str, arguments: Sequence[str], options: Mapping[str, str]) -> int:
    """Start the processes and wait; the message of the one that failed first comes last."""
    import logging

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    alone = options.get("--nnodes", "1") == "1" and not any(name.startswith("--rdzv") for name in options)
    flags = [f"{name}={value}" for name, value in options.items()]
    if alone:  # a meeting place of this job's own, as torchrun --standalone makes it
        flags += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]
    # A step and its checkpoint must fit between SIGTERM and SIGKILL; torchrun's own 30 seconds are few.
    parsed = parse_args([*flags, "--shutdown-timeout=900", "-m", module, *arguments])
    config, entrypoint, entry_arguments = config_from_args(parsed)
    try:
        elastic_launch(config=config, entrypoint=entrypoint)(*entry_arguments)
    except ChildFailedError as error:
        return _show_failure(error)
    return 0


def _show_failure(error: Any) -> int:
    rank, failure = error.get_first_failure()
    message = failure.message
    if isinstance(message, dict):
        message = message.get("extraInfo", {}).get("py_callstack", message.get("message", ""))
    if failure.exitcode < 0:
        message = f"hybridengine: rank {rank} was ended by {failure.signal_name()}, from outside or for want of memory"
    sys.stderr.write(f"{message}\n")
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _refused_early(command: Command, arguments: Sequence[str]) -> int | None:
    """The exit status where a command line can't be right, before any process is started."""
    if command.module != "hybridengine.train":
        return None
    from hybridengine.config.arguments import read_arguments
    from hybridengine.config.compose import build
    from hybridengine.config.schema import ConfigError
    from hybridengine.failure import report

    try:
        given = read_arguments(arguments)
        if not given.show:
            build(given.overrides, given.config_dirs)
    except ConfigError as error:
        return report(error, 0)
    return None


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


# -- help and tab completion -----------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """For help and completion; the commands read their arguments themselves."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="hybridengine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="store_true", help="versions of this package and of what it runs on")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands (COMMAND --help says more)")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, add_help=False)
        keys: Any = sub.add_argument("arguments", nargs="*")
        if command.launched or name == "compare":  # takes a training run's keys too
            keys.completer = complete_key
        if command.launched:
            for option in LAUNCH_OPTIONS:
                sub.add_argument(option)
    completion = commands.add_parser("completion", help='tab completion: eval "$(hybridengine completion bash)"')
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    return parser


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and end, where it is the shell that asks (the variable _ARGCOMPLETE)."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)


def print_completion(arguments: Sequence[str]) -> int:
    """The shell code that turns completion on."""
    shells = ("bash", "zsh", "fish")
    if len(arguments) != 1 or arguments[0] not in shells:
        sys.stderr.write(f"hybridengine completion: give one of {', '.join(shells)}\n")
        return 2
    import argcomplete

    print(argcomplete.shellcode(["hybridengine"], shell=arguments[0]))
    return 0


def complete_key(prefix: str, **_: Any) -> list[str]:
    """What ``prefix`` can become: keys and groups up to their =, then choices, true and false, or files."""
    from hybridengine.config import limits_of, walk
    from hybridengine.config.schema import config_groups

    plus = "+" if prefix.startswith("+") else ""
    name, equals, value = prefix.removeprefix("+").partition("=")
    leaves, groups = dict(walk()), config_groups()
    if not equals:
        experiments = [f"+experiment={option}" for option in groups["experiment"]]
        names = [f"{plus}{known}=" for known in (*leaves, *groups) if known != "experiment"] + experiments
        return [known for known in names if known.startswith(prefix)]
    if name in groups:
        options: Sequence[str] = groups[name]
    elif name in leaves:
        item = leaves[name]
        options = [str(choice) for choice in limits_of(item).choices]
        options = options or (["true", "false"] if "bool" in str(item.type) else list(_files(value)))
    else:
        options = []
    return [f"{plus}{name}={option}" for option in options if option.startswith(value)]


def _files(prefix: str) -> Iterator[str]:
    from glob import escape, iglob

    for path in sorted(iglob(f"{escape(prefix)}*")):
        yield path + ("/" if os.path.isdir(path) else "")


if __name__ == "__main__":
    sys.exit(main())
