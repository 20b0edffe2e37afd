"""Everything that proposes tokens."""

from __future__ import annotations

from specdec_cli.drafters.auto import AutoDrafter
from specdec_cli.drafters.model import ModelDrafter
from specdec_cli.drafters.ngram import NgramDrafter
from specdec_cli.drafters.none import NoDrafter
from specdec_cli.drafters.retokenize import Intersected, Retokenized

__all__ = ["AutoDrafter", "Intersected", "ModelDrafter", "NgramDrafter", "NoDrafter", "Retokenized"]
