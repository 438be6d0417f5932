"""Which page holds the block of a key, and the other way round."""

from collections.abc import Iterable

from wire.ids import BlockKey, PageId


class PrefixIndex:
    """A bijection between keys and pages."""

    def __init__(self) -> None:
        self._key_to_page: dict[BlockKey, PageId] = {}
        self._page_to_key: dict[PageId, BlockKey] = {}

    def __len__(self) -> int:
        return len(self._key_to_page)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._key_to_page

    def add(self, key: BlockKey, page: PageId) -> None:
        """Ties a key to a page. ValueError if one of them is tied already."""
        if key in self._key_to_page or page in self._page_to_key:
            raise ValueError(f"page {page} or its key is indexed already")
        self._key_to_page[key] = page
        self._page_to_key[page] = key

    def remove(self, page: PageId) -> None:
        """Unties a page and its key. KeyError if it has none."""
        del self._key_to_page[self._page_to_key.pop(page)]

    def find(self, key: BlockKey) -> PageId | None:
        return self._key_to_page.get(key)

    def key_of(self, page: PageId) -> BlockKey | None:
        return self._page_to_key.get(page)

    def longest(self, keys: Iterable[BlockKey]) -> list[PageId]:
        """Pages of the longest prefix of `keys` without a hole."""
        pages: list[PageId] = []
        for key in keys:
            page = self._key_to_page.get(key)
            if page is None:
                break
            pages.append(page)
        return pages
