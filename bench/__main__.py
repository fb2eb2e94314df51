"""python -m bench"""

from __future__ import annotations

from . import environment

if __name__ == "__main__":
    environment.settle()
    from .command import main

    raise SystemExit(main())
