"""PageDirectory: where the page of each expert lies in one rank's region of the host pool."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate


class PageDirectory:
    """Numbers one rank's pages: layer by layer, drafts after the backbone, local experts ascending.

    Invariant: page numbers are dense, and `index` and `locate` are inverses.
    """

    def __init__(self, experts_per_layer: Sequence[int]) -> None:
        self.experts_per_layer = tuple(experts_per_layer)
        self._first_page = (0, *accumulate(self.experts_per_layer))

    @property
    def num_pages(self) -> int:
        """Pages of the whole region."""
        return self._first_page[-1]

    def index(self, layer: int, expert: int) -> int:
        """Page of local expert `expert` in `layer`."""
        assert 0 <= expert < self.experts_per_layer[layer], f"{layer=} {expert=} {self.experts_per_layer=}"
        return self._first_page[layer] + expert

    def locate(self, page: int) -> tuple[int, int]:
        """Layer and local expert of a page."""
        assert 0 <= page < self.num_pages, f"{page=} {self.num_pages=}"
        layer = bisect_right(self._first_page, page) - 1
        return layer, page - self._first_page[layer]
