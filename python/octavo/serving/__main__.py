"""Serve a model over HTTP: python -m octavo.serving."""

from __future__ import annotations

import sys

try:
    from octavo.serving.server.cli import main
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.split(".")[0] not in ("starlette", "uvicorn"):
        raise
    sys.exit(f'octavo.serving: {missing}; the server needs pip install "octavo[serve]"')

sys.exit(main())
