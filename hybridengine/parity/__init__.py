"""Do the rollout engine, the trainer and plain transformers give the same tokens the same log-probabilities?"""

from hybridengine.parity.check import ParityError, check_parity
from hybridengine.parity.probes import choose_probes
from hybridengine.parity.report import Parity

__all__ = ["Parity", "ParityError", "check_parity", "choose_probes"]
