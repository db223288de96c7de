"""The tables of docs/settings.md, made from the declaration of the settings: ``python -m tests.docs.settings_page``."""

from __future__ import annotations

from typing import Final

from tests.house.rooms import ROOT
from unisono.core.settings import GROUPS, SETTINGS

__all__ = ["PAGE", "page"]

PAGE: Final = ROOT / "docs" / "settings.md"


def page(text: str) -> str:
    """Return the text of the page with today's tables."""
    lines = []
    for group, title in GROUPS.items():
        lines += [f"## {title}", "", "| name | value | default | meaning |", "|---|---|---|---|"]
        for setting in SETTINGS.values():
            if setting.group == group:
                name = f"`{setting.name}`" + (f" (`{setting.option.replace(' ', '`, `')}`)" if setting.option else "")
                form, words = (each.replace("|", "\\|") for each in (setting.form, setting.help))
                lines.append(f"| {name} | `{form}` | {setting.words_of_default} | {words} |")
        lines.append("")
    return text[: text.index("## Workers")] + "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
