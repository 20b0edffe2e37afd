"""Everything that proposes tokens."""

from __future__ import annotations

from specdec_cli.drafters.model import ModelDrafter
from specdec_cli.drafters.ngram import NgramDrafter
from specdec_cli.drafters.none import NoDrafter

__all__ = ["ModelDrafter", "NgramDrafter", "NoDrafter"]
