"""Small models whose init code is of the kinds that real projects write, written anew. Each is built by its own
constructor, init code and all; odd sizes, so that shards cut rows and heads unevenly."""

from __future__ import annotations

import zoo_sequences  # noqa: F401
import zoo_state_space  # noqa: F401
import zoo_vision  # noqa: F401
from zoo_registry import MODELS

__all__ = ["MODELS"]
