"""What to train with, found by trying: ``python train.py find=lr``. docs/features.md.

`lockstep.prepare` asks `request.finder` for the task; nothing else of the project
knows this folder.
"""
