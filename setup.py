"""Writes the description that package indexes show: README.md without what only resolves in the repository.

An index shows the text alone, so links and pictures at relative addresses would lead nowhere there; a link becomes its
text, and a picture is left out. Everything else about the package is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

RELATIVE = r"(?!https?:|mailto:|#)"
IMAGE = re.compile(rf"!\[[^\]]*\]\({RELATIVE}[^)]*\)")
TAG = re.compile(rf"""<(?:img|source|audio|video)\b[^>]*\bsrc(?:set)?=["']{RELATIVE}[^>]*>""")
LINK = re.compile(rf"\[((?:[^\[\]]|\[[^\]]*\])*)\]\({RELATIVE}[^)]*\)")


def description(readme: str) -> str:
    """Return a text in Markdown without relative links and pictures; blocks of code stay as they are."""
    parts = re.split(r"(^```.*?^```$)", readme, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = (LINK.sub(r"\1", TAG.sub("", IMAGE.sub("", text))) for text in parts[::2])
    return "".join(parts)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=description(readme), long_description_content_type="text/markdown")
