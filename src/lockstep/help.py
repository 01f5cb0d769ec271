"""The answer to ``--help``, read from the files.

Hydra's own answer is the same, but lists every group by copying its whole store: half a second.
It still serves where files are not all: with ``--config-dir``, overrides or other flags beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from string import Template

import yaml


def conf() -> Path:
    """Beside train.py; ``python -m lockstep.parity`` is started beside it."""
    script = Path(sys.argv[0]).parent
    return (script if (script / "conf").is_dir() else Path()) / "conf"


def help_text(conf: Path) -> str:
    """``hydra.help.template`` with the groups below ``conf``."""
    settings = yaml.safe_load((conf / "hydra" / "default.yaml").read_text())
    return Template(settings["help"]["template"]).substitute(APP_CONFIG_GROUPS=groups_in(conf))


def groups_in(conf: Path) -> str:
    """A line per folder: ``model: linear, mlp``."""
    choices: dict[str, list[str]] = {}
    for path in conf.rglob("*.yaml"):
        group = path.parent.relative_to(conf)
        if group.parts and group.parts[0] != "hydra":
            choices.setdefault(group.as_posix(), []).append(path.stem)
    return "".join(f"{group}: {', '.join(sorted(choices[group]))}\n" for group in sorted(choices))
