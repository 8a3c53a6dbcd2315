"""Whether a decoder keeps packed sequences apart: whether its layers call the attention that they are given."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hybridengine.models.rotary import fix_rotary

SPY = "hybridengine_spy"


class _Called(Exception):
    """The attention function has been reached."""


def packs(config: Any, *, trust_remote_code: bool = False) -> bool:
    """Whether the layers of this model call transformers' attention interface, through which packed sequences are told
    apart. Some (GPT-J, Falcon, BLOOM) have attention of their own: they would look across sequences.

    Runs the first layer without memory (meta device). A model that can't run so counts as one that doesn't pack.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(SPY, _spy)
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.pad_token_id = 1, None  # no look at the tokens for a warning about padding
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trust_remote_code
        ).eval()
        fix_rotary(model, 1)
        model.config._attn_implementation = SPY
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        try:
            with torch.no_grad():
                model.get_decoder()(input_ids=tokens, position_ids=tokens, use_cache=False)
        except _Called:
            return True
        except Exception:  # noqa: BLE001  whatever stops it, packing can't be shown to work
            return False
    return False


def _spy(*args: Any, **kwargs: Any) -> None:
    raise _Called
