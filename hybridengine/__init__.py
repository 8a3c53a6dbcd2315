"""hybridengine: a colocated hybrid-engine RL trainer for language models.

One process per GPU time-shares one model between a training layout (FSDP2) and a tensor-parallel
inference layout (vLLM). Importing the package imports no heavy backend and has no side effects.
"""

__version__ = "0.1.0"
