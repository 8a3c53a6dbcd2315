"""A small model with a tokenizer, trained for a moment so that some answers are right."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hybridengine.embedded import Recipe, ensure_embedded

    recipe = Recipe(steps=40, batch_size=64, warmup_steps=5, intermediate_size=128)
    return ensure_embedded(recipe, out=tmp_path_factory.mktemp("embedded") / "model")
