"""Hand a pipeline to other graph tools; the heavy packages are imported only when asked for."""

from __future__ import annotations

from typing import Any

from tilecast.model.pipeline.graph import Pipeline


def to_networkx(pipeline: Pipeline) -> Any:
    """The dataflow graph as a ``networkx.MultiDiGraph``: operations are nodes, edges keep distance and
    latency.

    Node attributes: kind, role, engine, tile, min_cycles, demand (dict, cycles per unit).  Edge attributes:
    distance (iterations), latency_cycles, kind, why, and ``weight`` = source duration + latency (cycles).
    Raises ImportError when networkx is not installed.
    """
    import networkx  # type: ignore[import-untyped, unused-ignore]

    graph = networkx.MultiDiGraph(name=pipeline.name, machine=pipeline.machine)
    for op in pipeline.ops:
        graph.add_node(
            op.name, kind=op.kind, role=op.role, engine=op.engine, tile=op.tile,
            min_cycles=op.min_cycles, demand=dict(op.demand),
        )  # fmt: skip
    for edge in pipeline.edges:
        graph.add_edge(
            edge.src, edge.dst, distance=edge.distance, latency_cycles=edge.latency_cycles, kind=edge.kind,
            why=edge.why, weight=pipeline.op(edge.src).min_cycles + edge.latency_cycles,
        )  # fmt: skip
    return graph
