"""Metadata of the distributions that depends on where the project is published: its address, the links of its README.

`make dist URL=https://HOST/OWNER/unisono` gives the address of the repository. Without it the distributions name no
address, and their description has the README as it stands.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Published(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        url = os.environ.get("UNISONO_URL", "").rstrip("/")
        if url:
            if not re.fullmatch(r"https://[^\s@]+", url):
                raise ValueError(f"UNISONO_URL is the address of the repository, https://HOST/OWNER/NAME; got {url!r}")
            tag = f"v{metadata['version']}"
            # An index shows the text without the files beside it.
            text = re.sub(r"(\]\()(?!https?:|#|mailto:)", rf"\g<1>{url}/blob/{tag}/", text)
            metadata["urls"] = {
                "Homepage": url,
                "Documentation": f"{url}/tree/{tag}/docs",
                "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
