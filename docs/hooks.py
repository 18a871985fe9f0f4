"""What mkdocs does to each page (`hooks` of mkdocs.yml): a link that leads out of docs/, where the
site has nothing, becomes the name of its file in the repository.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)")


# page: mkdocs's own, which need not be installed here.
def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def named(link: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(folder, link[2].partition("#")[0]))
        if not file.startswith("../"):
            return link[0]
        path = f"`{file.removeprefix('../')}`"
        return path if link[1].strip("`") == path.strip("`") else f"{link[1]} ({path})"

    return LINK.sub(named, markdown)
