"""The badge of a certificate: a small picture for a README."""

from __future__ import annotations

from typing import Final

__all__ = ["drawn"]

DIGITS: Final = 12
LEFT, RIGHT, HEIGHT = 66, 96, 20
"""Of its two fields, in pixels."""
_BADGE: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" aria-label="same bits: {digits}">
  <title>same bits: sha256 {digest}</title>
  <rect width="{left}" height="{height}" fill="#444"/>
  <rect x="{left}" width="{right}" height="{height}" fill="#2f6f4f"/>
  <g fill="#fff" font-family="DejaVu Sans Mono, Menlo, monospace" font-size="11" text-anchor="middle">
    <text x="{middle_left}" y="14">same bits</text>
    <text x="{middle_right}" y="14">{digits}</text>
  </g>
</svg>
"""


def drawn(digest: str) -> str:
    """Return the picture, as SVG.

    Args:
        digest: the SHA-256 of a model, 64 hexadecimal digits, of which it shows the first twelve.
    """
    return _BADGE.format(
        width=LEFT + RIGHT, height=HEIGHT, left=LEFT, right=RIGHT, middle_left=LEFT / 2, middle_right=LEFT + RIGHT / 2,
        digits=digest[:DIGITS], digest=digest,
    )  # fmt: skip
