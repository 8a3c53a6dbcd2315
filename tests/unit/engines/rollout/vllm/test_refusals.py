"""What vLLM refuses about a request comes out as one ValueError that has vLLM's reason and our keys."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from hybridengine.engines.rollout.streaming import Request
from hybridengine.engines.rollout.vllm.requests import Requests
from hybridengine.types import SamplingParams

pytest.importorskip("vllm", reason="needs vllm")


class Engine:
    """Takes every request, or refuses it as vLLM's input processor does."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.vllm_config = SimpleNamespace(use_v2_model_runner=True)
        self.refusal, self.added = refusal, []

    def add_request(self, name: str, prompt: Any, params: Any) -> str:
        if self.refusal is not None:
            raise self.refusal
        self.added.append(name)
        return f"{name}-internal"


def add(engine: Engine, params: SamplingParams, *, max_tokens: int = 4) -> None:
    requests = Requests(engine, None, stop=[2], stepping=nullcontext)
    request = Request(name="s0", token_ids=[5, 6, 7], max_tokens=max_tokens, seed=1)
    requests.add(request, params, interruptible=False)


@pytest.mark.parametrize(
    ("params", "max_tokens", "reason"),
    [
        (SamplingParams(temperature=-1.0), 4, "temperature"),
        (SamplingParams(top_p=1.5), 4, "top_p"),
        (SamplingParams(top_k=-5), 4, "top_k"),
        (SamplingParams(min_p=2.0), 4, "min_p"),
        (SamplingParams(stop=("",)), 4, "stop cannot contain an empty string"),
        (SamplingParams(), 0, "max_tokens"),
    ],
    ids=["temperature", "top_p", "top_k", "min_p", "stop", "max_tokens"],
)
def test_a_bad_parameter(params: SamplingParams, max_tokens: int, reason: str) -> None:
    """vLLM's own SamplingParams refuses it, with its own class of error."""
    from vllm.exceptions import VLLMValidationError

    engine = Engine()
    with pytest.raises(ValueError, match=rf"vLLM refuses a sample: .*{reason}") as found:
        add(engine, params, max_tokens=max_tokens)
    assert isinstance(found.value.__cause__, VLLMValidationError)
    assert f"temperature={params.temperature}, top_p={params.top_p}, top_k={params.top_k}" in str(found.value)
    assert not engine.added


def test_a_refusal_of_the_engine() -> None:
    """Such as a token that the vocabulary has not got: with the length of the request."""
    from vllm.exceptions import VLLMValidationError

    refusal = VLLMValidationError("Token id 7 is out of vocabulary", parameter="prompt", value=7)
    with pytest.raises(ValueError, match=r"Token id 7 .*parameter=prompt.* up to 4 tokens after 3, with temperature=1"):
        add(Engine(refusal), SamplingParams())


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="^engine died$"):
        add(Engine(RuntimeError("engine died")), SamplingParams())


def test_a_good_request_is_added() -> None:
    engine = Engine()
    add(engine, SamplingParams(top_p=0.9, top_k=3, stop=("x",)))
    assert engine.added == ["s0"]
