"""Bytes on links between network namespaces are those of the cost model; seconds are benchmarks."""

from __future__ import annotations

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))  # benchmarks/ is no package that is installed

from benchmarks import links, shaped

HEADERS = 1.08
"""TCP, IP and Ethernet add 5 % or so, in small packets more."""


@pytest.mark.cluster
@pytest.mark.processes
def test_a_ring_loads_each_link_alike_and_a_server_loads_its_own() -> None:
    """On 2 and 4 hosts, read from the interface of rank 0: 2 (N - 1) / N P and 2 (N - 1) P."""
    why = shaped.missing()
    if why is not None:
        pytest.skip(why)
    for strategy, model in links.EACH_WAY.items():
        for ranks in (2, 4):
            found = shaped.measure(ranks, 1000, [*links.RUN, f"strategy={strategy}"])
            both_ways = (2 if strategy == "ddp" else 1) * model(ranks)
            assert both_ways < found.wire_bytes_per_step < HEADERS * both_ways, (strategy, ranks)
            assert len(found.step_s) == links.STEPS - shaped.FIRST - 1
            assert found.outcome["per_process_batch_size"] == links.BATCH // ranks
