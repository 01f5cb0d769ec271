"""``python -m benchmarks.links``: a ring and a parameter server on links of a fixed rate.

Trains an MLP with ddp and with ddp_ps on 2, 4 and 8 hosts made of network namespaces, and prints
the step time of each beside the cost model: bytes of the busiest link, each way, over its rate.
Draws both into ``benchmarks/results/links.png``. About two minutes; needs root on Linux.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

from benchmarks.shaped import Measured, measure, missing
from benchmarks.timing import PROJECT, results_file

STEPS, BATCH = 8, 64
RANKS = (2, 4, 8)
RUN = (
    *("data=teacher", "data.datasets.val=8", f"data.datasets.train={STEPS * BATCH}"),
    *(f"data.global_batch_size={BATCH}", "model=mlp", "model.network.width=512"),
    *("trainer.limit_val_batches=0", "trainer.max_epochs=1", "test=false"),
    *("optimizer=sgd", "optimizer.lr=0.01", "scheduler=none", "callbacks=unmonitored"),
)
GRADIENTS = 4 * ((10 + 1) * 512 + (512 + 1) * 512 + 512 + 1)
"""P: bytes of all gradients of `RUN`'s network."""
EACH_WAY = {
    "ddp": lambda ranks: 2 * (ranks - 1) / ranks * GRADIENTS,
    "ddp_ps": lambda ranks: 2 * (ranks - 1) * GRADIENTS,
}
"""What must pass the busiest link one after the other: rank 0 of ddp_ps first receives (N - 1) P
and then sends as many; a link of the ring sends 2 (N - 1) / N P while it receives as many."""


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.links", description=__doc__)
    parser.add_argument(
        "--megabits", type=float, default=50, help="a second, each way (default 50)"
    )
    megabits = parser.parse_args().megabits
    if (why := missing()) is not None:
        parser.error(f"{why}.")
    print(f"P = {GRADIENTS:,} bytes of gradients, {megabits:g} Mbit/s each way")
    print("strategy  N  step, s: median (least to most)  model  MB on rank 0's link a step")
    rows = []
    for strategy in EACH_WAY:
        for ranks in RANKS:
            found = measure(ranks, megabits, [*RUN, f"strategy={strategy}"])
            rows.append(row(strategy, ranks, megabits, found))
            print(line(rows[-1]), flush=True)
    path = results_file("links.json")
    path.write_text(json.dumps({"megabits": megabits, "rows": rows}, indent=2) + "\n")
    draw(rows, megabits)


def row(strategy: str, ranks: int, megabits: float, found: Measured) -> dict[str, object]:
    return {
        "strategy": strategy,
        "ranks": ranks,
        "step_s": found.step_s,
        "model_s": EACH_WAY[strategy](ranks) * 8 / (megabits * 1e6),
        "wire_bytes_per_step": found.wire_bytes_per_step,
    }


def line(row: dict[str, object]) -> str:
    taken: list[float] = row["step_s"]
    spread = f"{median(taken):.2f} ({min(taken):.2f} to {max(taken):.2f})"
    moved: float = row["wire_bytes_per_step"]
    return (
        f"{row['strategy']:8}  {row['ranks']}  {spread:30}  {row['model_s']:.2f}  {moved / 1e6:.2f}"
    )


def draw(rows: list[dict[str, object]], megabits: float) -> None:
    """Medians with their spread, and the cost model as lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    for strategy, color in zip(EACH_WAY, ("tab:blue", "tab:red"), strict=True):
        mine = [row for row in rows if row["strategy"] == strategy]
        counts = [row["ranks"] for row in mine]
        times = [row["step_s"] for row in mine]
        middle = [median(taken) for taken in times]
        below = [m - min(taken) for m, taken in zip(middle, times, strict=True)]
        above = [max(taken) - m for m, taken in zip(middle, times, strict=True)]
        axes.errorbar(
            counts, middle, yerr=[below, above], fmt="o", capsize=3, color=color, label=strategy
        )
        model = [row["model_s"] for row in mine]
        axes.plot(counts, model, "--", color=color, label=f"{strategy}: bytes over the link's rate")
    axes.set_xlabel("processes, one a host")
    axes.set_ylabel("s a step")
    axes.set_title(f"links of {megabits:g} Mbit/s, {GRADIENTS / 1e6:.2f} MB of gradients")
    axes.set_xticks(RANKS)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path = results_file("links.png")
    figure.savefig(path, dpi=110)
    print(f"drawn in {path.relative_to(PROJECT)}")


if __name__ == "__main__":
    main()
