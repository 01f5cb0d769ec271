"""What a config may not do: run any code there is. Imports no torch.

Configs travel: with checkpoints, in issues, between people. One that names ``os.system`` as a
``_target_`` is a program.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lockstep.errors import UsageError

PACKAGES = (
    "lightning.pytorch.callbacks",
    "lightning.pytorch.loggers",
    "lightning.pytorch.profilers",
    "lockstep",
    "torch.nn",
    "torch.optim",
    "torch.profiler",
    "torch.tensor",
    "torch.utils.data",
    "torchmetrics",
    "torchvision",
)
"""What a ``_target_`` may name, with all below it; add what you trust with your account.

Not all of torch and Lightning: ``torch.utils.collect_env.run`` takes a command for the shell, and
``lightning.pytorch.cli.instantiate_class`` any class. What lies in the project, or in the directory
that a run is started in, may be named without.
"""
RUNS_GIT = r"^lockstep\.new\."
REFUSED = re.compile(RUNS_GIT + r"|\.(load|load_library|load_from_checkpoint|_\w+)(\.|$)")
"""Names in those packages that run git, unpickle or load code, and private ones."""
COMPILED = re.compile(r"torch\.(tensor|nn\.functional\.\w+)")
"""Functions that are not written in Python say that they are from ``torch`` or ``torch._C``."""
PROJECT = Path(__file__).resolve().parents[2]


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse targets that are not allowed; raises `UsageError`."""
    for key, name in targets(config):
        check_target(name, key)


def check_target(name: str, key: str = "_target_") -> None:
    """By its name alone; what it turns out to be is asked by `check_objects`."""
    if not _is_allowed(name):
        raise UsageError(
            f"{key} must be in one of the packages {', '.join(PACKAGES)}, or in this project; got "
            f"{name}. If you trust it, add it to PACKAGES in {Path(__file__).name}."
        )
    if REFUSED.search(name):
        raise UsageError(
            f"{key} must not name what runs other code, or is private; got {name}. Call it in a "
            "function of your own, and name that."
        )


def check_objects(config: object) -> None:
    """Refuse what came into an allowed package by an import, such as ``torch.os.system``.

    Imports what the targets name; one that is not there is left to whoever calls it.
    """
    for key, name in targets(config):
        check_target(name, key)
        try:
            _check_home(resolve_name(name), name)
        except (ImportError, AttributeError):
            continue


def _check_home(found: object, name: str) -> None:
    home = str(getattr(found, "__module__", None) or name)
    same = home.partition(".")[0] == name.partition(".")[0]
    if same and (_is_allowed(home) or COMPILED.fullmatch(name)):
        return  # it may lie in a private file, as torchvision.transforms.v2 does
    check_target(f"{home}.{getattr(found, '__qualname__', '')}", f"_target_={name}")


def targets(config: object) -> Iterator[tuple[str, str]]:
    """All of a config's ``_target_``, at any depth: the key, and what it names."""
    for key, value in _leaves(config, ""):
        if key.rpartition(".")[2] == "_target_":
            yield key, str(value)


def _is_allowed(name: str) -> bool:
    listed = any(name == allowed or name.startswith(f"{allowed}.") for allowed in PACKAGES)
    return listed or _in_project(name.partition(".")[0])


def _in_project(package: str) -> bool:
    """Whether its source lies in the project, and not in an environment that lies there."""
    if package == "__main__":
        return True  # a class of a notebook's cell
    if package in sys.stdlib_module_names:
        return False
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return True  # there is no such package, which is told better when it is looked for
    files = [spec.origin] if spec.has_location and spec.origin else []
    return any(
        any(Path(place).resolve().is_relative_to(home) for home in (PROJECT, Path.cwd()))
        and "site-packages" not in Path(place).parts
        for place in (*files, *(spec.submodule_search_locations or ()))
    )


def _leaves(node: object, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for name, child in node.items():
            yield from _leaves(child, f"{key}.{name}")
    elif isinstance(node, list | tuple):
        for index, child in enumerate(node):
            yield from _leaves(child, f"{key}[{index}]")
    else:
        yield key.lstrip("."), node
