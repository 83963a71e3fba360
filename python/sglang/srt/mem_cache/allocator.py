"""Free list of KV pages."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class PageAllocator:
    """Hands out page numbers 1..num_pages; page 0 is the dummy page, outside the pool.

    The slots of page p are p * page_size .. p * page_size + page_size - 1. Numbers of pages are
    arrays of int64, since a prompt takes thousands at once.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = array("q", range(num_pages, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> Sequence[int]:
        return self._free

    def allocate(self, num_pages: int) -> array[int] | None:
        """Takes pages from the pool; None, and nothing taken, when there are not enough."""
        if num_pages > len(self._free):
            return None
        if num_pages == 0:
            return array("q")
        pages = self._free[-num_pages:]
        del self._free[-num_pages:]
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back."""
        self._free.extend(pages)

    def rebuild(self, used_pages: set[int]) -> None:
        """Makes every page outside `used_pages` free (repair of a broken ledger, when idle)."""
        unused = (page for page in range(self.num_pages, 0, -1) if page not in used_pages)
        self._free = array("q", unused)
