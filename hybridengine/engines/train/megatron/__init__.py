"""Megatron-core as a training engine: tensor, pipeline, expert and sequence parallelism beside data parallelism.

The model is megatron's own GPTModel, its schedules, gradient buffers and distributed optimizer are too. What is ours
is what has to agree with the rest of the program: attention over packed sequences, rotary tables, log-probabilities,
loading, the layout in checkpoint coordinates, checkpoints. Import megatron through :mod:`.cpu`'s ``prepare`` only.
"""
