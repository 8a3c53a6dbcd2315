"""A control page says what is true at every moment, whenever another process looks."""

from __future__ import annotations

import mmap

import pytest

from hybridengine.sync.transfer.base import StaleGenerationError
from hybridengine.sync.transfer.control import PAGE_BYTES, ControlPage


class Watched(ControlPage):
    """Looks at itself after every word that is written, as another process might."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        super().__init__(mmap.mmap(-1, PAGE_BYTES), readers=1, create=True)
        self.seen.clear()

    def set(self, word: str, value: int, reader: int | None = None) -> None:
        super().set(word, value, reader)
        self.seen.append((self.get("generation"), self.get("version")))


def test_a_generation_is_there_when_its_version_is() -> None:
    page = Watched()
    page.publish(1, 10)
    page.publish(2, 20)
    assert page.seen == [(0, 10), (1, 10), (1, 20), (2, 20)]
    assert page.is_published(2, 20) and not page.is_published(3, 30)
    for generation, version in ((1, 10), (2, 21)):
        with pytest.raises(StaleGenerationError, match="publishes generation 2 .policy version 20."):
            page.is_published(generation, version)


def test_memory_of_something_else_is_no_page() -> None:
    with pytest.raises(StaleGenerationError, match="not a control page"):
        ControlPage(mmap.mmap(-1, PAGE_BYTES), readers=1)
