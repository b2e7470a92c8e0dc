"""HTML as a parser sees it."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = ("meta", "input", "br", "link")


class Parsed(HTMLParser):
    """The tags of a page, the text inside each, and all text. All tags must be closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[int] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(len(self.tags))
        self.tags.append((tag, dict(attrs)))
        self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.tags[self.open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]] += data

    def all(self, name: str) -> list[str]:
        return [text for (tag, _), text in zip(self.tags, self.texts, strict=True) if tag == name]

    @property
    def text(self) -> str:
        return "\n".join(self.texts)
