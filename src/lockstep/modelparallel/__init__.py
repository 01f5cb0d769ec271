"""Strategies that split the network over the ranks. docs/model-parallel.md says what is split.

`lockstep.prepare` asks `mesh.mesh_of` how many shares of the data there are,
`lockstep.build` asks `chosen.model_parallel` for a strategy;
nothing else of the project knows this folder.
"""
