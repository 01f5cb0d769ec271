"""The code of docs/from-the-documents.md on two CPU processes, under torchrun: what it really does.

Prints, from rank 0, one line of JSON: fact -> what each rank saw.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

PAGE = Path(__file__).parents[1] / "docs" / "from-the-documents.md"
ON_CPU = {
    # One group serves all blocks: a second one in the same store may meet the first one's ranks.
    'torch.distributed.init_process_group(backend="nccl")': "pass",
    'dist.init_process_group(backend="nccl")': "pass",
    '.to("cuda")': '.to("cpu")',
    "net.cuda()\n": "",
    ".cuda()": ".cpu()",
    "torch.cuda.set_device(local_rank)": "pass",
    'torch.device("cuda", local_rank)': 'torch.device("cpu")',
    "[torch.cuda.current_device()]": "None",
    "device_ids=[local_rank]": "device_ids=None",
    "output_device=local_rank": "output_device=None",
}


def blocks(page: Path = PAGE) -> list[str]:
    """The tutorials' code, in order, with a CPU in the place of GPUs."""
    found = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    return [_on_cpu(code) for code in found]


def _on_cpu(code: str) -> str:
    for gpu, cpu in ON_CPU.items():
        code = code.replace(gpu, cpu)
    return code


def run(code: str, names: dict[str, Any]) -> list[str]:
    """Execute a block; returns the lines that it prints, and leaves its variables in ``names``."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), names)
    return printed.getvalue().splitlines()


def training(code: str) -> dict[str, Any]:
    """The second tutorial's DDP block, in processes that are not seeded."""
    names: dict[str, Any] = {}
    printed = run(code, names)
    return {
        "printed": printed,
        "first input": names["inputs"][0].tolist(),
        "weight": names["model"].module.fc.weight.tolist(),
    }


def short_form(code: str) -> dict[str, Any]:
    """The third tutorial's short form, and then three steps on ``model`` as its reader writes."""
    torch.manual_seed(0)
    network, data = nn.Linear(3, 1), torch.arange(24.0).reshape(8, 3) / 24
    names = {
        "torch": torch,
        "DistributedSampler": DistributedSampler,
        "DataLoader": DataLoader,
        "model": network,
        "dataset": data,
        "batch_size": 2,
    }
    run(code, names)
    return {name: _after_steps(names[name], data) for name in ("mode", "model")}


def _after_steps(model: nn.Module, data: torch.Tensor) -> list[list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in data[dist.get_rank() :: 2].split(2):
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    network = getattr(model, "module", model)
    return network.weight.tolist()


def whole_script(code: str) -> dict[str, Any]:
    """The third tutorial's script; two processes stand for its two GPUs."""
    torch.seed()
    names: dict[str, Any] = {}
    printed = run(code.replace("torch.cuda.device_count()", "2"), names)
    return {"printed": printed, "sample 7": names["dataset"][7].tolist()}


def main() -> None:
    _, _, _, ddp, short, whole = blocks()
    dist.init_process_group("gloo")
    told: list[dict[str, Any]] = [{}, {}]
    seen = {"ddp": training(ddp), "short": short_form(short), "whole": whole_script(whole)}
    dist.all_gather_object(told, seen)
    if dist.get_rank() == 0:
        json.dump(told, sys.stdout)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
