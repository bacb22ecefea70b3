# SPDX-License-Identifier: Apache-2.0
"""An extension of griffe, which reads the docstrings of the reference for mkdocstrings."""

from __future__ import annotations

from typing import Any

import griffe


class SectionNames(griffe.Extension):
    """Gives the section of the example the name that griffe knows."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
