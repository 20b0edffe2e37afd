"""A look at a GGUF file before llama.cpp sees it."""

from __future__ import annotations

import struct
from pathlib import Path

from specdec_cli.errors import ModelLoadError, ModelMissingError

_VERSIONS = (2, 3)


def check_header(path: Path) -> None:
    """Refuse what cannot be a model, with a reason.

    Raises:
        ModelMissingError: there is no such file.
        ModelLoadError: not a GGUF file, a directory, or one that may not be read.
    """
    try:
        if path.is_dir():
            raise ModelLoadError(f"`{path}` is a directory", "name the .gguf file in it")
        if path.exists() and not path.is_file():
            raise ModelLoadError(f"`{path}` is not a regular file", "name a .gguf file on a disk")
        with path.open("rb") as stream:
            head = stream.read(24)
    except FileNotFoundError:
        raise ModelMissingError(f"no model file `{path}`", "`specdec pull` fetches the default pair") from None
    except OSError as error:
        raise ModelLoadError(f"cannot read `{path}`: {error.strerror}", "check its permissions") from None
    if head[:4] != b"GGUF":
        raise ModelLoadError(f"`{path}` is not a GGUF file: it begins with {head[:8]!r}", "download the model again")
    if len(head) < 24:
        raise ModelLoadError(f"`{path}` is cut off: {len(head)} bytes", "download the model again")
    (version,) = struct.unpack("<I", head[4:8])
    if version not in _VERSIONS:
        raise ModelLoadError(f"`{path}` has GGUF version {version}; known are 2 and 3", "update specdec")
