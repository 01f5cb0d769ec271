"""``python -m lockstep.schema``: schemas of ``conf/`` for editors: completion, red lines.

They are made of the dataclasses in `lockstep.config` by pydantic, which wandb brings along.
"""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from lockstep import config
from lockstep.config import Config, DataConfig, StrategyConfig, TrainerConfig

FOLDER = Path(__file__).resolve().parents[2] / ".vscode"
FILES: dict[str, tuple[type, tuple[str, ...]]] = {
    "config": (Config, ("train.yaml", "experiment/**/*.yaml", "debug/*.yaml", "features/*.yaml")),
    "data": (DataConfig, ("data/*.yaml",)),
    "strategy": (StrategyConfig, ("strategy/*.yaml",)),
    "trainer": (TrainerConfig, ("trainer/*.yaml",)),
}
"""Name of a schema -> the class that it is of, and the files below ``conf/`` that it holds for."""
if find_spec("lockstep.find"):  # a room that can be deleted
    from lockstep.find.request import KINDS

    FILES |= {f"find_{name}": (kind, (f"find/{name}.yaml",)) for name, kind in KINDS.items()}
INTERPOLATION = {"type": "string", "pattern": r"\$\{"}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in written().items():
        (FOLDER / name).write_text(text)
        print(f"wrote {FOLDER.name}/{name}")


def written() -> dict[str, str]:
    """File name -> text: the schemas, and the editor's settings that say where each holds."""
    schemas = {f"{name}.schema.json": schema_of(kind) for name, (kind, _) in FILES.items()}
    places = {
        f"./{FOLDER.name}/{name}.schema.json": [f"conf/{place}" for place in where]
        for name, (_, where) in FILES.items()
    }
    files = {**schemas, "settings.json": {"yaml.schemas": places}}
    return {name: json.dumps(content, indent=2) + "\n" for name, content in files.items()}


def schema_of(kind: type) -> dict[str, Any]:
    """The keys of a file: of ``kind``, and Hydra's own."""
    for known in (*vars(config).values(), kind):
        if isinstance(known, type) and is_dataclass(known):
            known.__pydantic_config__ = ConfigDict(use_attribute_docstrings=True)  # type: ignore[attr-defined]
    schema = TypeAdapter(kind).json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        _as_in_files(part)
    schema["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    return schema


def _as_in_files(part: dict[str, Any]) -> None:
    """No other keys; any value may be an interpolation; a part may be left out with null."""
    part["additionalProperties"] = False
    for name, value in part["properties"].items():
        about = {key: value.pop(key) for key in ("title", "description", "default") if key in value}
        about.pop("title", None)
        part["properties"][name] = {**about, "anyOf": [value, INTERPOLATION]} if value else about


if __name__ == "__main__":
    main()
