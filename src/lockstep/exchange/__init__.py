"""Other ways for ranks to exchange gradients or weights. docs/choosing-a-strategy.md compares them.

`lockstep.build` asks `chosen.strategy_class` for a class; nothing else of the project
knows this folder.
"""
